"""What a round result means for the drafts: what remains of each pending draft, and which side branch replaces it.

The rule is `resolve` in `decoding.resolve`; `TorchDraftOps.adopt` is the reference.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..backend import Value, constexpr, jit, power_of_two, tl, varying
from .memory import FEW, PendingBuffers, SideBranchBuffers, load_round_result, warps


class AfterRound(NamedTuple):
    """What is known of each row once the last round is resolved, [B] each; see `DraftRound`."""

    survived: Tensor  # bool: a drafted branch outlived the round
    room: Tensor  # tokens the row may still gain
    empty: Tensor  # bool: nothing is pending
    going: Tensor  # bool: nothing is pending, and there is room for a draft
    bound: Tensor  # the column where a new draft must end
    drafted: Tensor  # tokens drafted in this round: none yet


def resolve_pending(
    round_result: Tensor,
    pending: PendingBuffers,
    side: SideBranchBuffers,
    slot_positions: Tensor,
    limit: Tensor,
    depth: int,
    moved: bool,
    after: AfterRound,
) -> None:
    """Resolve the last round: what survived becomes the pending draft.

    Args:
        round_result: [7, B] packed; see `RoundResult` in `decoding.state`.
        pending: the pending draft, of which the rest remains, or which a side branch replaces.
        side: the side branches; the tokens and confidences of a surviving one move to the pending draft.
        slot_positions: [B, slots] the position of the token in each slot.
        limit: [1] the longest a text may get.
        depth: tokens of a branch after its first.
        moved: in some row a side branch becomes the pending draft.
        after: receives what is known of each row.
    """
    _resolve_kernel[(pending.rows,)](
        round_result, *pending[:4], pending.confidence, *side[:4], side.slots, slot_positions,
        limit, *after, round_result.stride(0), pending.ids.stride(0), pending.ring, side.most, depth,
        slot_positions.stride(0), MOVED=moved, BLOCK=power_of_two(depth + 1, FEW), num_warps=1,
    )  # fmt: skip


def adopt(
    round_result: Tensor, pending: PendingBuffers, side: SideBranchBuffers, layers: list[tuple[Tensor, Tensor]]
) -> None:
    """Move the distributions, keys and values of surviving side branches to those of the pending draft.

    Args:
        round_result: [7, B] packed; see `RoundResult` in `decoding.state`.
        pending: the pending draft, which receives the distributions.
        side: the side branches.
        layers: keys and values [B, heads, slots, size] of each layer of the draft model.
    """
    depth, block = side.depth, pending.block
    _adopt_kernel[(pending.rows, depth)](
        round_result, side.forks, side.scores, pending.scores, round_result.stride(0), pending.ring,
        side.most, depth, pending.vocabulary, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    for keys, values in layers:
        heads, size = keys.shape[1], keys.shape[3]
        _move_kernel[(pending.rows, depth, heads)](
            round_result, side.forks, side.point, side.slots, keys, values, round_result.stride(0), side.most,
            depth, size, *keys.stride()[:3], *values.stride()[:3], BLOCK=power_of_two(size), num_warps=1,
        )  # fmt: skip


@jit
def _winner(round_result: Value, row: Value, stride: Value) -> Value:
    """Return the side branch that becomes a row's pending draft, counted from 0; below 0: none."""
    committed, accepted, _, survivor, continuation, _ = load_round_result(round_result, row, stride)
    complete = committed == accepted + 1 + (continuation >= 0).to(tl.int64)
    return tl.where(complete, survivor, 0) - 1


