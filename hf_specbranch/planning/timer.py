"""Measures plan segments while they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

from ..decoding.text import Text
from ..runtime.overlap import Overlap, Totals
from ..stats import SpecBranchStats
from .chooser import describe
from .costs import SegmentTiming
from .online import PlanSegment

OUTLIER = 3.0  # times of a round that are so many times the median are left out


class Work(NamedTuple):
    """The forwards of one kind in one round."""

    seconds: float
    forwards: int
    positions: int


class SegmentTimer:
    """Measures plan segments, and adds them to the statistics.

    Args:
        stats: where forwards are counted and segments are listed.
        overlap: where work is timed.
        text: where tokens are committed.
        captures: returns how many graphs have been captured so far.
        capture_seconds: returns how long that took.
    """

    def __init__(
        self,
        stats: SpecBranchStats,
        overlap: Overlap,
        text: Text,
        captures: Callable[[], int],
        capture_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.stats, self.overlap, self.text = stats, overlap, text
        self.captures, self.capture_seconds = captures, capture_seconds
        self.joined: Any = None  # when the draft began to read the text, if it was just before this segment

    def join(self) -> None:
        """Note that the draft of the next segment begins to read the text."""
        self.joined = self.overlap.clock.now()
        self._count_captures()

    def start(self) -> None:
        """Begin a segment. On a GPU it begins once the draft has read the text, although the host does not wait."""
        if self.joined is None:
            self._count_captures()
        self.began, self.gained = self.overlap.clock.now(), self.text.gained

    def _count_captures(self) -> None:
        self.captured, self.captured_in = self.captures(), self.capture_seconds()

    def read(self, segment: PlanSegment) -> SegmentTiming:
        """End a segment and return its timing."""
        clock, spans, ended = self.overlap.clock, self.overlap.spans, self.overlap.clock.now()
        began = clock.seconds(self.began)
        seconds = clock.seconds(ended) - began
        reading = 0.0 if self.joined is None else began - clock.seconds(self.joined)
        self.joined = None
        work = self.overlap.take()
        timing = SegmentTiming(
            rounds=work["verify"].forwards,
            tokens=(self.text.gained - self.gained) / len(self.text.lengths),
            seconds=seconds,
            overlap=segment.overlap,
            disturbed=self.captures() > self.captured,
            reading=reading,
            capturing=self.capture_seconds() - self.captured_in,
            **work,
        )
        self.stats.plans.append(summary(segment, timing.rounds, timing.tokens, timing.seconds))
        if self.overlap.clock.by_events or segment.overlap:
            return timing
        return without_outliers(
            timing,
            **{
                kind: [Work(clock.seconds(end) - clock.seconds(begin), *done[1:]) for begin, end, done in each]
                for kind, each in spans.items()
            },
        )


def summary(segment: PlanSegment, rounds: int, tokens: float, seconds: float) -> dict[str, Any]:
    """Return what the statistics say about a segment."""
    return {
        "plan": describe(segment.plan, segment.overlap),
        "rounds": rounds,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "predicted_tokens_per_second": segment.predicted,
    }


def without_outliers(
    timing: SegmentTiming, draft: Sequence[Work], verify: Sequence[Work], branch: Sequence[Work]
) -> SegmentTiming:
    """Return the timing as it would have been without the rounds in which the machine did something else.

    Args:
        timing: of a segment without overlap.
        draft: drafting before the pass, round by round.
        verify: the passes.
        branch: drafting after them.

    Example:
        >>> passes = [Work(0.01, 1, 1)] * 4 + [Work(0.2, 1, 1)]
        >>> timing = SegmentTiming(5, 5, 0.25, False, Totals(), Totals(0.24, 5, 5), Totals())
        >>> cleaned = without_outliers(timing, [], passes, [])
        >>> round(cleaned.verify.seconds, 3), round(cleaned.seconds, 3)
        (0.05, 0.06)
    """
    spent = timing.draft.seconds + timing.verify.seconds + timing.branch.seconds
    loop = max(0.0, timing.seconds - spent)
    before, passes, ahead = map(_typical, (draft, verify, branch))
    forwards = before.seconds + passes.seconds + ahead.seconds
    return timing._replace(seconds=forwards + min(loop, forwards), draft=before, verify=passes, branch=ahead)


def _typical(rounds: Sequence[Work]) -> Totals:
    """Return the totals with the time of an outlier replaced by the mean of the others."""
    totals = Totals(0.0, sum(each.forwards for each in rounds), sum(each.positions for each in rounds))
    rates = [each.seconds / each.forwards for each in rounds if each.forwards]
    if not rates:
        return Totals(sum(each.seconds for each in rounds), *totals[1:])
    limit = OUTLIER * median(rates)
    kept = [rate for rate in rates if rate <= limit]
    return totals._replace(seconds=totals.forwards * sum(kept) / len(kept))
