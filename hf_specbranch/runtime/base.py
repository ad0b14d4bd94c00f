"""The one contract between the algorithm and a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class Step(NamedTuple):
    """What one forward pass returns."""

    logits: Tensor  # [B, Q, V], as the model gives them
    hidden_states: Sequence[Tensor] | Mapping[int, Tensor] | None = None  # a layer: [B, Q, H]; only when asked for
    attentions: Sequence[Tensor] | None = None  # a layer: [B, heads, Q, S]; only when asked for

    @property
    def is_aligned(self) -> bool:
        """Whether there is a hidden state for each logit; the prompt's pass has more states than logits."""
        states = self.hidden_states
        if not states:
            return False
        first = next(iter(states.values())) if isinstance(states, Mapping) else states[0]
        return first.shape[1] == self.logits.shape[1]


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
