"""Printing, and ending a command cleanly."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import rich.console
import typer

from ..stats import SpecBranchStats

INTERRUPTED, TERMINATED = 130, 143  # exit codes that shells expect after Ctrl-C and SIGTERM


class Terminated(KeyboardInterrupt):
    """SIGTERM, treated like Ctrl-C."""


class Console(rich.console.Console):
    """A console that leaves broken pipes to `leaving_cleanly`."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


@contextmanager
def leaving_cleanly() -> Iterator[None]:
    """Treat a closed pipe (`| head -1`) as success; end the command with one line on Ctrl-C."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would flush the rest on exit, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except KeyboardInterrupt as reason:
        print("\ninterrupted", file=sys.stderr)
        raise typer.Exit(TERMINATED if isinstance(reason, Terminated) else INTERRUPTED) from None


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM, as `timeout` sends it, end this block as Ctrl-C would."""

    def stop(*_: Any) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def note(line: str) -> None:
    """Print to standard error, apart from the output."""
    print(line, file=sys.stderr)


def stats_lines(stats: SpecBranchStats) -> list[str]:
    """Return the statistics of a generation as a few short lines."""
    lines = [
        f"{stats.new_tokens} tokens, {stats.tokens_per_second:.1f} per second, policy {stats.policy}",
        f"{stats.mean_acceptance_length:.2f} tokens per target pass",
        f"passes: {stats.target_forwards} target, {stats.draft_forwards} draft",
    ]
    if stats.num_draft_tokens:
        lines.append(
            f"draft tokens: {stats.num_draft_tokens}; {stats.num_accepted_tokens} accepted, {stats.rollback_tokens} "
            f"rolled back, {stats.wasted_branch_tokens} wasted"
        )
    if stats.branch_points:
        lines.append(f"branch points hit: {stats.branch_hits} of {stats.branch_points}")
    if stats.rejection_points:
        lines.append(f"rejection branches hit: {stats.rejection_hits} of {stats.rejection_points}")
    if stats.tree_leaves:
        lines.append(f"tree leaves accepted: {stats.tree_leaf_hits} of {stats.tree_leaves}")
    if stats.draft_seconds:
        lines.append(f"drafting hidden: {stats.hidden_fraction:.0%}")
    if stats.plans:
        last = stats.plans[-1]
        predicted = last["predicted_tokens_per_second"]
        expected = "" if predicted is None else f" ({predicted:.0f} predicted)"
        lines.append(
            f"last plan of {len(stats.plans)}: {last['plan']}: {last['tokens_per_second']:.0f} per second{expected}"
        )
    if stats.reused_tokens:
        lines.append(f"{stats.reused_tokens} tokens of the prompt were still in memory and not read again")
    if stats.graphs_captured or stats.capture_seconds:
        taken = f" in {stats.capture_seconds:.2f} s" if stats.capture_seconds else ""
        lines.append(f"captured {stats.graphs_captured} CUDA graphs{taken}; later generations reuse them")
    if stats.slowed_by:
        lines.append(f"slowed: {stats.slowed_by}")
    return lines
