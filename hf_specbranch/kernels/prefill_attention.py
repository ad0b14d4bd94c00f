"""Flash attention for a chunk of a prompt: many queries over a long cache, each over a range of slots.

A program computes one tile of queries of one head. It reads blocks of keys and values one after the other and keeps,
per query, the largest score m, the sum of exponentials l and the weighted sum of values:

    m' = max(m, max_s score_s),    l' = exp(m - m') l + sum_s exp(score_s - m'),    out = acc / l

How long the context is stands in the spans only, on the device: one captured launch serves every length. Blocks that
all queries of a tile see come first and need no mask. Blocks at the borders of the ranges come after them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .attention_reference import attend_reference
from .backend import (
    Value,
    can_run,
    constexpr,
    dependent_launch,
    jit,
    launch_dependents,
    power_of_two,
    tl,
    triton,
    varying,
    wait_for_dependencies,
)

LOG2_E = math.log2(math.e)  # scores are kept in units of log 2, where the GPU has an instruction for the exponential
LARGEST_STRIDE = (1 << 31) // 128  # elements between slots: offsets within a block are 32-bit numbers


class Tiles(NamedTuple):
    """The sizes that the kernel is compiled for."""

    queries: int  # in a tile
    keys: int  # in a block
    warps: int
    stages: int  # of the pipeline that loads blocks


def attend_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Compute attention for many queries, each over one range of slots. A query that sees nothing gets zeros.

    Slots before the first and after the last one that a tile of queries sees are not read: they may hold anything, or
    be reserved memory without pages. Slots between two ranges of one tile are read and must hold numbers.

    Args:
        query: [B, Hq, Q, D].
        key: [B, Hkv, S, D], Hkv dividing Hq.
        value: [B, Hkv, S, D].
        spans: [B, 1, Q, 4], int32: query q sees the slots `first <= s < end`, the first two numbers, within
            0 <= s < S. The last two, the query's own range outside the text, are ignored: in a chunk of a prompt
            that range is empty.
        scaling: factor of the scores.
        softcap: scores become `softcap * tanh(score / softcap)`.
        sinks: [Hq], an extra score per head that takes weight and adds no value.
        tiles: the sizes that the kernel is compiled for, if not the usual ones.

    Returns:
        [B, Q, Hq, D].

    Example:
        >>> query, cache = torch.randn(1, 4, 100, 64), torch.randn(1, 2, 500, 64)
        >>> spans = torch.zeros((1, 1, 100, 4), dtype=torch.int32)
        >>> spans[..., 1] = torch.arange(301, 401)  # 300 tokens before the chunk
        >>> attend_chunk(query, cache, cache, spans, scaling=0.125).shape
        torch.Size([1, 100, 4, 64])
    """
    if not fits(query, key, value, spans, scaling):
        return attend_chunk_reference(query, key, value, spans, scaling, softcap, sinks)
    rows, heads, queries, size = query.shape
    tiles = tiles or tiles_for(size, query.dtype, query.device)
    # tanh(x) = 1 - 2 / (exp(2 x) + 1), so that score = cap - 2 cap / (2^(scale product) + 1)
    scale = LOG2_E * (scaling if softcap is None else 2 * scaling / softcap)
    out = query.new_empty((rows, queries, heads, size))
    _chunk_kernel[(rows * heads, triton.cdiv(queries, tiles.queries))](
        query, key, value, spans, query if sinks is None else sinks, out,
        scale, LOG2_E * (softcap or 1.0), heads, heads // key.shape[1], queries, size,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], spans.stride(0), spans.stride(2),
        SOFTCAP=softcap is not None, SINKS=sinks is not None, EXACT=query.dtype == torch.float32,
        PADDED=power_of_two(size, 16) != size, TILE=tiles.queries, BLOCK=tiles.keys, SIZE=power_of_two(size, 16),
        num_warps=tiles.warps, num_stages=tiles.stages, **dependent_launch(query.device),
    )  # fmt: skip
    return out


