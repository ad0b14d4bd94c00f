"""A command of `hf-specbranch`: how it ends, and the option names of the previous release."""

from __future__ import annotations

import sys
from typing import Any

import typer.core

from .printing import leaving_cleanly

RENAMED = {
    "--gamma": "--max-draft-length",
    "--epsilon": "--confidence-threshold",
    "--branches": "--max-branches",
    "--head": "--length-head",
    "--new-tokens": "--max-new-tokens",
    "--ways": "--methods",
}
REMOVED = {
    "--file": "give the prompt on standard input, < FILE",
    "--echo": "the prompt is not printed any more",
    "--pass-at": "see examples/benchmarks/pass_time.py",
    "--each-kernel": "see examples/benchmarks/each_kernel.py",
    "--time-to-first-token": "see examples/benchmarks/latency.py",
    "--round-cost": "see examples/benchmarks/latency.py",
    "--stability": "see examples/benchmarks/latency.py",
    "--predict": "see examples/benchmarks/predictions.py",
    "--no-predict": "nothing is predicted any more",
    "--stream-prompts": "one prompt is streamed",
    "--sweep-prompts": "sweeps use two prompts",
    "--sweep-specbranch": "name specbranch-best in --methods",
    "--sweep-epsilon": "use `hf-specbranch tune`",
}


class Command(typer.core.TyperCommand):
    """A command that ends cleanly, and still accepts the option names of the previous release, with a warning."""

    def invoke(self, ctx: Any) -> Any:
        with leaving_cleanly():
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for option in self.params for name in (*option.opts, *option.secondary_opts)}
        end = args.index("--") if "--" in args else len(args)
        renamed = [_new_name(argument, known) for argument in args[:end]]
        return super().parse_args(ctx, [*renamed, *args[end:]])


def _new_name(argument: str, known: set[str]) -> str:
    """Return an argument under its new name; an option that was removed is refused."""
    old, equals, value = argument.partition("=")
    new = RENAMED.get(old, old)
    if old in known or new == old and old not in REMOVED:
        return argument
    if new not in known:
        if old in REMOVED:
            raise ValueError(f"{old} was removed: {REMOVED[old]}")
        return argument
    print(f"warning: {old} is now {new}; the next release will not accept {old}", file=sys.stderr)
    return f"{new}{equals}{value}"
