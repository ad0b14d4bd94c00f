"""The data of one round, as it passes between the parts of the loop."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .resolve import NONE, Drafted, Resolution, resolve


class TreeLeaves(NamedTuple):
    """Alternatives to single draft tokens, which the target verifies in the same pass."""

    tokens: Tensor  # [B, W]
    at: Tensor  # [B, W] the draft position each is an alternative for, or NONE: there is no such leaf

    def to(self, device: torch.device) -> TreeLeaves:
        return TreeLeaves(self.tokens.to(device), self.at.to(device))


class DraftTokens(NamedTuple):
    """The draft tokens under verification, row by row."""

    tokens: Tensor  # [B, N]
    length: Tensor  # [B] how many are real
    scores: Tensor | None = None  # [B, N, V] the draft's distributions `q`, where the tokens were drawn from them
    leaves: TreeLeaves | None = None
    memory: int = -1  # names the static buffers that hold the tokens; captured stages have read their address

    def to(self, device: torch.device) -> DraftTokens:
        scores = None if self.scores is None else self.scores.to(device)
        leaves = None if self.leaves is None else self.leaves.to(device)
        return DraftTokens(self.tokens.to(device), self.length.to(device), scores, leaves, self.memory)


class BranchStarts(NamedTuple):
    """The first tokens of the branches drafted for likely verify results: the main branch first."""

    tokens: Tensor  # [B, K] the token each branch starts with
    at: Tensor  # [B, K] how many draft tokens must be accepted for it to live on; NONE: there is no such branch
    scores: Tensor | None = None  # [B, V] the draft's distribution at the branch point
    following: Tensor | None = None  # [B, K] the second token of each, where a leaf continuation may skip to it

    def to(self, device: torch.device) -> BranchStarts:
        scores = None if self.scores is None else self.scores.to(device)
        following = None if self.following is None else self.following.to(device)
        return BranchStarts(self.tokens.to(device), self.at.to(device), scores, following)


class VerifyResult(NamedTuple):
    """One row's verify result and what was drafted at that time, on the host."""

    accepted: int  # draft tokens that the target agreed with
    token: int  # its own token after them
    survivor: int  # the branch that starts with that token (and goes on with the leaf continuation), or NONE
    continuation: int  # the target's token after its own, where that was a tree leaf; else NONE
    drafted: Drafted
    sent_tokens: list[int]  # the draft tokens under verification, and padding

    @classmethod
    def unpack(cls, numbers: list[int]) -> VerifyResult:
        """Read a row as the verifier wrote it."""
        counts = 4 + len(Drafted._fields)
        accepted, token, survivor, continuation = numbers[:4]
        return cls(accepted, token, survivor, continuation, Drafted(*numbers[4:counts]), numbers[counts:])

    @property
    def offered(self) -> list[int]:
        """The tokens that the text may gain."""
        more = [] if self.continuation < 0 else [self.continuation]
        return [*self.sent_tokens[: self.accepted], self.token, *more]

    @property
    def has_continuation(self) -> bool:
        return self.continuation >= 0

    def resolve(self, committed: int, finished: bool, depth: int) -> Resolution:
        """Apply the rule of a round; see `resolve.resolve`."""
        return resolve(self.drafted, self.accepted, self.survivor, self.has_continuation, committed, finished, depth)


RESULT_NUMBERS = 4 + len(Drafted._fields)  # of a packed verify result, before the draft tokens


class RowResult(NamedTuple):
    """What a round meant for one row, on the host; the fields of `RoundResult`."""

    committed: int  # tokens added to the text
    accepted: int  # draft tokens that the target agreed with
    token: int  # its own token after them
    survivor: int  # the branch that goes on after what the verify result allowed, or NONE
    continuation: int  # the target's token after its own, or NONE
    finished: bool  # the row's text is complete

    @property
    def complete(self) -> bool:
        """Whether everything that was allowed was committed; a stop, or a slower row, may leave less."""
        return self.committed == self.accepted + 1 + (self.continuation >= 0)


class RoundResult:
    """What a round meant for all rows, on the device: one tensor [7, B] with a name for each row of it.

    Kernels read and write it in this order (`kernels/rounds/memory.py`).
    """

    FIELDS = (*RowResult._fields, "length")

    def __init__(self, packed: Tensor) -> None:
        self.packed = packed  # [7, B]
        self.committed, self.accepted, self.token, self.survivor, self.continuation = packed[:5]  # [B] each
        self.finished_flag, self.length = packed[5], packed[6]  # [B]; the text's length, in columns

    @property
    def finished(self) -> Tensor:
        """[B] bool: the row's text is complete."""
        return self.finished_flag > 0

    def to(self, device: torch.device) -> RoundResult:
        return self if device == self.packed.device else RoundResult(self.packed.to(device))


class Feedback(NamedTuple):
    """What a round meant, for the drafter."""

    result: RoundResult
    features: Tensor | None  # [B, layers, H] target hidden states at the last verified position, if hooks want them
    moved: bool  # in some row a side branch becomes the pending draft
    draft_ended: bool  # some row has no pending draft left


__all__ = [
    "NONE", "RESULT_NUMBERS", "BranchStarts", "DraftTokens", "Drafted", "Feedback", "Resolution", "RoundResult",
    "RowResult", "TreeLeaves", "VerifyResult",
]  # fmt: skip
