"""The distance to the limit: a pass cannot be faster than its weights can be read once."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..runtime.selection import runner_for

BRANCHES = (1, 4)  # of a draft step
STEPS = (2, 6)  # of stages whose difference tells what a step takes
COPY_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}  # large enough to leave every cache


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights one pass reads: all but the embedding table, of which it reads a few rows.

    A table that is also the output layer is read, as the output layer.
    """
    table, output = model.get_input_embeddings(), model.get_output_embeddings()
    skipped = table.weight if output is None or output.weight is not table.weight else None
    return sum(weight.numel() * weight.element_size() for weight in model.parameters() if weight is not skipped)


def copy_bandwidth(device: torch.device, size: int | None = None, repeats: int = 10) -> float:
    """Bytes a second that a large copy on one device reads and writes."""
    size = size or COPY_BYTES.get(device.type, COPY_BYTES["cpu"])
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    return 2 * size / median(timed(lambda: destination.copy_(source), device, repeats))


@torch.no_grad()
def target_pass(
    model: PreTrainedModel, context: int, queries: int, runtime: str, kernels: bool | str = "auto", repeats: int = 30
) -> float:
    """Seconds of one pass over `queries` tokens behind `context` others, the median of many.

    On CUDA the passes are queued one behind the other, so that launching them costs nothing where the runtime
    launches faster than the device runs.
    """
    device, total = model.device, context + queries
    tokens, columns = _text(model, total)
    last = columns[:, context:]  # [1, Q]
    visible = columns[:, None, :] <= last[:, :, None]  # [1, Q, S]
    with runner_for(model, "target", rows=1, slots=total, runtime=runtime, kernels=kernels) as runner:
        runner.reserve(1, total)
        runner.prefill(tokens[:, :context], columns[:, :context], None)
        return median(timed(lambda: runner.forward(tokens[:, context:], last, last, visible), device, repeats))


@torch.no_grad()
def draft_step(
    model: PreTrainedModel, context: int, branches: int, runtime: str, kernels: bool | str = "auto", repeats: int = 30
) -> float:
    """Seconds of one step over a token of each branch behind `context` others, among the steps of a stage.

    That is what drafting one token more takes: where stages are captured, launching is not part of it.
    """
    device, total = model.device, context + branches
    tokens, columns = _text(model, total)
    last = columns[:, context:]  # [1, K]
    positions = torch.full_like(last, context)
    with runner_for(model, "draft", rows=1, slots=total, runtime=runtime, kernels=kernels) as runner:
        shown = runner.bucket(total)
        slots = torch.arange(shown, device=device)
        visible = (slots < context) | (slots == last[:, :, None])  # [1, K, S]
        runner.reserve(1, shown)
        runner.prefill(tokens[:, :context], columns[:, :context], None)
        buffers = runner.buffers(object())  # which nobody asks for again

        def stage(steps: int) -> None:
            for _ in range(steps):
                runner.forward_uncaptured(tokens[:, context:], positions, last, visible)

        fewer, more = (
            median(timed(partial(buffers.run, steps, partial(stage, steps)), device, repeats)) for steps in STEPS
        )
    return (more - fewer) / (STEPS[1] - STEPS[0])


def _text(model: PreTrainedModel, length: int) -> tuple[Tensor, Tensor]:
    """Tokens, and columns of them: positions and slots alike."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    return tokens.to(model.device), torch.arange(length, device=model.device)[None]


def timed(work: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls after three that do not count; by device events on CUDA."""
    for _ in range(3):
        work()
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(repeats):
            work()
            marks.append(time.perf_counter())
        return [later - earlier for earlier, later in zip(marks, marks[1:])]
    with torch.cuda.device(device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        torch.cuda.synchronize(device)
    return [earlier.elapsed_time(later) / 1000 for earlier, later in zip(events, events[1:])]


def distance_to_limit(
    model: PreTrainedModel,
    contexts: tuple[int, ...],
    runtime: str,
    kernels: bool | str = "auto",
    queries: tuple[int, ...] = (1, 8),
) -> dict[str, Any]:
    """Weights over bandwidth against the time of a pass, at each context and number of tokens."""
    weights, bandwidth = weight_bytes(model), copy_bandwidth(model.device)
    limit = weights / bandwidth
    passes = []
    for context in contexts:
        for count in queries:
            seconds = target_pass(model, context, count, runtime, kernels)
            passes.append(
                {"context": context, "tokens": count, "ms": seconds * 1000, "times_the_limit": seconds / limit}
            )
    return {
        "weight_bytes": weights,
        "copy_bytes_per_second": bandwidth,
        "limit_ms": limit * 1000,
        "runtime": runtime,
        "passes": passes,
    }


def draft_steps(model: PreTrainedModel, context: int, runtime: str, kernels: bool | str = "auto") -> dict[str, Any]:
    """Weights over bandwidth against the time of a draft step, of one branch and of several."""
    weights, bandwidth = weight_bytes(model), copy_bandwidth(model.device)
    limit = weights / bandwidth
    steps = []
    for branches in BRANCHES:
        seconds = draft_step(model, context, branches, runtime, kernels)
        steps.append({"branches": branches, "ms": seconds * 1000, "times_the_limit": seconds / limit})
    return {
        "weight_bytes": weights,
        "copy_bytes_per_second": bandwidth,
        "limit_ms": limit * 1000,
        "runtime": runtime,
        "context": context,
        "steps": steps,
    }
