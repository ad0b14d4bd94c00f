"""What became of every drafted token: accepted, rolled back or wasted, and nothing else."""

from __future__ import annotations

from ..stats import SpecBranchStats
from .acceptance import NONE
from .state import RowResult, VerifyResult


def settle(stats: SpecBranchStats, drafted: VerifyResult, row_result: RowResult, depth: int) -> None:
    """Count one verdict on one row.

    Args:
        drafted: what stood drafted when the verdict came.
        outcome: what the verdict meant.
        depth: tokens of a sibling behind its first.
    """
    stats.num_draft_tokens += drafted.drafted
    stats.tree_leaves += drafted.leaves
    stats.tree_leaf_hits += row_result.continuation >= 0
    if not (drafted.draft_tokens or drafted.main):
        return
    stats.num_drafts += 1
    if drafted.branches and row_result.complete and row_result.accepted == drafted.draft_tokens:
        stats.branch_points += 1
        stats.branch_hits += row_result.survivor != NONE
    elif drafted.rejection_branches and row_result.complete:
        stats.rejection_points += 1
        stats.rejection_hits += row_result.survivor != NONE
    accepted, lost_chain, lost_main, lost_siblings = _fates(drafted, row_result, depth)
    stats.count_acceptance(accepted)
    stats.num_accepted_tokens += accepted
    stats.wasted_branch_tokens += lost_siblings + (lost_main if drafted.branches else 0)
    stats.rollback_tokens += lost_chain + (0 if drafted.branches else lost_main)


def _fates(drafted: VerifyResult, row_result: RowResult, depth: int) -> tuple[int, int, int, int]:
    """Accepted; lost from the line; lost from the main branch; lost from the siblings."""
    draft_tokens, main = drafted.draft_tokens, drafted.main
    side_branches = (max(0, drafted.branches - 1) + drafted.rejection_branches) * (1 + depth)
    if row_result.complete and row_result.survivor == NONE:
        return row_result.accepted, draft_tokens - row_result.accepted, main, side_branches
    if row_result.complete and row_result.survivor > 0:
        # The survivor is the line now; if the text ends here, so does it.
        skipped = int(row_result.continuation >= 0)  # the branch's next token is in the text too
        lost = draft_tokens - row_result.accepted + (depth - skipped if row_result.finished else 0)
        return row_result.accepted + 1 + skipped, lost, main, side_branches - 1 - depth
    accepted = row_result.committed  # all of them on the line
    if not row_result.finished:
        return accepted, 0, 0, side_branches
    if accepted > draft_tokens:  # the main branch survived: it is the line
        return accepted, draft_tokens + main - accepted, 0, side_branches
    return accepted, draft_tokens - accepted, main, side_branches


class Accounting:
    """Counts verdicts, at a time when nobody waits for it.

    Args:
        stats: where to count.
        depth: tokens of a sibling behind its first.
    """

    def __init__(self, stats: SpecBranchStats, depth: int) -> None:
        self.stats, self.depth = stats, depth
        self.noted: list[tuple[VerifyResult, RowResult]] = []  # not counted yet
        self.last: list[tuple[VerifyResult, RowResult]] = []  # of the last round, counted or not

    def note(self, results: list[VerifyResult], rejection_branches: list[RowResult]) -> None:
        """Take down the verdicts of a round."""
        self.settle()
        self.last = self.noted = list(zip(results, rejection_branches))

    def settle(self) -> None:
        """Count what was taken down."""
        for verify_result, row_result in self.noted:
            settle(self.stats, verify_result, row_result, self.depth)
        self.noted = []

    def pending_lengths(self) -> list[int]:
        """How many drafted tokens stand behind the text of each unfinished row after the last round."""
        return [pending_length(*acceptance, self.depth) for acceptance in self.last if not acceptance[1].finished]

    def close(self) -> None:
        """Nothing more is counted here: what stands drafted is given up."""
        self.settle()
        self.stats.rollback_tokens += sum(self.pending_lengths())


def pending_length(drafted: VerifyResult, row_result: RowResult, depth: int) -> int:
    """How many drafted tokens stand behind the text after a verdict."""
    if row_result.complete and row_result.survivor == NONE:
        return 0
    if row_result.complete and row_result.survivor > 0:
        return depth - (row_result.continuation >= 0)
    return drafted.draft_tokens + drafted.main - row_result.committed
