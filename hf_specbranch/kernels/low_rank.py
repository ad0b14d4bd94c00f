"""Low-rank terms of a product, scale * (x A^T) B^T: the small product with A, and the epilogue that multiplies by B.

Adapters stay where they are: nothing is joined or copied.
"""

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
    prefetch,
    tl,
    varying,
    wait_for_dependencies,
)
from .linear import BLOCK, tile

MOST_TERMS = 3  # layers with adapters in one product: q, k and v


class LowRank(NamedTuple):
    """One low-rank term for each of some layers whose product is computed as one."""

    downs: tuple[Tensor, ...]  # A [r, K]
    ups: tuple[Tensor, ...]  # B [N_i, r]
    scales: tuple[float, ...]
    starts: tuple[int, ...]  # the first column of the layer in the product


def inner_product(flat: Tensor, terms: LowRank) -> Tensor:
    """Return the partials [S, T, rows, R] of x A^T for each term, in float32; R is the rank, padded with zeros."""
    (rows, depth), (rank, count) = flat.shape, (terms.downs[0].shape[0], len(terms.downs))
    padded = power_of_two(rank, 16)
    splits = min(16, power_of_two(depth // (8 * BLOCK) + 1))  # four to eight blocks in most
    inner = flat.new_empty((splits, count, rows, padded), dtype=torch.float32)
    first = terms.downs[0]
    _inner_kernel[(count, splits)](
        flat, *terms.downs, *[first] * (MOST_TERMS - count), inner, rows, rank, depth, flat.stride(0),
        ROWS=tile(rows)["ROWS"], RANK=padded, BLOCK=BLOCK, num_warps=4, num_stages=3 if padded <= 32 else 2,
        **dependent_launch(flat.device, late=True),
    )  # fmt: skip
    return inner


def epilogue_arguments(terms: LowRank) -> list[Tensor | int | float]:
    """Return B, scale, first and last column of each term, as kernel arguments; the last term fills unused places."""
    each = list(zip(terms.ups, terms.scales, terms.starts))
    each += each[-1:] * (MOST_TERMS - len(each))
    return [argument for up, scale, start in each for argument in (up, scale, start, start + up.shape[0])]


def epilogue_constants(inner: Tensor, terms: LowRank) -> dict[str, int]:
    """Return the sizes that the epilogue is compiled for."""
    return {"TERMS": len(terms.downs), "PARTIALS": inner.shape[0], "RANK": inner.shape[3]}


@varying("rows")
def _inner_kernel(
    x: Value,
    first: Value,
    second: Value,
    third: Value,
    inner: Value,
    rows: Value,
    rank: Value,
    depth: Value,
    x_row: Value,
    ROWS: constexpr,
    RANK: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    term, terms = tl.program_id(0), tl.num_programs(0)
    split, splits = tl.program_id(1), tl.num_programs(1)
    steps = depth // BLOCK
    begin, end = split * steps // splits, (split + 1) * steps // splits
    target = inner + (split * terms + term) * rows * RANK
    if term == 0:
        _multiply(x, first, target, begin, end, rows, rank, depth, x_row, ROWS, RANK, BLOCK, PDL)
    elif term == 1:
        _multiply(x, second, target, begin, end, rows, rank, depth, x_row, ROWS, RANK, BLOCK, PDL)
    else:
        _multiply(x, third, target, begin, end, rows, rank, depth, x_row, ROWS, RANK, BLOCK, PDL)


@jit
def _multiply(
    x: Value,
    down: Value,
    target: Value,
    begin: Value,
    end: Value,
    rows: Value,
    rank: Value,
    depth: Value,
    x_row: Value,
    ROWS: constexpr,
    RANK: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    """Store A x over blocks `begin` to `end` of the inner dimension: [rows, RANK], zeros beyond the rank.

    The next kernel may start when x is complete: it can multiply x by W before it waits for this one.
    """
    index, row = tl.arange(0, RANK), tl.arange(0, ROWS)
    inside = begin * BLOCK + tl.arange(0, BLOCK)
    left = down + index[:, None] * depth + inside[None, :]
    right = x + row[None, :] * x_row + inside[:, None]
    if PDL:
        line = tl.minimum(begin * BLOCK + tl.arange(0, 16) * (BLOCK // 2), end * BLOCK - 1)
        prefetch(down + tl.minimum(index, rank - 1)[:, None] * depth + line[None, :])
    wait_for_dependencies(PDL)
    result = tl.zeros((RANK, ROWS), tl.float32)
    for _ in range(begin, end):
        weights = tl.load(left, mask=(index < rank)[:, None], other=0.0)
        states = tl.load(right, mask=(row < rows)[None, :], other=0.0)
        if down.dtype.element_ty == x.dtype.element_ty:
            result = tl.dot(weights, states, result)
        else:
            result = tl.dot(weights.to(tl.float32), states.to(tl.float32), result, input_precision="tf32x3")
        left += BLOCK
        right += BLOCK
    tl.store(target + row[None, :] * RANK + index[:, None], result, mask=(row < rows)[None, :])


@jit
def prefetch_term(up: Value, start: Value, end: Value, strip: Value, rank: Value) -> None:
    """Prefetch the rows of B for the columns `strip` that belong to a term."""
    ours = (strip >= start) & (strip < end)
    prefetch(up + tl.where(ours, strip - start, 0).to(tl.int64) * rank)


@jit
def _add_term(
    result: Value,
    inner: Value,
    partial_stride: Value,
    up: Value,
    scale: Value,
    start: Value,
    end: Value,
    strip: Value,
    rows: Value,
    rank: Value,
    PARTIALS: constexpr,
    RANK: constexpr,
    ROWS: constexpr,
) -> Value:
    """Add scale * B a to the columns `strip` that belong to a term, where a is the sum of its partials."""
    index, row = tl.arange(0, RANK), tl.arange(0, ROWS)
    ours = (strip >= start) & (strip < end)
    place = (strip - start).to(tl.int64)[:, None] * rank + index[None, :]
    weights = tl.load(up + place, mask=ours[:, None] & (index < rank)[None, :], other=0.0).to(tl.float32)
    states = tl.zeros((RANK, ROWS), tl.float32)
    for split in tl.static_range(PARTIALS):
        part = inner + split * partial_stride + row[None, :] * RANK + index[:, None]
        states += tl.load(part, mask=(row < rows)[None, :], other=0.0)
    return result + scale * tl.dot(weights, states, input_precision="tf32x3")


@jit
def add_terms(
    result: Value,
    inner: Value,
    up_0: Value,
    scale_0: Value,
    start_0: Value,
    end_0: Value,
    up_1: Value,
    scale_1: Value,
    start_1: Value,
    end_1: Value,
    up_2: Value,
    scale_2: Value,
    start_2: Value,
    end_2: Value,
    strip: Value,
    rows: Value,
    rank: Value,
    TERMS: constexpr,
    PARTIALS: constexpr,
    RANK: constexpr,
    ROWS: constexpr,
) -> Value:
    """Add all terms to the columns `strip` of a product [STRIP, ROWS]; a column of -1 belongs to none."""
    size = rows * RANK
    stride = TERMS * size
    result = _add_term(result, inner, stride, up_0, scale_0, start_0, end_0, strip, rows, rank, PARTIALS, RANK, ROWS)
    if TERMS > 1:
        result = _add_term(
            result, inner + size, stride, up_1, scale_1, start_1, end_1, strip, rows, rank, PARTIALS, RANK, ROWS
        )
    if TERMS > 2:
        result = _add_term(
            result, inner + 2 * size, stride, up_2, scale_2, start_2, end_2, strip, rows, rank, PARTIALS, RANK,
            ROWS,
        )  # fmt: skip
    return result
