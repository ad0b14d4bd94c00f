"""The tensors that the kernels of a round share, and how kernels read and write a round result."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..backend import Value, jit, power_of_two, tl
from ..parallel_build import room as index_memory
from ..spans import SPANS

LARGEST_BLOCK = 4096  # tokens of a distribution per program; see `chunks.py`
FEW = 32  # the shortest block of positions, so that one build serves drafts of any usual length


class PendingBuffers(NamedTuple):
    """The tensors of a `PendingDraft`. Confidence and scores are rings of R entries, addressed by column."""

    ids: Tensor  # [B, C + 1] the text and the drafted tokens; the last column is scratch
    start: Tensor  # [B] the first column that is not committed
    end: Tensor  # [B] the column after the last drafted token
    cached: Tensor  # [B] columns whose keys and values the draft has
    next: Tensor  # [B] the token for column `end`, where `cached == end`
    confidence: Tensor  # [B, R + 1] the draft's largest probability; the last entry is scratch
    scores: Tensor  # [B, R + 1, V] the draft's distributions; the last entry is scratch

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
        """Return how many tokens of a distribution a program reads per block."""
        return min(LARGEST_BLOCK, power_of_two(self.vocabulary))


class SideBranchBuffers(NamedTuple):
    """The tensors of `SideBranches`: W of them, each a first token and `depth` tokens after it."""

    point: Tensor  # [B, 1] the branch point's column
    forks: Tensor  # [B, W] the column of each one's first token
    tokens: Tensor  # [B, W, depth + 1]
    confidence: Tensor  # [B, W, depth]
    scores: Tensor  # [B, W, depth, V]
    slots: Tensor  # [W, depth] where their keys and values are, counted from the branch point

    @property
    def most(self) -> int:
        return self.forks.shape[1]

    @property
    def depth(self) -> int:
        return self.confidence.shape[2]


class ForwardInputs(NamedTuple):
    """The inputs of a forward."""

    tokens: Tensor  # [B, Q]
    slots: Tensor  # [B, Q] where their keys and values go
    positions: Tensor  # [B, Q]
    spans: Tensor  # [B, Q, 4] the slots that each token sees; see `kernels.spans`


def warps(block: int) -> int:
    """Return how many warps a program with such a block takes."""
    return min(16, max(1, block // 256))


def empty_inputs(rows: int, queries: int, device: torch.device) -> ForwardInputs:
    """Return memory for the inputs of a forward."""
    tokens, slots, positions = (index_memory((rows, queries), torch.long, device) for _ in range(3))
    return ForwardInputs(tokens, slots, positions, index_memory((rows, queries, 4), SPANS, device))


@jit
def store_spans(spans: Value, place: Value, first: Value, end: Value, own_first: Value, own_end: Value) -> None:
    """Write the spans of one query."""
    spans += place * 4
    tl.store(spans, first.to(tl.int32))
    tl.store(spans + 1, end.to(tl.int32))
    tl.store(spans + 2, own_first.to(tl.int32))
    tl.store(spans + 3, own_end.to(tl.int32))


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
