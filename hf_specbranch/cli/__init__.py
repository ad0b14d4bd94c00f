"""The `hf-specbranch` command."""

from __future__ import annotations

import sys

import typer

from .bench import EPILOG as BENCH_EPILOG
from .bench import bench
from .chat import chat
from .doctor import doctor
from .families import families
from .generate import generate
from .head import app as head_app
from .trace import trace
from .tune import tune

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(chat)
app.command()(doctor)
app.command()(tune)
app.command()(trace)
app.command()(families)
app.add_typer(head_app, name="head")
app.command(epilog=BENCH_EPILOG)(bench)


@app.callback()
def _root() -> None:
    """Branch-parallel speculative decoding behind model.generate().

    Without --target and --draft, commands work on a small pair that comes with the package.

    Example: hf-specbranch generate "def add(a, b):" --max-new-tokens 64
    """


def main() -> None:
    """Run the command; what a user can put right is told in one line, without a traceback."""
    try:
        app()
    except (OSError, ValueError) as error:
        first_line = str(error).strip().split("\n")[0]  # transformers adds advice of its own below
        print(f"error: {first_line}", file=sys.stderr)
        raise SystemExit(1) from None
