"""What became of every drafted token: accepted, rolled back or wasted, and nothing else."""

from __future__ import annotations

from typing import NamedTuple

from ..stats import SpecBranchStats
from .records import Outcome
from .verify import NONE


class Drafted(NamedTuple):
    """What stood drafted on one row when a verdict came."""

    chain: int  # tokens the target looked at
    main: int  # tokens behind it on the line; where the line forks, these are the main branch
    branches: int  # branches at the fork, the main one included; 0 where the line does not fork (or in PEARL)
    depth: int  # tokens of a sibling behind its first

    @property
    def sibling_tokens(self) -> int:
        return max(0, self.branches - 1) * (1 + self.depth)


def settle(stats: SpecBranchStats, drafted: Drafted, outcome: Outcome) -> None:
    """Count one verdict on one row."""
    if not (drafted.chain or drafted.main):
        return
    stats.num_drafts += 1
    if drafted.branches and outcome.complete and outcome.accepted == drafted.chain:
        stats.branch_points += 1
        stats.branch_hits += outcome.survivor != NONE
    accepted, lost_chain, lost_main, lost_siblings = _fates(drafted, outcome)
    stats.count_acceptance(accepted)
    stats.num_accepted_tokens += accepted
    stats.wasted_branch_tokens += lost_siblings + (lost_main if drafted.branches else 0)
    stats.rollback_tokens += lost_chain + (0 if drafted.branches else lost_main)


def _fates(drafted: Drafted, outcome: Outcome) -> tuple[int, int, int, int]:
    """Accepted; lost from the line; lost from the main branch; lost from the siblings."""
    chain, main, siblings = drafted.chain, drafted.main, drafted.sibling_tokens
    if outcome.complete and outcome.survivor == NONE:
        return outcome.accepted, chain - outcome.accepted, main, siblings
    if outcome.complete and outcome.survivor > 0:
        # The survivor is the line now; if the text ends here, so does it.
        return chain + 1, drafted.depth if outcome.finished else 0, main, siblings - 1 - drafted.depth
    accepted = outcome.committed  # all of them on the line
    if not outcome.finished:
        return accepted, 0, 0, siblings
    if accepted > chain:  # the main branch survived: it is the line
        return accepted, chain + main - accepted, 0, siblings
    return accepted, chain - accepted, main, siblings
