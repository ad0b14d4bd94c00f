"""Step costs: how long steps of both models take. `sizes` predicts them, `calibrate` corrects them.

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
from math import log2
from typing import NamedTuple

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

    def rounded(self) -> StepCosts:
        """Return the same costs to about a percent, so that what they predict can be kept until they really change.

        Example:
            >>> StepCosts(target_pass=0.00803).rounded() == StepCosts(target_pass=0.00801).rounded()
            True
        """
        passes = tuple((further, _rounded(seconds)) for further, seconds in self.passes)
        numbers = {name: _rounded(getattr(self, name)) for name in (*_IN_SECONDS, "waiting")}
        return replace(self, passes=passes, hidden=round(self.hidden, 2), **numbers)

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
        return interpolate(self.passes, sent) + max(0.0, sent - self.passes[-1][0]) * self.target_token

    def parts(self, each: Round) -> tuple[float, float]:
        """Return the time of a round's pass, and of the drafting that may overlap with it."""
        verify = self.pass_seconds(each.sent)
        return verify, each.overlapped_steps * (self.draft_step + max(0, each.width - 1) * self.draft_branch)


def _rounded(seconds: float) -> float:
    """Return the nearest of the powers of two in steps of a 32nd."""
    return 2.0 ** (round(32 * log2(seconds)) / 32) if seconds > 0 else 0.0


def interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value at a place between points, which are in order; outside them that of the nearest.

    Example:
        >>> interpolate([(1, 10.0), (3, 20.0)], 2), interpolate([(1, 10.0), (3, 20.0)], 9)
        (15.0, 20.0)
    """
    if at <= points[0][0]:
        return points[0][1]
    for (low, first), (high, second) in pairwise(points):
        if at <= high:
            return first + (at - low) / (high - low) * (second - first)
    return points[-1][1]


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
    reading: float = 0.0  # seconds before the segment, in which the draft read the text; not part of `seconds`
    capturing: float = 0.0  # seconds of all this in which stages were captured

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds
