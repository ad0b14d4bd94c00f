"""The data of one round, as it passes between the parts of the loop."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TreeLeaves(NamedTuple):
    """Runner-up tokens that the target checks beside a chain."""

    tokens: Tensor  # [B, W]
    at: Tensor  # [B, W] the chain position each stands at, or -1: there is none

    def to(self, device: torch.device) -> TreeLeaves:
        return TreeLeaves(self.tokens.to(device), self.at.to(device))


class DraftTokens(NamedTuple):
    """Drafted tokens on their way to the target, row by row."""

    tokens: Tensor  # [B, N]
    length: Tensor  # [B] how many are real
    scores: Tensor | None = None  # [B, N, V] the draft's distributions, where the tokens were drawn from them
    leaves: TreeLeaves | None = None
    memory: int = -1  # names the desk it lies on; captured stages have read its address

    def to(self, device: torch.device) -> DraftTokens:
        scores = None if self.scores is None else self.scores.to(device)
        leaves = None if self.leaves is None else self.leaves.to(device)
        return DraftTokens(self.tokens.to(device), self.length.to(device), scores, leaves, self.memory)


class Branches(NamedTuple):
    """What was drafted for the verdicts that may come: the main branch first, then its siblings."""

    tokens: Tensor  # [B, K] the token each starts with
    at: Tensor  # [B, K] the chain position where the verdict must end for it to live on; -1: there is no such branch
    scores: Tensor | None = None  # [B, V] the draft's distribution at the branch point
    following: Tensor | None = None  # [B, K] the token behind the first, where runners-up may skip to it

    def to(self, device: torch.device) -> Branches:
        scores = None if self.scores is None else self.scores.to(device)
        following = None if self.following is None else self.following.to(device)
        return Branches(self.tokens.to(device), self.at.to(device), scores, following)


class VerifyResult(NamedTuple):
    """One row's verdict and what was drafted when it came, on the host."""

    accepted: int  # chain tokens the target agreed with
    token: int  # its own token after them
    survivor: int  # the branch that starts with that token (and goes on with the bonus), or -1
    continuation: int  # the target's token behind that, where that was a runner-up it had checked; else -1
    draft_tokens: int  # drafted tokens the target looked at
    main: int  # tokens behind them on the line; where the line forks, these are the main branch
    branches: int  # branches at the fork, the main one included; 0 where the line does not fork (or in PEARL)
    rejection_branches: int  # branches at earlier positions
    leaves: int  # runners-up the target checked
    drafted: int  # tokens drafted in this round
    sent_tokens: list[int]

    @classmethod
    def of(cls, numbers: list[int]) -> VerifyResult:
        static_shapes = len(cls._fields) - 1
        return cls._make([*numbers[:static_shapes], numbers[static_shapes:]])

    @property
    def offered(self) -> list[int]:
        """The tokens the verdict allows."""
        continuation = [] if self.continuation < 0 else [self.continuation]
        return [*self.sent_tokens[: self.accepted], self.token, *continuation]


class RowResult(NamedTuple):
    """What a verdict meant for one row, on the host."""

    committed: int  # tokens added to the text
    accepted: int  # chain tokens the target agreed with
    token: int  # its own token after them
    survivor: int  # the branch that goes on behind what the verdict allowed, or -1
    continuation: int  # the target's token behind its own, or -1
    finished: bool  # the row's text is complete

    @property
    def allowed(self) -> int:
        """How many tokens the verdict allowed."""
        return self.accepted + 1 + (self.continuation >= 0)

    @property
    def complete(self) -> bool:
        """Whether everything the verdict allowed was committed; a stop, or a slower row, may cut it short."""
        return self.committed == self.allowed


class Feedback(NamedTuple):
    """What the verdicts of a round meant, for the drafter."""

    round_result: Tensor  # [7, B] the fields of `RowResult`, and the length of the text
    features: Tensor | None  # [B, layers, H] target hidden states at the last verified position, if hooks want them
    moved: bool  # some row goes on with a sibling
    draft_ended: bool  # some row has no drafted line left

    @property
    def finished(self) -> Tensor:
        """[B] bool: the row's text is complete."""
        return self.round_result[5] > 0
