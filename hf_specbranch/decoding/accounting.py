"""Counts what became of every drafted token: accepted, rolled back or wasted."""

from __future__ import annotations

from ..stats import SpecBranchStats
from .resolve import NONE, Resolution
from .state import RowResult, VerifyResult


def count_round(stats: SpecBranchStats, result: VerifyResult, row: RowResult, resolution: Resolution) -> None:
    """Add one round of one row to the statistics."""
    drafted = result.drafted
    stats.num_draft_tokens += drafted.new
    stats.tree_leaves += drafted.leaves
    stats.tree_leaf_hits += result.has_continuation
    if not (drafted.sent or drafted.ahead):
        return
    stats.num_drafts += 1
    if drafted.branches and row.complete and row.accepted == drafted.sent:
        stats.branch_points += 1
        stats.branch_hits += row.survivor != NONE
    elif drafted.rejection_branches and row.complete:
        stats.rejection_points += 1
        stats.rejection_hits += row.survivor != NONE
    stats.count_acceptance(resolution.accepted)
    stats.num_accepted_tokens += resolution.accepted
    stats.rollback_tokens += resolution.rolled_back
    stats.wasted_branch_tokens += resolution.wasted


class Accounting:
    """Counts rounds at a time when nobody waits for it.

    Args:
        stats: where to count.
        depth: tokens of a side branch after its first.
    """

    def __init__(self, stats: SpecBranchStats, depth: int) -> None:
        self.stats, self.depth = stats, depth
        self.uncounted: list[tuple[VerifyResult, RowResult, Resolution]] = []
        self.pending: list[int] = []  # drafted tokens after the text of each unfinished row

    def add(self, results: list[VerifyResult], rows: list[RowResult]) -> None:
        """Take a round; `flush` counts it."""
        self.flush()
        resolved = [result.resolve(row.committed, row.finished, self.depth) for result, row in zip(results, rows)]
        self.uncounted = list(zip(results, rows, resolved))
        self.pending = [each.pending for each, row in zip(resolved, rows) if not row.finished]

    def flush(self) -> None:
        """Count the round that was added last."""
        for result, row, resolution in self.uncounted:
            count_round(self.stats, result, row, resolution)
        self.uncounted = []

    def close(self) -> None:
        """Count what is pending as rolled back: another drafter takes over, or the text ends."""
        self.flush()
        self.stats.rollback_tokens += sum(self.pending)
        self.pending = []
