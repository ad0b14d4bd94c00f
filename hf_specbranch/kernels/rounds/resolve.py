"""After a verdict: where the text goes on, and which drafted line lives on there."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..backend import Value, constexpr, jit, power_of_two, tl, varying
from .memory import FEW, PendingBuffers, SideBranchBuffers, load_round_result, warps


class AfterRound(NamedTuple):
    """What a drafter wants to know about each row once it has followed a verdict, [B] each."""

    survived: Tensor  # bool: the line outlived it
    room: Tensor  # tokens the row may still gain
    empty: Tensor  # bool: no drafted token is left
    going: Tensor  # bool: there is none, and room for some
    bound: Tensor  # the column where a new line must end
    drafted: Tensor  # tokens drafted in this round: none yet


def resolve_pending(
    round_result: Tensor,
    pending: PendingBuffers,
    side_branches: SideBranchBuffers,
    slot_positions: Tensor,
    limit: Tensor,
    depth: int,
    moves: bool,
    after: AfterRound,
) -> None:
    """Take note of a verdict.

    Args:
        told: [7, B]; see `Feedback.round_result`.
        line: becomes what is left of it.
        siblings: one of them may become the line: its tokens and confidences move.
        slot_positions: [B, slots] the position of what each slot holds.
        limit: [1] the longest a text may get.
        depth: tokens behind a branch's first.
        moves: some row goes on with a sibling.
        after: what there is to know afterwards.
    """
    _resolve_kernel[(pending.rows,)](
        round_result, *pending[:4], pending.confidence, *side_branches[:4], side_branches.slots, slot_positions,
        limit, *after, round_result.stride(0), pending.ids.stride(0), pending.ring, side_branches.most, depth,
        slot_positions.stride(0), MOVES=moves, BLOCK=power_of_two(depth + 1, FEW), num_warps=1,
    )  # fmt: skip


def adopt(
    round_result: Tensor, pending: PendingBuffers, side_branches: SideBranchBuffers, layers: list[tuple[Tensor, Tensor]]
) -> None:
    """Move a surviving sibling's distributions, and its keys and values, to where the line's belong.

    Args:
        layers: keys and values [B, heads, slots, size] of each layer of the draft.
    """
    depth, block = side_branches.depth, pending.block
    _adopt_kernel[(pending.rows, depth)](
        round_result, side_branches.forks, side_branches.scores, pending.scores, round_result.stride(0), pending.ring,
        side_branches.most, depth, pending.vocabulary, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    for keys, values in layers:
        heads, size = keys.shape[1], keys.shape[3]
        _move_kernel[(pending.rows, depth, heads)](
            round_result, side_branches.forks, side_branches.point, side_branches.slots, keys, values,
            round_result.stride(0), side_branches.most, depth,
            size, *keys.stride()[:3], *values.stride()[:3], BLOCK=power_of_two(size), num_warps=1,
        )  # fmt: skip


@jit
def _winner(round_result: Value, row: Value, stride: Value) -> Value:
    """Which sibling lives on in a row; below 0: none."""
    committed, accepted, _, survivor, continuation, _ = load_round_result(round_result, row, stride)
    complete = committed == accepted + 1 + (continuation >= 0).to(tl.int64)
    return tl.where(complete, survivor, 0) - 1


@varying("stride", "ids_stride", "ring", "most", "depth", "slots_stride")
def _resolve_kernel(
    round_result: Value, ids: Value, start: Value, end: Value, cached: Value, confidence: Value,
    point: Value, forks: Value, side_tokens: Value, side_confidence: Value, side_slots: Value,
    slot_positions: Value, limit: Value, survived: Value, room: Value, empty: Value, going: Value, bound: Value,
    count: Value,
    stride: Value, ids_stride: Value, ring: Value, most: Value, depth: Value, slots_stride: Value,
    MOVES: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    committed, accepted, token, survivor, continuation, finished = load_round_result(round_result, row, stride)
    complete = committed == accepted + 1 + (continuation >= 0).to(tl.int64)
    missed = complete & (survivor == -1)
    moved = complete & (survivor > 0)
    ids += row * ids_stride
    if MOVES:
        winner = tl.maximum(_winner(round_result, row, stride), 0)
        fork = tl.load(forks + row * most + winner)
        nth = tl.arange(0, BLOCK)
        last = tl.where(moved, depth, -1)  # of the sibling's tokens
        sibling = row * most + winner
        tokens = tl.load(side_tokens + sibling * (depth + 1) + nth, mask=nth <= depth, other=0)
        tl.store(ids + fork + nth, tokens, mask=nth <= last)
        sure = tl.load(side_confidence + sibling * depth + nth, mask=nth < depth, other=0.0)
        tl.store(confidence + row * (ring + 1) + (fork + 1 + nth) % ring, sure, mask=nth < last)
        source = tl.load(point + row) + tl.load(side_slots + winner * depth + nth, mask=nth < depth, other=0)
        slot_positions += row * slots_stride
        position = tl.load(slot_positions + source, mask=nth < last, other=0)
        tl.store(slot_positions + fork + nth, position, mask=nth < last)
    before = tl.load(start + row)
    column = before + accepted  # where the target's own token stands
    tl.store(ids + column, token, mask=missed)
    tl.store(ids + column + 1, continuation, mask=missed & (continuation >= 0))
    begin = before + committed
    tip = tl.where(moved, column + 1 + depth, tl.load(end + row))
    tip = tl.where(missed | finished, begin, tip)
    read = tl.where(moved, tip - 1, tl.load(cached + row))
    read = tl.where(missed, tl.minimum(read, column), read)
    tl.store(start + row, begin)
    tl.store(end + row, tip)
    tl.store(cached + row, read)
    left = tl.where(finished, 0, tl.load(limit) - begin)
    tl.store(survived + row, complete & (missed == 0) & (finished == 0))
    tl.store(room + row, left)
    tl.store(empty + row, tip == begin)
    tl.store(going + row, (tip == begin) & (left > 1))
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
        there = tl.load(forks + row * most + winner) + nth
        column = tl.arange(0, BLOCK)
        inside = column < size
        key = keys + row * key_row + head * key_head + column
        value = values + row * value_row + head * value_head + column
        tl.store(key + there * key_slot, tl.load(key + source * key_slot, mask=inside), mask=inside)
        tl.store(value + there * value_slot, tl.load(value + source * value_slot, mask=inside), mask=inside)
