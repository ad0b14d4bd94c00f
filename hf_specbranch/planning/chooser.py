"""Choose the plan with the most predicted tokens per second, given step costs and recordings of agreement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from ..config import BLOCK_SIZE, BY_COST, LOOKUP_BESIDE_LEAVES, LOOKUP_TOKENS, SpecBranchConfig
from .agreement import Agreement
from .costs import StepCosts
from .simulate import predict

# The values that plans are built from, by whether stages are captured as CUDA graphs.
LENGTHS = {True: (1, 2, 3, 4, 6, 8, 12), False: (2, 4, 6, 8)}
THRESHOLDS = {True: (0.02,), False: (0.2, 0.4)}
REJECTION_BRANCHES = {True: (12,), False: (0, 4)}
TREE_LEAVES = {True: (0, 8), False: (0,)}  # a wider pass costs more on a CPU
LONG_STEP = 1.5e-4  # seconds of a draft step from which on it pays to wait for each: ten times what that costs
MIN_GAIN = 1.03  # a plan replaces the current one if it is predicted to be this much faster
MIN_PREDICTED_GAIN = 1.06  # the same where costs are only predicted, and the gain is less certain
MIN_HIDDEN = 0.05  # the smallest hidden fraction for which overlap is used


class Choice(NamedTuple):
    """A plan and its predicted speed."""

    plan: SpecBranchConfig
    tokens_per_second: float
    tokens_per_pass: float


def plans_within(config: SpecBranchConfig, captured: bool, step: float = 0.0) -> list[SpecBranchConfig]:
    """Return all plans that `policy="auto"` may choose from; what the user has set is kept.

    Args:
        config: the user's settings.
        captured: stages are captured as CUDA graphs.
        step: the predicted seconds of a draft step.

    Example:
        >>> from hf_specbranch import SpecBranchConfig
        >>> {plan.max_draft_length for plan in plans_within(SpecBranchConfig(max_draft_length=3), captured=True)}
        {3}
    """
    return list(_plans_within(config, captured, captured and step >= LONG_STEP))


@lru_cache(maxsize=8)  # every call asks, usually with the settings of the last one
def _plans_within(config: SpecBranchConfig, captured: bool, stepwise: bool) -> tuple[SpecBranchConfig, ...]:
    length, epsilon = config.max_draft_length, config.confidence_threshold
    lengths = LENGTHS[captured] if isinstance(length, str) else (length,)
    thresholds = THRESHOLDS[captured] if epsilon == "auto" else (epsilon,)
    whole = single = list(product(lengths, thresholds))
    if stepwise and epsilon == "auto":  # a draft that stops by itself needs no other lengths
        single = [(config.draft_length, BY_COST)]
    has_leaves = config.tree_leaves != 0 and any(TREE_LEAVES[captured])
    lookup = _given_or(config.prompt_lookup_num_tokens, LOOKUP_BESIDE_LEAVES if has_leaves else LOOKUP_TOKENS)
    plan = replace(config, prompt_lookup_num_tokens=lookup)
    vanilla = replace(plan, policy="vanilla", max_rejection_branches=0, overlap=False)
    plans = list(_drafting(vanilla, single, captured))
    for branches in REJECTION_BRANCHES[captured]:
        ahead = replace(
            plan, policy="specbranch", max_rejection_branches=_given_or(config.max_rejection_branches, branches)
        )
        plans += _drafting(ahead, whole, captured)
    autoregressive = replace(plans[0], policy="autoregressive", tree_leaves=0)
    return tuple(dict.fromkeys([autoregressive, *plans]))


def _drafting(
    plan: SpecBranchConfig, lengths_and_thresholds: list[tuple[int, float | str]], captured: bool
) -> Iterator[SpecBranchConfig]:
    """Yield the plan with each of these lengths and thresholds, with and without tree leaves."""
    for (length, epsilon), leaves in product(lengths_and_thresholds, TREE_LEAVES[captured]):
        fitting = max(0, min(leaves, BLOCK_SIZE - 2 - length)) if captured else leaves
        leaves = _given_or(plan.tree_leaves, fitting)
        yield replace(plan, max_draft_length=length, confidence_threshold=epsilon, tree_leaves=leaves)


def _given_or(given: int | str, default: int) -> int:
    """Return the user's number, or the default where the setting is "auto"."""
    return default if isinstance(given, str) else given


