"""How to go on: the settings that promise most tokens a second, given what steps take and how well the draft agrees.

The model is that of `simulate`. A plan is played on the text so far, round by round as the loop would go, and its
rounds are priced:

    a pass over q tokens          t(q), interpolated between the widths that were timed
    a draft step over w branches  d(w) = d(1) + (w - 1) * a branch
    a round                       loop + S + t(q) + B - hidden * min(t(q), B)

with S drafting before the pass and B drafting beside it; where there is such a B the loop waits for verdicts, and may
take longer. Prices come from the rounds of the generation itself
(`prices`), where they may; the plan with the most tokens a second is chosen (`choose`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from ..config import SpecBranchConfig
from .agreement import Agreement
from .costs import StepCosts
from .simulate import predict

# By whether stages are captured: lengths of chains, thresholds of confidence, outcome branches, runners-up.
LENGTHS = {True: (1, 2, 3, 4, 6, 8, 12), False: (2, 4, 8, 12)}
SENDING = {True: (0.02,), False: (0.1, 0.4)}
REJECTION_BRANCHES = {True: (12,), False: (0, 4)}
LEAVES = {True: (0, 8), False: (0, 4, 8)}
BLOCK = 16  # tokens that our kernels take at the price of one or little more; captured passes are kept within it
BETTER = 1.03  # a plan must promise so much more than the one under way
SURELY_BETTER = 1.06  # so much where prices are not measured: a change costs the same, and what it promises is a guess
MOST_HIDDEN = 0.7  # of drafting beside a pass on the same device; 0.4 was measured on an H200, next to nothing on CPUs
WORTH_OVERLAPPING = 0.05  # the least hidden part for which both models work at once


class Choice(NamedTuple):
    """A plan, and what is expected of it."""

    plan: SpecBranchConfig
    tokens_per_second: float
    tokens_per_pass: float


def plans_within(config: SpecBranchConfig, captured: bool) -> list[SpecBranchConfig]:
    """Everything that `policy="auto"` may choose; what the user has set stays.

    Args:
        config: the user's settings.
        captured: stages are captured as CUDA graphs.

    Example:
        >>> from hf_specbranch import SpecBranchConfig
        >>> {plan.max_draft_length for plan in plans_within(SpecBranchConfig(max_draft_length=3), captured=True)}
        {3}
    """
    lengths = LENGTHS[captured] if config.max_draft_length == "auto" else (config.draft_length,)
    given = config.confidence_threshold
    sending = SENDING[captured] if isinstance(given, str) else (given,)
    found = []
    for length, epsilon in product(lengths, sending):
        plan = replace(config, max_draft_length=length, confidence_threshold=epsilon)
        simple = replace(plan, policy="vanilla", max_rejection_branches=0, overlap=False)
        for leaves in LEAVES[captured]:
            fitting = max(0, min(leaves, BLOCK - 2 - length)) if captured else leaves
            leaves = set_or(config.tree_leaves, fitting)
            found.append(replace(simple, tree_leaves=leaves))
            for outcomes in REJECTION_BRANCHES[captured]:
                branching = replace(
                    plan, policy="specbranch", max_rejection_branches=set_or(config.max_rejection_branches, outcomes)
                )
                found.append(replace(branching, tree_leaves=leaves))
    none = replace(found[0], policy="autoregressive", tree_leaves=0)
    return list(dict.fromkeys([none, *found]))


def width(plan: SpecBranchConfig) -> int:
    """Tokens in a pass of the target: the last one, the chain, runners-up, and with these the token before the last."""
    leaves = int(plan.tree_leaves)
    return 1 + plan.draft_length + (1 + leaves if leaves else 0)


def set_or(given: int | str, count: int) -> int:
    """What the user has set, or else this."""
    return count if isinstance(given, str) else given


def choose(
    plans: Sequence[SpecBranchConfig],
    agreements: Sequence[Agreement],
    costs: StepCosts,
    captured: bool,
    current: SpecBranchConfig | None = None,
    ratios: Mapping[SpecBranchConfig, float] | None = None,
    better: float = BETTER,
) -> Choice:
    """The plan that promises most; the current one unless another is clearly better.

    Args:
        plans: what may be chosen.
        agreements: how the draft did on the text so far.
        costs: what a step takes.
        captured: stages are captured as CUDA graphs.
        current: the plan under way.
        ratios: what plans did over what was predicted of them, where they were tried.
        better: how many times the current plan's speed another must promise.
    """
    overlap = costs.hidden >= WORTH_OVERLAPPING

    def judged(plan: SpecBranchConfig) -> Choice:
        expected = predict(agreements, plan, costs, captured)
        ratio = likely_ratio(plan, ratios or {})
        return Choice(plan, ratio * expected.tokens_per_second, expected.tokens_per_pass)

    possible = [plan if overlap or not plan.overlap else replace(plan, overlap=False) for plan in plans]
    best = max(map(judged, possible), key=lambda choice: choice.tokens_per_second)
    if current is None:
        return best
    now = judged(current)
    return best if best.tokens_per_second > better * now.tokens_per_second else now


def may_be_better(
    plans: Sequence[SpecBranchConfig],
    agreements: Sequence[Agreement],
    costs: StepCosts,
    captured: bool,
    than: Choice,
    most_hidden: float,
    ratios: Mapping[SpecBranchConfig, float] | None = None,
) -> bool:
    """Whether some plan that drafts beside the target would be clearly better if as much as can be were hidden.

    If not, there is no need to find out how much is.
    """
    beside = [plan for plan in plans if plan.overlap and plan.policy == "specbranch"]
    ideal = replace(costs, hidden=most_hidden, waiting=0.0)
    found = choose(beside, agreements, ideal, captured, ratios=ratios) if beside else than
    return found.tokens_per_second > BETTER * than.tokens_per_second


def likely_ratio(plan: SpecBranchConfig, ratios: Mapping[SpecBranchConfig, float]) -> float:
    """What a plan will do over what is predicted of it: as before, or as others of its policy did.

    Otherwise a plan that was never tried would look better than any that was, and each trial has its price.
    """
    if plan in ratios:
        return ratios[plan]
    alike = [ratio for other, ratio in ratios.items() if other.policy == plan.policy]
    return sum(alike) / len(alike) if alike else 1.0


def described(plan: SpecBranchConfig, overlap: bool) -> Iterator[str]:
    """A plan in words, one setting at a time."""
    yield plan.policy
    if plan.policy != "autoregressive":
        yield f"length {plan.max_draft_length}"
        yield f"epsilon {plan.confidence_threshold:g}"
        yield f"{plan.tree_leaves} runners-up"
    if plan.policy == "specbranch":
        yield f"{plan.max_rejection_branches} outcome branches"
        yield "overlapped" if overlap else "one after the other"
