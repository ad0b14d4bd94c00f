"""The one contract between the algorithm and a model."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Step(NamedTuple):
    """What one forward pass returns."""

    logits: Tensor  # [B, Q, V], as the model gives them
    hidden_states: tuple[Tensor, ...] | None = None  # a layer: [B, Q, H]; only when asked for
    attentions: tuple[Tensor, ...] | None = None  # a layer: [B, heads, Q, S]; only when asked for


class Runner(Protocol):
    """A model and its cache. A call says: these tokens, at these positions, written to these slots,
    seeing these slots.

    A slot holds the key and value of one token in every layer. Branches of a sequence are further queries
    of the same row that see different slots, so a shared prefix is stored once. Nothing is ever deleted: a
    slot that no query sees does not exist.
    """

    def forward(
        self,
        tokens: Tensor,  # [B, Q]
        positions: Tensor,  # [B, Q]
        slots: Tensor,  # [B, Q]
        visible: Tensor,  # [B, Q, S] bool, S = how many slots take part
    ) -> Step: ...

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy the contents of `source` slots to `destination` slots, both [B, N]."""
        ...
