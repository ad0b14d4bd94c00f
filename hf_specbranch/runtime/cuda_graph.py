"""The fast runner on CUDA: forwards and whole stages are captured once as CUDA graphs and replayed with one launch.

In eager mode Python launches the hundreds of kernels of a forward one by one, more slowly than the GPU runs them. Two
models in one process cannot even launch at the same time. A replay is one launch, so the draft's steps really overlap
with the target's pass.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..garbage_collection import no_garbage_collection
from ..kept_checks import load_check, save_check
from ..kernels import build_in_parallel
from ..kernels.spans import SPANS
from ..layers import can_build_in_parallel, fuse, fused
from ..model_state import adapter_state, state_of
from . import idle_runners
from .base import Step
from .eager import NOTHING, SMALLEST, EagerRunner, MaskMaker, make_spans, round_up
from .fingerprint import fingerprint
from .pieces import Part, Piece, in_pieces, pieces_of
from .self_check import PARENTS, check_kernels
from .static_buffers import Buffers, GraphMemory, StaticBuffers

logger = logging.getLogger(__name__)

Layers = Literal["plain", "fused"]  # how the layers run: as transformers wrote them, or through our kernels
MOST_QUERIES = 1024  # longer forwards are limited by the device, not by launches, and run eagerly
MANY_QUERIES = 256  # a size for which libraries choose other kernels than for one query
MOST_CHECKS = 64  # states of a model (weights, adapters, modes) whose kernel check is remembered
MOST_BUFFERS = 64  # settings whose static buffers and captured stages are kept; the least recently used go first
COLUMNS = 1 << 13  # the width of buffers that are indexed by column; four times as much for a longer text
LIMIT = 1 << 17  # slots that addresses are reserved for; a longer text moves the cache, and graphs are captured again


class Captured(NamedTuple):
    """A captured forward: its CUDA graphs, the static buffers that they read, and the step that they write."""

    graphs: list[Part]
    tokens: Tensor  # [B, Q]
    positions: Tensor  # [B, Q]
    slots: Tensor  # [B, Q]
    visible: Tensor  # [B, Q, S], or spans [B, Q, 4]
    step: Step  # what they write


class GraphRunner(EagerRunner):
    """Replays forwards as CUDA graphs, and hands out static buffers whose stages are captured as a whole.

    A forward is keyed by rows, queries and the extra arguments; under masks also by the number of slots shown, rounded
    up to few sizes. The next forward with the same key overwrites what `forward` returned.

    Args:
        model: the model.
        masks: makes its masks.
        layers: how the layers run.
        takes_spans: attention runs through our kernels, which read spans.
    """

    captures = True

    def __init__(
        self, model: PreTrainedModel, masks: MaskMaker, layers: Layers = "plain", takes_spans: bool = False
    ) -> None:
        super().__init__(model, masks, LIMIT)
        self.layers, self.takes_spans, self.can_take_spans = layers, takes_spans, takes_spans
        self.runtime = "graph"
        self.widest = COLUMNS  # the width of buffers that are indexed by column
        self.captured: dict[tuple[Any, ...], Captured] = {}
        self.buffers_by_settings: dict[Hashable, StaticBuffers] = {}
        self.fingerprint = 0  # of the model when the runner was created
        self.purpose, self.last_used = (0, "", 0), 0  # see `idle_runners.Idle`

    @cached_property
    def graph_memory(self) -> GraphMemory:
        """The memory that all graphs of this runner share. They never replay at the same time."""
        return GraphMemory(self.device)

    @cached_property
    def builds_in_parallel(self) -> bool:
        """Whether a dry run can find out which kernels a pass needs, so that they are built in parallel.

        A recurrent model has states and their slots in torch tensors, which a dry run would change. The dry run of its
        module check, which has no cache, takes place.
        """
        return (
            self.layers == "fused"
            and self.device.type == "cuda"
            and can_build_in_parallel(self.model, self._sample_passes)
            and not self.is_recurrent
        )

    @cached_property
    def pieces(self) -> list[Piece]:
        """In which the model is captured, if it is split."""
        return pieces_of(self.model)

    def _sample_passes(self) -> None:
        """Run passes over one token, over the tokens of the self-check and over many tokens, for a dry run.

        Does nothing once the cache holds a text. The first pass creates the cache's layers; they are removed
        afterwards, with the noise in them. The last pass lets libraries initialise while kernels are built.
        """
        if self.cache.layers:
            return
        rows = self.slot_positions.shape[0]
        try:
            for queries in (1, 1, len(PARENTS), MANY_QUERIES):
                tokens = torch.zeros((rows, queries), dtype=torch.long, device=self.device)
                seen = torch.ones((rows, SMALLEST), dtype=torch.bool, device=self.device)
                visible = self.visible(make_spans(tokens, tokens + 1), SMALLEST, seen)
                self.forward_uncaptured(tokens, tokens, tokens, visible)
        finally:
            self.cache.layers.clear()

    @property
    def graphs_captured(self) -> int:  # type: ignore[override]
        return self.graph_memory.captures

    @property
    def capture_seconds(self) -> float:  # type: ignore[override]
        return self.graph_memory.seconds

    def buffers(self, settings: Hashable) -> Buffers:
        """Return the static buffers for these settings, all zero, from an earlier generation if there was one."""
        buffers = self.buffers_by_settings.pop(settings, None) or StaticBuffers(
            self.device, self.graph_memory, self.builds_in_parallel
        )
        buffers.begin()
        self.buffers_by_settings[settings] = buffers
        for oldest in list(self.buffers_by_settings)[:-MOST_BUFFERS]:
            del self.buffers_by_settings[oldest]
        return buffers

    def columns(self, needed: int) -> int:
        """Return one of few widths, the same for almost every text, because captured stages contain it."""
        while self.widest < needed:
            self.widest *= 4
        return self.widest

    def reserve(self, rows: int, slots: int) -> bool:
        needed = slots if self.takes_spans else round_up(slots)  # under masks, passes read one of few numbers of slots
        try:
            moved = super().reserve(rows, needed)
        except torch.OutOfMemoryError:
            if not idle_runners.free_all(self.device):
                raise
            moved = super().reserve(rows, needed)
        if moved:
            self.drop_graphs()
        return moved

    def drop_graphs(self) -> None:
        self.captured.clear()
        self.plans_run.clear()
        for buffers in self.buffers_by_settings.values():
            buffers.graphs.clear()
        if self.device.type == "cuda":
            self.graph_memory.renew()

    @property
    def num_bytes(self) -> int:
        """The memory that the KV cache, static buffers and graphs take."""
        graphs = self.graph_memory.num_bytes if self.device.type == "cuda" else 0
        return self.cache.num_bytes + graphs + sum(each.num_bytes for each in self.buffers_by_settings.values())

    def shrink_cache(self, num_bytes: int) -> None:
        """Free at least this much memory of the KV cache, or all. Graphs stay valid where it does not move."""
        self.cache.release(num_bytes)
        self.remembered = NOTHING

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, visible: Tensor | int, **extra: Any) -> Step:
        """Replay the CUDA graph of a forward of this size; capture it first if there is none yet.

        A forward over more than `MOST_QUERIES` tokens is launched eagerly. A stage, which is captured as a whole, calls
        `forward_uncaptured` instead.
        """
        if isinstance(visible, int) or visible.shape[1] > MOST_QUERIES:
            return super().forward(tokens, positions, slots, visible, **extra)
        rows, queries, shown = visible.shape
        size = shown if visible.dtype == SPANS else round_up(shown)
        self.reserve(rows, 0 if visible.dtype == SPANS else size)  # drops graphs if the cache has moved
        key = (rows, queries, size, visible.dtype, *sorted(extra.items()))
        captured = self.captured.get(key)
        if captured is None:
            captured = self.captured[key] = self._capture(tokens, positions, slots, visible, size, extra)
        captured.tokens.copy_(tokens)
        captured.positions.copy_(positions)
        captured.slots.copy_(slots)
        captured.visible[:, :, :shown].copy_(visible)
        captured.visible[:, :, shown:] = 0
        for graph in captured.graphs:
            graph.replay()
        return captured.step

    def forward_uncaptured(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, visible: Tensor | int, **extra: Any
    ) -> Step:
        """Launch the forward kernel by kernel, through our kernels if `layers` is "fused". Never replays a graph."""
        with self._layers(), in_pieces(self.pieces), self._on_device():
            return super().forward_uncaptured(tokens, positions, slots, visible, **extra)

    def _on_device(self) -> AbstractContextManager[Any]:
        """Launch kernels on this runner's device, whichever is the current one."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _layers(self) -> AbstractContextManager[Any]:
        return fused(self.model) if self.layers == "fused" else nullcontext()

    def _capture(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, size: int, extra: dict[str, Any]
    ) -> Captured:
        """Capture a forward. The warm-up runs on the real inputs, so it writes the right entries to the KV cache."""
        padded = torch.zeros((*visible.shape[:2], size), dtype=visible.dtype, device=self.device)
        padded[:, :, : visible.shape[2]] = visible
        buffers = tokens.clone(), positions.clone(), slots.clone(), padded
        steps: list[Step] = []
        with self.graph_memory.capturing():
            if self.builds_in_parallel:
                build_in_parallel(lambda: self.forward_uncaptured(*buffers, **extra), self.device)
            # The first run initialises libraries, outside the graph.
            graphs = self.graph_memory.run_and_record(lambda: steps.append(self.forward_uncaptured(*buffers, **extra)))
        return Captured(graphs, *buffers, steps[-1])