def attend_chunk_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute what `attend_chunk` does, in plain torch. It waits for the spans, whose last slot bounds the work."""
    first, end = spans[..., 0:1], spans[..., 1:2]  # [B, 1, Q, 1]
    seeing = end > first
    last = int((end * seeing).max())
    slot = torch.arange(last, device=spans.device)
    seen = (slot >= first) & (slot < end)  # [B, 1, Q, S]
    used = seen.any(2)[..., None]  # other slots may hold anything, and 0 * NaN is NaN
    key, value = (states[:, :, :last].masked_fill(~used, 0.0) for states in (key, value))
    return attend_reference(query, key, value, seen, scaling, softcap, sinks)


def fits(query: Tensor, key: Tensor, value: Tensor, spans: Tensor, scaling: float) -> bool:
    """Return whether the kernel can take these."""
    return (
        can_run(query, key, value)
        and query.shape[3] == value.shape[3] <= 256
        and all(states.stride(3) == 1 for states in (query, key, value))
        and max(key.stride(2), value.stride(2)) < LARGEST_STRIDE
        and spans.dtype == torch.int32
        and spans.device == query.device
        and spans.stride(3) == 1
        and scaling > 0  # the largest product is the largest score
    )


@lru_cache
def tiles_for(size: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """Return tiles that suit a head size and fit in shared memory: a tile of queries, and blocks of keys and values."""
    if dtype == torch.float32:
        return Tiles(32 if size <= 128 else 16, 32, 8, 1)  # without tensor cores: more spills registers
    if size <= 64:
        tiles = Tiles(128, 64, 4, 3)
    else:
        tiles = Tiles(128, 128, 8, 3) if size <= 128 else Tiles(128, 64, 8, 2)
    row = power_of_two(size, 16) * dtype.itemsize  # bytes
    while (tiles.queries + 2 * tiles.stages * tiles.keys) * row > _shared_memory(device) and tiles.keys > 16:
        tiles = tiles._replace(stages=2) if tiles.stages > 2 else tiles._replace(keys=tiles.keys // 2)
    return tiles


def _shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program can have."""
    if device.type != "cuda":
        return 227 << 10
    capability = torch.cuda.get_device_capability(device)
    kilobytes = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}.get(capability, 99)
    return kilobytes << 10


@jit
def _add_block(
    query_tile: Value,
    top: Value,
    total: Value,
    result: Value,
    keys: Value,
    values: Value,
    slot: Value,
    key_slot: Value,
    value_slot: Value,
    first: Value,
    end: Value,
    highest: Value,
    size: Value,
    scale: Value,
    cap: Value,
    MASKED: constexpr,
    SOFTCAP: constexpr,
    EXACT: constexpr,
    PADDED: constexpr,
    BLOCK: constexpr,
    SIZE: constexpr,
) -> tuple[Value, Value, Value]:
    """Add the block of keys and values that begins at a slot to what a tile of queries has summed so far."""
    step, lane = tl.arange(0, BLOCK), tl.arange(0, SIZE)
    place = slot.to(tl.int64)
    keys_at = keys + place * key_slot + (step * key_slot)[None, :] + lane[:, None]
    values_at = values + place * value_slot + (step * value_slot)[:, None] + lane[None, :]
    if MASKED:
        used = slot + step < highest
        key_block = tl.load(keys_at, mask=used[None, :] & (lane < size)[:, None], other=0.0)
        value_block = tl.load(values_at, mask=used[:, None] & (lane < size)[None, :], other=0.0)
    elif PADDED:
        key_block = tl.load(keys_at, mask=(lane < size)[:, None], other=0.0)
        value_block = tl.load(values_at, mask=(lane < size)[None, :], other=0.0)
    else:
        key_block = tl.load(keys_at)
        value_block = tl.load(values_at)
    if EXACT:
        score = tl.dot(query_tile, key_block, input_precision="ieee")
    else:
        score = tl.dot(query_tile, key_block)
    if SOFTCAP:
        score = cap - 2.0 * cap / (tl.exp2(score * scale) + 1.0)
        scale = 1.0
    if MASKED:
        slots = (slot + step)[None, :]
        score = tl.where((slots >= first[:, None]) & (slots < end[:, None]), score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1) * scale)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    else:
        new_top = tl.maximum(top, tl.max(score, 1) * scale)
        base = new_top
    weight = tl.exp2(score * scale - base[:, None])
    rescale = tl.exp2(top - base)  # of what was summed under the old maximum
    total = total * rescale + tl.sum(weight, 1)
    result = result * rescale[:, None]
    if EXACT:
        result = tl.dot(weight, value_block, result, input_precision="ieee")
    else:
        result = tl.dot(weight.to(value_block.dtype), value_block, result)
    return new_top, total, result


