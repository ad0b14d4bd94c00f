"""What commands print."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from ..stats import SpecBranchStats

INTERRUPTED = 130  # what shells expect of a program that Ctrl-C ended


@contextmanager
def leaving_cleanly() -> Iterator[None]:
    """A reader who goes away (`| head -1`) is no error; Ctrl-C ends the command with one line."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would flush what is left on exit, and complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


def note(line: str) -> None:
    """Tell the person at the terminal, without mixing it into the output."""
    print(line, file=sys.stderr)


def stats_lines(stats: SpecBranchStats) -> list[str]:
    """A generation in a few short lines."""
    lines = [
        f"{stats.new_tokens} tokens, {stats.tokens_per_second:.1f} a second, policy {stats.policy}",
        f"{stats.mean_acceptance_length:.2f} tokens a target pass",
        f"passes: {stats.target_forwards} target, {stats.draft_forwards} draft",
    ]
    if stats.num_draft_tokens:
        lines.append(
            f"drafted {stats.num_draft_tokens}: {stats.num_accepted_tokens} accepted, {stats.rollback_tokens} rolled "
            f"back, {stats.wasted_branch_tokens} lost"
        )
    if stats.branch_points:
        lines.append(f"branch points hit: {stats.branch_hits} of {stats.branch_points}")
    if stats.draft_seconds:
        lines.append(f"drafting hidden: {stats.hidden_fraction:.0%}")
    return lines
