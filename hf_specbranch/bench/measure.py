"""Every way on the same models and prompts, in turns; what is measured stays at hand if the run is cut short.

The order of a run:

1. Each way starts once from nothing, on the longest prompt, with no cache or graph of another way in memory: that
   gives its warm-up time and its peak memory. Sweeps come between these, since they settle what the swept ways are.
2. Ways that capture or compile sizes meet the longest and the shortest prompt again, unmeasured.
3. Prompt by prompt, every way in turn, `repeat` times; outputs are compared with plain `generate()`'s.
4. A few prompts once more with a streamer that notes when tokens arrive. It has a pass of its own, since a streamer may
   make the device wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from statistics import median
from typing import Any

from torch import Tensor

from ..config import SpecBranchConfig
from ..stats import SpecBranchStats
from .differences import Difference, difference
from .timing import Generation, TimingStreamer, forget, generate_once, peak_memory
from .ways import EAGER, SWEPT, Choices, Pair, Way, candidates, fixed_ways


@dataclass(frozen=True)
class Plan:
    """What to run.

    Args:
        names: ways by name, "plain" among them.
        choices: what the user set for our ways.
        new_tokens: at most, for each prompt.
        repeat: measured runs of a way on a prompt.
        sweep: draft lengths that sweeps try.
        sweep_epsilon: confidence thresholds that the sweep of specbranch tries.
        sweep_prompts: prompts of a sweep.
        stream_prompts: prompts of the streamed pass.
    """

    names: tuple[str, ...]
    choices: Choices = Choices()
    new_tokens: int = 128
    repeat: int = 1
    sweep: tuple[int, ...] = (2, 4, 6, 8, 12, 16)
    sweep_epsilon: tuple[float, ...] = ()
    sweep_prompts: int = 2
    stream_prompts: int = 2


@dataclass
class OnPrompt:
    """One way on one prompt."""

    new_tokens: int
    seconds: list[float] = field(default_factory=list)  # of each repeat
    stats: SpecBranchStats | None = None  # of the first

    @property
    def speed(self) -> float:
        return self.new_tokens / median(self.seconds)


@dataclass
class Measurement:
    """All that is known of one way so far."""

    way: Way
    first_seconds: float | None = None  # its first generation, on the longest prompt
    peak_memory: int | None = None  # bytes, of that generation
    prompts: dict[int, OnPrompt] = field(default_factory=dict)  # by the prompt's index
    gaps: list[float] = field(default_factory=list)  # between streamed tokens
    first_token: list[float] = field(default_factory=list)  # seconds to it, of each streamed generation
    differences: list[Difference] = field(default_factory=list)

    @property
    def stats(self) -> SpecBranchStats | None:
        """Counts and times of all prompts together; None for transformers' own ways."""
        return pooled([found.stats for found in self.prompts.values() if found.stats is not None])

    def ratio_to(self, other: Measurement | None) -> float | None:
        """Median over prompts of the ratio of speeds on a prompt."""
        if other is None:
            return None
        both = [index for index in self.prompts if index in other.prompts]
        return median(self.prompts[at].speed / other.prompts[at].speed for at in both) if both else None

    def warm_up_seconds(self, longest: int) -> float | None:
        """How much longer the first generation took than later ones of the same prompt."""
        later = self.prompts.get(longest)
        return None if later is None or self.first_seconds is None else self.first_seconds - median(later.seconds)


