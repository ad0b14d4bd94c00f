"""Measurements beside the comparison: the limit, the first token, the cost of a round, steadiness."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .each_kernel import check_sizes, each_kernel
from .latency import REPEATS, check_context, round_cost, stability, time_to_first_token
from .limit import distance_to_limit, draft_steps
from .measure import Plan
from .timing import forget
from .ways import Pair


class Further(NamedTuple):
    """Which of them to take; empty or None leaves one out."""

    pass_at: tuple[int, ...] = ()  # contexts at which a target pass is timed
    first_token_at: int | None = None  # tokens of a long prompt
    round_cost_at: tuple[int, ...] = ()  # contexts at which a round is timed
    stability_runs: int | None = None
    kernels_alone: bool = False  # each kernel is timed by itself
    repeats: int = REPEATS  # counted runs of the second and third

    def check(self, pair: Pair) -> None:
        """Refuse contexts and sizes that the models do not have."""
        first = () if self.first_token_at is None else (self.first_token_at,)
        check_context(pair, (*self.pass_at, *first, *self.round_cost_at))
        if self.kernels_alone:
            check_sizes(pair.target)

    def run(self, pair: Pair, all_inputs: list[dict[str, Tensor]], plan: Plan, found: dict[str, Any]) -> None:
        """Take them one by one and put each into `found` as soon as it is known."""
        choices = plan.choices
        if self.pass_at:
            forget(pair)
            found["limit"] = distance_to_limit(pair.target, self.pass_at, choices.runtime, choices.kernels)
            forget(pair)
            found["draft_steps"] = draft_steps(pair.draft, self.pass_at[0], choices.runtime, choices.kernels)
            forget(pair)
        if self.kernels_alone:
            found["kernels"] = each_kernel(pair.target)
        if self.first_token_at is not None:
            found["time_to_first_token"] = time_to_first_token(
                pair, all_inputs, choices, self.first_token_at, self.repeats
            )
        if self.round_cost_at:
            found["round_cost"] = round_cost(pair, all_inputs, choices, self.round_cost_at, self.repeats)
        if self.stability_runs is not None:
            found["stability"] = stability(pair, all_inputs[0], choices, self.stability_runs, plan.new_tokens)
