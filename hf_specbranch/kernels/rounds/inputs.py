"""The inputs of a forward: tokens, slots, positions, and the slots that each token sees."""

from __future__ import annotations

from torch import Tensor

from ..backend import Value, constexpr, tl, varying
from .memory import (
    ForwardInputs,
    PendingBuffers,
    SideBranchBuffers,
    load_round_result,
    load_text_length,
    store_spans,
)


def pending_inputs(pending: PendingBuffers, positions: Tensor, first: Tensor, inputs: ForwardInputs) -> None:
    """Write the last tokens of each pending draft as forward inputs, as many as `inputs` has room for.

    Args:
        pending: the pending draft.
        positions: [B, C] by column.
        first: [B, 1] the first column that is not padding.
        inputs: receives Q tokens per row.
    """
    rows, queries = inputs.tokens.shape
    _pending_inputs_kernel[(rows, queries)](
        pending.ids, pending.end, positions, first, *inputs, queries, pending.ids.stride(0), positions.stride(0),
        num_warps=1,
    )  # fmt: skip


def open_branches(
    pending: PendingBuffers,
    side: SideBranchBuffers,
    point: Tensor,
    tokens: Tensor,
    at: Tensor,
    positions: Tensor,
    first: Tensor,
    inputs: ForwardInputs,
) -> None:
    """Open the side branches, and write the first forward inputs of all branches.

    The inputs are the last token of the main branch and the first token of each side branch.

    Args:
        pending: the pending draft, which ends with the main branch.
        side: receives the branch point, and the column and first token of each side branch.
        point: [B] the branch point's column.
        tokens: [B, 1 + W] the token each branch starts with, the main branch first.
        at: [B, 1 + W] how many draft tokens are before it; NONE: it is not open, and starts at the branch point.
        positions: [B, C] by column.
        first: [B, 1] the first column that is not padding.
        inputs: receives 1 + W tokens per row.
    """
    rows, queries = inputs.tokens.shape
    _open_branches_kernel[(rows, queries)](
        pending.ids, pending.start, pending.end, point, tokens, at, side.point, side.forks, side.tokens, side.slots,
        positions, first, *inputs, queries, pending.ids.stride(0), positions.stride(0), tokens.stride(0), side.depth,
        num_warps=1,
    )  # fmt: skip


def verify_inputs(
    ids: Tensor,
    round_result: Tensor,
    draft_tokens: Tensor,
    leaves: tuple[Tensor, Tensor] | None,
    first_position: Tensor,
    last: Tensor,
    first: Tensor,
    base: Tensor,
    inputs: ForwardInputs,
) -> None:
    """Write what the target reads: the last token and the draft; with leaves also the token before, and these.

    Args:
        ids: [B, C] the text.
        round_result: [7, B] packed; see `RoundResult` in `decoding.state`.
        draft_tokens: [B, N].
        leaves: tree leaves [B, W] and the draft positions [B, W] they are alternatives for, or None.
        first_position: [B, 1] the position of slot 0.
        last: [1] the last slot that counts for positions.
        first: [B, 1] the first slot that is not padding.
        base: [1] slots before the text.
        inputs: receives N + 1 tokens per row, or N + 2 + W with leaves. If it has room for more of these, the first one
            fills it: its keys and values are written more than once.
    """
    rows, queries = inputs.tokens.shape
    tokens, at = leaves or (draft_tokens, draft_tokens)
    _verify_inputs_kernel[(rows, queries)](
        ids, round_result, draft_tokens, tokens, at, first_position, last, first, base, *inputs, queries, ids.stride(0),
        round_result.stride(0), draft_tokens.shape[1], draft_tokens.stride(0), tokens.stride(0), tokens.shape[1],
        LEAVES=leaves is not None, num_warps=1,
    )  # fmt: skip


@varying("queries", "ids_stride", "positions_stride")
def _pending_inputs_kernel(
    ids: Value, end: Value, positions: Value, first: Value, input_tokens: Value, input_slots: Value,
    input_positions: Value, spans: Value, queries: Value, ids_stride: Value, positions_stride: Value,
) -> None:  # fmt: skip
    row, query = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.maximum(tl.load(end + row) - queries + query, 0)
    place = row * queries + query
    tl.store(input_tokens + place, tl.load(ids + row * ids_stride + column))
    tl.store(input_slots + place, column)
    tl.store(input_positions + place, tl.load(positions + row * positions_stride + column))
    store_spans(spans, place, tl.load(first + row), column + 1, column * 0, column * 0)


