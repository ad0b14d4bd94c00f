"""What a draft source is: anything that proposes draft tokens for the target to verify.

A draft model is the first (`drafter.Drafter`); `NoDraft` proposes nothing. Another source implements this protocol, and
`assembly.Assembly.with_drafter` chooses it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .resolve import Drafted
from .state import BranchStarts, DraftTokens, Feedback


class DraftSource(Protocol):
    """Proposes draft tokens, and continues them while the target verifies.

    Attributes:
        device: where its tensors are.
        depth: tokens of a side branch after its first.
        max_tokens_per_round: the most tokens that a round can add to a text.
        same_every_round: a round launches the same work whatever the last verify result was, so that the next round may
            start before the host has read it.
    """

    device: torch.device
    depth: int
    max_tokens_per_round: int
    same_every_round: bool

    def prefill(self, length: int) -> None:
        """Read the first columns of the text."""
        ...

    def propose(self, feedback: Feedback, reached: int) -> DraftTokens:
        """Adopt what survived the last round, and return the draft tokens for the next target pass.

        Args:
            feedback: what the last round meant.
            reached: the longest any row of the text can be by now.
        """
        ...

    def branch(self, reached: int) -> BranchStarts:
        """Draft continuations for likely verify results, while the target runs."""
        ...

    def drafted(self) -> Tensor:
        """[B, 6] what is drafted while the target verifies; the fields of `Drafted`."""
        ...


class NoDraft:
    """The draft source of autoregressive decoding: it proposes nothing.

    Args:
        nothing: no draft tokens and no branches.
    """

    depth, max_tokens_per_round, same_every_round = 0, 1, True

    def __init__(self, nothing: tuple[DraftTokens, BranchStarts]) -> None:
        self.nothing, self.device = nothing, nothing[0].length.device

    def prefill(self, length: int) -> None: ...

    def propose(self, feedback: Feedback, reached: int) -> DraftTokens:
        return self.nothing[0]

    def branch(self, reached: int) -> BranchStarts:
        return self.nothing[1]

    def drafted(self) -> Tensor:
        rows = self.nothing[0].length.shape[0]
        return torch.zeros((rows, len(Drafted._fields)), dtype=torch.long, device=self.device)
