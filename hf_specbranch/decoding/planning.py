"""When to measure, when to look again, and what is remembered of a pair: the planner at work in a generation.

A generation goes in legs: some rounds after one plan. Costs are measured over the first legs at each length of context
(without overlap, with it, and without a draft), once for a pair; then the best plan is followed, and thought over when
it does not do as predicted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ..config import SpecBranchConfig
from ..planner import Choice, Stretch, choose, described, prices
from ..runners.placement import Beside
from ..simulate import Agreement, StepCosts, predict
from ..stats import SpecBranchStats
from .text import Text

WARM_UP, TIMED = 3, 6  # rounds; the first of a plan may set things up
TRIES = 4  # a leg in which a stage was captured is timed again, but not for ever
LEARNING = 24  # rounds before the first choice where nothing may be timed
CHECK = 64  # rounds until the first look at how a plan does; then twice as many each time
AS_PREDICTED = 0.15  # how far off a plan may be without being thought over
SHORTEST = 1024  # contexts up to this length are one situation


class Leg(NamedTuple):
    """Rounds to go, and how."""

    plan: SpecBranchConfig
    rounds: int
    overlap: bool
    predicted: float | None = None  # tokens a second of a row


@dataclass
class Knowledge:
    """What earlier generations of a pair have shown; `situation` stands for what costs depend on."""

    # The last leg after each policy, with overlap and without, by situation.
    timed: dict[Hashable, dict[tuple[str, bool], Stretch]] = field(default_factory=dict)
    choices: dict[Hashable, Choice] = field(default_factory=dict)  # the last one, by situation
    ratios: dict[SpecBranchConfig, float] = field(default_factory=dict)  # what a plan did over what was predicted
    agreements: deque[Agreement] = field(default_factory=lambda: deque(maxlen=2))


_KNOWN: WeakKeyDictionary[PreTrainedModel, WeakKeyDictionary[PreTrainedModel, Knowledge]] = WeakKeyDictionary()


def knowledge_of(target: PreTrainedModel, draft: PreTrainedModel) -> Knowledge:
    """What is known of a pair; kept as long as both models are there."""
    return _KNOWN.setdefault(target, WeakKeyDictionary()).setdefault(draft, Knowledge())


def forget(target: PreTrainedModel) -> None:
    """Drop what is known of a target's pairs."""
    _KNOWN.pop(target, None)


class Planner:
    """Chooses plans for one generation.

    Args:
        plans: what may be chosen; the first is what is done until something is known.
        captured: stages are captured as CUDA graphs.
        situation: what costs depend on, the length of the context left out.
        known: what earlier generations have shown; it is added to.
        usual: costs to go by where nothing may be timed: a sampled text must depend on its seed, not on how fast the
            machine happens to be. None: measure them.
        agreements: reads how the draft does on the text so far.
        context: says how long the text is.
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
    ) -> None:
        self.plans, self.captured, self.known, self.usual = plans, captured, known, usual
        self.agreements, self.context, self._situation = agreements, context, situation

    @property
    def situation(self) -> Hashable:
        """Costs grow with the context: when it has doubled they are measured anew."""
        return self._situation, max(SHORTEST, self.context()).bit_length()

    def legs(self) -> Generator[Leg, Stretch, None]:
        """How to go on; each leg is answered with what it took."""
        return self._by_measured_costs() if self.usual is None else self._by_usual_costs(self.usual)

    def _by_usual_costs(self, costs: StepCosts) -> Generator[Leg, Stretch, None]:
        plan, rounds, predicted = self.plans[0], LEARNING, None
        while True:
            yield Leg(plan, rounds, plan.overlap, predicted)
            rounds *= 4
            if found := self.agreements():
                plan, predicted = choose(self.plans, found, costs, self.captured, plan)

    def _by_measured_costs(self) -> Generator[Leg, Stretch, None]:
        choice, rounds = self.known.choices.get(self.situation), CHECK
        while True:
            timed = self.known.timed.setdefault(self.situation, {})
            yield from self._measure(timed)
            if choice is None:
                choice = self._choose(prices(list(timed.values())), self.plans[0], None)
            self.known.choices[self.situation] = choice
            plan, predicted = choice
            took = yield Leg(plan, rounds, plan.overlap, predicted)
            rounds *= 2
            if not took.disturbed:
                timed[plan.policy, plan.overlap] = took
            # Without a draft nothing is seen of what it could do.
            if plan.policy == "autoregressive" or abs(took.tokens_per_second / predicted - 1) > AS_PREDICTED:
                choice = self._choose(prices(list(timed.values())), plan, took)

    def _measure(self, timed: dict[tuple[str, bool], Stretch]) -> Generator[Leg, Stretch, None]:
        """Time what was not timed yet: both models one after the other, at once, and the target alone."""
        first, none = self.plans[0], next(each for each in self.plans if each.policy == "autoregressive")
        for plan, overlap in ((first, False), (first, first.overlap), (none, False)):
            if (plan.policy, overlap) in timed:
                continue
            yield Leg(plan, WARM_UP, overlap)
            for _ in range(TRIES):
                took = yield Leg(plan, TIMED, overlap)
                timed[plan.policy, overlap] = took
                if not took.disturbed:
                    break

    def _choose(self, costs: StepCosts, plan: SpecBranchConfig, took: Stretch | None) -> Choice:
        """Think it over, on this text and on the last ones."""
        known = self.known
        if found := self.agreements():
            known.agreements.extend(found)
            if took is not None and not took.disturbed:
                expected = predict(found, plan, costs, self.captured).tokens_per_second
                known.ratios[plan] = (known.ratios.get(plan, 1.0) + took.tokens_per_second / expected) / 2
        if not known.agreements:
            return Choice(plan, took.tokens_per_second if took else 1.0)
        return choose(self.plans, list(known.agreements), costs, self.captured, plan, known.ratios)


class Meter:
    """Reads what a leg took off the statistics and the clocks.

    Args:
        stats: where forwards are counted, and legs noted.
        beside: where work is timed.
        text: where tokens are gained.
        captures: says how many graphs have been captured so far.
    """

    def __init__(self, stats: SpecBranchStats, beside: Beside, text: Text, captures: Callable[[], int]) -> None:
        self.stats, self.beside, self.text, self.captures = stats, beside, text, captures
        self.start()

    def start(self) -> None:
        """What comes from here on belongs to the next leg."""
        self.clock, self.gained, self.captured = time.perf_counter(), self.text.gained, self.captures()

    def read(self, leg: Leg) -> Stretch:
        """What was done since the start."""
        seconds, work = time.perf_counter() - self.clock, self.beside.take()
        took = Stretch(
            rounds=work["verify"].forwards,
            tokens=(self.text.gained - self.gained) / len(self.text.lengths),
            seconds=seconds,
            overlap=leg.overlap,
            disturbed=self.captures() > self.captured,
            **work,
        )
        self.stats.plans.append(
            {
                "plan": ", ".join(described(leg.plan, leg.overlap)),
                "rounds": took.rounds,
                "tokens": took.tokens,
                "seconds": took.seconds,
                "tokens_per_second": took.tokens_per_second,
                "predicted_tokens_per_second": leg.predicted,
            }
        )
        return took
