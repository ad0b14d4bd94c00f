"""Times single draft steps of two models, to compare a cheaper copy of a draft with the draft itself."""

from __future__ import annotations

import time

import torch
from transformers import PreTrainedModel

from ..config import SpecBranchConfig
from ..runtime.eager import EagerRunner, make_spans
from ..runtime.selection import runner_for

WARM_UP, STEPS = 3, 20


def step_gain(
    runner: EagerRunner, original: PreTrainedModel, config: SpecBranchConfig, rows: int, used: int
) -> float | None:
    """Return how many times faster a step of a copy is than one of the draft itself; None if it cannot be timed.

    Args:
        runner: of the copy.
        original: the draft itself.
        config: the settings of the call.
        rows: the batch size.
        used: slots of the copy that must not be written.
    """
    with runner_for(original, "draft", rows, 0, config.runtime, config.kernels, config.memory_budget) as other:
        if not _can_time(runner, used) or not _can_time(other, 0):
            return None
        return step_seconds(other, rows) / step_seconds(runner, rows)


def _can_time(runner: EagerRunner, used: int) -> bool:
    return runner.captures and runner.takes_spans and not runner.is_recurrent and used < runner.cache.address.capacity


def step_seconds(runner: EagerRunner, rows: int) -> float:
    """Return the seconds of a captured pass over one token per row, which is written to the last slot of the cache."""
    tokens = torch.zeros((rows, 1), dtype=torch.long, device=runner.device)
    capacity = runner.cache.address.capacity
    slots = tokens + (capacity - 1)
    seen = torch.ones((rows, capacity), dtype=torch.bool, device=runner.device)
    visible = runner.visible(make_spans(slots, slots + 1), capacity, seen)
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            began = _now(runner)
        runner.forward(tokens, tokens, slots, visible)
    return (_now(runner) - began) / STEPS


def _now(runner: EagerRunner) -> float:
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
    return time.perf_counter()
