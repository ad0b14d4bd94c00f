"""What the planner knows of a pair of models, from one generation to the next and from one process to the next."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import inf, isfinite, log
from typing import Any, NamedTuple, TypeAlias

from transformers import PreTrainedModel

from ..config import SpecBranchConfig
from ..model_state import adapter_state, state_of
from .agreement import Agreement, RecentTexts
from .calibrate import CostFactors
from .chooser import Choice
from .horizon import best_start
from .sizes import ModelSize, sizes_of
from .store import Entries, PairFile, file_of

RECENT_TEXTS = 8  # how many recordings are kept
RECENT_LENGTHS = 16  # how many lengths of texts are kept
RECENT_SEGMENTS, FEWEST_SEGMENTS = 16, 4  # with a draft: how many are kept, and how many show its speed
EVALUATE_ALWAYS = 4  # up to this generation each one re-evaluates the choice, later ones ever more rarely
# A fraction more generations, by whether the choice drafts (if not, nothing else shows that it is wrong); and at most
# so many more.
EVALUATE_AFTER, EVALUATE_EVERY = {True: 1.0, False: 0.25}, 64
CHECK_EVERY = 16  # generations; where stages are not captured, plain decoding is compared with a draft so often
# A text without a draft says nothing about what a draft could do, so now and then the draft reads one. That must not
# take more than this fraction of the time.
MOST_TRYING = 0.02
MOST_CHOICES = 32  # choices and ratios that are kept on disk
LARGEST_STEP = 1.25  # by which one measurement changes the ratio of a plan
FORGOTTEN = 0.25  # of the ratio of a plan that is not followed, with each evaluation
FEWEST_PROGRESS = 3  # texts that are judged together; before, each one is judged by itself
# Plans are re-evaluated if the tokens that rounds commit over the prediction leave these ranges: those of one text, and
# those of several. Texts differ, and an evaluation takes as long as many rounds.
EXPECTED_TOKENS, EXPECTED_PROGRESS = (0.6, 1.7), (0.75, 1.4)
OTHER_THREADS = 100.0  # a distance that is larger than that between any two batch sizes
SCALE = 1000  # probabilities are kept on disk in thousandths


class Situation(NamedTuple):
    """Everything that step costs depend on, except the length of the context."""

    rows: int = 1
    runtime: str = "eager"
    captured: bool = False
    threads: int = 0  # of a CPU

    def distance(self, other: Situation) -> float:
        """Return how far the batch sizes are apart; infinite if the runtime differs, far if the threads do."""
        if self[1:3] != other[1:3]:
            return float("inf")
        return abs(log(self.rows / other.rows)) + OTHER_THREADS * (self.threads != other.threads)


Key: TypeAlias = tuple[SpecBranchConfig, Situation]  # the user's settings, and where they apply


@dataclass
class Knowledge:
    """What earlier generations have shown about a pair.

    Attributes:
        factors: measured over predicted step costs, per situation.
        choices: the last choice, per situation and the user's settings.
        ratios: measured over predicted speed of each plan that was followed in captured stages.
        progress: tokens of the last texts, and how many were predicted, since the choice was made, per situation and
            the user's settings.
        missed: seconds that a plan would have saved, had its stages been captured.
        rivals: the plan that would be faster if its stages were captured, and the share of the time that it would save,
            per situation and the user's settings.
        shelved: a choice that pays for longer texts than the last ones, and the seconds per token that it saves, per
            situation and the user's settings.
        lengths: new tokens of the last texts.
        drafted: tokens and seconds of the last segments with a draft, per situation and the user's settings.
        generations: how many generations have been timed.
        next_evaluation: the generation after which the choice is re-evaluated, whatever its rounds took, per situation
            and the user's settings.
        evaluation_seconds: how long the last evaluation took.
        unplanned_seconds: of generation since then.
        confirmed: how many evaluations in a row have kept a choice that drafts, per situation and the user's settings.
        copy_gains: how many times faster texts are with cheaper copies of the draft, by their form (`draft_choice`).
        step_gains: how many times faster a step of these copies is.
        texts: recordings of agreement on the last texts.
        sizes: of target and draft, counted once.
        file: where all this is kept, if anywhere.
    """

    factors: dict[Situation, CostFactors] = field(default_factory=dict)
    choices: dict[Key, Choice] = field(default_factory=dict)
    ratios: dict[SpecBranchConfig, float] = field(default_factory=dict)
    progress: dict[Key, list[tuple[float, float]]] = field(default_factory=dict)
    missed: dict[SpecBranchConfig, float] = field(default_factory=dict)
    rivals: dict[Key, tuple[SpecBranchConfig, float]] = field(default_factory=dict)
    shelved: dict[Key, tuple[Choice, float]] = field(default_factory=dict)
    lengths: list[float] = field(default_factory=list)
    drafted: dict[Key, list[tuple[float, float]]] = field(default_factory=dict)
    generations: int = 0
    next_evaluation: dict[Key, int] = field(default_factory=dict)
    evaluation_seconds: float = 0.0
    unplanned_seconds: float = 0.0
    confirmed: dict[Key, int] = field(default_factory=dict)
    copy_gains: dict[str, float] = field(default_factory=dict)
    step_gains: dict[str, float] = field(default_factory=dict)
    texts: RecentTexts = field(default_factory=lambda: RecentTexts(RECENT_TEXTS))
    sizes: tuple[ModelSize, ModelSize] | None = None
    file: PairFile | None = None

    def factors_in(self, situation: Situation, first: Callable[[], CostFactors] = CostFactors) -> CostFactors:
        """Return the factors of a situation; to begin with, a guess from the nearest batch size.

        Args:
            situation: everything that costs depend on, except the context length.
            first: returns the factors to begin with where no batch size is known.
        """
        found = self.factors.get(situation)
        if found is None:
            near = [each for each in list(self.factors) if situation.distance(each) < float("inf")]
            nearest = min(near, key=situation.distance, default=None)
            found = first() if nearest is None else self.factors[nearest].first_guess()
            self.factors[situation] = found
        return found

    def evaluation_is_due(self, key: Key) -> bool:
        """Return whether to re-evaluate the choice, although its rounds went as predicted."""
        always = self.generations <= EVALUATE_ALWAYS
        is_cheap = self.evaluation_seconds <= MOST_TRYING * self.unplanned_seconds
        return self.generations >= self.next_evaluation.get(key, 0) and (always or is_cheap)

    def schedule_evaluation(self, key: Key, drafts: bool) -> None:
        """Put off the next evaluation: by one text to begin with, then by a fraction of the texts so far.

        Args:
            key: the user's settings and the situation.
            drafts: the choice drafts.
        """
        now = self.generations
        further = 1 if now < EVALUATE_ALWAYS else min(1 + int(EVALUATE_AFTER[drafts] * now), EVALUATE_EVERY)
        # A situation that no longer occurs must not keep others from resting.
        alike = (key[0], key[1].rows, key[1].threads)
        known = [each for each in list(self.choices) if (each[0], each[1].rows, each[1].threads) == alike]
        self.next_evaluation.update(dict.fromkeys([key, *known], now + further))

    def resting_choice(self, settings: SpecBranchConfig, rows: int, threads: int) -> Choice | None:
        """Return the choice of plain decoding for texts that need not look at the draft; None if the planner must run.

        The runtime is not asked for: the draft would have to be prepared to know it. So plain decoding must have been
        chosen in all situations with so many rows and threads.

        Args:
            settings: the user's settings.
            rows: the batch size.
            threads: of a CPU.
        """
        found = {key[1]: choice for key, choice in list(self.choices.items()) if key[0] == settings}
        alike = {each: choice for each, choice in found.items() if (each.rows, each.threads) == (rows, threads)}
        if any(self._take_up((settings, each)) for each in alike):
            return None
        checked = not all(each.captured for each in alike) and self.generations % CHECK_EVERY == CHECK_EVERY - 1
        keys = [(settings, each) for each in alike]
        if checked or any(self.evaluation_is_due(key) or self._worth_capturing(key) for key in keys):
            return None
        drafts = any(choice.plan.policy != "autoregressive" for choice in alike.values())
        return None if drafts else next(iter(alike.values()), None)

    def _take_up(self, key: Key) -> bool:
        """Take up a shelved choice, if texts have become long enough for it; return whether that is so."""
        if key not in self.shelved:
            return False
        choice, saved = self.shelved[key]
        if best_start(self.lengths, inf, saved, self.factors_in(key[1]).reading_seconds)[0] == inf:
            return False
        del self.shelved[key]
        self.choices[key] = choice
        return True

    def end_rest(self, settings: SpecBranchConfig, rows: int, tokens: float, seconds: float) -> None:
        """Count a text that was generated without looking at the draft."""
        self.unplanned_seconds += seconds
        for key in list(self.rivals):
            if key[0] == settings and key[1].rows == rows:
                self.miss(key, seconds)
        self.end_text(tokens)

    def _worth_capturing(self, key: Key) -> bool:
        return self.miss(key, 0.0)

    def miss(self, key: Key, seconds: float) -> bool:
        """Count what a rival would have saved in so much time; return whether that is worth its captures by now."""
        if key not in self.rivals:
            return False
        plan, share = self.rivals[key]
        self.missed[plan] = self.missed.get(plan, 0.0) + share * seconds
        return self.missed[plan] >= self.factors_in(key[1]).capture_seconds

    def update_ratio(self, plan: SpecBranchConfig, measured: float) -> None:
        """Take half of a new measurement, within limits: a pause of the host may have been in it.

        The ratios of other plans are forgotten bit by bit. Otherwise one that was measured too low would keep its plan
        from ever being followed, and so measured, again.
        """
        for other in self.ratios.keys() - {plan}:
            self.ratios[other] += FORGOTTEN * (1 - self.ratios[other])
        known = self.ratios.get(plan, 1.0)
        self.ratios[plan] = min(max((known + measured) / 2, known / LARGEST_STEP), known * LARGEST_STEP)

    def is_off(self, key: Key, tokens: float, predicted: float) -> bool:
        """Add a text that has ended; return whether the last texts have other numbers of tokens than predicted.

        Texts differ. If each one that is far below its prediction were recorded, recordings would be of such texts.
        """
        texts = self.progress[key] = [*self.progress.get(key, ())[1 - RECENT_TEXTS :], (tokens, predicted)]
        if len(texts) < FEWEST_PROGRESS:
            return not EXPECTED_TOKENS[0] < tokens / predicted < EXPECTED_TOKENS[1]
        relative = sum(each[0] for each in texts) / sum(each[1] for each in texts)
        return not EXPECTED_PROGRESS[0] < relative < EXPECTED_PROGRESS[1]

    def add_drafted(self, key: Key, tokens: float, seconds: float) -> None:
        """Count a segment with a draft."""
        self.drafted[key] = [*self.drafted.get(key, ())[1 - RECENT_SEGMENTS :], (tokens, seconds)]

    def drafted_speed(self, key: Key) -> float | None:
        """Return the tokens per second of the last segments with a draft; None after too few of them."""
        segments = self.drafted.get(key, [])
        if len(segments) < FEWEST_SEGMENTS:
            return None
        return sum(tokens for tokens, _ in segments) / sum(seconds for _, seconds in segments)

    def end_text(self, tokens: float) -> None:
        """Count a generation of so many tokens per row."""
        self.generations += 1
        self.lengths = [*self.lengths[1 - RECENT_LENGTHS :], tokens]

    def save(self) -> None:
        """Write to the file, if there is one."""
        if self.file is not None:
            self.file.save(self.to_dict())

    def to_dict(self) -> Entries:
        """Return what is worth keeping, ready for JSON."""
        costs = {json.dumps(situation): factors.to_dict() for situation, factors in list(self.factors.items())}
        choices = [
            [config.to_dict(), situation, choice.plan.to_dict(), choice.tokens_per_second, choice.tokens_per_pass]
            for (config, situation), choice in list(self.choices.items())[-MOST_CHOICES:]
        ]
        ratios = [[plan.to_dict(), ratio] for plan, ratio in list(self.ratios.items())[-MOST_CHOICES:]]
        texts = [_compact(text) for text in self.texts.all() if text.chances]
        scheduled = [each for each in list(self.next_evaluation.values()) if each > self.generations]
        next_evaluation = min(scheduled, default=self.generations)
        counts = {"generations": self.generations, "next_evaluation": next_evaluation}
        lists = {"choices": choices, "ratios": ratios, "texts": texts, "copy_gains": self.copy_gains}
        further = {"step_gains": self.step_gains, "lengths": self.lengths}
        return {"costs": costs, **lists, **further, **counts}

    def update(self, entries: Entries) -> None:
        """Take over what `to_dict` returned in an earlier process.

        Raises:
            ValueError, TypeError, KeyError: if it is something else; nothing is taken over then.
        """
        factors = {_situation(json.loads(key)): CostFactors.from_dict(each) for key, each in entries["costs"].items()}
        choices = {
            (SpecBranchConfig.from_dict(config), _situation(situation)): Choice(
                SpecBranchConfig.from_dict(plan), _positive(speed), _positive(tokens)
            )
            for config, situation, plan, speed, tokens in entries.get("choices", ())
        }
        ratios = {SpecBranchConfig.from_dict(plan): _positive(ratio) for plan, ratio in entries.get("ratios", ())}
        texts = [_recording(each) for each in entries.get("texts", ())]
        copy_gains, step_gains = (
            {str(name): _positive(gain) for name, gain in entries.get(kind, {}).items()}
            for kind in ("copy_gains", "step_gains")
        )
        generations, next_evaluation = (int(entries.get(name, 0)) for name in ("generations", "next_evaluation"))
        self.lengths = [_positive(tokens) for tokens in entries.get("lengths", ())]
        self.factors, self.choices, self.ratios = factors, choices, ratios
        self.generations, self.next_evaluation = generations, dict.fromkeys(choices, next_evaluation)
        self.copy_gains, self.step_gains = copy_gains, step_gains
        for text in texts:
            self.texts.update(self.texts.begin(), [text])


def knowledge_of(target: PreTrainedModel, draft: PreTrainedModel) -> Knowledge:
    """Return what is known of a pair in the present state of its adapters; kept as long as both models exist.

    What earlier processes have learned is read once. With adapters nothing is kept on disk.
    """
    known: dict[Hashable, Knowledge] = state_of(target).pairs.setdefault(draft, {})
    adapters = (adapter_state(target), adapter_state(draft))
    if adapters not in known:
        learned = Knowledge(sizes=sizes_of(target, draft))
        if adapters == (None, None):
            learned.file = file_of(target, draft)
        if learned.file is not None and (entries := learned.file.load()):
            try:
                learned.update(entries)
            except (ValueError, TypeError, KeyError, AttributeError):
                pass  # not what this version writes: start with nothing
        known.setdefault(adapters, learned)
    return known[adapters]


def forget(target: PreTrainedModel) -> None:
    """Drop what is known of all pairs with this target; what is on disk stays."""
    state_of(target).pairs.clear()


def _situation(fields: Any) -> Situation:
    rows, runtime, captured, threads = fields
    if not isinstance(rows, int) or rows < 1 or not isinstance(runtime, str):
        raise ValueError(f"{fields}: expected a situation")
    return Situation(rows, runtime, bool(captured), int(threads))


def _positive(number: Any) -> float:
    if not isfinite(number) or number <= 0:
        raise ValueError(f"{number}: expected a number above 0")
    return float(number)


def _compact(text: Agreement) -> dict[str, Any]:
    """Return a recording in few whole numbers. The confidence is the first of the probabilities."""
    chances = [[round(SCALE * each) for each in all] for all in text.chances]
    return {"rank": text.rank, "chances": chances, "lookups": text.lookups}


def _recording(fields: dict[str, Any]) -> Agreement:
    chances = tuple(tuple(each / SCALE for each in all) for all in fields["chances"])
    if len({len(each) for each in chances}) != 1:
        raise ValueError("expected as many probabilities at each token")
    ranks = tuple(map(int, fields["rank"]))
    lookups = tuple(map(int, fields.get("lookups", ())))
    return Agreement(tuple(each[0] for each in chances), ranks, len(chances[0]), chances, lookups)
