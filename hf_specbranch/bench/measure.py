"""Every way on the same models and prompts, in turns; what is measured stays at hand if the run is cut short.

The order of a run:

1. Each way starts once from nothing, on the longest prompt, with no cache or graph of another way in memory: that
   gives its warm-up time and its peak memory. Sweeps come between these, since they settle what the swept ways are.
   Where nothing is captured or compiled, a generation of a few tokens and one more like it tell the same, and the cache
   of the other tokens is added to the peak.
2. Ways that capture or compile sizes meet the longest and the shortest prompt again, unmeasured.
3. Prompt by prompt, every way in turn, `repeat` times; a generation in which a graph was captured is warm-up, and run
   again. Outputs are compared with those of the first way: plain `generate()` where it takes part, which is slow on a
   GPU and may be left out.
4. A few prompts once more with a streamer that notes when tokens arrive. It has a pass of its own, since a streamer may
   make the device wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from ..config import SpecBranchConfig
from .differences import difference
from .findings import Measurement, OnPrompt
from .memory import cache_bytes
from .timing import Generation, TimingStreamer, forget, generate_once, peak_memory
from .ways import EAGER, SWEPT, Choices, Pair, Way, candidates, fixed_ways

SHORT = 8  # tokens of a generation that only has to happen
TRIES = 3  # of a measured generation in which graphs are captured


@dataclass(frozen=True)
class Plan:
    """What to run.

    Args:
        names: ways by name, in the order of `TITLES`.
        choices: what the user set for our ways.
        new_tokens: at most, for each prompt.
        repeat: measured runs of a way on a prompt.
        sweep: draft lengths that sweeps try.
        sweep_epsilon: confidence thresholds that the sweep of specbranch tries.
        sweep_prompts: prompts of a sweep.
        stream_prompts: prompts of the streamed pass.
        temperature: of sampling; at 0 all is greedy, and outputs are compared.
    """

    names: tuple[str, ...]
    choices: Choices = Choices()
    new_tokens: int = 128
    repeat: int = 1
    sweep: tuple[int, ...] = (2, 4, 6, 8, 12, 16)
    sweep_epsilon: tuple[float, ...] = ()
    sweep_prompts: int = 2
    stream_prompts: int = 1
    temperature: float = 0.0


class Progress:
    """Hears how a run goes; this one keeps it to itself."""

    def doing(self, what: str) -> None:
        """What is being run now."""

    def advance(self) -> None:
        """One generation is done."""

    def say(self, line: str) -> None:
        """Something the user should know before the run is over."""


class Benchmark:
    """Runs a plan; `measurements`, `sweeps` and `failed` grow as it goes.

    Args:
        pair: the models.
        prompts: their ids and inputs, `input_ids` [1, P] and `attention_mask`.
        plan: what to run.
        progress: told after each generation, and when something is worth saying.
    """

    def __init__(
        self,
        pair: Pair,
        prompts: list[tuple[str, dict[str, Tensor]]],
        plan: Plan,
        progress: Progress | None = None,
    ) -> None:
        self.pair, self.plan, self.progress = pair, plan, progress or Progress()
        self.ids = [name for name, _ in prompts]
        self.inputs = [inputs for _, inputs in prompts]
        self.by_length = sorted(range(len(prompts)), key=lambda at: self.inputs[at]["input_ids"].shape[1])
        self.measurements: dict[str, Measurement] = {}
        self.sweeps: dict[str, list[dict[str, Any]]] = {}
        self.failed: dict[str, str] = {}  # ways that could not start, and why
        self.outputs: dict[int, list[int]] = {}  # of the reference, by prompt
        self.spent: dict[str, float] = {}  # seconds of all generations of a way so far
        self.pace: dict[str, float] = {}  # seconds a token of its last one

    @property
    def reference(self) -> str | None:
        """The way whose outputs the others' are compared with: the first that could start."""
        return next(iter(self.measurements), None)

    @property
    def longest(self) -> int:
        return self.by_length[-1]

    @property
    def generations(self) -> int:
        """How many a whole run takes."""
        ways = [name for name in self.plan.names if name != "specbranch-head" or self.pair.head is not None]
        swept = sum(len(self.candidates(name)) for name in ways if name in SWEPT)
        captured = sum(self._captures(name) for name in ways)
        started = captured * (1 + len(self._some(2))) + (len(ways) - captured) * 2
        return len(ways) * self._turns + started + swept * 2 * len(self.sweep_prompts)

    @property
    def sweep_prompts(self) -> list[int]:
        """The prompts that sweeps use."""
        return self._some(self.plan.sweep_prompts)

    @property
    def _turns(self) -> int:
        """Measured and streamed generations of each way."""
        return len(self.inputs) * self.plan.repeat + len(self._some(self.plan.stream_prompts))

    def run(self) -> None:
        """The whole plan."""
        self.start_all()
        self.warm_up()
        self.progress.say(self.estimate())
        for prompt in range(len(self.inputs)):
            for _ in range(self.plan.repeat):
                for measurement in self.measurements.values():
                    self.progress.doing(f"{measurement.way.name}, prompt {prompt + 1} of {len(self.inputs)}")
                    self.measure(measurement, prompt)
        for prompt in self._some(self.plan.stream_prompts):
            for measurement in self.measurements.values():
                self.progress.doing(f"{measurement.way.name}, streamed")
                self.stream(measurement, prompt)

    def even_out(self) -> None:
        """Leave out prompts that some way has not run, of a run that was cut short: the others' medians are over more.

        If there is no prompt that all have run, each keeps its own.
        """
        common = set.intersection(*(set(found.prompts) for found in self.measurements.values()), set(self.outputs))
        if common:
            names = {self.ids[at] for at in common}
            for found in self.measurements.values():
                found.prompts = {at: entry for at, entry in found.prompts.items() if at in common}
                found.differences = [entry for entry in found.differences if entry.prompt in names]

    def estimate(self) -> str:
        """How long the measured and streamed generations will take, by way, from the pace of the last ones."""
        each = {name: self.pace[name] * self.plan.new_tokens * self._turns for name in self.measurements}
        told = ", ".join(f"{name} {seconds:.0f}" for name, seconds in each.items())
        return f"started; what is measured now takes about {sum(each.values()):.0f} s: {told}"

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
        self.progress.doing(f"{way.name}, first generation")
        forget(self.pair)
        captures = self._captures(way.name)
        length = self.plan.new_tokens if captures else min(SHORT, self.plan.new_tokens)
        found = self._generate(way, self.longest, new_tokens=length)
        peak = peak_memory(self.pair.target)
        if peak is not None and not captures:
            models = [self.pair.target, *([self.pair.draft] if way.drafts else [])]
            peak += sum(cache_bytes(model, self.plan.new_tokens - length) for model in models)
        second = None if captures else self._generate(way, self.longest, new_tokens=length).seconds
        self.measurements[way.name] = Measurement(way, found.seconds, second, peak)
        if found.stats is not None:
            wanted = self.plan.choices.expected_runtime(self.pair.target.device.type)
            for reason in complaints(way.name, found.stats.runtime, found.stats.slowed_by, wanted):
                self.progress.say(f"warning: {reason}")

    def start_swept(self, name: str) -> None:
        """Find a way's settings, then start it."""
        self.start(Way(name, self.sweep(name), drafts=True))

    def warm_up(self) -> None:
        """Let ways that capture sizes meet the longest and the shortest prompt."""
        for prompt in reversed(self._some(2)):
            for measurement in self.measurements.values():
                if self._captures(measurement.way.name):
                    self.progress.doing(f"{measurement.way.name}, warm-up")
                    self._generate(measurement.way, prompt)

    def sweep(self, name: str) -> SpecBranchConfig:
        """Try every candidate on a few prompts, each twice, the second time counted; the fastest wins."""
        tried: list[tuple[float, SpecBranchConfig]] = []
        for settings in self.candidates(name):
            way = Way(name, settings, drafts=True)
            self.progress.doing(f"{name}, sweep, drafts of {settings.max_draft_length}")
            tokens, seconds, decode = 0, 0.0, 0.0
            for prompt in self.sweep_prompts:
                self._generate(way, prompt)
                found = self._generate(way, prompt)
                tokens, seconds, decode = tokens + len(found.tokens), seconds + found.seconds, decode + found.decode
            tried.append((tokens / seconds, settings))
            self.sweeps.setdefault(name, []).append(
                {
                    "max_draft_length": settings.max_draft_length,
                    "confidence_threshold": settings.confidence_threshold,
                    "tokens_per_second": tokens / seconds,
                    "decode_tokens_per_second": max(0, tokens - len(self.sweep_prompts)) / decode if decode else None,
                }
            )
        return max(tried, key=lambda entry: entry[0])[1]

    def measure(self, measurement: Measurement, prompt: int) -> None:
        """One measured generation, compared with the reference's."""
        found = self._generate(measurement.way, prompt)
        for _ in range(1, TRIES):
            if found.stats is not None and found.stats.graphs_captured:
                measurement.run_again += 1
                found = self._generate(measurement.way, prompt, planned=False)
        expected = self.outputs.setdefault(prompt, found.tokens)  # the reference comes first
        known = measurement.prompts.setdefault(prompt, OnPrompt(len(found.tokens), stats=found.stats))
        known.seconds.append(found.seconds)
        known.decode_seconds += [found.decode] if found.stats is not None else []
        ids, name = self.inputs[prompt]["input_ids"], self.ids[prompt]
        if self.plan.temperature > 0 or any(entry.prompt == name for entry in measurement.differences):
            return
        seen = difference(self.pair.target, measurement.way.name, name, ids, expected, found.tokens)
        measurement.differences += [seen] if seen is not None else []

    def stream(self, measurement: Measurement, prompt: int) -> None:
        """One streamed generation."""
        streamer = TimingStreamer()
        self._generate(measurement.way, prompt, streamer)
        measurement.gaps += streamer.gaps()
        measurement.first_token.append(streamer.time_to_first_token)

    def _generate(
        self,
        way: Way,
        prompt: int,
        streamer: TimingStreamer | None = None,
        new_tokens: int | None = None,
        planned: bool = True,
    ) -> Generation:
        length = new_tokens or self.plan.new_tokens
        found = generate_once(self.pair, way, self.inputs[prompt], length, streamer, self.plan.temperature)
        self.spent[way.name] = self.spent.get(way.name, 0.0) + found.seconds
        self.pace[way.name] = found.seconds / max(1, len(found.tokens))
        if planned:
            self.progress.advance()
        return found

    def _captures(self, name: str) -> bool:
        """Whether a way compiles or captures something the first time it meets a size."""
        return name not in EAGER and self.pair.target.device.type == "cuda"

    def candidates(self, name: str) -> list[SpecBranchConfig]:
        """What the sweep of a way tries."""
        return candidates(name, self.plan.choices, self.plan.sweep, self.plan.sweep_epsilon)

    def _some(self, count: int) -> list[int]:
        """Up to `count` prompts, spread from the shortest to the longest."""
        last = len(self.by_length) - 1
        places = {round(place * last / max(1, count - 1)) for place in range(min(count, last + 1))}
        return [self.by_length[place] for place in sorted(places)]


def complaints(name: str, runtime: str, slowed_by: str, wanted: str) -> list[str]:
    """What a reader of a way's figures must know about how it ran.

    Example:
        >>> complaints("specbranch", runtime="eager", slowed_by="", wanted="graph")
        ['specbranch ran with runtime "eager", not "graph"']
    """
    found = [f'{name} ran with runtime "{runtime}", not "{wanted}"'] if runtime != wanted else []
    return found + ([f"{name} was driven step by step from the host: {slowed_by}"] if slowed_by else [])
