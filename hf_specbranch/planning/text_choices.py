"""Which plan a text should follow, by what is known: costs, recordings, captured stages, how long texts get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from ..config import SpecBranchConfig
from .agreement import Agreement, typical_agreement
from .calibrate import CostFactors
from .chooser import Choice, choose, pass_width
from .costs import StepCosts
from .horizon import best_start, expected_tokens, later_tokens
from .knowledge import Knowledge, Situation

# What predictions are certain of. Plans with drafts of 4 and of 8 tokens, of which a long chat accepted few, were
# predicted to differ by 3% and more, and their rounds took the same time.
CERTAIN_GAIN = 1.08
UNCERTAIN = 1.6  # times plain decoding: a smaller gain is compared with it once, also in captured stages


class TextChoices:
    """Chooses between plans for one text.

    Args:
        plans: the plans to choose from.
        settings: the user's settings, from which the plans were made.
        situation: everything that costs depend on, except the context length.
        known: what earlier generations have shown; updated here.
        predicted: the costs that the sizes of the models predict for a context of this length.
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
        context: Callable[[], int],
        measures: bool = True,
        is_captured: Callable[[SpecBranchConfig], bool] = lambda plan: True,
        remaining: Callable[[], float] = lambda: inf,
    ) -> None:
        self.plans, self.situation, self.known, self.key = plans, situation, known, (settings, situation)
        self.captured, self.predicted, self.measures = situation.captured, predicted, measures
        self.context, self.is_captured, self.remaining = context, is_captured, remaining
        self.branches = max(plan.max_branches for plan in plans)
        self.tokens = 0.0  # per row, of this text
        self.drafts = False  # the draft has read this text
        self.seconds = 0.0  # since the last evaluation

    @property
    def factors(self) -> CostFactors:
        return self.known.factors_in(self.situation)

    def costs(self) -> StepCosts:
        """Return the costs at the present length of the text."""
        predicted = self.predicted(self.context())
        return self.factors.costs(predicted) if self.measures else predicted

    @property
    def typical(self) -> Agreement:
        return typical_agreement(1 + self.branches)

    def texts(self) -> list[Agreement]:
        """Return the recordings of the last texts that have enough candidates for all plans."""
        return [text for text in self.known.texts.all() if text.candidates >= self.branches]

    def other(self, plan: SpecBranchConfig) -> SpecBranchConfig:
        """Return the plan without a draft; for that plan itself, the one with the narrowest passes over a draft."""
        if plan.policy != "autoregressive":
            return next((each for each in self.plans if each.policy == "autoregressive"), plan)
        vanilla = [each for each in self.plans if each.policy == "vanilla"]
        return min(vanilla, key=lambda each: (pass_width(each), each.confidence_threshold), default=plan)

    def may_pay(self) -> bool:
        """Return whether a draft would pay if the target accepted all of its tokens.

        In captured stages passes within a block take about the same time, so that is not asked there.
        """
        costs, lengths = self.costs(), {each.draft_length for each in self.plans if each.policy != "autoregressive"}
        return self.captured or any(
            costs.pass_seconds(length) + length * costs.draft_step < (1 + length) * costs.target_pass
            for length in lengths
        )

    def clearly_pays(self, plan: SpecBranchConfig, speed: float) -> bool:
        """Return whether captured rounds with a draft were far faster than plain decoding can be.

        A wide pass that took longer than predicted must not make plain decoding look slow too.

        Args:
            plan: that the rounds have followed.
            speed: their tokens per second.
        """
        if not self.captured or plan.policy == "autoregressive":
            return False
        plain = min(costs.target_pass for costs in (self.predicted(self.context()), self.costs()))
        return speed * plain >= UNCERTAIN

    def first_choice(self) -> Choice:
        """Return the choice of the last generation at present costs, or the best one by what is known."""
        last, texts, costs = self.known.choices.get(self.key), self.texts() or [self.typical], self.costs()
        if last is None or (not self.is_captured(last.plan) and any(map(self.is_captured, self.plans))):
            return self.best_choice(texts, costs, None)
        return choose([last.plan], texts, costs.rounded(), self.captured, ratios=dict(self.known.ratios))

    def best_choice(
        self, texts: list[Agreement], costs: StepCosts, plan: SpecBranchConfig | None, ending: bool = False
    ) -> Choice:
        """Return the best choice; a plan must save the time that it takes to capture its stages and to read the text.

        Captured stages serve later texts too, so what they cost is spread over those (`later_tokens`). What a plan
        would have saved in earlier texts is added to what it will save: a plan that is better for one short text after
        the other is captured in the end. A smaller gain than predictions are certain of is not worth the stutter of a
        capture. What reading costs at the start of a text, `draft_start` considers.
        """
        known, ratios = self.known, dict(self.known.ratios)  # another thread may add to them
        self.seconds = 0.0
        ready = [self.is_captured(each) for each in self.plans]
        waits = self.captured and not all(ready) and (plan is not None or any(ready))
        joins = plan is not None and not ending and not self.drafts
        reading = self.factors.reading_seconds if joins else 0.0

        capturing, remaining = self.factors.capture_seconds, self.remaining()
        if ending:
            remaining = expected_tokens(known.lengths, 0, self.tokens + remaining)
        elif plan is not None:
            remaining = expected_tokens(known.lengths, self.tokens, remaining)
        uses = remaining + later_tokens([*known.lengths, self.tokens] if ending else known.lengths)

        def delay(other: SpecBranchConfig) -> float:
            seconds = reading / max(1.0, remaining) if other.policy != "autoregressive" else 0.0
            if not waits or other == plan or self.is_captured(other):
                return seconds
            return seconds + max(0.0, capturing - known.missed.get(other, 0.0)) / max(1.0, uses)

        chosen = choose(self.plans, texts, costs, self.captured, plan, ratios, delay=delay)
        known.rivals.pop(self.key, None)
        if waits and plan is not None:
            if chosen.plan != plan and not self.is_captured(chosen.plan):
                now = choose([plan], texts, costs, self.captured, ratios=ratios)
                if chosen.tokens_per_second < CERTAIN_GAIN * now.tokens_per_second:
                    usable = [plan, *filter(self.is_captured, self.plans)]
                    chosen = choose(usable, texts, costs, self.captured, plan, ratios, delay=delay)
            best = choose(self.plans, texts, costs, self.captured, chosen.plan, ratios, CERTAIN_GAIN)
            if not self.is_captured(best.plan) and best.plan != chosen.plan:
                known.rivals[self.key] = best.plan, 1 - chosen.tokens_per_second / best.tokens_per_second
        return chosen

    def draft_start(self, choice: Choice, most: float, ending: bool = False) -> float:
        """Return after how many tokens of a text of at most `most` tokens the draft of a choice should begin.

        Infinite if it should not begin; 0 as long as plain decoding is not worth the capture of its stages.

        Args:
            choice: of a plan.
            most: the most tokens of the text.
            ending: a text has ended; count what a later start would have saved.
        """
        plain = self.other(choice.plan)
        if choice.plan.policy == "autoregressive" or plain == choice.plan:
            return 0
        start, saved = best_start(self.known.lengths, most, self._saved(choice), self.factors.reading_seconds)
        missed = self.known.missed.get(plain, 0.0)
        if ending:
            self.known.missed[plain] = missed = missed + saved
        return start if self.is_captured(plain) or missed >= self.factors.capture_seconds else 0

    def _saved(self, choice: Choice) -> float:
        """Return the seconds per token that a choice saves, compared with plain decoding."""
        costs, texts, ratios = self.costs().rounded(), self.texts() or [self.typical], dict(self.known.ratios)
        plans = self.other(choice.plan), choice.plan
        without, drafted = (
            choose([each], texts, costs, self.captured, ratios=ratios).tokens_per_second for each in plans
        )
        return 1 / without - 1 / max(drafted, self.known.drafted_speed(self.key) or 0.0)

    def kept(self, choice: Choice, drafted: SpecBranchConfig) -> Choice:
        """Return the choice for the next text: not plain decoding, if the last texts with a draft were faster.

        Recordings are of few texts, often of those that went badly. What was measured on many counts for more.

        Args:
            choice: by the recordings.
            drafted: the plan with a draft that this text has followed.
        """
        speed = self.known.drafted_speed(self.key)
        if choice.plan.policy != "autoregressive" or speed is None:
            return choice
        if speed < choice.tokens_per_second:
            self.known.drafted.pop(self.key, None)  # a later trial is judged by itself
            return choice
        texts = self.texts() or [self.typical]
        return choose([drafted], texts, self.costs(), self.captured, ratios=dict(self.known.ratios))

    def worth_reading(self, choice: Choice) -> Choice:
        """Return the choice, or plain decoding if texts are too short for a draft.

        Then the choice is shelved: it is taken up again once texts are longer.
        """
        if choice.plan.policy == "autoregressive":
            return choice
        self.known.shelved.pop(self.key, None)
        if self.draft_start(choice, inf, ending=True) < inf:
            return choice
        if (saved := self._saved(choice)) > 0:
            self.known.shelved[self.key] = choice, saved
        texts = self.texts() or [self.typical]
        return choose([self.other(choice.plan)], texts, self.costs(), self.captured, ratios=dict(self.known.ratios))
