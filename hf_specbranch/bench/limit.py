"""The distance to the limit: a pass cannot be faster than its weights can be read once."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from ..runners.choose import runner_for

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
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(vocabulary, (1, total), generator=torch.Generator().manual_seed(0)).to(device)
    columns = torch.arange(total, device=device)[None]  # positions and slots alike
    last = columns[:, context:]  # [1, Q]
    visible = columns[:, None, :] <= last[:, :, None]  # [1, Q, S]
    with runner_for(model, "target", rows=1, slots=total, runtime=runtime, kernels=kernels) as runner:
        runner.reserve(1, total)
        runner.prefill(tokens[:, :context], columns[:, :context], None)
        return median(timed(lambda: runner.forward(tokens[:, context:], last, last, visible), device, repeats))


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
