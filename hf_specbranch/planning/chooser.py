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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from random import Random
from typing import NamedTuple

from transformers import PreTrainedModel

from ..config import SpecBranchConfig
from ..stats import Totals
from .simulate import ABSENT, Agreement, StepCosts, predict

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


class SegmentTiming(NamedTuple):
    """Some rounds after one plan, and what they took."""

    rounds: int
    tokens: float  # committed a row
    seconds: float
    overlap: bool
    draft: Totals  # drafting before the passes
    verify: Totals
    branch: Totals  # drafting that could run beside them
    disturbed: bool = False  # something happened that happens once

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


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


def prices(stretches: Sequence[SegmentTiming]) -> StepCosts:
    """What steps take, from rounds that were timed; some of them without overlap.

    Example:
        >>> timed = Stretch(4, 8, 0.05, False, Sum(0.004, 4, 4), Sum(0.04, 4, 20), Sum())
        >>> one_token = Stretch(2, 0, 0.016, False, Sum(), Sum(0.016, 2, 2), Sum())
        >>> costs = prices([timed, one_token])
        >>> round(costs.target_pass, 4), round(costs.target_token, 4), round(costs.draft_step, 4)
        (0.009, 0.0005, 0.001)
    """
    alone = [each for each in stretches if not each.overlap]
    a_pass, a_token = _line(each.verify for each in alone)  # of all widths
    steps = [*(each.draft for each in stretches), *(each.branch for each in alone)]
    a_step, a_branch = _line(steps)
    loop = _loop([each for each in alone if not each.branch.forwards] or alone)
    waiting = max(0.0, _loop([each for each in alone if each.branch.forwards]) - loop)
    costs = StepCosts(a_pass + loop, a_token, a_step, a_branch, 0.0, _curve(alone, loop), waiting)
    saved = possible = 0.0
    for each in stretches:
        if each.overlap:
            further = each.verify.positions / each.verify.forwards - 1
            verify = each.verify.forwards * (costs.pass_over(round(further)) - loop)
            branch = each.branch.forwards * a_step + (each.branch.positions - each.branch.forwards) * a_branch
            saved += each.rounds * (loop + waiting) + each.draft.seconds + verify + branch - each.seconds
            possible += min(verify, branch)
    hidden = min(max(saved / possible, 0.0), 1.0) if possible > 0 else 0.0
    return replace(costs, hidden=hidden)


def _loop(alone: Sequence[SegmentTiming]) -> float:
    """Seconds of a round outside forwards."""
    if not alone:
        return 0.0
    parts = sum(each.draft.seconds + each.verify.seconds + each.branch.seconds for each in alone)
    return max(0.0, sum(each.seconds for each in alone) - parts) / sum(each.rounds for each in alone)


def _curve(alone: Sequence[SegmentTiming], loop: float) -> tuple[tuple[float, float], ...]:
    """(further tokens, seconds) of the passes without overlap, the narrowest first; a wider pass is no faster.

    A straight line would not do: on a CPU and in our kernels a pass over two tokens is a different thing from one over
    one, and further ones cost little until a block is full.
    """
    sums: dict[int, Totals] = {}
    for each in alone:
        width = round(each.verify.positions / each.verify.forwards)
        sums[width] = sums.get(width, Totals()) + each.verify
    points, slowest = [], 0.0
    for _, together in sorted(sums.items()):
        slowest = max(slowest, together.seconds / together.forwards)
        points.append((together.positions / together.forwards - 1, slowest + loop))
    return tuple(points)


def _line(sums: Iterable[Totals]) -> tuple[float, float]:
    """Seconds of a forward over one token, and of each further one: the best straight line, never falling."""
    points = [(each.positions / each.forwards, each.seconds / each.forwards, each.forwards) for each in sums if each[1]]
    count = sum(weight for *_, weight in points)
    if not count:
        return 0.0, 0.0
    x = sum(weight * width for width, _, weight in points) / count
    y = sum(weight * seconds for _, seconds, weight in points) / count
    spread = sum(weight * (width - x) ** 2 for width, _, weight in points)
    rise = sum(weight * (width - x) * (seconds - y) for width, seconds, weight in points)
    slope = max(0.0, rise / spread) if spread > 1e-9 else 0.0
    return max(1e-9, y - slope * (x - 1)), slope


def usual_costs(target: PreTrainedModel, draft: PreTrainedModel, captured: bool) -> StepCosts:
    """What steps take by the size of the models alone, for where nothing may be measured.

    Captured, a forward takes the time to read its weights and a little for each layer: that gives 4.1, 0.09, 1.3 and
    16.9 ms for 7B, 68M, 1.3B and 33B in half precision, where 4.2, 0.085, 1.3 and 17.6 were measured on an H200. On a
    CPU the embedded pair was the measure (docs/benchmarks.md).

    Both models are bound by memory, so little of one hides behind the other: 7B took 4.20 ms alone and 4.51 beside 0.5
    ms of drafting by 68M, and a round that drafts ahead waited 0.3 ms for the host.
    """
    a_pass, a_step = (_usual_seconds(model, captured) for model in (target, draft))
    if captured:
        return StepCosts(a_pass, 0.005 * a_pass, a_step, 0.03 * a_step, hidden=0.4, waiting=3e-4)
    return StepCosts(a_pass, 0.02 * a_pass, a_step, 0.05 * a_step)


def _usual_seconds(model: PreTrainedModel, captured: bool) -> float:
    size: int = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    layers: int = model.config.get_text_config(decoder=True).num_hidden_layers
    return size / 4.3e12 + layers * 3e-5 if captured else size / 1.5e10 + layers * 4e-4


@lru_cache(maxsize=8)
def ordinary_text(candidates: int) -> Agreement:
    """What an ordinary draft makes of an ordinary text: to plan by before anything is seen of either.

    Made up, and always the same: stretches of 16 tokens, easy ones and hard ones in turns, of which the draft has 9 of
    10 and half. Of what it has not, its second choice is right in 4 of 10 cases; of the rest its third, and so on.

    Args:
        candidates: how many of the draft's choices are looked at.

    Example:
        >>> round(ordinary_text(candidates=5).rate, 1)
        0.7
    """
    dice, ranks, chances = Random(0), [], []
    for position in range(256):
        right = 0.5 if position // 16 % 2 else 0.9
        others = [(1 - right) * 0.4 * 0.6**further for further in range(candidates - 1)]
        known = (right, *others)
        ranks += dice.choices([*range(candidates), ABSENT], [*known, 1 - sum(known)])
        chances.append(known)
    return Agreement(tuple(known[0] for known in chances), tuple(ranks), candidates, tuple(chances))


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
