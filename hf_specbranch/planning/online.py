"""When to measure, when to look again, and what is remembered of a pair: the planner at work in a generation.

A generation goes in legs: some rounds after one plan. Costs are measured over the first legs at each length of context,
once for a pair: passes of several widths, and where it could pay, drafting beside them. Then the best plan is followed,
and thought over when it does not do as predicted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from transformers import PreTrainedModel

from ..config import SpecBranchConfig
from ..decoding.text import Text
from ..model_state import state_of
from ..runtime.adapters import adapter_state
from ..runtime.overlap import Overlap
from ..stats import SpecBranchStats
from .agreement import Agreement, Texts, ordinary_text
from .chooser import SURELY_BETTER, Choice, choose, described, may_be_better, width
from .costs import SegmentTiming, StepCosts, prices
from .simulate import predict

WARM_UP, TIMED = 2, 4  # rounds; the first of a plan may set things up
FEW = 6  # tokens of a chain that is tried for what it takes
TRIES = 4  # a leg in which a stage was captured is timed again, but not for ever
LEARNING = 24  # rounds before the first choice where nothing is known
CHECK = 48  # rounds until the first look at how a plan does; then twice as many each time
# What a round takes, and the tokens it gains, over what was predicted; beyond that a plan is thought over. Texts differ
# in what a round gains, and to think takes as long as many rounds.
COST_AS_PREDICTED, GAIN_AS_PREDICTED = (0.75, 1.2), (0.6, 1.7)
# Generations after which the oldest measurement is taken again, the last number again and again. Not where stages are
# captured: times hardly scatter then, and each plan that is run once more may have to be captured once more.
REFRESH = 4, 16
TEXTS = 8  # how many of the last ones are remembered
FIRST = 4  # up to this generation every one is thought over, then ever fewer: it takes as long as two rounds
SHORTEST = 1024  # contexts up to this length are one situation


class PlanSegment(NamedTuple):
    """Rounds to go, and how."""

    plan: SpecBranchConfig
    rounds: int
    overlap: bool
    predicted: float | None = None  # tokens a second of a row
    tokens_per_pass: float = 1.0  # predicted too


@dataclass
class Knowledge:
    """What earlier generations of a pair have shown; `situation` stands for what costs depend on."""

    timed: dict[Hashable, dict[tuple[SpecBranchConfig, bool], SegmentTiming]] = field(default_factory=dict)
    choices: dict[Hashable, Choice] = field(default_factory=dict)  # the last one, by situation
    ratios: dict[SpecBranchConfig, float] = field(default_factory=dict)  # speed of its rounds over what was predicted
    promising: set[Hashable] = field(default_factory=set)  # situations in which drafting beside the target may pay
    generations: int = 0  # those in which costs were measured
    ask_again: int = 0  # the generation after which all is thought over again, surprise or not
    texts: Texts = field(default_factory=lambda: Texts(TEXTS))


def knowledge_of(target: PreTrainedModel, draft: PreTrainedModel) -> Knowledge:
    """What is known of a pair in the present state of its adapters; kept as long as both models are there."""
    known: dict[Hashable, Knowledge] = state_of(target).pairs.setdefault(draft, {})
    return known.setdefault((adapter_state(target), adapter_state(draft)), Knowledge())


def forget(target: PreTrainedModel) -> None:
    """Drop what is known of a target's pairs."""
    state_of(target).pairs.clear()


