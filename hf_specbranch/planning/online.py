"""The planner during a generation: which plan to follow, what to learn from its rounds, when to re-evaluate it.

A generation is a sequence of plan segments, each of them some rounds that follow one plan. The first one follows the
plan that is best at predicted costs (`sizes`), or that the last generation ended with. Its rounds are timed, and they
correct the prediction (`calibrate`). Where predictions are less good, a few rounds without a draft are put between two
segments, since they show whether drafting pays. They take no longer than plain decoding.

A draft must read the text before it drafts. Where texts are often short, it begins late or not at all (`horizon`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

import torch

from ..config import BLOCK_SIZE, SpecBranchConfig
from .agreement import Agreement
from .calibrate import SAMPLES
from .chooser import MIN_GAIN, MIN_PREDICTED_GAIN, Choice, choose, pass_width
from .costs import SegmentTiming, StepCosts
from .knowledge import CHECK_EVERY, EXPECTED_TOKENS, Knowledge, Situation
from .simulate import predict
from .text_choices import UNCERTAIN, TextChoices

FEWEST_ROUNDS = 4  # a shorter segment is not learned from
FIRST_ROUNDS = {True: 24, False: 8}  # by whether stages are captured: until the first evaluation of a new pair
PLANNED_ROUNDS = 48  # until a chosen plan is checked for the first time; doubled after each check
CHECKED_ROUNDS = 8  # of a plan, before it is compared with plain decoding
GROWS = 1.2  # times the pass over one token, from which on wider passes in one block do not take about the same time
CHECK_ROUNDS = 4  # of plain decoding, or of a draft where there is none
CHECKS = 2  # of how plain decoding compares, in the first generations; at most one each, or two if the first surprises
RARELY = 4  # times as many generations pass before a draft is tried that could not pay if all of it were accepted
SURPRISE = 0.8, 1.25  # a factor outside this range is measured again at once
EXPECTED_TIME = 0.75, 1.2  # a plan is re-evaluated if the time of its rounds over the prediction leaves this range
# The draft reads a text in about the time of so many steps. With a large draft on a CPU that takes longer than a better
# plan saves: at most this fraction of the time since the last evaluation, or a moment.
READING_STEPS, MOST_READING, MOMENT = 8, 0.05, 0.2
# Some texts are accepted far better or worse than others. That calls for an evaluation, but it must not take more than
# this fraction of the time: about 25 ms on a GPU, as long as six rounds of a 7B model. Where texts just differ, and
# evaluations keep confirming that a draft pays, the fraction becomes smaller, down to a fifth.
MOST_PLANNING, MOST_CONFIRMED = 0.03, 4
LONGEST_EVALUATION = 0.05  # seconds that one takes in captured stages; the first ones also build kernels and capture


class PlanSegment(NamedTuple):
    """A number of rounds that follow one plan."""

    plan: SpecBranchConfig
    rounds: int
    overlap: bool
    predicted: float | None = None  # tokens per second of a row; None in rounds of plain decoding beside the choice
    tokens_per_pass: float = 1.0  # predicted


class Planner(TextChoices):
    """Chooses the plans of one generation, and learns from their rounds. See `TextChoices`.

    Args:
        plans, settings, situation, known, predicted: as there.
        agreements: records how the draft agrees with the text so far.
        context, measures, is_captured, remaining: as there.
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
        super().__init__(plans, settings, situation, known, predicted, context, measures, is_captured, remaining)
        self.agreements, self.text = agreements, known.texts.begin()
        self.speed: float | None = None  # that the passes of the last segment showed
        self.last_plan: SpecBranchConfig | None = None
        self.last_draft: SpecBranchConfig | None = None  # that this text has followed
        self.checks = self.times_off = 0
        self.learned = False  # something that is worth keeping

    def segments(self) -> Generator[PlanSegment, SegmentTiming, None]:
        """Yield plan segments; the caller sends the timing of each."""
        return self._by_measured_costs() if self.measures else self._by_predicted_costs()

    def _by_predicted_costs(self) -> Generator[PlanSegment, SegmentTiming, None]:
        """Plan by this text alone, not by earlier ones: the same seed must give the same text."""
        plan, rounds, predicted = choose(self.plans, [self.typical], self.costs(), self.captured).plan, 24, None
        if (start := self._sampled_start(plan)) >= FEWEST_ROUNDS:
            yield PlanSegment(self.other(plan), start, False)
        while True:
            yield PlanSegment(plan, rounds, plan.overlap, predicted)
            rounds *= 4
            if recorded := self.agreements():
                plan, predicted, _ = choose(
                    self.plans, recorded, self.costs(), self.captured, plan, min_gain=MIN_PREDICTED_GAIN
                )

    def _sampled_start(self, plan: SpecBranchConfig) -> int:
        """Return after how many tokens a draft begins: when it would have saved the time to read the text.

        So a short text is hardly slower than without a draft, and a long one loses little.
        """
        plain = self.other(plan)
        if not self.captured or plan.policy == "autoregressive" or plain == plan:
            return 0
        costs = self.costs()
        both = (choose([each], [self.typical], costs, True) for each in (plain, plan))
        without, drafted = (1 / each.tokens_per_second for each in both)
        return int(READING_STEPS * costs.draft_step / max(without - drafted, 1e-9))

    def _by_measured_costs(self) -> Generator[PlanSegment, SegmentTiming, None]:
        choice, rounds = self.first_choice(), PLANNED_ROUNDS
        if self.key not in self.known.choices:
            rounds = FIRST_ROUNDS[self.captured]
            if choice.plan.policy == "autoregressive" and not self.factors.draft and self.may_pay():
                # One look at what the draft does.
                yield from self._check(choice.plan)
        elif start := self.draft_start(choice, self.remaining()):
            yield from self._prelude(choice.plan, start)
        while True:
            plan, predicted, tokens_per_pass = choice
            rounds = min(rounds, CHECKED_ROUNDS) if self._check_is_due(plan, predicted) else rounds
            segment = PlanSegment(plan, rounds, plan.overlap, predicted, tokens_per_pass)
            timing = yield segment
            due = self._learn(segment, timing)
            if self._threads_changed():
                choice, rounds = self.first_choice(), PLANNED_ROUNDS
                continue
            if self._check_is_due(plan, predicted):
                if _is_reliable(timing) and self.clearly_pays(plan, timing.tokens_per_second):
                    self.checks += 1  # this one needs no further rounds
                elif self.speed is not None:
                    plain = yield from self._check(plan)
                    # A draft that was just seen to pay is followed without an evaluation, until the end of the text.
                    pays = timing.tokens_per_second >= MIN_GAIN * plain.tokens_per_second
                    due = plan.policy == "autoregressive" or not pays
                elif timing.capturing > 0:
                    yield from self._capture_check(plan)
            choice = self._next_choice(segment, timing, due)
            rounds *= 2

    def _threads_changed(self) -> bool:
        """Return whether the passes of a CPU use another number of threads from now on, and so have other costs."""
        now = self.situation.threads and torch.get_num_threads()
        if now == self.situation.threads:
            return False
        self.situation = self.situation._replace(threads=now)
        self.key, self.speed, self.times_off = (self.key[0], self.situation), None, 0
        return True

    # ---- what plain decoding would take, where that is uncertain

    def _check(self, plan: SpecBranchConfig) -> Generator[PlanSegment, SegmentTiming, SegmentTiming]:
        """Follow plain decoding for a few rounds, and return their timing; for that plan itself, a draft."""
        check = self._check_of(plan)
        timing = yield check
        if not self._record(check, timing):  # its stages had to be captured
            timing = yield check
            self._record(check, timing)
        self.checks += 1
        return timing

    def _capture_check(self, plan: SpecBranchConfig) -> Generator[PlanSegment, SegmentTiming, None]:
        """Let the stages of a check be captured, in a text that has waited for captures anyway: no later one has to."""
        check = self._check_of(plan)
        if not self.is_captured(check.plan):
            timing = yield check._replace(rounds=1)
            self._record(check, timing._replace(disturbed=True))

    def _check_of(self, plan: SpecBranchConfig) -> PlanSegment:
        """Return rounds without lookup, whose wider passes would hide what a pass of plain decoding takes."""
        return PlanSegment(replace(self.other(plan), prompt_lookup_num_tokens=0), CHECK_ROUNDS, False)

    def _check_is_due(self, plan: SpecBranchConfig, speed: float) -> bool:
        """Return whether to compare the plan with plain decoding, or plain decoding with a draft.

        Captured passes within a block take about the same time, which needs no check if a draft gains much. In a
        mixture of experts they do not, and how many experts the tokens of a text share is not known before.

        Args:
            plan: the plan.
            speed: its predicted tokens per second.
        """
        drafts = plan.policy != "autoregressive"
        if self.remaining() < 2 * CHECK_ROUNDS or self.other(plan) == plan:
            return False
        if self.clearly_pays(plan, self.known.drafted_speed(self.key) or 0.0):
            return False
        promising = drafts or self.may_pay()
        width, predicted = pass_width(plan if drafts else self.other(plan)), self.predicted(self.context())
        in_block = self.situation.rows * width <= BLOCK_SIZE
        grows = in_block and predicted.pass_seconds(width - 1) > GROWS * predicted.target_pass
        if self.captured and not grows and (in_block or not drafts):
            return drafts and 1 not in self.factors.passes and speed * self.costs().target_pass < UNCERTAIN
        if self.times_off > 1 and not self.checks and promising:  # the rounds take another time than they used to
            return True
        samples = self.factors.passes.get(1, []) if drafts else self.factors.draft
        surprising = bool(samples) and not SURPRISE[0] < samples[-1] < SURPRISE[1]
        if self.checks:
            return self.checks == 1 and surprising and len(samples) < CHECKS
        # What says that a draft cannot pay may have been measured at a bad moment.
        every = CHECK_EVERY if promising or 0 < len(samples) < SAMPLES else RARELY * CHECK_EVERY
        later = not self.captured and self.known.generations % every == every - 1
        return later or (promising and len(samples) < (CHECKS if drafts and not self.captured else 1))

    # ---- learning

    def _record(self, segment: PlanSegment, timing: SegmentTiming) -> bool:
        """Learn costs from a segment; return whether there was enough to learn from."""
        self.seconds += timing.seconds
        self.tokens += timing.tokens
        self.drafts = self.drafts or segment.plan.policy != "autoregressive"
        self.factors.add_captures(timing)
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
        if reliable and segment.plan.policy != "autoregressive":
            self.known.add_drafted(self.key, timing.tokens, timing.seconds)
            self.last_draft = segment.plan
        self.known.unplanned_seconds += timing.seconds
        may_pause = ending or segment.plan.policy == "autoregressive"
        is_off = reliable and self._is_off(segment, timing, ending)
        most_planning = MOST_PLANNING / (1 + min(self.known.confirmed.get(self.key, 0), MOST_CONFIRMED))
        is_off = is_off and self.known.evaluation_seconds <= most_planning * self.known.unplanned_seconds
        missed = self.known.miss(self.key, timing.seconds)
        return is_off or missed or self.key not in self.known.choices or (may_pause and self._is_due(segment.plan))

    def _next_choice(self, segment: PlanSegment, timing: SegmentTiming, due: bool, ending: bool = False) -> Choice:
        assert segment.predicted is not None
        choice = Choice(segment.plan, segment.predicted, segment.tokens_per_pass)
        if due:
            choice = self._evaluate(segment.plan, timing, ending) or choice
        self.known.choices[self.key] = choice
        return choice

    def end(self, segment: PlanSegment, timing: SegmentTiming) -> None:
        """Learn from the last segment of a text, and keep on disk what is new."""
        if not self.measures:
            return
        if segment.predicted is not None:
            self._next_choice(segment, timing, self._learn(segment, timing, ending=True), ending=True)
        else:
            self._record(segment, timing)
            self.known.unplanned_seconds += timing.seconds
        self.known.end_text(self.tokens)
        if (choice := self.known.choices.get(self.key)) is not None:
            choice = choice if self.last_draft is None else self.kept(choice, self.last_draft)
            self.known.choices[self.key] = self.worth_reading(choice)
        if self.learned:
            self.known.save()

    def _is_due(self, plan: SpecBranchConfig) -> bool:
        """Return whether to re-evaluate although all went as predicted: after each of the first generations, then ever
        more rarely.

        One text says little, and rounds without a draft say nothing about what a draft could do.
        """
        if not self.known.evaluation_is_due(self.key):
            return False
        self.known.schedule_evaluation(self.key, plan.policy != "autoregressive")
        return True

    def _is_off(self, segment: PlanSegment, timing: SegmentTiming, ending: bool) -> bool:
        """Return whether rounds took another time, or committed another number of tokens, than predicted.

        Where stages are not captured times vary with the load, and a segment counts only if the one before was off too.
        At the end of a text its tokens are judged together with those of the last texts.
        """
        assert segment.predicted is not None
        relative_time = timing.seconds / timing.rounds * segment.predicted / segment.tokens_per_pass
        predicted = timing.rounds * segment.tokens_per_pass
        in_time = EXPECTED_TIME[0] < relative_time < EXPECTED_TIME[1]
        self.times_off = 0 if in_time else self.times_off + 1
        off_time = self.times_off > (0 if self.captured else 1)
        if ending:
            return self.known.is_off(self.key, timing.tokens, predicted) or off_time
        return off_time or not EXPECTED_TOKENS[0] < timing.tokens / predicted < EXPECTED_TOKENS[1]

    # ---- choosing

    def _evaluate(self, plan: SpecBranchConfig, timing: SegmentTiming, ending: bool) -> Choice | None:
        """Evaluate all plans on this text and the last ones; return None while there is nothing to evaluate them on.

        Args:
            plan: the plan that is being followed; kept unless another is clearly faster.
            timing: the timing of its last segment.
            ending: the choice is for the next text.
        """
        began = time.perf_counter()
        choice = self._evaluated(plan, timing, ending)
        seconds = time.perf_counter() - began
        self.known.evaluation_seconds = min(seconds, LONGEST_EVALUATION) if self.captured else seconds
        self.known.unplanned_seconds = 0.0
        self.known.progress.pop(self.key, None)
        drafts = plan.policy != "autoregressive" and choice is not None and choice.plan == plan
        self.known.confirmed[self.key] = self.known.confirmed.get(self.key, 0) + 1 if drafts else 0
        if choice is not None and choice.plan.policy == "autoregressive":
            self.known.schedule_evaluation(self.key, drafts=False)
        return choice

    def _evaluated(self, plan: SpecBranchConfig, timing: SegmentTiming, ending: bool) -> Choice | None:
        known, costs = self.known, self.costs()
        reads = self.captured or READING_STEPS * costs.draft_step < max(MOMENT, MOST_READING * self.seconds)
        recorded = self.agreements() if reads else []
        known.texts.update(self.text, recorded)
        self.learned = True
        if recorded and self.captured and _is_reliable(timing) and timing.rounds >= CHECKED_ROUNDS:
            # Compare times of rounds, not tokens: the segment was another part of the text.
            prediction = predict(recorded, plan, costs, self.captured)
            predicted_round = prediction.tokens_per_pass / prediction.tokens_per_second
            ratio = predicted_round * timing.rounds / timing.seconds
            known.update_ratio(plan, ratio)
        texts = self.texts() or ([] if reads else [self.typical])
        if not texts:
            return None
        return self.best_choice(texts, costs, plan, ending)

    # ---- whether a draft is worth its reading of the text

    def _prelude(self, plan: SpecBranchConfig, start: float) -> Generator[PlanSegment, SegmentTiming, None]:
        """Follow plain decoding until the draft begins."""
        while True:
            prelude = PlanSegment(self.other(plan), int(min(start, PLANNED_ROUNDS)), False)
            timing = yield prelude
            self._record(prelude, timing)
            self.known.unplanned_seconds += timing.seconds
            if start < inf:
                return


def _is_reliable(timing: SegmentTiming) -> bool:
    return timing.rounds >= FEWEST_ROUNDS and not timing.disturbed
