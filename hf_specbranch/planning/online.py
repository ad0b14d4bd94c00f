"""The planner during a generation: when to measure, when to re-evaluate the plan, and what is known of a pair.

A generation is a sequence of plan segments, each of them some rounds that follow one plan. Costs are measured once per
pair and context length, in the first segments: passes of several widths, and overlapped drafting where it could pay.
Then the best plan is followed, and it is re-evaluated when its rounds do not go as predicted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from transformers import PreTrainedModel

from ..config import SpecBranchConfig
from ..decoding.text import Text
from ..model_state import adapter_state, state_of
from ..runtime.overlap import Overlap
from ..stats import SpecBranchStats
from .agreement import Agreement, RecentTexts, typical_agreement
from .chooser import MIN_PREDICTED_GAIN, Choice, choose, describe, overlap_may_pay, pass_width
from .costs import SegmentTiming, StepCosts, fit_segment_costs
from .simulate import predict

WARM_UP_ROUNDS, TIMED_ROUNDS = 2, 4  # the first rounds of a plan may include one-off work
MEASURED_LENGTH = 6  # the longest draft that is used to measure costs
MAX_ATTEMPTS = 4  # a segment in which a graph was captured is timed again, at most this often
UNPLANNED_ROUNDS = 24  # until the first choice, where nothing is known
PLANNED_ROUNDS = 48  # until a chosen plan is checked for the first time; doubled after each check
# A plan is re-evaluated if the time of its rounds, or the tokens they commit, over the prediction leave these ranges.
# Texts differ in how many tokens a round commits, and an evaluation takes as long as many rounds.
EXPECTED_TIME, EXPECTED_TOKENS = (0.75, 1.2), (0.6, 1.7)
# The generations after which the oldest measurement is repeated; the last number means every multiple of it. Where
# stages are captured there is no need: times hardly vary, and a plan that is run again may have to be captured again.
REFRESH_AFTER = 4, 16
RECENT_TEXTS = 8  # how many recordings are kept
EVALUATE_ALWAYS = 4  # up to this generation each one re-evaluates the choice, later ones ever more rarely
MIN_CONTEXT = 1024  # contexts up to this length count as one situation


class PlanSegment(NamedTuple):
    """A number of rounds that follow one plan."""

    plan: SpecBranchConfig
    rounds: int
    overlap: bool
    predicted: float | None = None  # tokens per second of a row; None while nothing is predicted
    tokens_per_pass: float = 1.0  # predicted


@dataclass
class Knowledge:
    """What earlier generations have shown about a pair. A `situation` stands for everything that costs depend on.

    Attributes:
        timings: the last segment of each measured plan, with and without overlap, per situation.
        choices: the last choice per situation.
        ratios: measured over predicted speed of each plan that was followed.
        overlap_candidates: situations in which overlapped drafting may pay, and is therefore measured.
        generations: how many generations have measured costs.
        next_evaluation: the generation after which the choice is re-evaluated, whatever its rounds took.
        texts: recordings of agreement on the last texts.
    """

    timings: dict[Hashable, dict[tuple[SpecBranchConfig, bool], SegmentTiming]] = field(default_factory=dict)
    choices: dict[Hashable, Choice] = field(default_factory=dict)
    ratios: dict[SpecBranchConfig, float] = field(default_factory=dict)
    overlap_candidates: set[Hashable] = field(default_factory=set)
    generations: int = 0
    next_evaluation: int = 0
    texts: RecentTexts = field(default_factory=lambda: RecentTexts(RECENT_TEXTS))


def knowledge_of(target: PreTrainedModel, draft: PreTrainedModel) -> Knowledge:
    """Return what is known of a pair in the present state of its adapters; kept as long as both models exist."""
    known: dict[Hashable, Knowledge] = state_of(target).pairs.setdefault(draft, {})
    return known.setdefault((adapter_state(target), adapter_state(draft)), Knowledge())


def forget(target: PreTrainedModel) -> None:
    """Drop what is known of all pairs with this target."""
    state_of(target).pairs.clear()


class Planner:
    """Chooses the plans of one generation.

    Args:
        plans: the plans to choose from; overlap is measured with the first.
        captured: stages are captured as CUDA graphs.
        situation: everything that costs depend on, except the context length.
        known: what earlier generations have shown; updated here.
        predicted_costs: the costs to use where nothing may be measured: a sampled text must depend on its seed, not on
            the speed of the machine. None: measure them.
        agreements: records how the draft agrees with the text so far.
        context: returns the length of the text.
        max_hidden: the largest fraction of overlapped drafting that can be hidden.
    """

    def __init__(
        self,
        plans: Sequence[SpecBranchConfig],
        captured: bool,
        situation: Hashable,
        known: Knowledge,
        predicted_costs: StepCosts | None,
        agreements: Callable[[], list[Agreement]],
        context: Callable[[], int],
        max_hidden: float = 1.0,
    ) -> None:
        self.plans, self.captured, self.known, self.predicted_costs = plans, captured, known, predicted_costs
        self.max_hidden, self.text = max_hidden, known.texts.begin()
        self.agreements, self.context, self._situation = agreements, context, situation

    @property
    def situation(self) -> Hashable:
        """Everything that costs depend on. They grow with the context: when it has doubled they are measured again."""
        return self._situation, max(MIN_CONTEXT, self.context()).bit_length()

    @property
    def timings(self) -> dict[tuple[SpecBranchConfig, bool], SegmentTiming]:
        """The last segment of each plan in this situation, with and without overlap."""
        return self.known.timings.setdefault(self.situation, {})

    def segments(self) -> Generator[PlanSegment, SegmentTiming, None]:
        """Yield plan segments; the caller sends the timing of each."""
        if self.predicted_costs is None:
            return self._by_measured_costs()
        return self._by_predicted_costs(self.predicted_costs)

    def _by_predicted_costs(self, costs: StepCosts) -> Generator[PlanSegment, SegmentTiming, None]:
        """Plan by this text alone, not by earlier ones: the same seed must give the same text."""
        typical = typical_agreement(1 + max(plan.max_branches for plan in self.plans))
        plan, rounds, predicted = choose(self.plans, [typical], costs, self.captured).plan, UNPLANNED_ROUNDS, None
        while True:
            yield PlanSegment(plan, rounds, plan.overlap, predicted)
            rounds *= 4
            if recorded := self.agreements():
                plan, predicted, _ = choose(
                    self.plans, recorded, costs, self.captured, plan, min_gain=MIN_PREDICTED_GAIN
                )

    def _by_measured_costs(self) -> Generator[PlanSegment, SegmentTiming, None]:
        choice, rounds = self.known.choices.get(self.situation), PLANNED_ROUNDS
        while True:
            if (yield from self._measure()):
                choice = None
            choice = choice or self._choose()
            if self._unmeasured():  # the choice has shown that overlap may pay
                continue
            plan, predicted, tokens_per_pass = choice or (self._vanilla_plans[-1], None, 1.0)
            planned = UNPLANNED_ROUNDS if predicted is None else rounds
            segment = PlanSegment(plan, planned, plan.overlap, predicted, tokens_per_pass)
            choice = self.learn(segment, (yield segment))
            rounds *= 2

    def _measure(self) -> Generator[PlanSegment, SegmentTiming, bool]:
        """Time the plans that are not timed yet; return whether there were any."""
        wanted = self._unmeasured()
        for plan, overlap in wanted:
            yield PlanSegment(plan, WARM_UP_ROUNDS, overlap)
            for _ in range(MAX_ATTEMPTS):
                segment = PlanSegment(plan, TIMED_ROUNDS, overlap)
                timing = yield segment
                self._record(segment, timing)
                if not timing.disturbed:
                    break
        return bool(wanted)

    def _unmeasured(self) -> list[tuple[SpecBranchConfig, bool]]:
        """Return what is still to be timed: passes of several widths and, where it may pay, the first plan with and
        without overlap.

        Fewer widths are timed where stages are captured: each plan must be captured first, and passes within a block
        take about the same time.
        """
        first, vanilla = self.plans[0], self._vanilla_plans
        autoregressive = next(plan for plan in self.plans if plan.policy == "autoregressive")
        widths = [vanilla[-1], autoregressive]
        if not self.captured:
            widths.insert(1, vanilla[len(vanilla) // 2])
        wanted = [(plan, False) for plan in widths]
        if self.situation in self.known.overlap_candidates:
            wanted += dict.fromkeys([(first, first.overlap), (first, False)])
        return [each for each in wanted if each not in self.timings]

    @property
    def _vanilla_plans(self) -> list[SpecBranchConfig]:
        """The vanilla plans with short drafts, the narrowest pass first; among equals, the longest draft first.

        A draft step takes the same time in a short draft, and a long one might be drafted for nothing. If there are
        several thresholds, 0 is used: with a higher one an uncertain draft would stop early, and its pass would be
        narrower than intended.
        """
        vanilla = [plan for plan in self.plans if plan.policy == "vanilla"]
        if len({plan.confidence_threshold for plan in vanilla}) > 1:
            vanilla = list(dict.fromkeys(replace(plan, confidence_threshold=0.0) for plan in vanilla))
        longest = max(MEASURED_LENGTH, min(plan.draft_length for plan in vanilla))
        short = [plan for plan in vanilla if plan.draft_length <= longest]
        return sorted(short, key=lambda plan: (pass_width(plan), -plan.draft_length))

    def _record(self, segment: PlanSegment, timing: SegmentTiming) -> None:
        self.timings.pop((segment.plan, segment.overlap), None)
        self.timings[segment.plan, segment.overlap] = timing  # the most recent last

    def end(self, segment: PlanSegment, timing: SegmentTiming) -> None:
        """Learn from the last segment of a text, and drop the oldest measurement from time to time.

        The machine may have been busy during a measurement, and a plan that is never run again would keep its wrong
        timing.
        """
        if self.predicted_costs is not None:
            return
        self.learn(segment, timing, ending=True)
        unchosen = self.situation not in self.known.choices
        if unchosen and self.timings and not self._unmeasured() and (choice := self._choose()) is not None:
            self.known.choices[self.situation] = choice
        self.known.generations = now = self.known.generations + 1
        if self.timings and not self.captured and (now in REFRESH_AFTER or now % REFRESH_AFTER[-1] == 0):
            self.timings.pop(list(self.timings)[0], None)  # another thread may have dropped it
            self.known.choices.pop(self.situation, None)

    def learn(self, segment: PlanSegment, timing: SegmentTiming, ending: bool = False) -> Choice | None:
        """Record the timing of a segment; return the next choice, or None if the segment was not a predicted one."""
        if segment.predicted is None:
            return None
        choice = Choice(segment.plan, segment.predicted, segment.tokens_per_pass)
        reliable = timing.rounds >= TIMED_ROUNDS and not timing.disturbed
        if reliable:
            self._record(segment, timing)
        may_pause = ending or segment.plan.policy == "autoregressive"
        if (may_pause and self._is_due()) or (reliable and self._is_off(segment, timing)):
            choice = self._choose(segment.plan, timing if reliable else None) or choice
        self.known.choices[self.situation] = choice
        return choice

    def _is_due(self) -> bool:
        """Return whether to re-evaluate although all went as predicted: after each of the first generations, then each
        time their number has doubled.

        One text says little, and rounds without a draft say nothing about what a draft could do.
        """
        known, now = self.known, self.known.generations
        if now < known.next_evaluation:
            return False
        known.next_evaluation = now + 1 if now < EVALUATE_ALWAYS else 2 * now
        return True

    def _is_off(self, segment: PlanSegment, timing: SegmentTiming) -> bool:
        """Return whether rounds took another time, or committed another number of tokens, than predicted."""
        assert segment.predicted is not None
        relative_time = timing.seconds / timing.rounds * segment.predicted / segment.tokens_per_pass
        relative_tokens = timing.tokens / timing.rounds / segment.tokens_per_pass
        fastest, slowest = EXPECTED_TIME
        fewest, most = EXPECTED_TOKENS
        return not fastest < relative_time < slowest or not fewest < relative_tokens < most

    def _choose(self, plan: SpecBranchConfig | None = None, timing: SegmentTiming | None = None) -> Choice | None:
        """Evaluate all plans on this text and the last ones; return None while there is nothing to evaluate them on.

        Args:
            plan: the plan that is being followed; kept unless another is clearly faster.
            timing: the timing of its last segment.
        """
        known, timings = self.known, list(self.timings.values())
        if all(each.overlap for each in timings):  # the context has just doubled: nothing is measured yet
            return None
        costs = fit_segment_costs(timings)
        recorded = self.agreements()
        branches = max(plan.max_branches for plan in self.plans)  # calls with fewer have recorded fewer candidates
        texts = [text for text in known.texts.update(self.text, recorded) if text.candidates >= branches]
        if recorded and plan is not None and timing is not None:
            # Compare times of rounds, not tokens: the segment was another part of the text.
            prediction = predict(recorded, plan, costs, self.captured)
            predicted_round = prediction.tokens_per_pass / prediction.tokens_per_second
            ratio = predicted_round * timing.rounds / timing.seconds
            known.ratios[plan] = (known.ratios.get(plan, 1.0) + ratio) / 2
        if not texts:
            return None
        ratios = dict(known.ratios)  # another thread may add to them
        choice = choose(self.plans, texts, costs, self.captured, plan, ratios)
        if self.situation not in known.overlap_candidates:
            if overlap_may_pay(self.plans, texts, costs, self.captured, choice, self.max_hidden, ratios):
                known.overlap_candidates.add(self.situation)
        return choice


class SegmentTimer:
    """Measures plan segments, and adds them to the statistics.

    Args:
        stats: where forwards are counted and segments are listed.
        overlap: where work is timed.
        text: where tokens are committed.
        captures: returns how many graphs have been captured so far.
    """

    def __init__(self, stats: SpecBranchStats, overlap: Overlap, text: Text, captures: Callable[[], int]) -> None:
        self.stats, self.overlap, self.text, self.captures = stats, overlap, text, captures

    def start(self) -> None:
        """Begin a segment."""
        self.clock, self.gained, self.captured = time.perf_counter(), self.text.gained, self.captures()

    def read(self, segment: PlanSegment) -> SegmentTiming:
        """End a segment and return its timing."""
        seconds, work = time.perf_counter() - self.clock, self.overlap.take()
        timing = SegmentTiming(
            rounds=work["verify"].forwards,
            tokens=(self.text.gained - self.gained) / len(self.text.lengths),
            seconds=seconds,
            overlap=segment.overlap,
            disturbed=self.captures() > self.captured,
            **work,
        )
        self.stats.plans.append(
            {
                "plan": describe(segment.plan, segment.overlap),
                "rounds": timing.rounds,
                "tokens": timing.tokens,
                "seconds": timing.seconds,
                "tokens_per_second": timing.tokens_per_second,
                "predicted_tokens_per_second": segment.predicted,
            }
        )
        return timing
