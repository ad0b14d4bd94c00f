"""One generation, timed."""

from __future__ import annotations

import gc
import time
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..runtime.selection import release
from ..stats import SpecBranchStats
from .ways import Pair, Way


class Generation(NamedTuple):
    """What one timed `generate()` gave."""

    tokens: list[int]  # the new ones
    seconds: float
    stats: SpecBranchStats | None  # of our ways

    @property
    def decode(self) -> float:
        """Seconds behind the first token; 0 where that is not known."""
        return self.stats.total_seconds - self.stats.time_to_first_token if self.stats is not None else 0.0


class TimingStreamer(BaseStreamer):
    """Notes when each new token arrives; tokens of one round arrive together.

    Example:
        >>> streamer = TimingStreamer()
        >>> streamer.put(torch.tensor([[5, 6]]))  # the prompt is not counted
        >>> streamer.put(torch.tensor([7, 8]))
        >>> len(streamer.gaps())
        1
    """

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.arrivals: list[float] = []
        self.saw_prompt = False

    def put(self, value: Tensor) -> None:
        if self.saw_prompt:
            self.arrivals += [time.perf_counter()] * value.numel()
        self.saw_prompt = True

    def end(self) -> None:
        pass

    @property
    def time_to_first_token(self) -> float:
        return self.arrivals[0] - self.began

    def gaps(self) -> list[float]:
        """Seconds between each token and the one before it; 0 within a round."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:])]


def generate_once(
    pair: Pair,
    way: Way,
    inputs: dict[str, Tensor],
    new_tokens: int,
    streamer: BaseStreamer | None = None,
    temperature: float = 0.0,
) -> Generation:
    """One generation of up to `new_tokens` tokens, its time from call to last token; greedy at temperature 0."""
    model: Any = pair.target
    model.specbranch_stats = None
    how: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        torch.manual_seed(0)
        how = {"do_sample": True, "temperature": temperature, "top_k": 0}
    with way.prepared(pair) as arguments:
        wait(pair.target)
        began = time.perf_counter()
        out = model.generate(**inputs, max_new_tokens=new_tokens, streamer=streamer, **how, **arguments)
        wait(pair.target)
        seconds = time.perf_counter() - began
    stats: SpecBranchStats | None = model.specbranch_stats
    new = out[0, inputs["input_ids"].shape[1] :].tolist()
    return Generation(new, seconds, stats if way.is_ours else None)


def wait(model: PreTrainedModel) -> None:
    """Until the device has done what it was given."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def forget(pair: Pair) -> None:
    """Free caches and graphs that wait for a next generation, so that a way starts as in a new process.

    What torch has compiled in this process stays.
    """
    release(pair.target)
    release(pair.draft)
    gc.collect()
    if pair.target.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(pair.target.device)


def peak_memory(model: PreTrainedModel) -> int | None:
    """Most bytes in use since `forget`; None without CUDA."""
    return int(torch.cuda.max_memory_allocated(model.device)) if model.device.type == "cuda" else None


def allocated_memory(model: PreTrainedModel) -> int | None:
    """Bytes in use now; None without CUDA."""
    return int(torch.cuda.memory_allocated(model.device)) if model.device.type == "cuda" else None


def percentile(values: list[float], part: float) -> float | None:
    """The smallest value that at least this part of them does not exceed; None for no values.

    Example:
        >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5)
        2.0
    """
    return sorted(values)[max(0, ceil(part * len(values)) - 1)] if values else None
