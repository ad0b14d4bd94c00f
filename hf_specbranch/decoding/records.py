"""The data of one round, as it passes between the parts of the loop."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Chain(NamedTuple):
    """Drafted tokens on their way to the target, row by row."""

    tokens: Tensor  # [B, N]
    length: Tensor  # [B] how many are real
    scores: Tensor | None = None  # [B, N, V] the draft's distributions, where the tokens were drawn from them

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> Chain:
        return cls(torch.zeros((rows, 0), dtype=torch.long, device=device), _zeros(rows, device))

    def to(self, device: torch.device) -> Chain:
        scores = None if self.scores is None else self.scores.to(device)
        return Chain(self.tokens.to(device), self.length.to(device), scores)


class Branches(NamedTuple):
    """What was drafted for the position after the chain: the main branch first, then its siblings."""

    tokens: Tensor  # [B, K]
    width: Tensor  # [B] how many are real; 0: nothing was drafted there
    scores: Tensor | None = None  # [B, V] the draft's distribution at the branch point

    @classmethod
    def none(cls, rows: int, device: torch.device) -> Branches:
        return cls(torch.zeros((rows, 1), dtype=torch.long, device=device), _zeros(rows, device))

    def to(self, device: torch.device) -> Branches:
        scores = None if self.scores is None else self.scores.to(device)
        return Branches(self.tokens.to(device), self.width.to(device), scores)


class Outcome(NamedTuple):
    """What a verdict meant for one row, on the host."""

    committed: int  # tokens added to the text
    accepted: int  # chain tokens the target agreed with
    token: int  # its own token after them
    survivor: int  # the branch that starts with that token, or -1
    finished: bool  # the row's text is complete

    @property
    def complete(self) -> bool:
        """Whether everything the verdict allowed was committed; a stop, or a slower row, may cut it short."""
        return self.committed == self.accepted + 1


def _zeros(rows: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, dtype=torch.long, device=device)
