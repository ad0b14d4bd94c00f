"""The tensors that the kernels of a round share, and how kernels read and write a round result."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..backend import Value, jit, power_of_two, tl
from ..parallel_build import room as index_memory

LARGEST_BLOCK = 8192  # of a vocabulary, at a time


class PendingBuffers(NamedTuple):
    """A `PendingDraft`: drafted tokens behind the text, and rings of what the draft knew about each."""

    ids: Tensor  # [B, C + 1]; the last column is read by nobody
    start: Tensor  # [B]
    end: Tensor  # [B]
    cached: Tensor  # [B]
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


def empty_inputs(rows: int, queries: int, shown: int, device: torch.device) -> ForwardInputs:
    """Return memory for the inputs of a forward."""
    tokens, slots, positions = (index_memory((rows, queries), torch.long, device) for _ in range(3))
    visible = torch.empty((rows, queries, shown), dtype=torch.bool, device=device)
    return ForwardInputs(tokens, slots, positions, visible)


@jit
def load_round_result(result: Value, row: Value, stride: Value) -> Value:
    """Return committed, accepted, token, survivor, continuation and finished of a row; see `decoding.state`."""
    result += row
    return (
        tl.load(result),
        tl.load(result + stride),
        tl.load(result + 2 * stride),
        tl.load(result + 3 * stride),
        tl.load(result + 4 * stride),
        tl.load(result + 5 * stride) > 0,
    )


@jit
def load_text_length(result: Value, row: Value, stride: Value) -> Value:
    """Return the length of a row's text: the last field of the round result."""
    return tl.load(result + 6 * stride + row)


@jit
def store_round_result(
    result: Value, row: Value, stride: Value, committed: Value, accepted: Value, token: Value, survivor: Value,
    continuation: Value, finished: Value, length: Value,
) -> None:  # fmt: skip
    """Write all fields of a row's round result."""
    result += row
    tl.store(result, committed)
    tl.store(result + stride, accepted)
    tl.store(result + 2 * stride, token)
    tl.store(result + 3 * stride, survivor)
    tl.store(result + 4 * stride, continuation)
    tl.store(result + 5 * stride, finished.to(tl.int64))
    tl.store(result + 6 * stride, length)
