"""Split attention (flash decoding): a few queries over a long cache, under any mask.

The keys are split over many programs, so that one sequence fills the GPU. Each program writes the attention over its
keys alone, out_s, and the logarithm of its sum of exponentials, l_s. What reads the result combines them:

    out = sum_s exp(l_s - l) out_s / sum_s exp(l_s - l),    l = max_s l_s

A sink is a score without a value in the first split.

The queries of all heads that share keys are the rows of one matrix product. What a query sees is given by spans
(`spans.py`) or by a mask. Spans are read by the kernel, and nothing else depends on the length of the text: neither
the grid nor the number of splits. With a mask, blocks of keys that no query sees are skipped (`blocks.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention_reference import attend_reference
from .backend import (
    Value,
    can_run,
    constexpr,
    dependent_launch,
    launch_dependents,
    multiprocessors,
    power_of_two,
    prefetch,
    tl,
    triton,
    varying,
    wait_after,
)
from .blocks import Blocks, block_size, blocks_in_use, mask_kind, visible
from .combine import COMBINED, MOST_FOR_PRODUCT, Reader, SplitHeads, combined
from .pending_norms import PendingNorms, finish_key, head_factors
from .spans import SPANS, blocks_of_spans, splits_in_use

MOST_QUERIES = 64
LEAST_TILE = 16  # queries of a program, those of all heads that share a key
MOST_SPLITS = 64
BY_SPANS = 3  # in place of the kind of a mask; see `mask_kind`
# Stages of the pipeline. With three, two programs fit on a multiprocessor, so one loads while the other begins or ends.
# With a mask, two blocks are in flight, since the position of a block is itself loaded.
STAGES, STAGES_WITH_MASK = 3, 5
# Where the next product needs the L1 cache, two stages. Three take more than 48 KiB of shared memory. For such a kernel
# a multiprocessor has little L1, until all its programs have ended, those of a product that starts early included. On
# an H200 one token of Qwen3-0.6B took 0.57 ms with two stages and 0.70 ms with three, Phi-3-mini 2.26 and 3.24 ms.
STAGES_BESIDE_PRODUCT, SMALL_HEAD = 2, 64  # with heads of 64 dimensions three stages take 36 KiB
LEAST, LEAST_FOR_PRODUCT = 2, 4  # blocks of a split where there are many; see `splits_in_use`
PROGRAMS, PROGRAMS_WITH_MASK = 2, 1  # of a multiprocessor at a time, for which the keys are split


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
    """Compute attention for up to 64 queries. A query that sees nothing gets zeros.

    Args:
        query: [B, Hq, Q, D].
        key: [B, Hkv, S, D], Hkv dividing Hq.
        value: [B, Hkv, S, D].
        mask: [B or 1, 1, Q, S], boolean (True: visible) or additive; or spans [B, 1, Q, 4] of int32; None: everything
            is visible. With spans, no key outside of the blocks that they touch is read. Spans are read before the
            wait for the kernel before, which must be launched `LATE` if it is one of ours (`dependent_launch`).
        scaling: factor of the scores.
        softcap: scores become `softcap * tanh(score / softcap)`.
        sinks: [Hq], an extra score per head that takes weight and adds no value.
        blocks: the result of `blocks_in_use(mask, ...)`, if it is known already.

    Returns:
        [B, Q, Hq, D].

    Example:
        >>> query, cache = torch.randn(1, 4, 3, 64), torch.randn(1, 2, 100, 64)
        >>> attend(query, cache, cache, torch.ones(1, 1, 3, 100, dtype=torch.bool), scaling=0.125).shape
        torch.Size([1, 3, 4, 64])
    """
    heads = attend_in_splits(query, key, value, mask, scaling, softcap, sinks, blocks)
    return combined(heads).view(query.shape[0], query.shape[2], query.shape[1], -1)


def attend_in_splits(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    blocks: Blocks | None = None,
    reader: Reader = COMBINED,
    pending: PendingNorms | None = None,
) -> Tensor | SplitHeads:
    """Compute attention for a reader that can combine splits. See `attend`.

    `reader`: what reads the heads. `pending`: norms of q and k that are not finished, for one token under spans.

    Returns:
        [B, Q, Hq * D].
    """
    if not fits(query, key, value, mask):
        assert pending is None
        return attend_reference(query, key, value, mask, scaling, softcap, sinks).flatten(2)
    rows, heads, queries, size = query.shape
    key_heads, slots = key.shape[1], key.shape[2]
    by_spans = mask is not None and mask.dtype == SPANS
    packed = heads // key_heads * queries
    exact = query.dtype == torch.float32
    tile = min(power_of_two(packed, LEAST_TILE), LEAST_TILE if exact else 64 if size <= 128 else 32)
    tiles = triton.cdiv(packed, tile)
    if by_spans:
        listed, number, block = mask, mask, block_size(query)
        most_blocks, at_a_time = MOST_SPLITS, PROGRAMS
    else:
        blocks = blocks or blocks_in_use(mask, rows, slots, query)
        listed, number, block = blocks
        most_blocks, at_a_time = listed.shape[1], PROGRAMS_WITH_MASK
    splits = _splits(rows * key_heads * tiles, most_blocks, at_a_time * multiprocessors(query.device))
    splits, least = (min(splits, MOST_FOR_PRODUCT), LEAST_FOR_PRODUCT) if reader.combines else (splits, LEAST)
    # Two stages for more queries would fit too (44 KiB), but were not compared.
    leaves_l1 = reader.needs_l1 and SMALL_HEAD < size <= 2 * SMALL_HEAD and tile <= LEAST_TILE
    stages = STAGES_BESIDE_PRODUCT if leaves_l1 else STAGES
    if splits == 1:  # there is nothing to combine
        results = sums = query.new_empty((rows, queries, 1, heads * size))
    else:
        results = query.new_empty((rows, queries, splits, heads * size), dtype=torch.float32)
        sums = query.new_empty((rows, queries, heads, splits), dtype=torch.float32)
    seen = query if mask is None else mask.expand(rows, -1, -1, -1)
    mask_strides = (0, 0) if mask is None else (seen.stride(0), seen.stride(2))
    assert pending is None or (by_spans and queries == rows == tiles == 1)
    squares, eps, fresh = (sums, 0.0, number) if pending is None else pending
    _split_kernel[(tiles, rows * key_heads, splits)](
        query, key, value, seen, listed, number, results, sums, sums if sinks is None else sinks,
        squares, fresh, eps, scaling, softcap or 1.0, key_heads, heads // key_heads, queries, slots, size, splits,
        most_blocks,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *mask_strides,
        MASK=BY_SPANS if by_spans else mask_kind(mask), SOFTCAP=softcap is not None, EXACT=exact,
        PARTS=0 if pending is None else squares.shape[1], SINKS=sinks is not None, WHOLE=splits == 1,
        TILE=tile, BLOCK=block, LEAST=least, SIZE=power_of_two(size, 16),
        num_warps=8 if exact or tile == 64 else 4,  # with 4 warps, tiles of 64 take twice as long to compile
        num_stages=1 if exact else stages if by_spans else STAGES_WITH_MASK,
        **dependent_launch(query.device),
    )  # fmt: skip
    if splits == 1:
        return results[:, :, 0]
    return SplitHeads(results, sums, seen if by_spans else None, block, least, query.dtype, leaves_l1)


def _splits(programs: int, blocks: int, at_a_time: int) -> int:
    """Return the number of splits: enough that so many programs run at a time, with at least one block each."""
    return max(1, min(at_a_time // programs, blocks, MOST_SPLITS))


def fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether the kernel can take these."""
    return (
        can_run(query, key, value)
        and query.shape[2] <= MOST_QUERIES
        and query.shape[3] == value.shape[3] <= 256
        and all(states.stride(3) == 1 for states in (query, key, value))
        and (mask is None or (mask.shape[1] == 1 and mask.stride(3) == 1))
        and (mask is None or mask.dtype == SPANS or mask.shape[3] == key.shape[2])
        and (mask is None or mask.dtype == SPANS or mask.dtype in (torch.bool, query.dtype))
    )


