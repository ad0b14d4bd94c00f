"""The tensors that the kernels of a round share."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..backend import power_of_two

LARGEST_BLOCK = 8192  # of a vocabulary, at a time


class PendingBuffers(NamedTuple):
    """A `PendingDraft`: drafted tokens behind the text, and rings of what the draft knew about each."""

    ids: Tensor  # [B, C + 1]; the last column is read by nobody
    start: Tensor  # [B]
    end: Tensor  # [B]
    fed: Tensor  # [B]
    next: Tensor  # [B]
    confidence: Tensor  # [B, R + 1]
    scores: Tensor  # [B, R + 1, V]

    @property
    def rows(self) -> int:
        return self.ids.shape[0]

    @property
    def ring(self) -> int:
        return self.confidence.shape[1] - 1

    @property
    def vocabulary(self) -> int:
        return self.scores.shape[2]

    @property
    def block(self) -> int:
        """How much of a distribution a program looks at, at a time."""
        return min(LARGEST_BLOCK, power_of_two(self.vocabulary))


class SideBranchBuffers(NamedTuple):
    """`SideBranches`: W branches beside the main one, `depth` tokens behind their first."""

    point: Tensor  # [B, 1]
    forks: Tensor  # [B, W]
    tokens: Tensor  # [B, W, depth + 1]
    confidence: Tensor  # [B, W, depth]
    scores: Tensor  # [B, W, depth, V]
    slots: Tensor  # [W, depth] behind the branch point

    @property
    def most(self) -> int:
        return self.forks.shape[1]

    @property
    def depth(self) -> int:
        return self.confidence.shape[2]


class ForwardInputs(NamedTuple):
    """What a forward reads."""

    tokens: Tensor  # [B, Q]
    slots: Tensor  # [B, Q]
    positions: Tensor  # [B, Q]
    visible: Tensor  # [B, Q, S]


FEW = 32  # blocks of positions are no shorter, so that one kernel serves chains of any usual length


def warps(block: int) -> int:
    """Threads enough for a block of numbers."""
    return min(16, max(1, block // 256))