@varying("heads", "group", "queries", "span_row")
def _chunk_kernel(
    query: Value,
    key: Value,
    value: Value,
    spans: Value,
    sinks: Value,
    out: Value,
    scale: Value,
    cap: Value,
    heads: Value,
    group: Value,
    queries: Value,
    size: Value,
    query_row: Value,
    query_head: Value,
    query_token: Value,
    key_row: Value,
    key_head: Value,
    key_slot: Value,
    value_row: Value,
    value_head: Value,
    value_slot: Value,
    span_row: Value,
    span_query: Value,
    SOFTCAP: constexpr,
    SINKS: constexpr,
    EXACT: constexpr,
    PADDED: constexpr,
    TILE: constexpr,
    BLOCK: constexpr,
    SIZE: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    row, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # later queries see more: the longest tiles start first
    token = tile * TILE + tl.arange(0, TILE)
    real = token < queries
    lane = tl.arange(0, SIZE)
    inside = real[:, None] & (lane < size)[None, :]
    keys = key + row * key_row + (head // group) * key_head
    values = value + row * value_row + (head // group) * value_head
    wait_for_dependencies(PDL)
    spans_at = spans + row * span_row + token * span_query
    first = tl.load(spans_at, mask=real, other=0)
    end = tl.load(spans_at + 1, mask=real, other=0)
    sees = end > first
    # Blocks follow each other from the first slot that a query sees. All queries that see anything see the full ones.
    lowest = tl.min(tl.where(sees, first, 0x7FFFFFFF), 0)
    highest = tl.max(tl.where(sees, end, 0), 0)
    lowest = tl.minimum(lowest, highest)
    blocks = (highest - lowest + BLOCK - 1) // BLOCK
    before = (tl.max(tl.where(sees, first, 0), 0) - lowest + BLOCK - 1) // BLOCK
    before = tl.maximum(tl.minimum(before, blocks), 0)
    full = (tl.min(tl.where(sees, end, 0x7FFFFFFF), 0) - lowest) // BLOCK - before
    full = tl.maximum(tl.minimum(full, blocks - before), 0)
    query_at = query + row * query_row + head * query_head + (token * query_token)[:, None] + lane[None, :]
    query_tile = tl.load(query_at, mask=inside, other=0.0)
    if SINKS:  # the sink is a score that comes first
        top = tl.zeros((TILE,), tl.float32) + tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total = tl.full((TILE,), 1.0, tl.float32)
    else:
        top = tl.full((TILE,), float("-inf"), tl.float32)
        total = tl.zeros((TILE,), tl.float32)
    result = tl.zeros((TILE, SIZE), tl.float32)
    for block in range(before, before + full):
        top, total, result = _add_block(
            query_tile, top, total, result, keys, values, lowest + block * BLOCK, key_slot, value_slot,
            first, end, highest, size, scale, cap, False, SOFTCAP, EXACT, PADDED, BLOCK, SIZE,
        )  # fmt: skip
    for turn in tl.range(0, blocks - full, num_stages=1):
        block = tl.where(turn < before, turn, turn + full)
        top, total, result = _add_block(
            query_tile, top, total, result, keys, values, lowest + block * BLOCK, key_slot, value_slot,
            first, end, highest, size, scale, cap, True, SOFTCAP, EXACT, PADDED, BLOCK, SIZE,
        )  # fmt: skip
    # A query that sees nothing took part in the full blocks.
    result = tl.where(sees[:, None], result / tl.where(total == 0.0, 1.0, total)[:, None], 0.0)
    target = out + ((row * queries + token) * heads + head)[:, None] * size + lane[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=inside)
