"""What commands print."""

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

INTERRUPTED, TERMINATED = 130, 143  # what shells expect of a program that Ctrl-C or SIGTERM ended


class Terminated(KeyboardInterrupt):
    """SIGTERM, where it is to be treated like Ctrl-C."""


class Console(rich.console.Console):
    """A console that leaves a reader who goes away to `leaving_cleanly`."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


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
    except KeyboardInterrupt as reason:
        print("\ninterrupted", file=sys.stderr)
        raise typer.Exit(TERMINATED if isinstance(reason, Terminated) else INTERRUPTED) from None


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM, as `timeout` sends it, ends what runs here as Ctrl-C would."""

    def stop(*_: Any) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():  # signals arrive elsewhere
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
    if stats.rejection_points:
        lines.append(f"corrections foreseen: {stats.rejection_hits} of {stats.rejection_points}")
    if stats.tree_leaves:
        lines.append(f"runners-up that were right: {stats.tree_leaf_hits} of {stats.tree_leaves}")
    if stats.draft_seconds:
        lines.append(f"drafting hidden: {stats.hidden_fraction:.0%}")
    if stats.plans:
        last = stats.plans[-1]
        predicted = last["predicted_tokens_per_second"]
        beside = "" if predicted is None else f" ({predicted:.0f} predicted)"
        lines.append(
            f"last plan of {len(stats.plans)}: {last['plan']}: {last['tokens_per_second']:.0f} a second{beside}"
        )
    if stats.graphs_captured:
        lines.append(f"recorded {stats.graphs_captured} CUDA graphs, so that later generations are faster")
    if stats.slowed_by:
        lines.append(f"slowed: {stats.slowed_by}")
    return lines
