"""Which blocks of keys are visible to any query: a cache may be much larger than what a pass sees."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .backend import (
    Value,
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


class Blocks(NamedTuple):
    """The blocks of keys that some query of a row sees: the first `number` entries of `listed`."""

    listed: Tensor  # [B, blocks] of int32
    number: Tensor  # [B] of int32
    size: int  # keys in a block


def block_size(query: Tensor) -> int:
    """Return the number of keys in a block; float32 products need more registers."""
    return 32 if query.dtype == torch.float32 or query.shape[-1] > 128 else 64


def blocks_in_use(mask: Tensor | None, rows: int, slots: int, query: Tensor) -> Blocks:
    """List the blocks of keys that some query sees. Layers that share a mask [B or 1, 1, Q, S] may share the list."""
    size = block_size(query)
    number = triton.cdiv(slots, size)
    used = query.new_empty((rows, number), dtype=torch.int32)
    listed, count = torch.empty_like(used), used.new_empty((rows,))
    if mask is not None:
        seen = mask.expand(rows, -1, -1, -1)
        queries = seen.shape[2]
        _use_kernel[(rows, number)](
            seen, used, queries, slots, number, seen.stride(0), seen.stride(2),
            MASK=mask_kind(mask), QUERIES=power_of_two(queries, 16), BLOCK=size, num_warps=1,
            **dependent_launch(query.device),
        )  # fmt: skip
    else:
        used.fill_(1)
    _list_kernel[(rows,)](
        used, listed, count, number, BLOCK=power_of_two(number, 64), num_warps=4, **dependent_launch(query.device)
    )
    return Blocks(listed, count, size)


def mask_kind(mask: Tensor | None) -> int:
    """Return the kind of a mask: 0 none, 1 boolean, 2 additive."""
    return 0 if mask is None else 1 if mask.dtype == torch.bool else 2


@jit
def visible(mask: Value, MASK: constexpr) -> Value:
    """Return which mask values are visible. An additive mask hides with a value near the lowest of its dtype."""
    if MASK == 1:
        return mask != 0
    else:
        lowest: tl.constexpr = -3e4 if mask.dtype == tl.float16 else -1e38
        return mask.to(tl.float32) > lowest


@varying("queries", "blocks")
def _use_kernel(
    mask: Value,
    used: Value,
    queries: Value,
    slots: Value,
    blocks: Value,
    mask_row: Value,
    mask_query: Value,
    MASK: constexpr,
    QUERIES: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query = tl.arange(0, QUERIES)[:, None]
    slot = (block * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (query < queries) & (slot < slots)
    if MASK == 1:
        seen = tl.load(mask + row * mask_row + query * mask_query + slot, mask=inside, other=0)
    else:
        seen = tl.load(mask + row * mask_row + query * mask_query + slot, mask=inside, other=float("-inf"))
    tl.store(used + row * blocks + block, tl.max(tl.max(visible(seen, MASK).to(tl.int32), 1), 0))


@varying("blocks")
def _list_kernel(used: Value, listed: Value, count: Value, blocks: Value, BLOCK: constexpr, PDL: constexpr) -> None:
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    wanted = tl.load(used + row * blocks + block, mask=block < blocks, other=0)
    place = tl.cumsum(wanted, 0) - wanted
    tl.store(listed + row * blocks + place, block, mask=wanted != 0)
    tl.store(count + row, tl.sum(wanted, 0))
