"""One timed generation, and the memory it needs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..model_state import weight_bytes
from ..runtime.selection import release
from ..stats import SpecBranchStats
from .methods import Method, Pair


class Generation(NamedTuple):
    """The result of one timed `generate()` call."""

    tokens: list[int]  # the new ones
    seconds: float
    stats: SpecBranchStats | None  # of our methods

    @property
    def decode_seconds(self) -> float:
        """Seconds after the first token; 0 where that is not known."""
        return self.stats.total_seconds - self.stats.time_to_first_token if self.stats is not None else 0.0


class TimingStreamer(BaseStreamer):
    """Records when each new token arrives; tokens of one round arrive together.

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
        """Return the seconds between each token and the one before it; 0 within a round."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:])]


def generate_once(
    pair: Pair,
    method: Method,
    inputs: dict[str, Tensor],
    max_new_tokens: int,
    streamer: BaseStreamer | None = None,
    temperature: float = 0.0,
) -> Generation:
    """Generate up to `max_new_tokens` tokens, and time it from the call to the last token; greedy at temperature 0."""
    model: Any = pair.target
    model.specbranch_stats = None
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        torch.manual_seed(0)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
    with method.prepared(pair) as arguments:
        wait(pair.target)
        began = time.perf_counter()
        out = model.generate(**inputs, max_new_tokens=max_new_tokens, streamer=streamer, **sampling, **arguments)
        wait(pair.target)
        seconds = time.perf_counter() - began
    stats: SpecBranchStats | None = model.specbranch_stats
    new = out[0, inputs["input_ids"].shape[1] :].tolist()
    return Generation(new, seconds, stats if method.is_ours else None)


def wait(model: PreTrainedModel) -> None:
    """Wait until the device has finished its work."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def forget(pair: Pair) -> None:
    """Free caches and graphs kept for the next generation, so that a method starts as in a new process.

    What torch has compiled in this process stays.
    """
    release(pair.target)
    release(pair.draft)
    gc.collect()
    if pair.target.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(pair.target.device)


def peak_memory(model: PreTrainedModel) -> int | None:
    """Return the most bytes in use since `forget`; None without CUDA."""
    return int(torch.cuda.max_memory_allocated(model.device)) if model.device.type == "cuda" else None


def cache_bytes(model: PreTrainedModel, length: int) -> int:
    """Return the bytes of keys and values of `length` tokens in all layers."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * length * model.dtype.itemsize)


def needed_memory(pair: Pair, length: int) -> dict[str, Any]:
    """Return the bytes that a run needs at least: weights, and caches of `length` tokens."""
    needs = {}
    for role, model in (("target", pair.target), ("draft", pair.draft)):
        needs[f"{role}_weights"] = weight_bytes(model)
        needs[f"{role}_cache"] = cache_bytes(model, length)
    return {**needs, "total": sum(needs.values()), "tokens": length}


def percentile(values: list[float], part: float) -> float | None:
    """Return the smallest value that at least this part of the values does not exceed; None for no values.

    Example:
        >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5)
        2.0
    """
    return sorted(values)[max(0, ceil(part * len(values)) - 1)] if values else None


def timed(work: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Return the seconds of each of `repeats` calls after three uncounted ones; by device events on CUDA."""
    for _ in range(3):
        work()
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(repeats):
            work()
            marks.append(time.perf_counter())
        return [later - earlier for earlier, later in zip(marks, marks[1:])]
    with torch.cuda.device(device):
        new_event: Any = torch.cuda.Event
        events = [new_event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        torch.cuda.synchronize(device)
    return [earlier.elapsed_time(later) / 1000 for earlier, later in zip(events, events[1:])]
