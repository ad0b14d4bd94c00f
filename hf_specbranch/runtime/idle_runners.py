"""Runners between calls. Their graphs and KV caches are kept for the next call, within one memory budget per GPU.

Runners of several models, batch sizes and sets of adapters are kept side by side. When they exceed the budget, those
that were not used for the longest time give up memory of their KV caches first, from the end and only as much as must
be: their graphs stay valid, since the cache keeps its address. If that is not enough, whole runners go.
"""

from __future__ import annotations

from itertools import count
from threading import RLock
from typing import Protocol

import torch
from transformers import PreTrainedModel

from ..model_state import every_state, state_of
from .eager import PlanRun
from .kv_cache import SlotCache

_lock = RLock()
_moments = count()


class Idle(Protocol):
    """What is asked of a runner that may be kept."""

    device: torch.device
    cache: SlotCache
    purpose: tuple[int, str, int]  # rows, how the layers run, hash of the state of adapters
    last_used: int
    plans_run: set[PlanRun]

    @property
    def num_bytes(self) -> int:
        """The memory that its cache, buffers and graphs take."""
        ...

    def shrink_cache(self, num_bytes: int) -> None:
        """Free at least this much memory of the KV cache, or all; graphs stay valid where the cache does not move."""
        ...


def pop(model: PreTrainedModel, purpose: tuple[int, str, int]) -> Idle | None:
    """Take out the idle runner of a model for this purpose that was used last."""
    with _lock:
        idle: list[Idle] = state_of(model).idle_runners
        fitting = [runner for runner in idle if runner.purpose == purpose]
        if not fitting:
            return None
        idle.remove(fitting[-1])
        return fitting[-1]


def waiting(model: PreTrainedModel, layers: str, adapters: int) -> list[Idle]:
    """Return the idle runners of a model that run its layers in this way, with adapters in this state (a hash)."""
    with _lock:
        return [runner for runner in state_of(model).idle_runners if runner.purpose[1:] == (layers, adapters)]


def push(model: PreTrainedModel, runner: Idle, budget: float) -> None:
    """Keep a runner for the next call, and keep within the budget: a fraction of the GPU's memory."""
    with _lock:
        runner.last_used = next(_moments)
        state_of(model).idle_runners.append(runner)
        if runner.device.type == "cuda":
            keep_within(runner.device, int(budget * torch.cuda.get_device_properties(runner.device).total_memory))


def keep_within(device: torch.device, budget: int) -> None:
    """Free memory of idle runners on this device until they take at most `budget` bytes."""
    with _lock:
        held = sum(runner.num_bytes for runner in _on(device))
        for runner in _on(device):
            if held <= budget:
                return
            before = runner.cache.num_bytes
            runner.shrink_cache(held - budget)
            held -= before - runner.cache.num_bytes
        for runner in _on(device):
            if held <= budget:
                return
            held -= runner.num_bytes
            next(state for state in every_state() if runner in state.idle_runners).idle_runners.remove(runner)


def free_all(device: torch.device) -> bool:
    """Free all idle runners on a device, because memory has run out. Return whether there were any.

    Memory that torch keeps for later is freed too, since KV caches do not come from torch.
    """
    with _lock:
        there_were = bool(_on(device))
        for state in every_state():
            state.idle_runners[:] = [runner for runner in state.idle_runners if runner.device != device]
    torch.cuda.empty_cache()
    return there_were


def drop(model: PreTrainedModel) -> None:
    """Free the idle runners of a model, with their caches and graphs."""
    with _lock:
        state_of(model).idle_runners.clear()


def _on(device: torch.device) -> list[Idle]:
    """Return the idle runners on a device, the least recently used first."""
    found = [runner for state in every_state() for runner in state.idle_runners if runner.device == device]
    return sorted(found, key=lambda runner: runner.last_used)
