"""What steps of both models take: the costs themselves, fitted to the rounds of a generation, or by size alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from transformers import PreTrainedModel

from ..stats import Totals
from .replay import Round

_PRICES = ("target_pass", "target_token", "draft_step", "draft_branch")


@dataclass(frozen=True)
class StepCosts:
    """What a step takes, in seconds, the loop's own work included.

    Args:
        target_pass: the target over one token.
        target_token: each further token in the same pass.
        draft_step: the draft over one branch.
        draft_branch: each further branch in the same step.
        hidden: the part of drafting beside a pass that costs no time of its own: 0 none, 1 all.
        passes: (further tokens, seconds) of passes that were timed, if any, by their width: between them times are
            interpolated, and behind the last a token takes `target_token`.
        waiting: what a round with drafting beside its pass takes beyond all that, since the host must hear its verdict
            before it can say how the next one begins.

    Example:
        >>> from hf_specbranch.planning.simulate import StepCosts
        >>> costs = StepCosts(target_pass=0.008, target_token=0.0001, draft_step=0.0003, draft_branch=0.0)
        >>> round(costs.speed_ratio)
        27
    """

    target_pass: float
    target_token: float = 0.0
    draft_step: float = 0.0
    draft_branch: float = 0.0
    hidden: float = 0.0
    passes: tuple[tuple[float, float], ...] = ()
    waiting: float = 0.0

    def __post_init__(self) -> None:
        if self.target_pass <= 0 or min(self.target_token, self.draft_step, self.draft_branch) < 0:
            raise ValueError(f"{self}: expected a target pass that takes time, and nothing below 0")
        if not 0 <= self.hidden <= 1:
            raise ValueError(f"hidden={self.hidden}: expected a number from 0 to 1")

    @property
    def speed_ratio(self) -> float:
        """c: draft steps that fit into one target pass."""
        return self.target_pass / self.draft_step if self.draft_step else float("inf")

    def at_ratio(self, ratio: float) -> StepCosts:
        """The same target with a draft so fast that `ratio` of its steps take as long as one pass."""
        if ratio <= 0 or self.draft_step <= 0:
            raise ValueError(f"ratio={ratio} with draft_step={self.draft_step}: both must be above 0")
        scale = self.target_pass / ratio / self.draft_step
        return replace(self, draft_step=self.draft_step * scale, draft_branch=self.draft_branch * scale)

    def on_gpus(self, count: int) -> StepCosts:
        """The same models on `count` GPUs of this kind: from two on the draft has its own, so all that can run
        beside the target does; from three on branches are spread over those the target leaves free.
        """
        if count < 2:
            return self
        return replace(self, hidden=1.0, draft_branch=self.draft_branch / (count - 1))

    def to_dict(self) -> dict[str, float]:
        """Milliseconds a step, draft steps a pass, and the hidden part, ready for JSON."""
        prices = {f"{name}_ms": 1e3 * getattr(self, name) for name in _PRICES}
        return {**prices, "speed_ratio": self.speed_ratio, "hidden": self.hidden}

    def seconds(self, rounds: Iterable[Round] | Mapping[Round, int], overlap: bool = True) -> float:
        """What these rounds take together; of many that are alike one may be given, and how often it came."""
        return sum(count * self._round(each, overlap) for each, count in Counter(rounds).items())

    def _round(self, each: Round, overlap: bool) -> float:
        verify, ahead = self.parts(each)
        saved = self.hidden * min(verify, ahead) if overlap else 0.0
        return each.steps_before * self.draft_step + verify + ahead - saved + self.waiting * (each.steps_beside > 0)

    def pass_over(self, sent: int) -> float:
        """Seconds of a pass over one token and so many further ones."""
        if not self.passes:
            return self.target_pass + sent * self.target_token
        if sent <= self.passes[0][0]:
            return self.passes[0][1]
        for (low, fast), (high, slow) in pairwise(self.passes):
            if sent <= high:
                return fast + (sent - low) / (high - low) * (slow - fast)
        widest, seconds = self.passes[-1]
        return seconds + (sent - widest) * self.target_token

    def parts(self, each: Round) -> tuple[float, float]:
        """The pass, and the drafting that may run beside it."""
        verify = self.pass_over(each.sent)
        return verify, each.steps_beside * (self.draft_step + max(0, each.width - 1) * self.draft_branch)


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


def prices(stretches: Sequence[SegmentTiming]) -> StepCosts:
    """What steps take, from rounds that were timed; some of them without overlap.

    Example:
        >>> timed = SegmentTiming(4, 8, 0.05, False, Totals(0.004, 4, 4), Totals(0.04, 4, 20), Totals())
        >>> one_token = SegmentTiming(2, 0, 0.016, False, Totals(), Totals(0.016, 2, 2), Totals())
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
