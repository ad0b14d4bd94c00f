"""The planner during a generation: which plan to follow, what to learn from its rounds, when to re-evaluate it.

A generation is a sequence of plan segments, each of them some rounds that follow one plan. The first one follows the
plan that is best at predicted costs (`sizes`), or that the last generation ended with. Its rounds are timed, and they
correct the prediction (`calibrate`). Where predictions are less good, a few rounds without a draft are put between two
segments, since they show whether drafting pays. They take no longer than plain decoding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from math import inf
from typing import NamedTuple

import torch

from ..config import SpecBranchConfig
from .agreement import Agreement, typical_agreement
from .calibrate import CostFactors
from .chooser import BLOCK_SIZE, MIN_GAIN, MIN_PREDICTED_GAIN, Choice, choose, pass_width
from .costs import SegmentTiming, StepCosts
from .knowledge import Knowledge, Situation
from .simulate import predict

FEWEST_ROUNDS = 4  # a shorter segment is not learned from
FIRST_ROUNDS = {True: 24, False: 8}  # by whether stages are captured: until the first evaluation of a new pair
PLANNED_ROUNDS = 48  # until a chosen plan is checked for the first time; doubled after each check
CHECKED_ROUNDS = 8  # of a plan, before it is compared with plain decoding
GROWS = 1.2  # times the pass over one token, from which on wider passes in one block do not take about the same time
CHECK_ROUNDS = 4  # of plain decoding, or of a draft where there is none
CHECKS = 2  # of how plain decoding compares, in the first generations; at most one each, or two if the first surprises
CHECK_EVERY = 16  # generations, later
SURPRISE = 0.8, 1.25  # a factor outside this range is measured again at once
# A plan is re-evaluated if the time of its rounds, or the tokens they commit, over the prediction leave these ranges.
# Texts differ in how many tokens a round commits, and an evaluation takes as long as many rounds.
EXPECTED_TIME, EXPECTED_TOKENS = (0.75, 1.2), (0.6, 1.7)
EVALUATE_ALWAYS = 4  # up to this generation each one re-evaluates the choice, later ones ever more rarely
# Outside captured stages the draft reads a text in about the time of so many steps. With a large draft on a CPU that
# takes longer than a better plan saves: at most this fraction of the time since the last evaluation, or a moment.
READING_STEPS, MOST_READING, MOMENT = 8, 0.05, 0.2
CAPTURE_SECONDS = 0.25  # to capture the stages of one more plan
# Some texts are accepted far better or worse than others. That calls for an evaluation, but it must not take more than
# this fraction of the time: about 25 ms on a GPU, as long as six rounds of a 7B model.
MOST_PLANNING = 0.03


class PlanSegment(NamedTuple):
    """A number of rounds that follow one plan."""

    plan: SpecBranchConfig
    rounds: int
    overlap: bool
    predicted: float | None = None  # tokens per second of a row; None while nothing is predicted
    tokens_per_pass: float = 1.0  # predicted


class Planner:
    """Chooses the plans of one generation.

    Args:
        plans: the plans to choose from.
        settings: the user's settings, from which the plans were made.
        situation: everything that costs depend on, except the context length.
        known: what earlier generations have shown; updated here.
        predicted: the costs that the sizes of the models predict for a context of this length.
        agreements: records how the draft agrees with the text so far.
        context: returns the length of the text.
        measures: learn from timings. A sampled text must depend on its seed, not on the speed of the machine.
        is_captured: whether the stages of a plan are captured already.
        remaining: returns how many tokens are still to come, at most.
    """

    def __init__(
        self,
        plans: Sequence[SpecBranchConfig],
        settings: SpecBranchConfig,
        situation: Situation,
        known: Knowledge,
        predicted: Callable[[int], StepCosts],
        agreements: Callable[[], list[Agreement]],
        context: Callable[[], int],
        measures: bool = True,
        is_captured: Callable[[SpecBranchConfig], bool] = lambda plan: True,
        remaining: Callable[[], float] = lambda: inf,
    ) -> None:
        self.plans, self.situation, self.known, self.key = plans, situation, known, (settings, situation)
        self.captured, self.predicted, self.measures = situation.captured, predicted, measures
        self.agreements, self.context, self.is_captured, self.remaining = agreements, context, is_captured, remaining
        self.text = known.texts.begin()
        self.branches = max(plan.max_branches for plan in plans)
        self.speed: float | None = None  # that the passes of the last segment showed
        self.last_plan: SpecBranchConfig | None = None
        self.checks = self.times_off = 0
        self.seconds = 0.0  # since the last evaluation
        self.learned = False  # something that is worth keeping

    @property
    def factors(self) -> CostFactors:
        return self.known.factors_in(self.situation)

    def costs(self) -> StepCosts:
        """Return the costs at the present length of the text."""
        predicted = self.predicted(self.context())
        return self.factors.costs(predicted) if self.measures else predicted

    def segments(self) -> Generator[PlanSegment, SegmentTiming, None]:
        """Yield plan segments; the caller sends the timing of each."""
        return self._by_measured_costs() if self.measures else self._by_predicted_costs()

    def _by_predicted_costs(self) -> Generator[PlanSegment, SegmentTiming, None]:
        """Plan by this text alone, not by earlier ones: the same seed must give the same text."""
        plan, rounds, predicted = choose(self.plans, [self._typical], self.costs(), self.captured).plan, 24, None
        while True:
            yield PlanSegment(plan, rounds, plan.overlap, predicted)
            rounds *= 4
            if recorded := self.agreements():
                plan, predicted, _ = choose(
                    self.plans, recorded, self.costs(), self.captured, plan, min_gain=MIN_PREDICTED_GAIN
                )

    @property
    def _typical(self) -> Agreement:
        return typical_agreement(1 + self.branches)

    def _by_measured_costs(self) -> Generator[PlanSegment, SegmentTiming, None]:
        choice, rounds = self.first_choice(), PLANNED_ROUNDS
        if self.key not in self.known.choices:
            rounds = FIRST_ROUNDS[self.captured]
            if choice.plan.policy == "autoregressive" and not self.factors.draft:
                # One look at what the draft does.
                yield from self._check(choice.plan)
        while True:
            plan, predicted, tokens_per_pass = choice
            rounds = min(rounds, CHECKED_ROUNDS) if self._check_is_due(plan) else rounds
            segment = PlanSegment(plan, rounds, plan.overlap, predicted, tokens_per_pass)
            timing = yield segment
            due = self._learn(segment, timing)
            if self._threads_changed():
                choice, rounds = self.first_choice(), PLANNED_ROUNDS
                continue
            if self.speed is not None and self._check_is_due(plan):
                plain = yield from self._check(plan)
                # A draft that has just been seen to pay is followed without an evaluation, until the end of the text.
                due = plan.policy == "autoregressive" or timing.tokens_per_second < MIN_GAIN * plain.tokens_per_second
            choice = self._next_choice(segment, timing, due)
            rounds *= 2

    def first_choice(self) -> Choice:
        """Return the choice of the last generation at present costs, or the best one by what is known."""
        last, texts, costs = self.known.choices.get(self.key), self._texts() or [self._typical], self.costs()
        if last is None or (not self.is_captured(last.plan) and any(map(self.is_captured, self.plans))):
            return self._choose(texts, costs, None)
        return choose([last.plan], texts, costs, self.captured, ratios=dict(self.known.ratios))

    def _threads_changed(self) -> bool:
        """Return whether the passes of a CPU use another number of threads from now on, and so have other costs."""
        now = self.situation.threads and torch.get_num_threads()
        if now == self.situation.threads:
            return False
        self.situation = self.situation._replace(threads=now)
        self.key, self.speed, self.times_off = (self.key[0], self.situation), None, 0
        return True

    def _texts(self) -> list[Agreement]:
        """Return the recordings of the last texts that have enough candidates for all plans."""
        return [text for text in self.known.texts.all() if text.candidates >= self.branches]

    # ---- what plain decoding would take, where that is uncertain

    def _check(self, plan: SpecBranchConfig) -> Generator[PlanSegment, SegmentTiming, SegmentTiming]:
        """Follow plain decoding for a few rounds, and return their timing; for that plan itself, a draft."""
        check = PlanSegment(self._other(plan), CHECK_ROUNDS, False)
        timing = yield check
        if not self._record(check, timing):  # its stages had to be captured
            timing = yield check
            self._record(check, timing)
        self.checks += 1
        return timing

    def _check_is_due(self, plan: SpecBranchConfig) -> bool:
        """Return whether to compare the plan with plain decoding, or plain decoding with a draft.

        Captured passes within a block take about the same time, which needs no check. In a mixture of experts they do
        not, and how many experts the tokens of a text share is not known before.
        """
        if self.remaining() < 2 * CHECK_ROUNDS or self._other(plan) == plan:
            return False
        drafts = plan.policy != "autoregressive"
        width, predicted = pass_width(plan if drafts else self._other(plan)), self.predicted(self.context())
        in_block = self.situation.rows * width <= BLOCK_SIZE
        grows = in_block and predicted.pass_seconds(width - 1) > GROWS * predicted.target_pass
        if self.captured and not grows and (in_block or not drafts):
            return False
        if self.times_off > 1 and not self.checks:  # the rounds take another time than they used to
            return True
        samples = self.factors.passes.get(1, []) if drafts else self.factors.draft
        surprising = bool(samples) and not SURPRISE[0] < samples[-1] < SURPRISE[1]
        if self.checks:
            return self.checks == 1 and surprising and len(samples) < CHECKS
        later = not self.captured and self.known.generations % CHECK_EVERY == CHECK_EVERY - 1
        return later or len(samples) < (CHECKS if drafts and not self.captured else 1)

    def _other(self, plan: SpecBranchConfig) -> SpecBranchConfig:
        """Return the plan without a draft; for that plan itself, the one with the narrowest passes over a draft."""
        if plan.policy != "autoregressive":
            return next((each for each in self.plans if each.policy == "autoregressive"), plan)
        vanilla = [each for each in self.plans if each.policy == "vanilla"]
        return min(vanilla, key=lambda each: (pass_width(each), each.confidence_threshold), default=plan)

    # ---- learning

    def _record(self, segment: PlanSegment, timing: SegmentTiming) -> bool:
        """Learn costs from a segment; return whether there was enough to learn from."""
        self.seconds += timing.seconds
        if not _is_reliable(timing):
            self.speed = None
            return False
        before = None if segment.plan == self.last_plan else self.speed
        self.speed = self.factors.add(timing, self.predicted(self.context()), before)
        self.last_plan = segment.plan
        return True

    def _learn(self, segment: PlanSegment, timing: SegmentTiming, ending: bool = False) -> bool:
        """Record the timing of a segment that followed a choice; return whether to re-evaluate that choice."""
        reliable = self._record(segment, timing)
        self.known.unplanned_seconds += timing.seconds
        may_pause = ending or segment.plan.policy == "autoregressive"
        is_off = reliable and self._is_off(segment, timing)
        is_off = is_off and self.known.evaluation_seconds <= MOST_PLANNING * self.known.unplanned_seconds
        return is_off or self.key not in self.known.choices or (may_pause and self._is_due())

    def _next_choice(self, segment: PlanSegment, timing: SegmentTiming, due: bool) -> Choice:
        assert segment.predicted is not None
        choice = Choice(segment.plan, segment.predicted, segment.tokens_per_pass)
        if due:
            choice = self._evaluate(segment.plan, timing) or choice
        self.known.choices[self.key] = choice
        return choice

    def end(self, segment: PlanSegment, timing: SegmentTiming) -> None:
        """Learn from the last segment of a text, and keep on disk what is new."""
        if not self.measures:
            return
        if segment.predicted is None:
            self._record(segment, timing)
        else:
            self._next_choice(segment, timing, self._learn(segment, timing, ending=True))
        self.known.generations += 1
        if self.learned:
            self.known.save()

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
        """Return whether rounds took another time, or committed another number of tokens, than predicted.

        Where stages are not captured times vary with the load, and a segment counts only if the one before was off too.
        """
        assert segment.predicted is not None
        relative_time = timing.seconds / timing.rounds * segment.predicted / segment.tokens_per_pass
        relative_tokens = timing.tokens / timing.rounds / segment.tokens_per_pass
        in_time = EXPECTED_TIME[0] < relative_time < EXPECTED_TIME[1]
        self.times_off = 0 if in_time else self.times_off + 1
        off_time = self.times_off > (0 if self.captured else 1)
        return off_time or not EXPECTED_TOKENS[0] < relative_tokens < EXPECTED_TOKENS[1]

    # ---- choosing

    def _evaluate(self, plan: SpecBranchConfig, timing: SegmentTiming) -> Choice | None:
        """Evaluate all plans on this text and the last ones; return None while there is nothing to evaluate them on.

        Args:
            plan: the plan that is being followed; kept unless another is clearly faster.
            timing: the timing of its last segment.
        """
        began = time.perf_counter()
        choice = self._evaluated(plan, timing)
        self.known.evaluation_seconds, self.known.unplanned_seconds = time.perf_counter() - began, 0.0
        return choice

    def _evaluated(self, plan: SpecBranchConfig, timing: SegmentTiming) -> Choice | None:
        known, costs = self.known, self.costs()
        reads = self.captured or READING_STEPS * costs.draft_step < max(MOMENT, MOST_READING * self.seconds)
        recorded = self.agreements() if reads else []
        known.texts.update(self.text, recorded)
        self.learned = True
        if recorded and self.captured and _is_reliable(timing):
            # Compare times of rounds, not tokens: the segment was another part of the text.
            prediction = predict(recorded, plan, costs, self.captured)
            predicted_round = prediction.tokens_per_pass / prediction.tokens_per_second
            ratio = predicted_round * timing.rounds / timing.seconds
            known.ratios[plan] = (known.ratios.get(plan, 1.0) + ratio) / 2
        texts = self._texts() or ([] if reads else [self._typical])
        if not texts:
            return None
        return self._choose(texts, costs, plan)

    def _choose(self, texts: list[Agreement], costs: StepCosts, plan: SpecBranchConfig | None) -> Choice:
        """Return the best choice; a plan whose stages are not captured must save the time that this takes.

        What it would have saved since the last evaluation is added to what it will save: a plan that is better for one
        short text after the other is captured in the end.
        """
        known, ratios = self.known, dict(self.known.ratios)  # another thread may add to them
        seconds, self.seconds = self.seconds, 0.0
        if not self.captured or all(map(self.is_captured, self.plans)):
            return choose(self.plans, texts, costs, self.captured, plan, ratios)
        if plan is not None and seconds:
            best = choose(self.plans, texts, costs, self.captured, plan, ratios)
            now = choose([plan], texts, costs, self.captured, ratios=ratios)
            saved = seconds * (1 - now.tokens_per_second / best.tokens_per_second)
            known.missed[best.plan] = known.missed.get(best.plan, 0.0) + saved

        def delay(other: SpecBranchConfig) -> float:
            if other == plan or self.is_captured(other):
                return 0.0
            return max(0.0, CAPTURE_SECONDS - known.missed.get(other, 0.0))

        delays = delay if plan is not None or any(map(self.is_captured, self.plans)) else None
        return choose(self.plans, texts, costs, True, plan, ratios, delay=delays, remaining=self.remaining())


def _is_reliable(timing: SegmentTiming) -> bool:
    return timing.rounds >= FEWEST_ROUNDS and not timing.disturbed