def pass_width(plan: SpecBranchConfig) -> int:
    """Return the tokens in a pass of the target: the last token of the text, the draft tokens and the tree leaves.

    With tree leaves the pass also reads the token before the last again.
    """
    leaves = int(plan.tree_leaves)
    return 1 + plan.draft_length + (1 + leaves if leaves else 0)


def choose(
    plans: Sequence[SpecBranchConfig],
    agreements: Sequence[Agreement],
    costs: StepCosts,
    captured: bool,
    current: SpecBranchConfig | None = None,
    ratios: Mapping[SpecBranchConfig, float] | None = None,
    min_gain: float = MIN_GAIN,
    delay: Callable[[SpecBranchConfig], float] | None = None,
) -> Choice:
    """Return the plan with which the rest of the text is done first; the current one unless another is clearly faster.

    Args:
        plans: the plans to choose from.
        agreements: recordings.
        costs: step costs.
        captured: stages are captured as CUDA graphs.
        current: the plan that is being followed, if any.
        ratios: measured over predicted speed of plans that were followed before.
        min_gain: how many times faster than the current plan another must be.
        delay: the seconds before a plan can be followed, per token that follows it. None: no plan has to be waited for.
    """
    overlap, texts = costs.hidden >= MIN_HIDDEN, tuple(agreements)

    def evaluate(plan: SpecBranchConfig) -> Choice:
        prediction = _predict(texts, plan, costs, captured)
        ratio = expected_ratio(plan, ratios or {})
        return Choice(plan, ratio * prediction.tokens_per_second, prediction.tokens_per_pass)

    def seconds(choice: Choice) -> float:
        """The seconds per token, the delay included."""
        return 1 / choice.tokens_per_second + (0.0 if delay is None else delay(choice.plan))

    best = min(map(evaluate, _worth_a_look(plans, overlap)), key=seconds)
    if current is None:
        return best
    now = evaluate(current)
    return best if min_gain * seconds(best) < seconds(now) else now


_predict = lru_cache(maxsize=1024)(predict)  # the start and the end of a text ask for the same, at rounded costs


def _worth_a_look(plans: Sequence[SpecBranchConfig], overlap: bool) -> Sequence[SpecBranchConfig]:
    """Leave out plans that draft ahead where nothing hides it: plain speculation drafts the same tokens when needed."""
    if overlap:
        return plans
    return [plan for plan in plans if plan.policy != "specbranch"] or [replace(plan, overlap=False) for plan in plans]


def expected_ratio(plan: SpecBranchConfig, ratios: Mapping[SpecBranchConfig, float]) -> float:
    """Return the expected ratio of measured to predicted speed: the plan's own, or the mean over its policy.

    Without the mean, plans that were never tried would look faster than those that were, and each trial costs time.
    """
    if plan in ratios:
        return ratios[plan]
    same_policy = [ratio for other, ratio in ratios.items() if other.policy == plan.policy]
    return sum(same_policy) / len(same_policy) if same_policy else 1.0


def describe(plan: SpecBranchConfig, overlap: bool) -> str:
    """Return a plan in words.

    Example:
        >>> from hf_specbranch import SpecBranchConfig
        >>> describe(SpecBranchConfig("specbranch").decided(captured=True), overlap=True)
        'specbranch, length 8, epsilon 0.02, 0 tree leaves, 0 rejection branches, overlapped'
    """
    return ", ".join(_described(plan, overlap))


def _described(plan: SpecBranchConfig, overlap: bool) -> Iterator[str]:
    yield plan.policy
    if plan.lookup_tokens:
        yield f"lookup up to {plan.lookup_tokens}"
    if plan.policy != "autoregressive":
        yield f"length {plan.max_draft_length}"
        yield "stops by cost" if plan.stops_by_cost else f"epsilon {plan.confidence_threshold:g}"
        yield f"{plan.tree_leaves} tree leaves"
    if plan.policy == "specbranch":
        yield f"{plan.max_rejection_branches} rejection branches"
        yield "overlapped" if overlap else "not overlapped"