@varying("queries", "ids_stride", "positions_stride", "tokens_stride", "depth")
def _open_branches_kernel(
    ids: Value, start: Value, end: Value, point: Value, tokens: Value, at: Value, side_point: Value, forks: Value,
    side_tokens: Value, side_slots: Value, positions: Value, first: Value, input_tokens: Value, input_slots: Value,
    input_positions: Value, spans: Value, queries: Value, ids_stride: Value, positions_stride: Value,
    tokens_stride: Value, depth: Value,
) -> None:  # fmt: skip
    row, query = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row * queries + query
    branch_point = tl.load(point + row)
    if query == 0:
        column = tl.load(end + row) - 1
        slot = column
        token = tl.load(ids + row * ids_stride + column)
        tl.store(side_point + row, branch_point)
    else:
        where = tl.load(at + row * tokens_stride + query)
        column = tl.where(where < 0, branch_point, tl.load(start + row) + where)
        slot = branch_point + tl.load(side_slots + (query - 1) * depth)
        token = tl.load(tokens + row * tokens_stride + query)
        branch = row * (queries - 1) + query - 1
        tl.store(forks + branch, column)
        tl.store(side_tokens + branch * (depth + 1), token)
    tl.store(input_tokens + place, token)
    tl.store(input_slots + place, slot)
    tl.store(input_positions + place, tl.load(positions + row * positions_stride + column))
    # The main branch continues the text; a side branch sees the text before it, and its own slots.
    own = (query > 0).to(tl.int64)
    store_spans(spans, place, tl.load(first + row), column + 1 - own, slot * own, (slot + 1) * own)


@varying("queries", "ids_stride", "result_stride", "length", "draft_stride", "leaves_stride", "leaves")
def _verify_inputs_kernel(
    ids: Value, round_result: Value, draft_tokens: Value, leaf_tokens: Value, leaf_at: Value, first_position: Value,
    last: Value, first: Value, base: Value, input_tokens: Value, input_slots: Value, input_positions: Value,
    spans: Value, queries: Value, ids_stride: Value, result_stride: Value, length: Value, draft_stride: Value,
    leaves_stride: Value, leaves: Value, LEAVES: constexpr,
) -> None:  # fmt: skip
    row, query = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row * queries + query
    final = load_text_length(round_result, row, result_stride) - 1  # the column of the last token
    ids += row * ids_stride
    if LEAVES:
        nth = tl.where(query < length + leaves + 2, query, 0) - 1  # 0 is the last token
    else:
        nth = query
    _, _, _, _, continuation, _ = load_round_result(round_result, row, result_stride)
    skipped = (continuation >= 0).to(tl.int64)
    column = final + tl.where(nth < 0, -skipped, nth)
    token = tl.load(ids + column, mask=nth <= 0, other=0)
    drafted = tl.load(draft_tokens + row * draft_stride + nth - 1, mask=(nth > 0) & (nth <= length), other=0)
    token = tl.where(nth <= 0, token, drafted)
    before_text = tl.load(base)
    slot = column + before_text
    placed_at = slot
    own = skipped * 0
    if LEAVES:
        if nth > length:
            leaf = row * leaves_stride + nth - length - 1
            token = tl.load(leaf_tokens + leaf)
            # A leaf has the position of the draft token that it replaces, and a slot after the draft.
            placed_at = final + before_text + 1 + tl.maximum(tl.load(leaf_at + leaf), 0)
            own = skipped * 0 + 1
    tl.store(input_tokens + place, token)
    tl.store(input_slots + place, slot)
    position = tl.minimum(placed_at, tl.load(last)) + tl.load(first_position + row)
    tl.store(input_positions + place, tl.maximum(position, 0))
    store_spans(spans, place, tl.load(first + row), placed_at + 1 - own, slot * own, (slot + 1) * own)
