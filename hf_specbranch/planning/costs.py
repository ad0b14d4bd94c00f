"""Step costs: how long steps of both models take, fitted to the rounds of a generation or predicted from model sizes.

The model of a round, in seconds, with `q - 1` draft tokens and tree leaves in the pass and `w` branches per draft step:

    a pass of the target over q tokens    t(q) = target_pass + (q - 1) * target_token
    a step of the draft over w branches   d(w) = draft_step + (w - 1) * draft_branch
    drafting before the pass              S = steps * d(1)
    drafting that may overlap with it     B = steps * d(w)
    a round                               S + t(q) + B - hidden * min(t(q), B)

`hidden` is the fraction of the possible overlap that is achieved: 0 without overlap, 1 with a device for each model.
The loop's own work is part of `target_pass`. Where passes of several widths were measured, t(q) is interpolated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from transformers import PreTrainedModel

from ..runtime.overlap import Totals
from .replay import Round

_IN_SECONDS = ("target_pass", "target_token", "draft_step", "draft_branch")


@dataclass(frozen=True)
class StepCosts:
    """How long each step takes, in seconds, including the loop's own work.

    Args:
        target_pass: a pass of the target over one token.
        target_token: each further token in the same pass.
        draft_step: a step of the draft over one branch.
        draft_branch: each further branch in the same step.
        hidden: the fraction of overlapped drafting that costs no time: 0 none, 1 all.
        passes: (further tokens, seconds) of measured passes, the narrowest first. Between them the time of a pass is
            interpolated; after the widest, each token costs `target_token`. Empty: `target_pass` and `target_token`.
        waiting: the additional time of a round with overlapped drafting, in which the host must wait for the verify
            result before it can start the next round.

    Example:
        >>> from hf_specbranch.planning import StepCosts
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
            raise ValueError(f"{self}: expected a target_pass above 0, and nothing below 0")
        if not 0 <= self.hidden <= 1:
            raise ValueError(f"hidden={self.hidden}: expected a number from 0 to 1")

    @property
    def speed_ratio(self) -> float:
        """c: the number of draft steps that take as long as one target pass."""
        return self.target_pass / self.draft_step if self.draft_step else float("inf")

    def at_ratio(self, ratio: float) -> StepCosts:
        """Return the same costs with a draft so fast that `ratio` of its steps take as long as one target pass."""
        if ratio <= 0 or self.draft_step <= 0:
            raise ValueError(f"ratio={ratio} with draft_step={self.draft_step}: both must be above 0")
        scale = self.target_pass / ratio / self.draft_step
        return replace(self, draft_step=self.draft_step * scale, draft_branch=self.draft_branch * scale)

    def on_gpus(self, count: int) -> StepCosts:
        """Return the costs of the same models on `count` GPUs of this kind.

        With two or more, the draft has its own GPU, and all overlapped drafting is hidden. With three or more, the
        branches are spread over all GPUs but the target's.
        """
        if count < 2:
            return self
        return replace(self, hidden=1.0, draft_branch=self.draft_branch / (count - 1))

    def to_dict(self) -> dict[str, float]:
        """Return milliseconds per step, draft steps per pass and the hidden fraction, ready for JSON."""
        milliseconds = {f"{name}_ms": 1e3 * getattr(self, name) for name in _IN_SECONDS}
        return {**milliseconds, "speed_ratio": self.speed_ratio, "hidden": self.hidden}

    def seconds(self, rounds: Iterable[Round] | Mapping[Round, int], overlap: bool = True) -> float:
        """Return the total time of these rounds, given one by one or as a count of each different round."""
        return sum(count * self._round(each, overlap) for each, count in Counter(rounds).items())

    def _round(self, each: Round, overlap: bool) -> float:
        verify, overlapped = self.parts(each)
        saved = self.hidden * min(verify, overlapped) if overlap else 0.0
        waiting = self.waiting * (each.overlapped_steps > 0)
        return each.steps_before * self.draft_step + verify + overlapped - saved + waiting

    def pass_seconds(self, sent: int) -> float:
        """Return the time of a pass over one token and `sent` further ones."""
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
        """Return the time of a round's pass, and of the drafting that may overlap with it."""
        verify = self.pass_seconds(each.sent)
        return verify, each.overlapped_steps * (self.draft_step + max(0, each.width - 1) * self.draft_branch)


