"""Corrects predicted step costs by what the rounds of a generation took.

On a busy machine two measurements of the same step may differ by a factor of ten. So only ratios are learned, and each
of them from timings that were taken next to each other: the draft's step against the target's pass of the same segment,
and passes of one width against those of the segment before. The median of the last measurements decides: the first one
is believed, since products of several rows may take many times what is predicted, and a wild one among others is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import exp, isfinite, log
from statistics import median
from typing import Any

from .costs import SegmentTiming, StepCosts, interpolate

SAMPLES = 5  # the last measurements that are kept of each ratio
CAPTURE_SECONDS = 0.25  # to capture the stages of one more plan, until that is measured, and at most
SPEED_SAMPLES = 3  # the machine may become busy or quiet


@dataclass
class CostFactors:
    """Measured over predicted costs in one situation: the last measurements of each.

    Args:
        speed: of everything together; how much slower the machine is than predicted.
        draft: of a draft step, relative to the pass of the same segment.
        passes: of a pass, by its tokens per row, relative to the segment before.
        hidden: the fraction of overlapped drafting that was hidden. Not a factor.
        reading: seconds in which the draft read a text before it drafted. Not a factor.
        capturing: seconds in which the stages of a plan with a draft were captured. Not a factor.

    Example:
        >>> from hf_specbranch.planning import StepCosts
        >>> factors = CostFactors(speed=[2.0], draft=[1.5], passes={1: [0.6]})
        >>> costs = factors.costs(StepCosts(target_pass=0.01, draft_step=0.001))
        >>> round(costs.target_pass, 4), round(costs.draft_step, 4), round(costs.pass_seconds(4), 4)
        (0.012, 0.003, 0.012)
    """

    speed: list[float] = field(default_factory=list)
    draft: list[float] = field(default_factory=list)
    passes: dict[int, list[float]] = field(default_factory=dict)
    hidden: list[float] = field(default_factory=list)
    reading: list[float] = field(default_factory=list)
    capturing: list[float] = field(default_factory=list)

    def costs(self, predicted: StepCosts) -> StepCosts:
        """Return the predicted costs, corrected."""
        speed, draft = self.current_speed, middle(self.draft or [1.0])
        widths = sorted({0, *self.passes_known, *(round(further) for further, _ in predicted.passes)})
        points = tuple((float(sent), speed * self._pass_factor(sent) * predicted.pass_seconds(sent)) for sent in widths)
        rising, slowest = [], 0.0
        for sent, seconds in points:  # a wider pass is never faster
            slowest = max(slowest, seconds)
            rising.append((sent, slowest))
        return replace(
            predicted,
            target_pass=rising[0][1],
            target_token=speed * self._pass_factor(widths[-1]) * predicted.target_token,
            draft_step=speed * draft * predicted.draft_step,
            draft_branch=speed * draft * predicted.draft_branch,
            hidden=median([predicted.hidden, *self.hidden]),
            passes=tuple(rising) if len(rising) > 1 else (),
            waiting=predicted.waiting,
        )

    @property
    def reading_seconds(self) -> float:
        """How long the draft reads a text before it drafts; 0 until that is measured."""
        return middle(self.reading) if self.reading else 0.0

    @property
    def capture_seconds(self) -> float:
        """How long it takes to capture the stages of one more plan; the first ones may have built kernels too."""
        return min([CAPTURE_SECONDS, *self.capturing])

    @property
    def current_speed(self) -> float:
        return middle(self.speed[-SPEED_SAMPLES:]) if self.speed else 1.0

    @property
    def passes_known(self) -> list[int]:
        """The further tokens of the passes that were measured."""
        return [width - 1 for width in self.passes]

    def _pass_factor(self, sent: int) -> float:
        known = sorted((width, middle(samples)) for width, samples in self.passes.items() if samples)
        return interpolate(known, 1 + sent) if known else 1.0

    def add(self, timing: SegmentTiming, predicted: StepCosts, speed_before: float | None) -> float:
        """Learn from a segment; return the speed that its passes show.

        Args:
            timing: of the segment.
            predicted: the costs that sizes alone predict.
            speed_before: what this method returned for the segment just before, which followed another plan. None: that
                is too long ago to compare with.
        """
        if timing.reading > 0 and timing.draft.forwards + timing.branch.forwards > 0:
            _keep(self.reading, timing.reading)
        if timing.overlap:
            if predicted.hidden == 1 and timing.verify.seconds > 0:
                self._add_own_devices(timing, predicted)
            self._add_hidden(timing, predicted)
            return self.current_speed
        width = round(timing.verify.positions / timing.verify.forwards)
        seconds = (timing.seconds - timing.draft.seconds - timing.branch.seconds) / timing.rounds
        measured = max(seconds, 1e-9) / predicted.pass_seconds(width - 1)
        if speed_before is not None:
            _keep(self.passes.setdefault(width, []), measured / speed_before)
        elif not self.passes:  # passes of other widths are compared with this one
            self.passes[width] = [1.0]
        speed = measured / self._pass_factor(width - 1)
        _keep(self.speed, speed)
        if timing.draft.forwards and predicted.draft_step:
            step = timing.draft.seconds / timing.draft.forwards
            _keep(self.draft, step / predicted.draft_step / speed)
        return speed

    def add_captures(self, timing: SegmentTiming) -> None:
        """Learn how long captures take, from the first segment of a plan."""
        if timing.capturing > 0 and timing.draft.forwards + timing.branch.forwards > 0:
            _keep(self.capturing, timing.capturing)

    def _add_own_devices(self, timing: SegmentTiming, predicted: StepCosts) -> None:
        """Learn from overlapped rounds of models on devices of their own: each takes as long as it takes alone."""
        further = round(timing.verify.positions / timing.verify.forwards) - 1
        taken = timing.verify.seconds / timing.verify.forwards
        speed = taken / predicted.pass_seconds(further) / self._pass_factor(further)
        _keep(self.speed, speed)
        more = timing.branch.positions - timing.branch.forwards
        drafting = timing.branch.forwards * predicted.draft_step + more * predicted.draft_branch
        if drafting and timing.branch.seconds > 0:
            _keep(self.draft, timing.branch.seconds / drafting / speed)

    def _add_hidden(self, timing: SegmentTiming, predicted: StepCosts) -> None:
        """Learn how much time overlap saved, compared with the most that it could have saved."""
        costs, each = self.costs(predicted), timing
        further = round(each.verify.positions / each.verify.forwards) - 1
        verify = each.verify.forwards * costs.pass_seconds(further)
        branch = each.branch.forwards * costs.draft_step
        branch += (each.branch.positions - each.branch.forwards) * costs.draft_branch
        possible = min(verify, branch)
        saved = each.rounds * costs.waiting + each.draft.seconds + verify + branch - each.seconds
        if possible > 0:
            _keep(self.hidden, min(max(saved / possible, 0.0), 1.0))

    def first_guess(self) -> CostFactors:
        """Return the factors with which to begin in a similar situation, each as one measurement."""
        passes = {width: [middle(samples)] for width, samples in self.passes.items() if samples}
        draft, reading = ([middle(each)] if each else [] for each in (self.draft, self.reading))
        return CostFactors(self.speed[-1:], draft, passes, self.hidden[-1:], reading, self.capturing[:])

    def to_dict(self) -> dict[str, Any]:
        """Return all measurements, ready for JSON."""
        passes = {str(width): samples for width, samples in self.passes.items()}
        lists = {"speed": self.speed, "draft": self.draft, "hidden": self.hidden, "reading": self.reading}
        return {**lists, "capturing": self.capturing, "passes": passes}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> CostFactors:
        """Build factors from what `to_dict` returned; raise ValueError if a number makes no sense."""
        found = cls(
            list(map(float, fields["speed"])),
            list(map(float, fields["draft"])),
            {int(width): list(map(float, samples)) for width, samples in fields["passes"].items()},
            list(map(float, fields["hidden"])),
            list(map(float, fields.get("reading", ()))),
            list(map(float, fields.get("capturing", ()))),
        )
        factors = [
            *found.speed,
            *found.draft,
            *found.reading,
            *found.capturing,
            *(each for samples in found.passes.values() for each in samples),
        ]
        if not all(isfinite(each) and each > 0 for each in factors) or not all(0 <= each <= 1 for each in found.hidden):
            raise ValueError(f"{fields}: expected factors above 0, and fractions from 0 to 1")
        return found


def middle(samples: Iterable[float]) -> float:
    """Return the median of factors; of an even number, the geometric mean of the middle two.

    Example:
        >>> round(middle([1.0, 4.0]), 3), round(middle([1.0, 9.0, 4.0]), 3)
        (2.0, 4.0)
    """
    return exp(median(map(log, samples)))


def _keep(samples: list[float], sample: float) -> None:
    samples.append(sample)
    del samples[:-SAMPLES]
