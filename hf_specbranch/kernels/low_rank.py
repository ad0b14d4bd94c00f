"""Low-rank terms of a product, scale * (x A^T) B^T: the small product with A, and the epilogue that multiplies by B.

Adapters stay where they are: nothing is joined or copied. What is constant is loaded first: A before the wait for x, B
before the product with W. What is left to do after that product takes about a microsecond.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .backend import (
    LATE,
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

MOST_TERMS = 3  # layers with adapters in one product: q, k and v
_ELEMENTS = 1 << 14  # of A per program at most, in registers
_BLOCK = 512  # columns of A per program at most
_ROWS = 8  # of x that have programs of their own; these multiply further ones in turn
_WIDTH = 64  # elements of a row of B that are loaded before the product with W, in registers


class LowRank(NamedTuple):
    """One low-rank term for each of some layers whose product is computed as one."""

    downs: tuple[Tensor, ...]  # A [r, K]
    ups: tuple[Tensor, ...]  # B [N_i, r]
    scales: tuple[float, ...]
    starts: tuple[int, ...]  # the first column of the layer in the product


def inner_product(flat: Tensor, terms: LowRank) -> Tensor:
    """Return the partials [S, rows, T, R] of x A^T for each term, in float32; R is the rank, padded with zeros."""
    (rows, depth), (rank, count) = flat.shape, (terms.downs[0].shape[0], len(terms.downs))
    padded = power_of_two(rank, 16)
    block = min(_BLOCK, _ELEMENTS // padded)
    splits = triton.cdiv(depth, block)
    inner = flat.new_empty((splits, rows, count, padded), dtype=torch.float32)
    first = terms.downs[0]
    _inner_kernel[(count, splits, min(rows, _ROWS))](
        flat, *terms.downs, *[first] * (MOST_TERMS - count), inner, rows, rank, depth, flat.stride(0),
        RANK=padded, BLOCK=block, num_warps=8, **dependent_launch(flat.device, next=LATE),
    )  # fmt: skip
    return inner


def epilogue_arguments(terms: LowRank) -> list[Tensor | int | float]:
    """Return B, scale, first and last column of each term, as kernel arguments; the last term fills unused places."""
    each = list(zip(terms.ups, terms.scales, terms.starts))
    each += each[-1:] * (MOST_TERMS - len(each))
    return [argument for up, scale, start in each for argument in (up, scale, start, start + up.shape[0])]


def epilogue_constants(inner: Tensor, terms: LowRank) -> dict[str, int | bool]:
    """Return the sizes that the epilogue is compiled for; terms are added in groups."""
    padded = inner.shape[3]
    group = max(1, min(power_of_two(len(terms.downs)), _WIDTH // padded))
    return {
        "TERMS": len(terms.downs), "GROUP": group, "PARTIALS": len(inner), "POWER": power_of_two(len(inner)),
        "RANK": padded, "ONE_ROW": inner.shape[1] == 1,
    }  # fmt: skip


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
    RANK: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    """Multiply a block of columns of one A by rows of x, in float32 and without tensor cores: it takes less time.

    The next kernel may start when x is complete: it can multiply x by W before it waits for this one.
    """
    launch_dependents(PDL)
    term, terms = tl.program_id(0), tl.num_programs(0)
    split, stride = tl.program_id(1), tl.num_programs(2)
    down = first
    if term == 1:
        down = second
    if term == 2:
        down = third
    index, column = tl.arange(0, RANK), split * BLOCK + tl.arange(0, BLOCK)
    inside = column < depth
    place = index[:, None] * depth + column[None, :]
    weights = tl.load(down + place, mask=(index < rank)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    wait_for_dependencies(PDL)
    for row in range(tl.program_id(2), rows, stride):
        states = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
        target = inner + ((split * rows + row) * terms + term) * RANK + index
        tl.store(target, tl.sum(weights * states[None, :], 1))


@jit
def _load_rows(
    result: Value,
    up: Value,
    scale: Value,
    start: Value,
    end: Value,
    strip: Value,
    rank: Value,
    TERM: constexpr,
    GROUP: constexpr,
    RANK: constexpr,
) -> Value:
    """Add scale * B of a term to the rows of its group, where they are its own."""
    place = tl.arange(0, GROUP * RANK)
    index = place % RANK
    rows = (strip >= start) & (strip < end)
    columns = (place // RANK == TERM % GROUP) & (index < rank)
    at = (strip - start).to(tl.int64)[:, None] * rank + index[None, :]
    return result + scale * tl.load(up + at, mask=rows[:, None] & columns[None, :], other=0.0).to(tl.float32)


@jit
def load_terms(
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
    rank: Value,
    FIRST: constexpr,
    TERMS: constexpr,
    GROUP: constexpr,
    RANK: constexpr,
    STRIP: constexpr,
) -> Value:
    """Return scale * B of the GROUP terms from term FIRST on, side by side: [STRIP, GROUP * RANK].

    Zeros fill the rank, and the places of terms that a row does not belong to; a column of -1 belongs to none.
    """
    result = tl.zeros((STRIP, GROUP * RANK), tl.float32)
    if FIRST == 0:
        result = _load_rows(result, up_0, scale_0, start_0, end_0, strip, rank, 0, GROUP, RANK)
    if TERMS > 1 and 1 - GROUP < FIRST and FIRST <= 1:
        result = _load_rows(result, up_1, scale_1, start_1, end_1, strip, rank, 1, GROUP, RANK)
    if TERMS > 2 and 2 - GROUP < FIRST and FIRST <= 2:
        result = _load_rows(result, up_2, scale_2, start_2, end_2, strip, rank, 2, GROUP, RANK)
    return result


@jit
def add_terms(
    result: Value,
    weights: Value,
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
    GROUP: constexpr,
    PARTIALS: constexpr,
    POWER: constexpr,
    RANK: constexpr,
    ROWS: constexpr,
    STRIP: constexpr,
    ONE_ROW: constexpr,
) -> Value:
    """Add all terms to the columns `strip` of a product [STRIP, ROWS]; `weights` are the first group's."""
    result = _add_group(result, weights, inner, rows, 0, TERMS, GROUP, PARTIALS, POWER, RANK, ROWS, ONE_ROW)
    for first in tl.static_range(GROUP, TERMS, GROUP):
        weights = load_terms(
            up_0, scale_0, start_0, end_0, up_1, scale_1, start_1, end_1, up_2, scale_2, start_2, end_2, strip, rank,
            first, TERMS, GROUP, RANK, STRIP,
        )  # fmt: skip
        result = _add_group(result, weights, inner, rows, first, TERMS, GROUP, PARTIALS, POWER, RANK, ROWS, ONE_ROW)
    return result