def layers_for(model: PreTrainedModel, masks: MaskMaker, rows: int, now: int | None = None) -> Layers:
    """Return "fused" if a whole pass through our kernels agrees with the model's own pass, else "plain".

    The result is kept with the model for its fingerprint, which is `now` if it is known.
    """
    now, checks = fingerprint(model) if now is None else now, state_of(model).kernel_checks
    if now not in checks:  # otherwise the weights are where they were after they were joined
        with no_garbage_collection():
            now = _check_layers(model, masks, rows)
    return "plain" if checks[now] == "none" else "fused"


def _check_layers(model: PreTrainedModel, masks: MaskMaker, rows: int) -> int:
    """Join the weights of a model and check a pass through our kernels; return its fingerprint, which has changed."""
    fuse(model)
    now, checks = fingerprint(model), state_of(model).kernel_checks
    if now not in checks:
        runner = GraphRunner(model, masks, "fused", takes_spans=True)
        runner.reserve(rows, SMALLEST)
        with state_of(model).kernel_lock:  # one thread checks, and no other one runs the model meanwhile
            logger.debug("kernels are built in parallel: %s", runner.builds_in_parallel)
            if now not in checks:
                checks[now] = load_check(model, "kernels") or check_kernels(model, masks)
                if checks[now] != "none":
                    save_check(model, "kernels", checks[now])
        while len(checks) > MOST_CHECKS:
            del checks[next(iter(checks))]
    return now


