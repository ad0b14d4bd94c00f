"""The fast runner on CUDA: forwards and whole stages captured once as graphs and replayed with a single launch.

In eager mode Python launches the hundreds of kernels of a forward one by one, more slowly than the GPU runs them,
and two models in one process cannot even launch at the same time. A replay is one launch, so the target's pass
and the draft's steps really run beside each other.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..kernels import build_in_parallel, can_build_in_parallel, fuse, fused
from ..kernels.attention_interface import original_attention
from ..model_state import state_of
from .base import Step
from .eager import SMALLEST, EagerRunner, round_up
from .masks import MaskMaker
from .model_walk import every_buffer, every_module, every_parameter
from .self_check import PARENTS, kernels_agree
from .static_buffers import Buffers, GraphMemory, StaticBuffers

logger = logging.getLogger(__name__)

Layers = Literal["plain", "fused"]  # how the layers of a model run: as transformers wrote them, or through our kernels
MOST_QUERIES = 1024  # longer forwards are bound by the device, and run eagerly
MANY_QUERIES = 256  # for which libraries do other things than for one
MOST_BUFFERS = 24  # settings whose stages are kept; the least recently used go


class Captured(NamedTuple):
    """Graphs, the buffers they read and those they write."""

    graphs: list[torch.cuda.CUDAGraph]
    tokens: Tensor  # [B, Q]
    positions: Tensor  # [B, Q]
    slots: Tensor  # [B, Q]
    visible: Tensor  # [B, Q, S]
    step: Step  # what they write


class GraphRunner(EagerRunner):
    """Captures a forward for every (queries, visible slots) it meets, rounded up to few sizes, and gives out desks
    on which whole stages are captured.

    What `forward` returns is overwritten by the next forward of the same size.
    """

    captures = True

    def __init__(self, model: PreTrainedModel, masks: MaskMaker, layers: Layers = "plain") -> None:
        super().__init__(model, masks)
        self.layers = layers
        self.runtime = "graph"
        self.captured: dict[tuple[Any, ...], Captured] = {}
        self.buffers_by_settings: dict[Hashable, StaticBuffers] = {}
        self.fingerprint = 0  # of the model when the runner was made

    @cached_property
    def graph_memory(self) -> GraphMemory:
        """What all graphs of this runner share; they never replay at the same time."""
        return GraphMemory(self.device)

    @cached_property
    def builds_in_parallel(self) -> bool:
        """Whether passes can be rehearsed, so that kernels are built side by side."""
        return (
            self.layers == "fused"
            and self.device.type == "cuda"
            and can_build_in_parallel(self.model, self._some_passes)
        )

    def _some_passes(self) -> None:
        """Over one token, over those of the self-check and over many, for a rehearsal before the cache holds anything.

        The first makes the cache's layers, which go again with the noise in them. In the last libraries set themselves
        up, while kernels are built.
        """
        if self.cache.layers:
            return
        rows, shown = self.slot_positions.shape
        try:
            for queries in (1, 1, len(PARENTS), MANY_QUERIES):
                tokens = torch.zeros((rows, queries), dtype=torch.long, device=self.device)
                visible = torch.ones((rows, queries, shown), dtype=torch.bool, device=self.device)
                self.forward_uncaptured(tokens, tokens, tokens, visible)
        finally:
            self.cache.layers.clear()

    @property
    def graphs_captured(self) -> int:  # type: ignore[override]
        return self.graph_memory.captures

    def buffers(self, settings: Hashable) -> Buffers:
        """The desk for stages with these settings, from an earlier generation if there was one."""
        buffers = self.buffers_by_settings.pop(settings, None) or StaticBuffers(
            self.device, self.graph_memory, self.builds_in_parallel
        )
        self.buffers_by_settings[settings] = buffers
        for oldest in list(self.buffers_by_settings)[:-MOST_BUFFERS]:
            del self.buffers_by_settings[oldest]
        return buffers

    def reserve(self, rows: int, slots: int) -> None:
        before = self.cache.address.capacity, self.slot_positions.shape
        super().reserve(rows, round_up(slots))
        if (self.cache.address.capacity, self.slot_positions.shape) != before:
            self.captured.clear()  # their buffers have moved
            for buffers in self.buffers_by_settings.values():
                buffers.graphs.clear()
            if self.device.type == "cuda":
                self.graph_memory.renew()

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, **extra: Any) -> Step:
        rows, queries, shown = visible.shape
        if queries > MOST_QUERIES:
            return super().forward(tokens, positions, slots, visible, **extra)
        size = round_up(shown)
        self.reserve(rows, size)
        key = (rows, queries, size, *sorted(extra.items()))
        captured = self.captured.get(key)
        if captured is None:
            captured = self.captured[key] = self._capture(tokens, positions, slots, visible, size, extra)
        captured.tokens.copy_(tokens)
        captured.positions.copy_(positions)
        captured.slots.copy_(slots)
        captured.visible[:, :, :shown].copy_(visible)
        captured.visible[:, :, shown:] = False
        for graph in captured.graphs:
            graph.replay()
        return captured.step

    def forward_uncaptured(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, **extra: Any
    ) -> Step:
        with self._layers():
            return super().forward_uncaptured(tokens, positions, slots, visible, **extra)

    def _layers(self) -> AbstractContextManager[Any]:
        return fused(self.model) if self.layers == "fused" else nullcontext()

    def _capture(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, size: int, extra: dict[str, Any]
    ) -> Captured:
        """Record the forward. It runs on the real inputs, so what it writes to the cache is what belongs there."""
        rows, queries, shown = visible.shape
        padded = torch.zeros((rows, queries, size), dtype=torch.bool, device=self.device)
        padded[:, :, :shown] = visible
        buffers = tokens.clone(), positions.clone(), slots.clone(), padded
        self.graph_memory.captures += 1
        steps: list[Step] = []
        with self.graph_memory.aside():
            if self.builds_in_parallel:
                build_in_parallel(lambda: self.forward_uncaptured(*buffers, **extra), self.device)
            self.forward_uncaptured(*buffers, **extra)  # libraries set themselves up outside the graph
            graphs = self.graph_memory.record(lambda: steps.append(self.forward_uncaptured(*buffers, **extra)))
        return Captured(graphs, *buffers, steps[0])


def layers_for(model: PreTrainedModel, masks: MaskMaker, rows: int) -> Layers:
    """Our kernels, if a whole pass through them agrees with the model's own, else the model's own layers.

    Asked once of a model, and again when its weights have moved.
    """
    fuse(model)
    now, state = fingerprint(model), state_of(model)
    if state.kernel_check is None or state.kernel_check[0] != now:
        runner = GraphRunner(model, masks, "fused")
        runner.reserve(rows, SMALLEST)
        logger.debug("kernels are built side by side: %s", runner.builds_in_parallel)
        state.kernel_check = now, kernels_agree(model, masks)
    return "fused" if state.kernel_check[1] else "plain"


def why_it_syncs(model: PreTrainedModel, masks: MaskMaker) -> str:
    """Why a forward of this model cannot be captured, found out by trying once; empty if it can.

    A forward that waits for the device (to route tokens to experts, say) cannot be part of a graph.
    """
    state = state_of(model)
    if state.sync_reason is None:
        tokens = torch.zeros((1, 1), dtype=torch.long, device=model.get_input_embeddings().weight.device)
        runner = EagerRunner(model, masks)
        runner.reserve(1, 1)
        sees_itself = torch.ones((1, 1, 1), dtype=torch.bool, device=tokens.device)
        forward = partial(runner.forward, tokens, tokens, tokens, sees_itself)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reason = _why_it_syncs(forward)
            if reason:
                with suppress(RuntimeError):
                    forward()  # what is set up on first use may wait
                reason = _why_it_syncs(forward)
        if reason:
            logger.warning("%s runs eagerly: %s", type(model).__name__, reason)
        state.sync_reason = reason
    return state.sync_reason


def _why_it_syncs(forward: Callable[[], object]) -> str:
    mode = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        forward()
        return ""
    except RuntimeError as error:
        return f"its forward cannot be captured ({str(error).splitlines()[0]})"
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def take(model: PreTrainedModel, masks: MaskMaker, rows: int, layers: Layers = "plain") -> GraphRunner:
    """A runner for this model and batch size, from an earlier generation if it still fits the model."""
    waiting: GraphRunner | None = state_of(model).idle_runners.pop((rows, layers), None)
    if waiting is None or waiting.fingerprint != fingerprint(model):
        if layers == "fused":
            fuse(model)
        runner = GraphRunner(model, masks, layers)
        runner.fingerprint = fingerprint(model)
        return runner
    waiting.model, waiting.masks = model, masks
    waiting.cache.forget()
    return waiting


def give_back(runner: GraphRunner, rows: int) -> None:
    """Keep a runner for the next generation; one for each model, so that caches do not pile up.

    A waiting runner holds no reference to its model, so that it goes when the model goes.
    """
    state_of(runner.model).idle_runners = {(rows, runner.layers): runner}
    del runner.model


def drop(model: PreTrainedModel) -> None:
    """Free what is kept for a model."""
    state_of(model).idle_runners.clear()


def fingerprint(model: PreTrainedModel) -> int:
    """Changes with everything a captured graph has baked in: where weights lie, their dtype, and modes."""
    tensors = (*every_parameter(model), *every_buffer(model))
    weights = tuple((tensor.data_ptr(), tensor.dtype) for tensor in tensors)
    training = tuple(module.training for module in every_module(model))
    config = model.config.get_text_config(decoder=True)
    modes = (
        original_attention(config),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.get_float32_matmul_precision(),
        torch.is_inference_mode_enabled(),  # its tensors cannot be written outside it
    )
    return hash((weights, training, modes))
