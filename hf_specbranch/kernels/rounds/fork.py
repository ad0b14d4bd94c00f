"""Which branches to open: the branch point's candidates, and those at earlier positions."""

from __future__ import annotations

from torch import Tensor

from ..backend import Value, constexpr, tl, varying
from .likeliest import next_likeliest
from .memory import PendingBuffers, warps


def fork(
    pending: PendingBuffers,
    point: Tensor,
    sent_length: Tensor,
    ahead: Tensor,
    rejections: tuple[Tensor, Tensor],
    tokens: Tensor,
    at: Tensor,
    width: Tensor,
    count: Tensor,
    branches: int,
    depth: int,
    widest: int,
) -> None:
    """Open up to `branches` at the branch point, the less sure the draft is the more, and the foreseen ones.

    Args:
        line: the branch point's token stands on it.
        point: [B] its column.
        chain_length: [B] its position.
        ahead: [B] bool: rows that branch at all.
        foreseen: tokens and positions [B, n] of branches at chain positions; the first that fit are taken.
        tokens: [B, K] the token each branch starts with: the line's own first.
        at: [B, K] its position, NONE where it is not opened.
        width: [B] how many are open at the branch point.
        count: [B] drafted tokens, added to.
        branches: the most at the branch point.
        depth: tokens behind the first.
        widest: `max(1, floor(widest * (1 - confidence)))` are opened; 0 opens one.
    """
    block = pending.block
    _fork_kernel[(pending.rows,)](
        pending.ids, pending.confidence, pending.scores, point, sent_length, ahead, *rejections, tokens, at, width,
        count, pending.vocabulary, pending.ids.stride(0), pending.ring, branches, tokens.shape[1] - branches,
        rejections[0].stride(0), depth, widest, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip


@varying("vocabulary", "ids_stride", "ring", "branches", "outcomes", "foreseen_stride", "depth", "widest")
def _fork_kernel(
    ids: Value, confidence: Value, scores: Value, point: Value, sent_length: Value, ahead: Value,
    foreseen_tokens: Value, foreseen_at: Value, tokens: Value, at: Value, width: Value, count: Value,
    vocabulary: Value, ids_stride: Value, ring: Value, branches: Value, rejection_branches: Value,
    foreseen_stride: Value, depth: Value, widest: Value, BLOCK: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.load(point + row)
    entry = row * (ring + 1) + column % ring
    opens = tl.load(ahead + row).to(tl.int1)
    wide = tl.floor(widest * (1.0 - tl.load(confidence + entry))).to(tl.int64)
    wide = tl.where(opens, tl.minimum(tl.maximum(wide, 1), branches), 0)
    tl.store(width + row, wide)
    tokens += row * (branches + rejection_branches)
    at += row * (branches + rejection_branches)
    length = tl.load(sent_length + row)
    own = tl.load(ids + row * ids_stride + column)
    tl.store(tokens, own)
    tl.store(at, tl.where(wide > 0, length, -1))
    opened = tl.maximum(wide - 1, 0)
    value = 2.0
    index = 0
    for k in range(1, branches):
        value, index = next_likeliest(scores + entry * vocabulary, vocabulary, own, value, index, BLOCK)
        tl.store(tokens + k, index.to(tl.int64))
        tl.store(at + k, tl.where(k < wide, length, -1))
    for k in range(0, rejection_branches):
        where = tl.load(foreseen_at + row * foreseen_stride + k)
        where = tl.where(opens, where, -1)
        tl.store(tokens + branches + k, tl.load(foreseen_tokens + row * foreseen_stride + k))
        tl.store(at + branches + k, where)
        opened += (where >= 0).to(tl.int64)
    tl.store(count + row, tl.load(count + row) + opened * (1 + depth))