def take(
    model: PreTrainedModel, masks: MaskMaker, rows: int, layers: Layers = "plain", now: int | None = None
) -> GraphRunner:
    """Return a runner for a model, its active adapters and a batch size, an earlier one if it still fits the model.

    Args:
        model: the model.
        masks: makes its masks.
        rows: the batch size.
        layers: how the layers run.
        now: the fingerprint of the model, if it is known.
    """
    purpose = rows, layers, hash(adapter_state(model))
    idle = cast("GraphRunner | None", idle_runners.pop(model, purpose))
    if idle is None or idle.fingerprint != (fingerprint(model) if now is None else now):
        if layers == "fused":
            fuse(model)
        check = state_of(model).kernel_checks.get(now := fingerprint(model))
        runner = GraphRunner(model, masks, layers, takes_spans=layers == "fused" and check == "spans")
        runner.fingerprint, runner.purpose = now, purpose
        return runner
    idle.model, idle.masks, idle.takes_spans = model, masks, idle.can_take_spans
    idle.cache.forget()
    return idle


def give_back(runner: GraphRunner, budget: float) -> None:
    """Keep a runner for the next generation, with all that are kept within a fraction of the GPU's memory.

    An idle runner holds no reference to its model, so it is freed together with the model.
    """
    model = runner.model
    del runner.model
    runner.__dict__.pop("pieces", None)
    idle_runners.push(model, runner, budget)