@varying("stride", "ids_stride", "ring", "most", "depth", "slots_stride")
def _resolve_kernel(
    round_result: Value, ids: Value, start: Value, end: Value, cached: Value, confidence: Value,
    point: Value, forks: Value, side_tokens: Value, side_confidence: Value, side_slots: Value,
    slot_positions: Value, limit: Value, survived: Value, room: Value, empty: Value, going: Value, bound: Value,
    count: Value, stride: Value, ids_stride: Value, ring: Value, most: Value, depth: Value, slots_stride: Value,
    MOVED: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    committed, accepted, token, survivor, continuation, finished = load_round_result(round_result, row, stride)
    complete = committed == accepted + 1 + (continuation >= 0).to(tl.int64)
    rejected = complete & (survivor == -1)
    moved = complete & (survivor > 0)
    ids += row * ids_stride
    if MOVED:
        winner = tl.maximum(_winner(round_result, row, stride), 0)
        fork = tl.load(forks + row * most + winner)
        nth = tl.arange(0, BLOCK)
        last = tl.where(moved, depth, -1)  # index of the last token that moves
        branch = row * most + winner
        tokens = tl.load(side_tokens + branch * (depth + 1) + nth, mask=nth <= depth, other=0)
        tl.store(ids + fork + nth, tokens, mask=nth <= last)
        probability = tl.load(side_confidence + branch * depth + nth, mask=nth < depth, other=0.0)
        tl.store(confidence + row * (ring + 1) + (fork + 1 + nth) % ring, probability, mask=nth < last)
        source = tl.load(point + row) + tl.load(side_slots + winner * depth + nth, mask=nth < depth, other=0)
        slot_positions += row * slots_stride
        position = tl.load(slot_positions + source, mask=nth < last, other=0)
        tl.store(slot_positions + fork + nth, position, mask=nth < last)
    before = tl.load(start + row)
    column = before + accepted  # of the target's own token
    tl.store(ids + column, token, mask=rejected)
    tl.store(ids + column + 1, continuation, mask=rejected & (continuation >= 0))
    begin = before + committed
    new_end = tl.where(moved, column + 1 + depth, tl.load(end + row))
    new_end = tl.where(rejected | finished, begin, new_end)
    new_cached = tl.where(moved, new_end - 1, tl.load(cached + row))
    new_cached = tl.where(rejected, tl.minimum(new_cached, column), new_cached)
    tl.store(start + row, begin)
    tl.store(end + row, new_end)
    tl.store(cached + row, new_cached)
    left = tl.where(finished, 0, tl.load(limit) - begin)
    tl.store(survived + row, complete & (rejected == 0) & (finished == 0))
    tl.store(room + row, left)
    tl.store(empty + row, new_end == begin)
    tl.store(going + row, (new_end == begin) & (left > 1))
    tl.store(bound + row, begin + left - 1)
    tl.store(count + row, begin * 0)


@varying("stride", "ring", "most", "depth", "vocabulary")
def _adopt_kernel(
    round_result: Value, forks: Value, side_scores: Value, scores: Value, stride: Value, ring: Value, most: Value,
    depth: Value, vocabulary: Value, BLOCK: constexpr,
) -> None:  # fmt: skip
    row, nth = tl.program_id(0).to(tl.int64), tl.program_id(1)
    winner = _winner(round_result, row, stride)
    if winner >= 0:
        fork = tl.load(forks + row * most + winner)
        side_scores += ((row * most + winner) * depth + nth) * vocabulary
        scores += (row * (ring + 1) + (fork + 1 + nth) % ring) * vocabulary
        for first in range(0, vocabulary, BLOCK):
            token = first + tl.arange(0, BLOCK)
            tl.store(scores + token, tl.load(side_scores + token, mask=token < vocabulary), mask=token < vocabulary)


@varying("stride", "most", "depth", "size", "key_row", "key_head", "key_slot", "value_row", "value_head", "value_slot")
def _move_kernel(
    round_result: Value, forks: Value, point: Value, side_slots: Value, keys: Value, values: Value, stride: Value,
    most: Value, depth: Value, size: Value, key_row: Value, key_head: Value, key_slot: Value, value_row: Value,
    value_head: Value, value_slot: Value, BLOCK: constexpr,
) -> None:  # fmt: skip
    row, nth, head = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    winner = _winner(round_result, row, stride)
    if winner >= 0:
        source = tl.load(point + row) + tl.load(side_slots + winner * depth + nth)
        destination = tl.load(forks + row * most + winner) + nth
        column = tl.arange(0, BLOCK)
        inside = column < size
        key = keys + row * key_row + head * key_head + column
        value = values + row * value_row + head * value_head + column
        tl.store(key + destination * key_slot, tl.load(key + source * key_slot, mask=inside), mask=inside)
        tl.store(value + destination * value_slot, tl.load(value + source * value_slot, mask=inside), mask=inside)