class Planner:
    """Chooses plans for one generation.

    Args:
        plans: what may be chosen; the first drafts beside the target, and is how that is timed.
        captured: stages are captured as CUDA graphs.
        situation: what costs depend on, the length of the context left out.
        known: what earlier generations have shown; it is added to.
        usual: costs to go by where nothing may be timed: a sampled text must depend on its seed, not on how fast the
            machine happens to be. None: measure them.
        agreements: reads how the draft does on the text so far.
        context: says how long the text is.
        most_hidden: the most of drafting beside a pass that can be hidden.
    """

    def __init__(
        self,
        plans: Sequence[SpecBranchConfig],
        captured: bool,
        situation: Hashable,
        known: Knowledge,
        usual: StepCosts | None,
        agreements: Callable[[], list[Agreement]],
        context: Callable[[], int],
        most_hidden: float = 1.0,
    ) -> None:
        self.plans, self.captured, self.known, self.usual = plans, captured, known, usual
        self.most_hidden, self.text = most_hidden, known.texts.begin()
        self.agreements, self.context, self._situation = agreements, context, situation

    @property
    def situation(self) -> Hashable:
        """Costs grow with the context: when it has doubled they are measured anew."""
        return self._situation, max(SHORTEST, self.context()).bit_length()

    def segments(self) -> Generator[PlanSegment, SegmentTiming, None]:
        """How to go on; each leg is answered with what it took."""
        return self._by_measured_costs() if self.usual is None else self._by_usual_costs(self.usual)

    def _by_usual_costs(self, costs: StepCosts) -> Generator[PlanSegment, SegmentTiming, None]:
        """By the text alone, and by none that came before: the same seed must give the same text."""
        ordinary = ordinary_text(1 + max(plan.max_branches for plan in self.plans))
        plan, rounds, predicted = choose(self.plans, [ordinary], costs, self.captured).plan, LEARNING, None
        while True:
            yield PlanSegment(plan, rounds, plan.overlap, predicted)
            rounds *= 4
            if found := self.agreements():
                plan, predicted, _ = choose(self.plans, found, costs, self.captured, plan, better=SURELY_BETTER)

    def _by_measured_costs(self) -> Generator[PlanSegment, SegmentTiming, None]:
        choice, rounds = self.known.choices.get(self.situation), CHECK
        while True:
            if (yield from self._measure()):
                choice = None
            choice = choice or self._choose()
            if self._unmeasured():  # what was timed promises that something else may be better
                continue
            plan, predicted, gain = choice or (self._simple[-1], None, 1.0)
            segment = PlanSegment(plan, LEARNING if predicted is None else rounds, plan.overlap, predicted, gain)
            choice = self.learn(segment, (yield segment))
            rounds *= 2

    def _measure(self) -> Generator[PlanSegment, SegmentTiming, bool]:
        """Time what was not timed yet, if anything."""
        wanted = self._unmeasured()
        for plan, overlap in wanted:
            yield PlanSegment(plan, WARM_UP, overlap)
            for _ in range(TRIES):
                segment = PlanSegment(plan, TIMED, overlap)
                took = yield segment
                self._note(segment, took)
                if not took.disturbed:
                    break
        return bool(wanted)

    def _unmeasured(self) -> list[tuple[SpecBranchConfig, bool]]:
        """What is to be timed yet: passes of several widths; where it may pay, both models at once, and in turns.

        Where stages are captured, each plan that is tried must be; and passes up to a block take nearly the same.
        """
        first, simple = self.plans[0], self._simple
        none = next(plan for plan in self.plans if plan.policy == "autoregressive")
        widths = [simple[-1], none] if self.captured else [simple[-1], simple[len(simple) // 2], none]
        wanted = [(plan, False) for plan in widths]
        if self.situation in self.known.promising:
            wanted += dict.fromkeys([(first, first.overlap), (first, False)])
        return [each for each in wanted if each not in self.timed]

    @property
    def _simple(self) -> list[SpecBranchConfig]:
        """Plain speculation with chains of a few tokens, the narrowest pass first; of equal ones the longest chain.

        A step takes as long in a short chain, and a long one might be drafted for nothing. Where the threshold is not
        settled there is none, or a pass over what an unsure draft sends would not be as wide as it should be.
        """
        simple = [plan for plan in self.plans if plan.policy == "vanilla"]
        if len({plan.confidence_threshold for plan in simple}) > 1:
            simple = list(dict.fromkeys(replace(plan, confidence_threshold=0.0) for plan in simple))
        longest = max(FEW, min(plan.draft_length for plan in simple))
        few = [plan for plan in simple if plan.draft_length <= longest]
        return sorted(few, key=lambda plan: (width(plan), -plan.draft_length))

    @property
    def timed(self) -> dict[tuple[SpecBranchConfig, bool], SegmentTiming]:
        """The last leg after each plan, with overlap and without, in this situation."""
        return self.known.timed.setdefault(self.situation, {})

    def _note(self, segment: PlanSegment, took: SegmentTiming) -> None:
        self.timed.pop((segment.plan, segment.overlap), None)
        self.timed[segment.plan, segment.overlap] = took  # the latest last

    def end(self, segment: PlanSegment, took: SegmentTiming) -> None:
        """Remember the last leg too, and have what was measured first measured again from time to time.

        A machine may have been busy when it was measured, and what is not run again would never be seen in its true
        light.
        """
        if self.usual is not None:
            return
        self.learn(segment, took, ending=True)
        unchosen = self.situation not in self.known.choices
        if unchosen and self.timed and not self._unmeasured() and (choice := self._choose()) is not None:
            self.known.choices[self.situation] = choice
        self.known.generations = now = self.known.generations + 1
        if self.timed and not self.captured and (now in REFRESH or now % REFRESH[-1] == 0):
            self.timed.pop(list(self.timed)[0], None)  # unless another thread has
            self.known.choices.pop(self.situation, None)

    def learn(self, segment: PlanSegment, took: SegmentTiming, ending: bool = False) -> Choice | None:
        """Remember what a leg took, and say what to do next, the same again or something else."""
        if segment.predicted is None:
            return None
        choice = Choice(segment.plan, segment.predicted, segment.tokens_per_pass)
        sound = took.rounds >= TIMED and not took.disturbed
        if sound:
            self._note(segment, took)
        pause = ending or segment.plan.policy == "autoregressive"
        if (pause and self._is_time()) or (sound and self._is_surprise(segment, took)):
            choice = self._choose(segment.plan, took if sound else None) or choice
        self.known.choices[self.situation] = choice
        return choice

    def _is_time(self) -> bool:
        """Whether to think for no reason: after each of the first texts, then after twice as many each time. One text
        is little to go by; and without a draft nothing is seen of what one could do.
        """
        known, now = self.known, self.known.generations
        if now < known.ask_again:
            return False
        known.ask_again = now + 1 if now < FIRST else 2 * now
        return True

    def _is_surprise(self, segment: PlanSegment, took: SegmentTiming) -> bool:
        """Whether rounds took, or gained, something else than was predicted."""
        assert segment.predicted is not None
        cost = took.seconds / took.rounds * segment.predicted / segment.tokens_per_pass
        gain = took.tokens / took.rounds / segment.tokens_per_pass
        least, most = COST_AS_PREDICTED
        fewest, highest = GAIN_AS_PREDICTED
        return not least < cost < most or not fewest < gain < highest

    def _choose(self, plan: SpecBranchConfig | None = None, took: SegmentTiming | None = None) -> Choice | None:
        """Think it over, on this text and on the last ones; None while there is nothing to think about.

        Args:
            plan: the plan under way, to be kept unless another is clearly better.
            took: what it took.
        """
        known, timed = self.known, list(self.timed.values())
        if all(each.overlap for each in timed):  # the context has just doubled: nothing is measured yet
            return None
        costs = prices(timed)
        found = self.agreements()
        branches = max(plan.max_branches for plan in self.plans)  # calls with fewer have recorded fewer candidates
        texts = [text for text in known.texts.remember(self.text, found) if text.candidates >= branches]
        if found and plan is not None and took is not None:
            expected = predict(found, plan, costs, self.captured)
            a_round = expected.tokens_per_pass / expected.tokens_per_second
            ratio = a_round * took.rounds / took.seconds  # not of tokens: these are another part of the text
            known.ratios[plan] = (known.ratios.get(plan, 1.0) + ratio) / 2
        if not texts:
            return None
        ratios = dict(known.ratios)  # another thread may add to them
        choice = choose(self.plans, texts, costs, self.captured, plan, ratios)
        if self.situation not in known.promising:
            if may_be_better(self.plans, texts, costs, self.captured, choice, self.most_hidden, ratios):
                known.promising.add(self.situation)
        return choice


class SegmentTimer:
    """Reads what a leg took off the statistics and the clocks.

    Args:
        stats: where forwards are counted, and legs noted.
        overlap: where work is timed.
        text: where tokens are gained.
        captures: says how many graphs have been captured so far.
    """

    def __init__(self, stats: SpecBranchStats, overlap: Overlap, text: Text, captures: Callable[[], int]) -> None:
        self.stats, self.overlap, self.text, self.captures = stats, overlap, text, captures

    def start(self) -> None:
        """What comes from here on belongs to the next leg."""
        self.clock, self.gained, self.captured = time.perf_counter(), self.text.gained, self.captures()

    def read(self, segment: PlanSegment) -> SegmentTiming:
        """What was done since the start."""
        seconds, work = time.perf_counter() - self.clock, self.overlap.take()
        took = SegmentTiming(
            rounds=work["verify"].forwards,
            tokens=(self.text.gained - self.gained) / len(self.text.lengths),
            seconds=seconds,
            overlap=segment.overlap,
            disturbed=self.captures() > self.captured,
            **work,
        )
        self.stats.plans.append(
            {
                "plan": ", ".join(described(segment.plan, segment.overlap)),
                "rounds": took.rounds,
                "tokens": took.tokens,
                "seconds": took.seconds,
                "tokens_per_second": took.tokens_per_second,
                "predicted_tokens_per_second": segment.predicted,
            }
        )
        return took