class SegmentTiming(NamedTuple):
    """What the rounds of one plan segment did, and how long they took."""

    rounds: int
    tokens: float  # committed tokens per row
    seconds: float
    overlap: bool
    draft: Totals  # drafting before the passes
    verify: Totals
    branch: Totals  # drafting that could overlap with them
    disturbed: bool = False  # includes one-off work, such as the capture of a graph

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def fit_segment_costs(timings: Sequence[SegmentTiming]) -> StepCosts:
    """Fit step costs to timed segments, of which at least one ran without overlap.

    Segments without overlap give the costs of each step. Segments with overlap give the hidden fraction: the time they
    saved compared with these costs, over the most that they could have saved.

    Example:
        >>> timed = SegmentTiming(4, 8, 0.05, False, Totals(0.004, 4, 4), Totals(0.04, 4, 20), Totals())
        >>> one_token = SegmentTiming(2, 0, 0.016, False, Totals(), Totals(0.016, 2, 2), Totals())
        >>> costs = fit_segment_costs([timed, one_token])
        >>> round(costs.target_pass, 4), round(costs.target_token, 4), round(costs.draft_step, 4)
        (0.009, 0.0005, 0.001)
    """
    serial = [each for each in timings if not each.overlap]
    target_pass, target_token = _fit_line(each.verify for each in serial)  # over all widths
    draft_step, draft_branch = _fit_line([*(each.draft for each in timings), *(each.branch for each in serial)])
    loop = _loop_seconds([each for each in serial if not each.branch.forwards] or serial)
    waiting = max(0.0, _loop_seconds([each for each in serial if each.branch.forwards]) - loop)
    passes = _pass_curve(serial, loop)
    costs = StepCosts(target_pass + loop, target_token, draft_step, draft_branch, 0.0, passes, waiting)
    saved = possible = 0.0
    for each in timings:
        if each.overlap:
            further = each.verify.positions / each.verify.forwards - 1
            verify = each.verify.forwards * (costs.pass_seconds(round(further)) - loop)
            extra_branches = each.branch.positions - each.branch.forwards
            branch = each.branch.forwards * draft_step + extra_branches * draft_branch
            saved += each.rounds * (loop + waiting) + each.draft.seconds + verify + branch - each.seconds
            possible += min(verify, branch)
    hidden = min(max(saved / possible, 0.0), 1.0) if possible > 0 else 0.0
    return replace(costs, hidden=hidden)


def _loop_seconds(serial: Sequence[SegmentTiming]) -> float:
    """Return the seconds per round that are spent outside forward passes."""
    if not serial:
        return 0.0
    forwards = sum(each.draft.seconds + each.verify.seconds + each.branch.seconds for each in serial)
    return max(0.0, sum(each.seconds for each in serial) - forwards) / sum(each.rounds for each in serial)


def _pass_curve(serial: Sequence[SegmentTiming], loop: float) -> tuple[tuple[float, float], ...]:
    """Return (further tokens, seconds) of the measured passes, the narrowest first; a wider pass is never faster.

    A straight line does not fit. On a CPU and in our kernels, a pass over two tokens runs different code than a pass
    over one, and further tokens cost little until a block is full.
    """
    by_width: dict[int, Totals] = {}
    for each in serial:
        width = round(each.verify.positions / each.verify.forwards)
        by_width[width] = by_width.get(width, Totals()) + each.verify
    points, slowest = [], 0.0
    for _, totals in sorted(by_width.items()):
        slowest = max(slowest, totals.seconds / totals.forwards)
        points.append((totals.positions / totals.forwards - 1, slowest + loop))
    return tuple(points)


def _fit_line(totals: Iterable[Totals]) -> tuple[float, float]:
    """Return the seconds of a forward over one token and of each further token: weighted least squares, slope >= 0."""
    points = [
        (each.positions / each.forwards, each.seconds / each.forwards, each.forwards) for each in totals if each[1]
    ]
    count = sum(weight for *_, weight in points)
    if not count:
        return 0.0, 0.0
    x = sum(weight * width for width, _, weight in points) / count
    y = sum(weight * seconds for _, seconds, weight in points) / count
    variance = sum(weight * (width - x) ** 2 for width, _, weight in points)
    covariance = sum(weight * (width - x) * (seconds - y) for width, seconds, weight in points)
    slope = max(0.0, covariance / variance) if variance > 1e-9 else 0.0
    return max(1e-9, y - slope * (x - 1)), slope


def predicted_costs(target: PreTrainedModel, draft: PreTrainedModel, captured: bool) -> StepCosts:
    """Predict step costs from the sizes of the models alone, for use where nothing may be measured.

    In a captured stage, a forward takes the time to read its weights, plus a constant per layer. This gives 4.1, 0.09,
    1.3 and 16.9 ms for 7B, 68M, 1.3B and 33B in half precision; 4.2, 0.085, 1.3 and 17.6 ms were measured on an H200.
    The constants for a CPU were measured with the embedded pair (docs/benchmarks.md).

    Both models are bound by memory bandwidth, so little of the overlapped drafting is hidden: a pass of the 7B target
    took 4.20 ms alone and 4.51 ms while the 68M draft ran for 0.5 ms. A round that drafts ahead waited 0.3 ms for the
    host.
    """
    target_pass, draft_step = (_predicted_seconds(model, captured) for model in (target, draft))
    if captured:
        return StepCosts(target_pass, 0.005 * target_pass, draft_step, 0.03 * draft_step, hidden=0.4, waiting=3e-4)
    return StepCosts(target_pass, 0.02 * target_pass, draft_step, 0.05 * draft_step)


def _predicted_seconds(model: PreTrainedModel, captured: bool) -> float:
    size: int = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    layers: int = model.config.get_text_config(decoder=True).num_hidden_layers
    return size / 4.3e12 + layers * 3e-5 if captured else size / 1.5e10 + layers * 4e-4
