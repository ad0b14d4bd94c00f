"""The fast runner on CUDA: forwards captured once as graphs and replayed with a single launch.

In eager mode Python launches the hundreds of kernels of a forward one by one, more slowly than the GPU runs them,
and two models in one process cannot even launch at the same time. A replay is one launch, so the target's pass
and the draft's steps really run beside each other.
"""

from __future__ import annotations

import logging
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .base import Step
from .eager import EagerRunner
from .masks import MaskMaker

logger = logging.getLogger(__name__)

SMALLEST = 256  # slots a captured forward reads at the least; larger ones are powers of two
MOST_QUERIES = 64  # longer forwards are rare and run eagerly


class Captured(NamedTuple):
    """A graph, the buffers it reads and those it writes."""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor  # [B, Q]
    positions: Tensor  # [B, Q]
    slots: Tensor  # [B, Q]
    visible: Tensor  # [B, Q, S]
    step: Step  # what it writes


class GraphRunner(EagerRunner):
    """Captures a forward for every (queries, visible slots) it meets, rounded up to few sizes.

    What it returns is overwritten by the next forward of the same size. A model that cannot be captured runs
    eagerly.
    """

    def __init__(self, model: PreTrainedModel, masks: MaskMaker) -> None:
        super().__init__(model, masks)
        self.captured: dict[tuple[Any, ...], Captured] = {}
        self.capturable = True
        self.fingerprint = 0  # of the model when the runner was made

    @cached_property
    def pool(self) -> Any:
        """Memory that all graphs of this runner share; they never replay at the same time."""
        return torch.cuda.graph_pool_handle()

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """Where forwards are captured."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def reserve(self, rows: int, slots: int) -> None:
        before = self.cache.address.capacity, self.slot_positions.shape
        super().reserve(rows, round_up(slots))
        if (self.cache.address.capacity, self.slot_positions.shape) != before:
            self.captured.clear()  # their buffers have moved

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Tensor,
        first: int | None = None,
        **extra: Any,
    ) -> Step:
        rows, queries, shown = visible.shape
        if not self.capturable or queries > MOST_QUERIES:
            return super().forward(tokens, positions, slots, visible, first, **extra)
        size = round_up(shown)
        self.reserve(rows, size)
        key = (rows, queries, size, *sorted(extra.items()))
        captured = self.captured.get(key)
        if captured is None:
            captured = self._capture(tokens, positions, slots, visible, size, extra)
            if captured is None:
                return super().forward(tokens, positions, slots, visible, first, **extra)
            self.captured[key] = captured
        captured.tokens.copy_(tokens)
        captured.positions.copy_(positions)
        captured.slots.copy_(slots)
        captured.visible[:, :, :shown].copy_(visible)
        captured.visible[:, :, shown:] = False
        captured.graph.replay()
        return captured.step

    def _capture(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, size: int, extra: dict[str, Any]
    ) -> Captured | None:
        """Record the forward. It runs on the real inputs, so what it writes to the cache is what belongs there."""
        rows, queries, shown = visible.shape
        padded = torch.zeros((rows, queries, size), dtype=torch.bool, device=self.device)
        padded[:, :, :shown] = visible
        buffers = tokens.clone(), positions.clone(), slots.clone(), padded
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                super().forward(*buffers, **extra)  # libraries set themselves up outside the graph
                self.stream.synchronize()
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    step = super().forward(*buffers, **extra)
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self.capturable = False
            reason = str(error).splitlines()[0]
            logger.warning("%s runs eagerly: it cannot be captured (%s)", type(self.model).__name__, reason)
            return None
        finally:
            current.wait_stream(self.stream)
        return Captured(graph, *buffers, step)


def round_up(slots: int) -> int:
    """The next power of two, so that few sizes are captured."""
    return max(SMALLEST, 1 << (slots - 1).bit_length())


# Runners that wait for a model's next generation: their graphs and caches are worth keeping. A waiting runner holds
# no reference to its model, so that it goes when the model goes.
_IDLE: WeakKeyDictionary[PreTrainedModel, dict[int, GraphRunner]] = WeakKeyDictionary()


def take(model: PreTrainedModel, masks: MaskMaker, rows: int) -> GraphRunner:
    """A runner for this model and batch size, from an earlier generation if it still fits the model."""
    waiting = _IDLE.get(model, {}).pop(rows, None)
    current = fingerprint(model)
    if waiting is None or waiting.fingerprint != current:
        runner = GraphRunner(model, masks)
        runner.fingerprint = current
        return runner
    waiting.model, waiting.masks = model, masks
    waiting.cache.forget()
    return waiting


def give_back(runner: GraphRunner, rows: int) -> None:
    """Keep a runner for the next generation; one for each model, so that caches do not pile up."""
    _IDLE[runner.model] = {rows: runner}
    del runner.model


def drop(model: PreTrainedModel) -> None:
    """Free what is kept for a model."""
    _IDLE.pop(model, None)


def fingerprint(model: PreTrainedModel) -> int:
    """Changes with everything a captured graph has baked in: where weights lie, their dtype, and modes."""
    tensors = (*model.parameters(), *model.buffers())
    weights = tuple((tensor.data_ptr(), tensor.dtype) for tensor in tensors)
    training = tuple(module.training for module in model.modules())
    config = model.config.get_text_config(decoder=True)
    modes = (
        config._attn_implementation,
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.get_float32_matmul_precision(),
        torch.is_inference_mode_enabled(),  # its tensors cannot be written outside it
    )
    return hash((weights, training, modes))
