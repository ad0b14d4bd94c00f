"""What goes to the target: as much of the line as was decided, and what follows from that."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..backend import Value, constexpr, power_of_two, tl, varying
from .memory import FEW, PendingBuffers


class SentDraft(NamedTuple):
    """What a drafter remembers of a chain, row by row."""

    tokens: Tensor  # [B, gamma]
    length: Tensor  # [B]
    ahead: Tensor  # [B] bool: there is room to draft past it
    point: Tensor  # [B] the branch point's column
    width: Tensor  # [B] branches there: none yet
    at: Tensor  # [B, K] where branches stand: nowhere yet


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
    """Send the beginning of each line.

    Args:
        survived: [B] bool: lines that have outlived a verdict; none has afterwards.
        room: [B] tokens each row may still gain.
        kept: [B] how much to send; None: a survivor up to its first token of too little confidence, others whole.
        reach: the longest a line can get.
        epsilon: how little is too little.
        ahead: the method drafts past the chain.
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
        keep = tl.load(kept + row)
    else:
        place = row * (ring + 1) + (begin + nth) % ring
        sure = tl.load(confidence + place, mask=nth < length, other=1.0) >= epsilon
        keep = tl.min(tl.where(sure, length, nth.to(tl.int64)), 0)
        keep = tl.where(tl.load(survived + row).to(tl.int1), keep, length)
    left = tl.load(room + row)
    sends = tl.minimum(tl.maximum(tl.minimum(keep, left - 1), 0), gamma)
    tl.store(sent_length + row, sends)
    none = left < -1  # no row has less room than none
    if AHEAD:
        tl.store(ahead + row, left > sends + 1)
    else:
        tl.store(ahead + row, none)
    tl.store(point + row, begin + sends)
    tl.store(width + row, begin * 0)
    tl.store(survived + row, none)
    tl.store(at + row * branches + nth, tl.full((BLOCK,), -1, tl.int64), mask=nth < branches)
    column = tl.minimum(begin + nth, ids_stride - 1)
    tl.store(
        draft_tokens + row * gamma + nth, tl.load(ids + row * ids_stride + column, mask=nth < gamma), mask=nth < gamma
    )
