"""The contract between the decoding loop and a model: these tokens, at these positions, in these KV cache slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Step(NamedTuple):
    """The result of one forward pass."""

    logits: Tensor  # [B, Q, V], as the model computes them
    hidden_states: Sequence[Tensor] | Mapping[int, Tensor] | None = None  # per layer: [B, Q, H]; only on request
    attentions: Sequence[Tensor] | None = None  # per layer: [B, heads, Q, S]; only on request

    @property
    def is_aligned(self) -> bool:
        """Return whether there is one hidden state for each logit. Prefill has more hidden states than logits."""
        states = self.hidden_states
        if not states:
            return False
        first = next(iter(states.values())) if isinstance(states, Mapping) else states[0]
        return first.shape[1] == self.logits.shape[1]

    def aligned(self, queries: Tensor) -> Step:
        """Return the results for other queries [B, N] of this pass; below 0 stands for the first."""
        rows, chosen = torch.arange(queries.shape[0], device=queries.device)[:, None], queries.clamp(min=0)
        states, attentions = self.hidden_states, self.attentions
        if states is not None:
            layers = states.values() if isinstance(states, Mapping) else states
            states = tuple(state[rows, chosen] for state in layers)
        if attentions is not None:
            attentions = tuple(each.transpose(1, 2)[rows, chosen].transpose(1, 2) for each in attentions)
        return Step(self.logits[rows, chosen], states, attentions)


class Runner(Protocol):
    """Runs a model on a KV cache whose entries are addressed by slot.

    A slot holds the key and the value of one token in every layer. Branches of a sequence are further queries of the
    same row that attend to other slots, so a shared prefix is stored once. Nothing is ever deleted: rollback means
    that no query attends to a slot any more.
    """

    def forward(
        self,
        tokens: Tensor,  # [B, Q]
        positions: Tensor,  # [B, Q]
        slots: Tensor,  # [B, Q]
        visible: Tensor | int,  # [B, Q, S] bool: the pass reads the first S slots; spans [B, Q, 4]; or S, if Q is 1
    ) -> Step:
        """Run these tokens at these positions, write them to these slots, and attend to the visible slots."""
        ...

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy the contents of `source` slots to `destination` slots, both [B, N]."""
        ...