class Benchmark:
    """Runs a plan; `measurements`, `sweeps` and `failed` grow as it goes.

    Args:
        pair: the models.
        prompts: their ids and inputs, `input_ids` [1, P] and `attention_mask`.
        plan: what to run.
        advance: called after each generation, for a progress bar.
    """

    def __init__(
        self,
        pair: Pair,
        prompts: list[tuple[str, dict[str, Tensor]]],
        plan: Plan,
        advance: Callable[[], object] = lambda: None,
    ) -> None:
        self.pair, self.plan, self.advance = pair, plan, advance
        self.ids = [name for name, _ in prompts]
        self.inputs = [inputs for _, inputs in prompts]
        self.by_length = sorted(range(len(prompts)), key=lambda at: self.inputs[at]["input_ids"].shape[1])
        self.measurements: dict[str, Measurement] = {}
        self.sweeps: dict[str, list[dict[str, Any]]] = {}
        self.failed: dict[str, str] = {}  # ways that could not start, and why
        self.outputs: dict[int, list[int]] = {}  # plain generate()'s, by prompt

    @property
    def longest(self) -> int:
        return self.by_length[-1]

    @property
    def generations(self) -> int:
        """How many a whole run takes."""
        ways = [name for name in self.plan.names if name != "specbranch-head" or self.pair.head is not None]
        swept = sum(len(self._candidates(name)) for name in ways if name in SWEPT)
        captured = sum(name not in EAGER for name in ways)
        turns = 1 + len(self.inputs) * self.plan.repeat + len(self._some(self.plan.stream_prompts))
        warm_up = captured * len(self._some(2))
        return len(ways) * turns + warm_up + swept * 2 * len(self._some(self.plan.sweep_prompts))

    def run(self) -> None:
        """The whole plan."""
        self.start_all()
        self.warm_up()
        for prompt in range(len(self.inputs)):
            for _ in range(self.plan.repeat):
                for measurement in self.measurements.values():
                    self.measure(measurement, prompt)
        for prompt in self._some(self.plan.stream_prompts):
            for measurement in self.measurements.values():
                self.stream(measurement, prompt)

    def start_all(self) -> None:
        """First generations. What transformers compiles stays in memory, so its static cache comes last."""
        ways = fixed_ways(self.plan.names, self.plan.choices, self.pair.head)
        for name, way in ways.items():
            if name != "static":
                self.attempt(name, partial(self.start, way))
        for name in SWEPT:
            if name in self.plan.names:
                self.attempt(name, partial(self.start_swept, name))
        if "static" in ways:
            self.attempt("static", partial(self.start, ways["static"]))
        self.measurements = {name: self.measurements[name] for name in self.plan.names if name in self.measurements}

    def attempt(self, name: str, work: Callable[[], None]) -> None:
        """Leave a way out that fails at its first try (no memory, no compiler), unless all rest on it."""
        try:
            work()
        except RuntimeError as error:
            if name == "plain":
                raise
            self.failed[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"

    def start(self, way: Way) -> None:
        """The first generation of a way, with nothing of the others in memory."""
        forget(self.pair)
        seconds = self._generate(way, self.longest).seconds
        self.measurements[way.name] = Measurement(way, seconds, peak_memory(self.pair.target))

    def start_swept(self, name: str) -> None:
        """Find a way's settings, then start it."""
        self.start(Way(name, self.sweep(name), drafts=True))

    def warm_up(self) -> None:
        """Let ways that capture sizes meet the longest and the shortest prompt."""
        for prompt in reversed(self._some(2)):
            for measurement in self.measurements.values():
                if measurement.way.captures:
                    self._generate(measurement.way, prompt)

    def sweep(self, name: str) -> SpecBranchConfig:
        """Try every candidate on a few prompts, each twice, the second time counted; the fastest wins."""
        tried: list[tuple[float, SpecBranchConfig]] = []
        for settings in self._candidates(name):
            way = Way(name, settings, drafts=True)
            tokens, seconds = 0, 0.0
            for prompt in self._some(self.plan.sweep_prompts):
                self._generate(way, prompt)
                found = self._generate(way, prompt)
                tokens, seconds = tokens + len(found.tokens), seconds + found.seconds
            tried.append((tokens / seconds, settings))
            self.sweeps.setdefault(name, []).append(
                {
                    "max_draft_length": settings.max_draft_length,
                    "confidence_threshold": settings.confidence_threshold,
                    "tokens_per_second": tokens / seconds,
                }
            )
        return max(tried, key=lambda entry: entry[0])[1]

    def measure(self, measurement: Measurement, prompt: int) -> None:
        """One measured generation, compared with plain `generate()`'s."""
        found = self._generate(measurement.way, prompt)
        plain = self.outputs.setdefault(prompt, found.tokens)  # plain generate() comes first
        known = measurement.prompts.setdefault(prompt, OnPrompt(len(found.tokens), stats=found.stats))
        known.seconds.append(found.seconds)
        ids, name = self.inputs[prompt]["input_ids"], self.ids[prompt]
        if any(entry.prompt == name for entry in measurement.differences):
            return
        seen = difference(self.pair.target, measurement.way.name, name, ids, plain, found.tokens)
        measurement.differences += [seen] if seen is not None else []

    def stream(self, measurement: Measurement, prompt: int) -> None:
        """One streamed generation."""
        streamer = TimingStreamer()
        self._generate(measurement.way, prompt, streamer)
        measurement.gaps += streamer.gaps()
        measurement.first_token.append(streamer.time_to_first_token)

    def _generate(self, way: Way, prompt: int, streamer: TimingStreamer | None = None) -> Generation:
        found = generate_once(self.pair, way, self.inputs[prompt], self.plan.new_tokens, streamer)
        self.advance()
        return found

    def _candidates(self, name: str) -> list[SpecBranchConfig]:
        return candidates(name, self.plan.choices, self.plan.sweep, self.plan.sweep_epsilon)

    def _some(self, count: int) -> list[int]:
        """Up to `count` prompts, spread from the shortest to the longest."""
        last = len(self.by_length) - 1
        places = {round(place * last / max(1, count - 1)) for place in range(min(count, last + 1))}
        return [self.by_length[place] for place in sorted(places)]


def pooled(all_stats: list[SpecBranchStats]) -> SpecBranchStats | None:
    """Counts and times added up, so that rates are those of all generations together; None for none.

    Example:
        >>> pooled([SpecBranchStats(new_tokens=3), SpecBranchStats(new_tokens=4)]).new_tokens
        7
    """
    if not all_stats:
        return None
    total = SpecBranchStats(policy=all_stats[0].policy)
    for stats in all_stats:
        for entry in fields(stats):
            value = getattr(stats, entry.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                setattr(total, entry.name, getattr(total, entry.name) + value)
        for accepted, count in enumerate(stats.acceptance_histogram):
            total.acceptance_histogram.extend([0] * (accepted + 1 - len(total.acceptance_histogram)))
            total.acceptance_histogram[accepted] += count
    return total
