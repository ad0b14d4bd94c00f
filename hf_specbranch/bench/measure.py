"""Runs every method on the same models and prompts, in turns; an interrupted run keeps what it has measured.

The order of a run:

1. Each method starts once, on the longest prompt, with no cache or graph of another method in memory. That gives its
   warm-up time and its peak memory. Swept methods run their sweep first. Where nothing is captured or compiled, two
   generations of a few tokens tell the same, and the cache of the remaining tokens is added to the peak.
2. Methods that capture or compile sizes run on the longest and the shortest prompt again, unmeasured.
3. Prompt by prompt, every method in turn, `repeat` times. A generation that captured a graph is repeated. Outputs are
   compared with those of the first method: plain `generate()` where it takes part.
4. A few prompts run once more with a streamer that records when tokens arrive. This pass is separate, since a streamer
   may make the device wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from hf_specbranch.config import SpecBranchConfig
from hf_specbranch.progress import Progress

from .methods import EAGER, SWEPT, TRANSFORMERS, Method, Overrides, Pair, candidates, fixed_methods
from .results import Measurement, OnPrompt, difference
from .timing import Generation, TimingStreamer, cache_bytes, forget, generate_once, peak_memory

SHORT = 8  # tokens of a first generation where nothing is captured
TRIES = 3  # of a measured generation that captures graphs


@dataclass(frozen=True)
class Plan:
    """What to run.

    Args:
        names: methods by name, in the order of `METHODS`.
        overrides: what the user set for our methods.
        max_new_tokens: limit per prompt.
        repeat: measured runs per method and prompt.
        sweep: draft lengths that sweeps try.
        sweep_prompts: number of prompts of a sweep.
        stream_prompts: number of prompts of the streamed pass.
        temperature: of sampling; 0 is greedy, and only then outputs are compared.
        slow_prompts: transformers' own methods run on the first so many prompts only; None: on all.
    """

    names: tuple[str, ...]
    overrides: Overrides = Overrides()
    max_new_tokens: int = 128
    repeat: int = 1
    sweep: tuple[int, ...] = (2, 4, 6, 8, 12, 16)
    sweep_prompts: int = 2
    stream_prompts: int = 1
    temperature: float = 0.0
    slow_prompts: int | None = None


class Benchmark:
    """Runs a plan and fills `measurements`, `sweeps` and `failed`.

    Args:
        pair: the models.
        prompts: their ids and inputs, `input_ids` [1, P] and `attention_mask`.
        plan: what to run.
        progress: receives each finished generation and warnings.
        kinds: of the prompts, if there are several; figures are also shown per kind.
    """

    def __init__(
        self,
        pair: Pair,
        prompts: list[tuple[str, dict[str, Tensor]]],
        plan: Plan,
        progress: Progress | None = None,
        kinds: Sequence[str] = (),
    ) -> None:
        self.kinds = list(kinds) or [""] * len(prompts)
        self.pair, self.plan, self.progress = pair, plan, progress or Progress()
        self.ids = [name for name, _ in prompts]
        self.inputs = [inputs for _, inputs in prompts]
        self.by_length = sorted(range(len(prompts)), key=lambda at: self.inputs[at]["input_ids"].shape[1])
        self.measurements: dict[str, Measurement] = {}
        self.sweeps: dict[str, list[dict[str, Any]]] = {}
        self.failed: dict[str, str] = {}  # methods that could not start, and why
        self.outputs: dict[int, list[int]] = {}  # of the reference method, by prompt
        self.spent: dict[str, float] = {}  # seconds of all generations of a method so far
        self.pace: dict[str, float] = {}  # seconds per token of its last generation

    @property
    def reference(self) -> str | None:
        """The method whose outputs are the reference: the first one that could start."""
        return next(iter(self.measurements), None)

    @property
    def longest(self) -> int:
        return self.by_length[-1]

    @property
    def generations(self) -> int:
        """The number of generations of a complete run."""
        methods = [name for name in self.plan.names if name != "specbranch-head" or self.pair.head is not None]
        swept = sum(len(self.candidates(name)) for name in methods if name in SWEPT)
        captured = sum(self._captures(name) for name in methods)
        started = captured * (1 + len(self._some(2))) + (len(methods) - captured) * 2
        return sum(map(self._turns, methods)) + started + swept * 2 * len(self.sweep_prompts)

    @property
    def sweep_prompts(self) -> list[int]:
        """The prompts that sweeps use."""
        return self._some(self.plan.sweep_prompts)

    def _turns(self, name: str) -> int:
        """Return the measured and streamed generations of a method."""
        return self._measured_prompts(name) * self.plan.repeat + len(self._some(self.plan.stream_prompts))

    def _measured_prompts(self, name: str) -> int:
        """Return on how many prompts a method is measured: the first ones."""
        most = self.plan.slow_prompts if name in TRANSFORMERS else None
        return len(self.inputs) if most is None else min(most, len(self.inputs))

    def run(self) -> None:
        """Run the whole plan."""
        self.start_all()
        self.warm_up()
        self.progress.say(self.estimate())
        for prompt in range(len(self.inputs)):
            for _ in range(self.plan.repeat):
                for name, measurement in self.measurements.items():
                    if prompt < self._measured_prompts(name):
                        self.progress.doing(f"{name}, prompt {prompt + 1} of {len(self.inputs)}")
                        self.measure(measurement, prompt)
        for prompt in self._some(self.plan.stream_prompts):
            for measurement in self.measurements.values():
                self.progress.doing(f"{measurement.method.name}, streamed")
                self.stream(measurement, prompt)

    def even_out(self) -> None:
        """Drop prompts of an interrupted run that not every method has run, so that medians are over the same prompts.

        If there is no prompt that all have run, each method keeps its own.
        """
        every = [found for name, found in self.measurements.items() if self._measured_prompts(name) == len(self.inputs)]
        common = set.intersection(*(set(found.prompts) for found in every), set(self.outputs))
        if common:
            names = {self.ids[at] for at in common}
            for found in self.measurements.values():
                found.prompts = {at: entry for at, entry in found.prompts.items() if at in common}
                found.differences = [entry for entry in found.differences if entry.prompt in names]

    def estimate(self) -> str:
        """Return how long the measured generations will take by method, from the speed of the last ones."""
        each = {name: self.pace[name] * self.plan.max_new_tokens * self._turns(name) for name in self.measurements}
        listed = ", ".join(f"{name} {seconds:.0f}" for name, seconds in each.items())
        return f"all methods have started; measuring takes about {sum(each.values()):.0f} s: {listed}"

    def start_all(self) -> None:
        """Run the first generations. What transformers compiles stays in memory, so its static cache comes last."""
        methods = fixed_methods(self.plan.names, self.plan.overrides, self.pair.head)
        for name, method in methods.items():
            if name != "static":
                self.attempt(name, partial(self.start, method))
        for name in SWEPT:
            if name in self.plan.names:
                self.attempt(name, partial(self.start_swept, name))
        if "static" in methods:
            self.attempt("static", partial(self.start, methods["static"]))
        self.measurements = {name: self.measurements[name] for name in self.plan.names if name in self.measurements}

    def attempt(self, name: str, work: Callable[[], None]) -> None:
        """Leave out a method that fails at its first try (no memory, no compiler), unless it is plain `generate()`."""
        try:
            work()
        except RuntimeError as error:
            if name == "plain":
                raise
            self.failed[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"

    def start(self, method: Method) -> None:
        """Run the first generation of a method, with nothing of the others in memory."""
        self.progress.doing(f"{method.name}, first generation")
        forget(self.pair)
        captures = self._captures(method.name)
        length = self.plan.max_new_tokens if captures else min(SHORT, self.plan.max_new_tokens)
        found = self._generate(method, self.longest, max_new_tokens=length)
        peak = peak_memory(self.pair.target)
        if peak is not None and not captures:
            models = [self.pair.target, *([self.pair.draft] if method.drafts else [])]
            peak += sum(cache_bytes(model, self.plan.max_new_tokens - length) for model in models)
        second = None if captures else self._generate(method, self.longest, max_new_tokens=length).seconds
        self.measurements[method.name] = Measurement(method, found.seconds, second, peak)
        if found.stats is not None:
            wanted = self.plan.overrides.expected_runtime(self.pair.target.device.type)
            for reason in complaints(method.name, found.stats.runtime, found.stats.slowed_by, wanted):
                self.progress.say(f"warning: {reason}")

    def start_swept(self, name: str) -> None:
        """Find the best settings of a method, then start it."""
        self.start(Method(name, self.sweep(name), drafts=True))

    def warm_up(self) -> None:
        """Run methods that capture sizes on the longest and the shortest prompt."""
        for prompt in reversed(self._some(2)):
            for measurement in self.measurements.values():
                if self._captures(measurement.method.name):
                    self.progress.doing(f"{measurement.method.name}, warm-up")
                    self._generate(measurement.method, prompt)

    def sweep(self, name: str) -> SpecBranchConfig:
        """Run every candidate twice on a few prompts, count the second run, and return the fastest."""
        tried: list[tuple[float, SpecBranchConfig]] = []
        for settings in self.candidates(name):
            method = Method(name, settings, drafts=True)
            self.progress.doing(f"{name}, sweep, draft length {settings.max_draft_length}")
            tokens, seconds, decode_seconds = 0, 0.0, 0.0
            for prompt in self.sweep_prompts:
                self._generate(method, prompt)
                found = self._generate(method, prompt)
                tokens, seconds = tokens + len(found.tokens), seconds + found.seconds
                decode_seconds += found.decode_seconds
            tried.append((tokens / seconds, settings))
            self.sweeps.setdefault(name, []).append(
                {
                    "max_draft_length": settings.max_draft_length,
                    "tokens_per_second": tokens / seconds,
                    "decode_tokens_per_second": max(0, tokens - len(self.sweep_prompts)) / decode_seconds
                    if decode_seconds
                    else None,
                }
            )
        return max(tried, key=lambda entry: entry[0])[1]

    def measure(self, measurement: Measurement, prompt: int) -> None:
        """Run one measured generation, and compare its output with the reference."""
        found = self._generate(measurement.method, prompt)
        for _ in range(1, TRIES):
            if found.stats is not None and found.stats.graphs_captured:
                measurement.run_again += 1
                found = self._generate(measurement.method, prompt, planned=False)
        expected = self.outputs.setdefault(prompt, found.tokens)  # the reference comes first
        known = measurement.prompts.setdefault(prompt, OnPrompt(len(found.tokens), stats=found.stats))
        known.seconds.append(found.seconds)
        known.decode_seconds += [found.decode_seconds] if found.stats is not None else []
        ids, name = self.inputs[prompt]["input_ids"], self.ids[prompt]
        if self.plan.temperature > 0 or any(entry.prompt == name for entry in measurement.differences):
            return
        seen = difference(self.pair.target, measurement.method.name, name, ids, expected, found.tokens)
        measurement.differences += [seen] if seen is not None else []

    def stream(self, measurement: Measurement, prompt: int) -> None:
        """Run one streamed generation."""
        streamer = TimingStreamer()
        self._generate(measurement.method, prompt, streamer)
        measurement.gaps += streamer.gaps()
        measurement.first_token.append(streamer.time_to_first_token)

    def _generate(
        self,
        method: Method,
        prompt: int,
        streamer: TimingStreamer | None = None,
        max_new_tokens: int | None = None,
        planned: bool = True,
    ) -> Generation:
        length = max_new_tokens or self.plan.max_new_tokens
        found = generate_once(self.pair, method, self.inputs[prompt], length, streamer, self.plan.temperature)
        self.spent[method.name] = self.spent.get(method.name, 0.0) + found.seconds
        self.pace[method.name] = found.seconds / max(1, len(found.tokens))
        if planned:
            self.progress.advance()
        return found

    def _captures(self, name: str) -> bool:
        """Return whether a method compiles or captures something when it first runs at a size."""
        return name not in EAGER and self.pair.target.device.type == "cuda"

    def candidates(self, name: str) -> list[SpecBranchConfig]:
        """Return the settings that the sweep of a method tries."""
        return candidates(name, self.plan.overrides, self.plan.sweep)

    def _some(self, count: int) -> list[int]:
        """Return up to `count` prompts, spread from the shortest to the longest."""
        last = len(self.by_length) - 1
        places = {round(place * last / max(1, count - 1)) for place in range(min(count, last + 1))}
        return [self.by_length[place] for place in sorted(places)]


def complaints(name: str, runtime: str, slowed_by: str, wanted: str) -> list[str]:
    """Return what a reader of a method's figures must know about how it ran.

    Example:
        >>> complaints("specbranch", runtime="eager", slowed_by="", wanted="graph")
        ['specbranch ran with runtime "eager", not "graph"']
    """
    found = [f'{name} ran with runtime "{runtime}", not "{wanted}"'] if runtime != wanted else []
    return found + ([f"{name} was driven step by step from the host: {slowed_by}"] if slowed_by else [])
