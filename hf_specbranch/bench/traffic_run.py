"""Replays traffic on a pair, and measures how far each call is from its steady time.

The order of a run:

1. A warm-up of all sizes if requested; then one ordinary call.
2. Every kind of traffic, call by call, each once.
3. After everything, the steady time of each call: the fastest of a few repetitions in a row. A repetition reads its
   whole prompt again, as if no text before had begun like it; a chat is repeated turn by turn.
4. Some calls are compared with plain `generate()`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..attach import specbranch
from ..config import SpecBranchConfig
from ..model_state import state_of
from ..progress import Progress
from ..runtime.eager import NOTHING
from ..stats import SpecBranchStats
from .methods import Pair
from .results import Difference, difference
from .timing import forget, peak_memory, wait
from .traffic import (
    BATCH_LENGTH,
    BATCHES,
    BATCHES_AGAIN,
    CHAT,
    CHAT_CACHED,
    MIXED,
    MIXED_AGAIN,
    REQUESTS,
    Item,
    TextSource,
    Traffic,
    inputs_of,
    pad_token,
)

MOST_STEADY = 40  # calls of one kind whose steady time is measured


@dataclass
class Call:
    """One measured call."""

    item: Item
    new: list[list[int]]  # generated tokens of each row
    seconds: float
    stats: SpecBranchStats
    memory: int | None = None  # bytes in use on the device afterwards; None without CUDA

    @property
    def new_tokens(self) -> int:
        return sum(map(len, self.new))


@dataclass
class Replay:
    """All calls of one kind of traffic."""

    calls: list[Call] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    compared: int = 0  # rows that were compared with plain `generate()`
    peak_allocated: int | None = None  # bytes, of torch's allocator


class TrafficBenchmark:
    """Replays traffic and fills `replays` and `steady`.

    Args:
        pair: the models.
        texts: prompts are made from these.
        traffic: what to replay.
        settings: ours, for all calls.
        progress: receives each finished call.
    """

    def __init__(
        self,
        pair: Pair,
        texts: list[str],
        traffic: Traffic,
        settings: SpecBranchConfig | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.pair, self.traffic, self.progress = pair, traffic, progress or Progress()
        self.model: Any = specbranch(pair.target, draft=pair.draft)
        self.settings = settings or SpecBranchConfig()
        self.source = TextSource(pair, texts, traffic.seed)
        self.replays: dict[str, Replay] = {}
        self.steady: dict[Item, Call] = {}
        self.first: Call | None = None
        self.warm_up_seconds: float | None = None

    @property
    def calls(self) -> int:
        """The number of calls of a complete run."""
        traffic = self.traffic
        counts = [traffic.mixed, *[len(traffic.chat_lengths())] * 2, len(traffic.batch_sizes)]
        again = counts[0] + counts[-1]
        steady = sum(min(MOST_STEADY, count) for count in (*counts, traffic.requests))
        return 1 + sum(counts) + again + traffic.requests + steady * traffic.steady_runs

    def run(self) -> None:
        """Replay everything."""
        forget(self.pair)
        with never_ending(self.model, self.settings):
            self.start()
            self.replay_all()
            for name, replay in self.replays.items():
                self.measure_steady(name, replay)
            for name, replay in self.replays.items():
                self.compare(name, replay)

    def start(self) -> None:
        """Warm up if requested, and run one ordinary call."""
        traffic = self.traffic
        if traffic.warm_up and not hasattr(self.model, "warm_up_specbranch"):
            self.progress.say("warning: this model has no warm_up_specbranch(); nothing is warmed up")
        elif traffic.warm_up:
            self.progress.doing("warm-up")
            began = time.perf_counter()
            longest = traffic.max_length + traffic.max_new_tokens
            self.model.warm_up_specbranch(batch_sizes=sorted(set(traffic.batch_sizes)), max_length=longest)
            wait(self.pair.target)
            self.warm_up_seconds = time.perf_counter() - began
        self.progress.doing("first call")
        self.first = self.call(Item([self.source.prompt(traffic.scaled(BATCH_LENGTH))]))

    def replay_all(self) -> None:
        """Replay every kind of traffic."""
        mixed = [Item([self.source.prompt(length)]) for length in self.traffic.mixed_lengths()]
        batches = [self._batch(lengths) for lengths in self.traffic.batch_lengths()]
        self.replay(MIXED, mixed)
        self.replay(MIXED_AGAIN, mixed)
        self.chat(CHAT, with_cache=False)
        self.chat(CHAT_CACHED, with_cache=True)
        self.replay(BATCHES, batches)
        self.replay(BATCHES_AGAIN, batches)
        if self.traffic.requests:
            self.replay(REQUESTS, [self._batch(lengths) for lengths in self.traffic.request_lengths()])

    def replay(self, name: str, items: list[Item]) -> None:
        """Make the calls of one kind."""
        replay = self._begin(name)
        for number, item in enumerate(items, start=1):
            self.progress.doing(f"{name}, {number} of {len(items)}")
            replay.calls.append(self.call(item))
            replay.peak_allocated = peak_memory(self.pair.target)

    def chat(self, name: str, with_cache: bool) -> None:
        """Make the calls of a chat, turn by turn."""
        replay = self._begin(name)
        cache = DynamicCache(config=self.pair.target.config) if with_cache else None
        text: list[int] = []
        lengths = self.traffic.chat_lengths()
        for number, length in enumerate(lengths, start=1):
            self.progress.doing(f"{name}, turn {number} of {len(lengths)}")
            text = text + self.source.tokens(length - len(text)) if text else self.source.prompt(length)
            cached = None if cache is None else int(cache.get_seq_length())
            call = self.call(Item([text], cached), cache)
            replay.calls.append(call)
            replay.peak_allocated = peak_memory(self.pair.target)
            text = text + call.new[0]

    def measure_steady(self, name: str, replay: Replay) -> None:
        """Measure the steady time of the calls of one kind, or of `MOST_STEADY` of them and the slowest one."""
        spread = [round(at * len(replay.calls) / MOST_STEADY) for at in range(MOST_STEADY)]
        chosen = replay.calls if len(replay.calls) <= MOST_STEADY else [replay.calls[at] for at in spread]
        slowest = max(replay.calls, key=lambda call: call.seconds)
        calls = {call.item: call for call in (*chosen, slowest) if call.item not in self.steady}
        if name == CHAT:
            self.progress.doing(f"{name}, steady")
            chats = [self.repeat_chat(list(calls)) for _ in range(self.traffic.steady_runs)]
            self.steady |= {item: _fastest(runs, calls[item]) for item, runs in zip(calls, zip(*chats))}
            return
        for number, (item, call) in enumerate(calls.items(), start=1):
            self.progress.doing(f"{name}, steady {number} of {len(calls)}")
            self.steady[item] = _fastest([self.repeat(item) for _ in range(self.traffic.steady_runs)], call)

    def repeat_chat(self, items: list[Item]) -> list[Call]:
        """Make the turns of a chat once more, one after the other."""
        self._forget_texts()
        return [self.call(item) for item in items]

    def repeat(self, item: Item) -> Call:
        """Make a call once more: the same text, of which nothing is reused."""
        cache = None if item.cached is None else DynamicCache(config=self.pair.target.config)
        if item.cached:
            read = inputs_of(Item([item.prompts[0][: item.cached]]), self.pair)
            self.model.generate(**read, past_key_values=cache, max_new_tokens=1, do_sample=False, specbranch=False)
        self._forget_texts()
        return self.call(item, cache)

    def _forget_texts(self) -> None:
        """Let no prompt begin like the text before."""
        for model in (self.pair.target, self.pair.draft):
            for runner in state_of(model).idle_runners:
                runner.remembered = NOTHING

    def compare(self, name: str, replay: Replay) -> None:
        """Compare the tokens of some calls with those of plain `generate()`."""
        chance = Random(self.traffic.seed)
        for number in sorted(chance.sample(range(len(replay.calls)), min(self.traffic.compared, len(replay.calls)))):
            self.progress.doing(f"{name}, compared with plain generate()")
            call = replay.calls[number]
            expected = self._new(call.item, self._generate(call.item, specbranch=False))
            for row, (plain, ours) in enumerate(zip(expected, call.new)):
                ids = inputs_of(Item([call.item.prompts[row]]), self.pair)["input_ids"]
                place = f"{name}, call {number + 1}, row {row + 1}"
                found = difference(self.pair.target, "auto", place, ids, plain, ours)
                replay.differences += [found] if found is not None else []
                replay.compared += 1

    def call(self, item: Item, cache: Any = None) -> Call:
        """Make one call and time it."""
        wait(self.pair.target)
        began = time.perf_counter()
        out = self._generate(item, **({} if cache is None else {"past_key_values": cache}))
        wait(self.pair.target)
        seconds = time.perf_counter() - began
        stats: SpecBranchStats | None = self.model.specbranch_stats
        if stats is None:
            raise RuntimeError("a call fell back to transformers' own decoding, which traffic cannot measure")
        new = self._new(item, out)
        self.progress.advance()
        return Call(item, new, seconds, stats, memory_in_use(self.pair.target))

    def _generate(self, item: Item, **arguments: Any) -> Tensor:
        out: Tensor = self.model.generate(
            **inputs_of(item, self.pair),
            max_new_tokens=self.traffic.max_new_tokens,
            do_sample=False,
            pad_token_id=pad_token(self.pair),
            **arguments,
        )
        return out

    def _new(self, item: Item, out: Tensor) -> list[list[int]]:
        new: list[list[int]] = out[:, item.length :].tolist()
        if any(len(row) != self.traffic.max_new_tokens for row in new):
            raise RuntimeError(f"a text ended after {len(new[0])} of {self.traffic.max_new_tokens} tokens")
        return new

    def _batch(self, lengths: tuple[int, ...]) -> Item:
        return Item([self.source.prompt(length) for length in lengths])

    def _begin(self, name: str) -> Replay:
        gc.collect()
        if self.pair.target.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.pair.target.device)
        return self.replays.setdefault(name, Replay())


def _fastest(runs: Iterable[Call], call: Call) -> Call:
    """Return the fastest repetition of a call, if possible one with the same text."""
    return min(runs, key=lambda run: (run.new != call.new, run.seconds))


@contextmanager
def never_ending(model: PreTrainedModel, settings: SpecBranchConfig) -> Iterator[None]:
    """Give a model these settings, and no end-of-sequence token, so that texts have full length.

    Both are in the generation config, where warm-up and calls find them.
    """
    config: Any = model.generation_config
    before = dict(vars(config))
    config.eos_token_id, config.specbranch = None, settings.to_dict()
    try:
        yield
    finally:
        vars(config).clear()
        vars(config).update(before)


def memory_in_use(model: PreTrainedModel) -> int | None:
    """Return the bytes in use on the model's device, by all allocators and processes; None without CUDA."""
    if model.device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(model.device)
    return int(total - free)
