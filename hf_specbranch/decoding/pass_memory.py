"""The memory of captured target passes: what they read, and what they return."""

from __future__ import annotations

import torch

from ..kernels.rounds import ForwardInputs
from ..kernels.spans import SPANS
from ..runtime.base import Step
from ..runtime.static_buffers import Buffers


class PassMemory:
    """Memory whose addresses are the same in all calls, so that graphs can contain them.

    Args:
        buffers: where it comes from.
        rows: the batch size.
        layers: the hidden states to keep.
    """

    def __init__(self, buffers: Buffers, rows: int, layers: tuple[int, ...]) -> None:
        self.buffers, self.rows, self.layers = buffers, rows, layers
        self.by_width: dict[int, ForwardInputs] = {}

    def inputs(self, width: int) -> ForwardInputs:
        """Return memory for the inputs of a pass over so many tokens."""
        if width not in self.by_width:
            names, shape = ("tokens", "slots", "positions"), (self.rows, width)
            tokens, slots, positions = (self.buffers.tensor(f"target.{name}{width}", shape) for name in names)
            spans = self.buffers.tensor(f"target.spans{width}", (*shape, 4), SPANS)
            self.by_width[width] = ForwardInputs(tokens, slots, positions, spans)
        return self.by_width[width]

    def keep(self, step: Step) -> None:
        """Keep the results of a pass."""
        queries = step.logits.shape[1]
        self.buffers.keep(f"target.logits{queries}", step.logits)
        if self.layers:
            assert step.hidden_states is not None
            states = torch.stack([step.hidden_states[layer] for layer in self.layers])
            self.buffers.keep(f"target.states{queries}", states)

    def kept(self, width: int, queries: int) -> Step:
        """Return the last results of a pass that kept so many of them, for the first `queries` tokens."""
        logits = self.buffers.recall(f"target.logits{width}")[:, :queries]
        if not self.layers:
            return Step(logits)
        states = self.buffers.recall(f"target.states{width}")[:, :, :queries]  # [layers, B, Q, H]
        return Step(logits, dict(zip(self.layers, states)))
