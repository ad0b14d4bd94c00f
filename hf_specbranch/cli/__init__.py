"""The `hf-specbranch` command."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .. import __version__
from .batch import batch
from .bench import EPILOG as BENCH_EPILOG
from .bench import bench
from .chat import chat
from .command import Command
from .doctor import doctor
from .families import families
from .generate import generate
from .head import app as head_app
from .serve import serve
from .shortlist import shortlist
from .trace import trace
from .tune import tune
from .warmup import warmup

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (generate, chat, doctor, tune, warmup, trace, families, shortlist, serve, batch):
    app.command(cls=Command)(command)
app.add_typer(head_app, name="head")
app.command(cls=Command, epilog=BENCH_EPILOG)(bench)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Branch-parallel speculative decoding for model.generate().

    Without --target and --draft, commands use a small pair that comes with the package.

    Example: hf-specbranch generate "def add(a, b):" --max-new-tokens 64
    """


def main() -> None:
    """Run the command; errors that a user can correct are one line, without a traceback."""
    try:
        app()
    except (OSError, ValueError) as error:
        first_line = str(error).strip().split("\n")[0]  # transformers adds advice below
        print(f"error: {first_line}", file=sys.stderr)
        raise SystemExit(1) from None
