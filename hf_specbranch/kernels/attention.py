"""Attention of a few queries over a long cache, with any visibility.

The keys are split over many programs, so that one sequence fills the GPU; each leaves a partial result (the largest
score m, the sum of exponentials l, the weighted sum of values), and a second kernel combines them:

    out = sum_s exp(m_s - m) acc_s / (exp(sink - m) + sum_s exp(m_s - m) l_s),    m = max(sink, max_s m_s)

The queries of all heads that share keys stand together as rows of one matrix product. Blocks of keys that no query
sees are left out beforehand, so a cache may be much larger than what is in use.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import (
    Value,
    constexpr,
    early,
    multiprocessors,
    power_of_two,
    runs,
    start_next,
    tl,
    triton,
    varying,
    wait_for_last,
    wait_once_known,
)
from .blocks import Blocks, blocks_in_use, mask_kind, visible

MOST_QUERIES = 64
MOST_SPLITS = 64
STAGES = 5  # of the pipeline; two blocks are then under way, since where a block lies is itself read


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    blocks: Blocks | None = None,
) -> Tensor:
    """Attention of up to 64 queries; a query that sees nothing gets zeros.

    Args:
        query: [B, Hq, Q, D].
        key: [B, Hkv, S, D], Hkv dividing Hq.
        value: [B, Hkv, S, D].
        mask: [B or 1, 1, Q, S], of bool (True is seen) or float (added to the scores); None sees everything.
        scaling: factor of the scores.
        softcap: scores become `softcap * tanh(score / softcap)`.
        sinks: [Hq], a further score of each head that takes weight and brings no value.
        blocks: what `blocks_in_use(mask, ...)` gave, if it is known already.

    Returns:
        [B, Q, Hq, D].

    Example:
        >>> query, cache = torch.randn(1, 4, 3, 64), torch.randn(1, 2, 100, 64)
        >>> attend(query, cache, cache, torch.ones(1, 1, 3, 100, dtype=torch.bool), scaling=0.125).shape
        torch.Size([1, 3, 4, 64])
    """
    if not fits(query, key, value, mask):
        return attend_reference(query, key, value, mask, scaling, softcap, sinks)
    rows, heads, queries, size = query.shape
    key_heads, slots = key.shape[1], key.shape[2]
    blocks = blocks or blocks_in_use(mask, rows, slots, query)
    packed = heads // key_heads * queries
    exact = query.dtype == torch.float32
    tile = min(power_of_two(packed, 16), 16 if exact else 64 if size <= 128 else 32)
    tiles = triton.cdiv(packed, tile)
    splits = _splits(rows * key_heads * tiles, blocks.listed.shape[1], query.device)
    partial = query.new_empty((rows, heads, queries, splits, size), dtype=torch.float32)
    scores = query.new_empty((2, rows, heads, queries, splits), dtype=torch.float32)
    seen = query if mask is None else mask.expand(rows, -1, -1, -1)
    mask_strides = (0, 0) if mask is None else (seen.stride(0), seen.stride(2))
    _split_kernel[(tiles, rows * key_heads, splits)](
        query, key, value, seen, blocks.listed, blocks.number, partial, scores, scores[1],
        scaling, softcap or 1.0, key_heads, heads // key_heads, queries, slots, size, splits, blocks.listed.shape[1],
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *mask_strides,
        MASK=mask_kind(mask), SOFTCAP=softcap is not None, EXACT=exact,
        TILE=tile, BLOCK=blocks.size, SIZE=power_of_two(size, 16),
        num_warps=8 if exact or tile == 64 else 4,  # for tiles of 64 four take twice as long to compile
        num_stages=1 if exact else STAGES, **early(query.device),
    )  # fmt: skip
    out = query.new_empty((rows, queries, heads, size))
    _combine_kernel[(queries, heads, rows)](
        partial, scores, scores[1], sinks if sinks is not None else scores, out, size, splits,
        SINKS=sinks is not None, SPLITS=power_of_two(splits, 8), SIZE=power_of_two(size, 16), num_warps=1,
        **early(query.device),
    )  # fmt: skip
    return out


def attend_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """What `attend` computes, in plain torch: at least float32 throughout, rounded once at the end."""
    groups, wide = query.shape[1] // key.shape[1], torch.promote_types(query.dtype, torch.float32)
    key, value = (states.to(wide).repeat_interleave(groups, dim=1) for states in (key, value))
    scores = query.to(wide) @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2
        scores = scores if mask.dtype == torch.bool else scores + mask
        scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.to(wide).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : key.shape[2]]  # NaN where nothing is seen
    return (weights @ value).transpose(1, 2).to(query.dtype)


def _splits(programs: int, blocks: int, device: torch.device) -> int:
    """As many as fill the GPU twice over, but a block at least for each."""
    return max(1, min(2 * multiprocessors(device) // programs, blocks, MOST_SPLITS))


def fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernel can take these."""
    return (
        runs(query, key, value)
        and query.shape[2] <= MOST_QUERIES
        and query.shape[3] == value.shape[3] <= 256
        and all(states.stride(3) == 1 for states in (query, key, value))
        and (mask is None or (mask.shape[1] == 1 and mask.shape[3] == key.shape[2] and mask.stride(3) == 1))
        and (mask is None or mask.dtype in (torch.bool, query.dtype))
    )


