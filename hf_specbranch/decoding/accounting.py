"""What became of every drafted token: accepted, rolled back or wasted, and nothing else."""

from __future__ import annotations

from ..stats import SpecBranchStats
from .acceptance import NONE
from .state import Outcome, Report


def settle(stats: SpecBranchStats, drafted: Report, outcome: Outcome, depth: int) -> None:
    """Count one verdict on one row.

    Args:
        drafted: what stood drafted when the verdict came.
        outcome: what the verdict meant.
        depth: tokens of a sibling behind its first.
    """
    stats.num_draft_tokens += drafted.drafted
    stats.runners_up += drafted.leaves
    stats.runner_up_hits += outcome.bonus >= 0
    if not (drafted.chain or drafted.main):
        return
    stats.num_drafts += 1
    if drafted.branches and outcome.complete and outcome.accepted == drafted.chain:
        stats.branch_points += 1
        stats.branch_hits += outcome.survivor != NONE
    elif drafted.outcomes and outcome.complete:
        stats.outcome_points += 1
        stats.outcome_hits += outcome.survivor != NONE
    accepted, lost_chain, lost_main, lost_siblings = _fates(drafted, outcome, depth)
    stats.count_acceptance(accepted)
    stats.num_accepted_tokens += accepted
    stats.wasted_branch_tokens += lost_siblings + (lost_main if drafted.branches else 0)
    stats.rollback_tokens += lost_chain + (0 if drafted.branches else lost_main)


def _fates(drafted: Report, outcome: Outcome, depth: int) -> tuple[int, int, int, int]:
    """Accepted; lost from the line; lost from the main branch; lost from the siblings."""
    chain, main = drafted.chain, drafted.main
    siblings = (max(0, drafted.branches - 1) + drafted.outcomes) * (1 + depth)
    if outcome.complete and outcome.survivor == NONE:
        return outcome.accepted, chain - outcome.accepted, main, siblings
    if outcome.complete and outcome.survivor > 0:
        # The survivor is the line now; if the text ends here, so does it.
        skipped = int(outcome.bonus >= 0)  # the branch's next token is in the text too
        lost = chain - outcome.accepted + (depth - skipped if outcome.finished else 0)
        return outcome.accepted + 1 + skipped, lost, main, siblings - 1 - depth
    accepted = outcome.committed  # all of them on the line
    if not outcome.finished:
        return accepted, 0, 0, siblings
    if accepted > chain:  # the main branch survived: it is the line
        return accepted, chain + main - accepted, 0, siblings
    return accepted, chain - accepted, main, siblings


class Books:
    """Counts verdicts, at a time when nobody waits for it.

    Args:
        stats: where to count.
        depth: tokens of a sibling behind its first.
    """

    def __init__(self, stats: SpecBranchStats, depth: int) -> None:
        self.stats, self.depth = stats, depth
        self.noted: list[tuple[Report, Outcome]] = []  # not counted yet
        self.last: list[tuple[Report, Outcome]] = []  # of the last round, counted or not

    def note(self, reports: list[Report], outcomes: list[Outcome]) -> None:
        """Take down the verdicts of a round."""
        self.settle()
        self.last = self.noted = list(zip(reports, outcomes))

    def settle(self) -> None:
        """Count what was taken down."""
        for report, outcome in self.noted:
            settle(self.stats, report, outcome, self.depth)
        self.noted = []

    def lines_left(self) -> list[int]:
        """How many drafted tokens stand behind the text of each unfinished row after the last round."""
        return [line_left(*verdict, self.depth) for verdict in self.last if not verdict[1].finished]

    def close(self) -> None:
        """Nothing more is counted here: what stands drafted is given up."""
        self.settle()
        self.stats.rollback_tokens += sum(self.lines_left())


def line_left(drafted: Report, outcome: Outcome, depth: int) -> int:
    """How many drafted tokens stand behind the text after a verdict."""
    if outcome.complete and outcome.survivor == NONE:
        return 0
    if outcome.complete and outcome.survivor > 0:
        return depth - (outcome.bonus >= 0)
    return drafted.chain + drafted.main - outcome.committed
