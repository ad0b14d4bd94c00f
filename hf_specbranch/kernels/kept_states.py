"""Where the kernels of recurrent layers find the state before a pass, and where they put the state after each token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class KeptStates(NamedTuple):
    """The states of a layer after each of the last tokens, for each row of a batch.

    The state before slot `s` of row `r` is entry `s % size * B + r`. So the slots of a pass say where its first state
    is, and where each further state goes. The slots of a row follow each other, and there are fewer than `size`. Only
    the first may be repeated, by the same token: a row that has fewer tokens to read than others.
    """

    states: Tensor  # [size * B, ...]
    slots: Tensor  # [B, Q] the slots of the pass

    @property
    def size(self) -> int:
        """How many states are kept per row."""
        return self.states.shape[0] // self.slots.shape[0]

    def before(self, token: int) -> Tensor:
        """Return the states [B, ...] before a token of the pass."""
        return self.states.index_select(0, self._entry(self.slots[:, token]))

    def put(self, token: int, state: Tensor) -> None:
        """Keep the states [B, ...] after a token of the pass."""
        self.states.index_copy_(0, self._entry(self.slots[:, token] + 1), state.to(self.states.dtype))

    def _entry(self, slots: Tensor) -> Tensor:
        return slots % self.size * slots.shape[0] + torch.arange(slots.shape[0], device=slots.device)


def empty_states(
    rows: int, tokens: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> KeptStates:
    """Return states of zeros for a pass over the first tokens of a text.

    Args:
        rows: the batch size.
        tokens: of the pass.
        shape: of the state of one row.
        dtype: of the state.
        device: of the state.

    Example:
        >>> empty_states(2, 3, (5,), torch.float32, torch.device("cpu")).states.shape
        torch.Size([8, 5])
    """
    slots = torch.arange(tokens, device=device).expand(rows, -1)
    return KeptStates(torch.zeros(((tokens + 1) * rows, *shape), dtype=dtype, device=device), slots)