@varying("key_heads", "group", "queries", "splits", "blocks")
def _split_kernel(
    query: Value,
    key: Value,
    value: Value,
    mask: Value,
    listed: Value,
    count: Value,
    partial: Value,
    maxima: Value,
    sums: Value,
    scaling: Value,
    softcap: Value,
    key_heads: Value,
    group: Value,
    queries: Value,
    slots: Value,
    size: Value,
    splits: Value,
    blocks: Value,
    query_row: Value,
    query_head: Value,
    query_token: Value,
    key_row: Value,
    key_head: Value,
    key_slot: Value,
    value_row: Value,
    value_head: Value,
    value_slot: Value,
    mask_row: Value,
    mask_query: Value,
    MASK: constexpr,
    SOFTCAP: constexpr,
    EXACT: constexpr,
    TILE: constexpr,
    BLOCK: constexpr,
    SIZE: constexpr,
    EARLY: constexpr,
) -> None:
    start_next(EARLY)
    row = (tl.program_id(1) // key_heads).to(tl.int64)
    shared = (tl.program_id(1) % key_heads).to(tl.int64)
    split = tl.program_id(2)
    packed = tl.program_id(0) * TILE + tl.arange(0, TILE)  # heads that share keys, then tokens
    head, token = packed // queries, packed % queries
    real = packed < group * queries
    lane = tl.arange(0, SIZE)
    lane_inside = lane < size
    inside_tile = real[:, None] & lane_inside[None, :]
    mine = query + row * query_row + shared * group * query_head
    mine = mine + (head * query_head + token * query_token)[:, None] + lane[None, :]
    keys = key + row * key_row + shared * key_head
    values = value + row * value_row + shared * value_head
    masks = mask + row * mask_row + (token * mask_query)[:, None]
    wait_once_known(row + shared + head + token, EARLY)
    asked = tl.load(mine, mask=inside_tile, other=0.0)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    result = tl.zeros((TILE, SIZE), tl.float32)
    # Blocks go round the splits like cards: whatever part of the cache is in use, each gets its share. The first is
    # looked up beside their number; it may be none of those listed, and is not used then.
    first = tl.load(listed + row * blocks + split)
    for turn in range(split, tl.load(count + row), splits):
        slot = tl.load(listed + row * blocks + turn, mask=turn != split, other=first) * BLOCK + tl.arange(0, BLOCK)
        inside = slot < slots
        place = slot.to(tl.int64)
        known = tl.load(
            keys + place[None, :] * key_slot + lane[:, None], mask=inside[None, :] & lane_inside[:, None], other=0.0
        )
        if EXACT:
            score = tl.dot(asked, known, input_precision="ieee") * scaling
        else:
            score = tl.dot(asked, known) * scaling
        if SOFTCAP:
            score = softcap * (1.0 - 2.0 / (tl.exp(2.0 * score / softcap) + 1.0))
        seen = real[:, None] & inside[None, :]
        if MASK == 1:
            seen = visible(tl.load(masks + slot[None, :], mask=seen, other=0), MASK)
        elif MASK == 2:
            bias = tl.load(masks + slot[None, :], mask=seen, other=float("-inf"))
            seen = visible(bias, MASK)
            score += bias.to(tl.float32)
        score = tl.where(seen, score * 1.4426950408889634, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weight, 1)
        brought = tl.load(
            values + place[:, None] * value_slot + lane[None, :], mask=inside[:, None] & lane_inside[None, :], other=0.0
        )
        if EXACT:
            result = result * fade[:, None] + tl.dot(weight, brought, input_precision="ieee")
        else:
            result = result * fade[:, None] + tl.dot(weight.to(brought.dtype), brought)
        top = higher
    before = (row * key_heads + shared) * group * queries * splits
    target = packed * splits + split
    tl.store(maxima + before + target, top, mask=real)
    tl.store(sums + before + target, total, mask=real)
    tl.store(partial + before * size + (target * size)[:, None] + lane[None, :], result, mask=inside_tile)


@varying("splits")
def _combine_kernel(
    partial: Value,
    maxima: Value,
    sums: Value,
    sinks: Value,
    out: Value,
    size: Value,
    splits: Value,
    SINKS: constexpr,
    SPLITS: constexpr,
    SIZE: constexpr,
    EARLY: constexpr,
) -> None:
    start_next(EARLY)
    token, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    queries, heads = tl.num_programs(0), tl.num_programs(1)
    first = ((row * heads + head) * queries + token) * splits
    split, lane = tl.arange(0, SPLITS), tl.arange(0, SIZE)
    wait_for_last(EARLY)
    tops = tl.load(maxima + first + split, mask=split < splits, other=float("-inf"))
    totals = tl.load(sums + first + split, mask=split < splits, other=0.0)
    parts = tl.load(
        partial + first * size + (split * size)[:, None] + lane[None, :],
        mask=(split < splits)[:, None] & (lane < size)[None, :],
        other=0.0,
    )
    highest = tl.max(tops, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        highest = tl.maximum(highest, sink)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    share = tl.exp2(tops - base)
    whole = tl.sum(share * totals, 0)
    if SINKS:
        whole += tl.exp2(sink - base)
    result = tl.sum(parts * share[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    target = out + ((row * queries + token) * heads + head) * size
    tl.store(target + lane, result.to(out.dtype.element_ty), mask=lane < size)