@jit
def _add_group(
    result: Value,
    weights: Value,
    inner: Value,
    rows: Value,
    FIRST: constexpr,
    TERMS: constexpr,
    GROUP: constexpr,
    PARTIALS: constexpr,
    POWER: constexpr,
    RANK: constexpr,
    ROWS: constexpr,
    ONE_ROW: constexpr,
) -> Value:
    """Add GROUP terms from term FIRST on: the sum of the partials of x A^T, by `weights` from `load_terms`."""
    AT_ONCE: tl.constexpr = 8
    place, row = FIRST * RANK + tl.arange(0, GROUP * RANK), tl.arange(0, ROWS)
    inside = place < TERMS * RANK
    if ONE_ROW:
        part = tl.arange(0, POWER)
        at = inner + part[:, None] * (TERMS * RANK) + place[None, :]
        states = tl.sum(tl.load(at, mask=(part < PARTIALS)[:, None] & inside[None, :], other=0.0), 0)
        result += tl.where(row == 0, 1.0, 0.0)[None, :] * tl.sum(weights * states[None, :], 1)[:, None]
    else:
        states = tl.zeros((GROUP * RANK, ROWS), tl.float32)
        for begin in range(0, PARTIALS, AT_ONCE):
            for part in tl.static_range(AT_ONCE):
                at = inner + ((begin + part) * rows + row)[None, :] * (TERMS * RANK) + place[:, None]
                mask = (row < rows)[None, :] & inside[:, None] & (begin + part < PARTIALS)
                states += tl.load(at, mask=mask, other=0.0)
        result = tl.dot(weights, states, result, input_precision="tf32x3")
    return result