def finishes_norms(heads: int, key_heads: int, dtype: torch.dtype) -> bool:
    """Return whether the kernel may be left to finish the norms of the heads of one token.

    One program must have all queries that share a key, since it writes that key. In float16, numbers before a norm may
    be too large.
    """
    return dtype == torch.bfloat16 and heads <= LEAST_TILE * key_heads


@varying("key_heads", "group", "queries", "splits", "blocks")
def _split_kernel(
    query: Value,
    key: Value,
    value: Value,
    mask: Value,
    listed: Value,
    count: Value,
    results: Value,
    sums: Value,
    sinks: Value,
    squares: Value,
    fresh: Value,
    eps: Value,
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
    PARTS: constexpr,
    SINKS: constexpr,
    WHOLE: constexpr,
    TILE: constexpr,
    BLOCK: constexpr,
    LEAST: constexpr,
    SIZE: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    row = (tl.program_id(1) // key_heads).to(tl.int64)
    shared = (tl.program_id(1) % key_heads).to(tl.int64)
    split = tl.program_id(2)
    packed = tl.program_id(0) * TILE + tl.arange(0, TILE)  # heads that share keys, then tokens
    head, token = packed // queries, packed % queries
    real = packed < group * queries
    lane, near = tl.arange(0, SIZE), tl.arange(0, BLOCK)
    lane_inside = lane < size
    inside_tile = real[:, None] & lane_inside[None, :]
    queries_at = query + row * query_row + shared * group * query_head
    queries_at = queries_at + (head * query_head + token * query_token)[:, None] + lane[None, :]
    keys = key + row * key_row + shared * key_head
    values = value + row * value_row + shared * value_head
    masks = mask + row * mask_row + (token * mask_query)[:, None]
    # Blocks are dealt to the splits in turn, so that each gets its share of whatever is in use.
    if MASK == 3:
        # The kernel before this one writes q, k and v of the tokens in the pass. It lets this one start when everything
        # before it is complete: the spans, and the keys and values of the text, which are prefetched.
        first = tl.load(masks, mask=real[:, None], other=0, cache_modifier=".cg")
        end = tl.load(masks + 1, mask=real[:, None], other=0, cache_modifier=".cg")
        own_first = tl.load(masks + 2, mask=real[:, None], other=0, cache_modifier=".cg")
        own_end = tl.load(masks + 3, mask=real[:, None], other=0, cache_modifier=".cg")
        listed_first, number, last = blocks_of_spans(mask + row * mask_row, queries, mask_query, BLOCK)
        used = splits_in_use(number, splits, LEAST)
        if split >= used:
            return
        first_slots = tl.minimum((listed_first + split) * BLOCK + near, slots - 1).to(tl.int64)[:, None]
        line = tl.minimum(tl.arange(0, (SIZE + 31) // 32) * 32, size - 1)[None, :]
        if PDL:
            if number > 0:
                prefetch(keys + first_slots * key_slot + line)
                prefetch(values + first_slots * value_slot + line)
        wait_after(row + shared + head + token + used, PDL)
    else:
        used = splits
        wait_after(row + shared + head + token, PDL)
        # The first block is loaded along with their number; if it is not one of those listed, the loop does not use it.
        number = tl.load(count + row)
        listed_first = tl.load(listed + row * blocks + split)
        last = slots
    query_block = tl.load(queries_at, mask=inside_tile, other=0.0)
    if PARTS > 0:  # norms are finished here
        new_slot = tl.load(fresh, cache_modifier=".cg").to(tl.int32)
        scaling = scaling * head_factors(squares, shared * group + head, real, size, eps, PARTS)[:, None]
        of_keys = key_heads * group + shared + tl.arange(0, 1)
        key_factor = tl.sum(head_factors(squares, of_keys, of_keys >= 0, size, eps, PARTS), 0)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    result = tl.zeros((TILE, SIZE), tl.float32)
    if SINKS:
        sink = tl.load(sinks + shared * group + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        top, total = tl.where(split == 0, sink, top), tl.where(split == 0, 1.0, total)
    for turn in range(split, number, used):
        block = listed_first + turn
        if MASK != 3:
            block = tl.load(listed + row * blocks + turn, mask=turn != split, other=listed_first)
        slot = block * BLOCK + near
        inside = slot < last
        begin = (block * BLOCK).to(tl.int64)  # distances within a block fit into 32 bits: less arithmetic
        query_tile = query_block
        if MASK == 3 and TILE <= 16:
            # Few queries go to shared memory in the loop. Before it, the first keys would be loaded only after these
            # have come. More queries would take registers that the loop needs.
            query_tile = tl.where(turn >= 0, query_block, 0.0)
        key_block = tl.load(
            keys + begin * key_slot + (near[None, :] * key_slot + lane[:, None]),
            mask=inside[None, :] & lane_inside[:, None], other=0.0,
        )  # fmt: skip
        if EXACT:
            score = tl.dot(query_tile, key_block, input_precision="ieee") * scaling
        else:
            score = tl.dot(query_tile, key_block) * scaling
        if PARTS > 0:
            score = tl.where((slot == new_slot)[None, :], score * key_factor, score)
        if SOFTCAP:
            score = softcap * (1.0 - 2.0 / (tl.exp(2.0 * score / softcap) + 1.0))
        seen = real[:, None] & inside[None, :]
        if MASK == 1:
            seen = visible(tl.load(masks + slot[None, :], mask=seen, other=0), MASK)
        elif MASK == 2:
            bias = tl.load(masks + slot[None, :], mask=seen, other=float("-inf"))
            seen = visible(bias, MASK)
            score += bias.to(tl.float32)
        elif MASK == 3:
            in_text = (slot[None, :] >= first) & (slot[None, :] < end)
            seen = in_text | ((slot[None, :] >= own_first) & (slot[None, :] < own_end))
        score = tl.where(seen, score * 1.4426950408889634, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - base[:, None])
        rescale = tl.exp2(top - base)  # of what was summed under the old maximum
        total = total * rescale + tl.sum(weight, 1)
        value_block = tl.load(
            values + begin * value_slot + (near[:, None] * value_slot + lane[None, :]),
            mask=inside[:, None] & lane_inside[None, :], other=0.0,
        )  # fmt: skip
        if EXACT:
            result = result * rescale[:, None] + tl.dot(weight, value_block, input_precision="ieee")
        else:
            result = result * rescale[:, None] + tl.dot(weight.to(value_block.dtype), value_block)
        top = new_top
    if PARTS > 0:
        turn = new_slot // BLOCK - listed_first
        if split == tl.where((turn >= 0) & (turn < number), turn % used, 0):  # no other program reads this key
            finish_key(keys + new_slot.to(tl.int64) * key_slot, key_factor, lane, lane_inside)
    total = tl.where(total == 0.0, 1.0, total)
    result = result * (1.0 / total)[:, None]
    heads = key_heads * group
    token, head = row * queries + token, shared * group + head
    place = ((token * splits + split) * heads + head) * size
    tl.store(results + place[:, None] + lane[None, :], result.to(results.dtype.element_ty), mask=inside_tile)
    if not WHOLE:
        tl.store(sums + (token * heads + head) * splits + split, top + tl.log2(total), mask=real)
