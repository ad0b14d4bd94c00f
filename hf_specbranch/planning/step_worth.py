"""Whether a draft model should take another step: by what the step costs, and how likely its token is to be accepted.

A token saves the time that the text takes per token, if the target accepts it and everything drafted before it. The
chance of that is about the product of the confidences so far. So a draft stops when

    (c_1 c_2 ... c_n, summed over the rows)  <=  tokens per second of the text * seconds of a step

An expensive draft, or one beside lookups that are mostly right, stops early; a cheap one goes on for longer.
"""

from __future__ import annotations

from typing import NamedTuple

from ..stats import SpecBranchStats
from .costs import StepCosts

TYPICAL_TOKENS = 2.0  # that a pass commits per row, before anything is known of the text
PRIOR_PASSES = 4  # that this counts for


class _Counts(NamedTuple):
    passes: int  # of the target
    tokens: int  # committed, over all rows
    steps: int  # of the draft


class StepWorth:
    """What a draft step must bring, from the costs and counts of the rounds since it was first asked.

    What came before them depends on what was still in memory, and a sampled text must depend on its seed alone.

    Args:
        stats: counts passes, steps and tokens.
        costs: what steps cost.
        rows: the batch size.
        width: the draft tokens and tree leaves in a pass.

    Example:
        >>> stats = SpecBranchStats()
        >>> worth = StepWorth(stats, StepCosts(target_pass=0.004, draft_step=0.001), rows=1, width=8)
        >>> worth.least_chance()
        0.5
        >>> stats.target_forwards = stats.row_passes = 96  # and nothing is accepted
        >>> worth.least_chance()
        0.26
    """

    def __init__(self, stats: SpecBranchStats, costs: StepCosts, rows: int, width: int) -> None:
        self.stats, self.costs, self.rows, self.width = stats, costs, rows, width
        self.before: _Counts | None = None

    def least_chance(self) -> float:
        """Return how many tokens of a step must be accepted, over all rows, for it to save more time than it takes."""
        return self.speed() * self.costs.draft_step

    def speed(self) -> float:
        """Return the tokens per second of the text, over all rows."""
        now = self._counts()
        self.before = self.before or now
        passes, tokens, steps = (one - other for one, other in zip(now, self.before))
        seconds = (passes + PRIOR_PASSES) * self.costs.pass_seconds(self.width) + steps * self.costs.draft_step
        return (tokens + PRIOR_PASSES * TYPICAL_TOKENS * self.rows) / seconds

    def _counts(self) -> _Counts:
        stats = self.stats
        tokens = stats.row_passes + stats.num_accepted_tokens + stats.tree_leaf_hits
        return _Counts(stats.target_forwards, tokens, stats.draft_forwards)
