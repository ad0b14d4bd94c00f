"""What is sent to the target: the first tokens of each pending draft; and the count of what is drafted."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..backend import Value, constexpr, power_of_two, tl, varying
from .memory import FEW, PendingBuffers


class SentDraft(NamedTuple):
    """The draft that is sent, and its branches, row by row; see `DraftRound`."""

    tokens: Tensor  # [B, gamma] the draft tokens
    length: Tensor  # [B] how many are real
    ahead: Tensor  # [B] bool: the row drafts past what is sent
    point: Tensor  # [B] the branch point's column
    width: Tensor  # [B] branches at the branch point: none yet
    at: Tensor  # [B, K] the draft position of each branch: NONE yet


def send(
    pending: PendingBuffers,
    survived: Tensor,
    room: Tensor,
    kept: Tensor | None,
    sent: SentDraft,
    reach: int,
    epsilon: float = 0.0,
    ahead: bool = True,
) -> None:
    """Send the first tokens of each pending draft.

    Args:
        pending: the pending draft.
        survived: [B] bool: the pending draft outlived the last round; cleared here.
        room: [B] tokens each row may still gain.
        kept: [B] how many tokens to send; None: a survivor is cut at its first confidence below epsilon, and other
            drafts are sent whole.
        sent: receives what is sent.
        reach: the longest a pending draft can get.
        epsilon: the confidence threshold.
        ahead: the method drafts past what is sent.
    """
    size = power_of_two(max(reach, sent.tokens.shape[1], sent.at.shape[1]), FEW)
    _send_kernel[(pending.rows,)](
        pending.ids, pending.start, pending.end, pending.confidence, survived, room,
        pending.start if kept is None else kept, *sent,
        pending.ids.stride(0), pending.ring, sent.tokens.shape[1], sent.at.shape[1], epsilon,
        KEPT=kept is not None, AHEAD=ahead, BLOCK=size, num_warps=1,
    )  # fmt: skip


@varying("ids_stride", "ring", "gamma", "branches")
def _send_kernel(
    ids: Value, start: Value, end: Value, confidence: Value, survived: Value, room: Value, kept: Value,
    draft_tokens: Value, sent_length: Value, ahead: Value, point: Value, width: Value, at: Value,
    ids_stride: Value, ring: Value, gamma: Value, branches: Value, epsilon: Value,
    KEPT: constexpr, AHEAD: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    nth = tl.arange(0, BLOCK)
    begin = tl.load(start + row)
    length = tl.load(end + row) - begin
    if KEPT:
        wanted = tl.load(kept + row)
    else:
        entry = row * (ring + 1) + (begin + nth) % ring
        confident = tl.load(confidence + entry, mask=nth < length, other=1.0) >= epsilon
        wanted = tl.min(tl.where(confident, length, nth.to(tl.int64)), 0)
        wanted = tl.where(tl.load(survived + row).to(tl.int1), wanted, length)
    room_left = tl.load(room + row)
    length_sent = tl.minimum(tl.maximum(tl.minimum(wanted, room_left - 1), 0), gamma)
    tl.store(sent_length + row, length_sent)
    never = room_left < -1  # false in every row: room is never that small
    if AHEAD:
        tl.store(ahead + row, room_left > length_sent + 1)
    else:
        tl.store(ahead + row, never)
    tl.store(point + row, begin + length_sent)
    tl.store(width + row, begin * 0)
    tl.store(survived + row, never)
    tl.store(at + row * branches + nth, tl.full((BLOCK,), -1, tl.int64), mask=nth < branches)
    column = tl.minimum(begin + nth, ids_stride - 1)
    tl.store(
        draft_tokens + row * gamma + nth, tl.load(ids + row * ids_stride + column, mask=nth < gamma), mask=nth < gamma
    )


def count_drafted(
    pending: PendingBuffers, sent_length: Tensor, width: Tensor, at: Tensor, leaves_at: Tensor, count: Tensor,
    branches: int, leaves: int, forks: bool, out: Tensor,
) -> None:  # fmt: skip
    """Write what is drafted while the target verifies, row by row.

    Args:
        pending: the pending draft.
        sent_length: [B] draft tokens under verification.
        width: [B] branches at the branch point.
        at: [B, K] the draft position of each branch, or NONE; after the first `branches` come rejection branches.
        leaves_at: [B, n] the draft position of each tree leaf, or NONE; the first `leaves` are sent.
        count: [B] tokens drafted in this round.
        branches: the most branches at the branch point.
        leaves: the most tree leaves to send.
        forks: the method branches.
        out: [B, 6] receives the fields of `Drafted` in `decoding.resolve`.
    """
    _count_kernel[(pending.rows,)](
        pending.start, pending.end, sent_length, width, at, leaves_at, count, out, at.shape[1], branches,
        leaves_at.stride(0), leaves, FORKS=forks, BLOCK=power_of_two(max(at.shape[1], leaves), FEW), num_warps=1,
    )  # fmt: skip


@varying("stride", "branches", "leaves_stride", "leaves")
def _count_kernel(
    start: Value, end: Value, sent_length: Value, width: Value, at: Value, leaves_at: Value, count: Value,
    out: Value, stride: Value, branches: Value, leaves_stride: Value, leaves: Value,
    FORKS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    nth = tl.arange(0, BLOCK)
    length = tl.load(sent_length + row)
    out += row * 6
    rejection_branches = tl.load(at + row * stride + nth, mask=(nth >= branches) & (nth < stride), other=-1) >= 0
    verified_leaves = tl.load(leaves_at + row * leaves_stride + nth, mask=nth < leaves, other=-1) >= 0
    tl.store(out, length)
    tl.store(out + 1, tl.load(end + row) - tl.load(start + row) - length)
    if FORKS:
        tl.store(out + 2, tl.load(width + row))
    else:
        tl.store(out + 2, length * 0)
    tl.store(out + 3, tl.sum(rejection_branches.to(tl.int64), 0))
    tl.store(out + 4, tl.sum(verified_leaves.to(tl.int64), 0))
    tl.store(out + 5, tl.load(count + row))
