"""y = x W^T for a few rows of x, where the time is that of reading W once.

Libraries tile such products for many rows and leave bandwidth unused. Here each program streams a strip of W through
tensor cores; where strips alone are too few programs to fill the GPU, the inner dimension is split as well, if the
kernel that reads the result can add the parts. Which is faster depends on the shape and the GPU, so it is measured,
once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .backend import Value, ask_for, constexpr, early, jit, runs, start_next, tl, triton, varying, wait_for_last

MOST_ROWS = 32
STRIP = 64  # rows of W that a program reads: the fewest that tensor cores take from where copies put them
BLOCK = 128  # elements of the inner dimension that are read at a time


class Plan(NamedTuple):
    """How to cut a product into programs."""

    splits: int  # parts of the inner dimension
    stages: int  # reads under way at the same time


# Over 106 shapes of models from 68M to 70B on an H200, the fastest of these is within 1%, on average, of the fastest
# of all that were tried, with other strips, blocks, stages and numbers of warps (docs/experiments.md).
PLANS = tuple(Plan(splits, stages) for splits in (1, 2, 4, 8) for stages in (3, 4, 6))


class Parts(NamedTuple):
    """A product whose inner dimension was split: what is to be added."""

    terms: Tensor  # [S, rows, N] of float32
    shape: torch.Size  # of the product
    dtype: torch.dtype

    def sum(self) -> Tensor:
        """The product, where the reader's kernel cannot take it."""
        return self.terms.sum(0).to(self.dtype).view(self.shape)


def opened(product: Tensor | Parts) -> tuple[Tensor, int]:
    """What a kernel that can add is given, and how many parts that is."""
    return (product.terms, product.terms.shape[0]) if isinstance(product, Parts) else (product.contiguous(), 1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan | None) -> Tensor:
    """x W^T + bias.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N] or None.
        plan: what `choose` said, with the inner dimension in one piece; None leaves it to torch.

    Returns:
        [..., N].

    Example:
        >>> linear(torch.randn(3, 64), torch.randn(8, 64), None, None).shape
        torch.Size([3, 8])
    """
    product = linear_in_parts(x, weight, bias, plan)
    assert not isinstance(product, Parts)
    return product


def linear_in_parts(x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan | None) -> Tensor | Parts:
    """The same for readers that can add."""
    if plan is None or not fits(x, weight, bias, plan):
        return functional.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    rows, depth = flat.shape
    columns = weight.shape[0]
    shape = torch.Size((*x.shape[:-1], columns))
    dtype = x.dtype if plan.splits == 1 else torch.float32
    target = flat.new_empty((plan.splits, rows, columns), dtype=dtype)
    _product_kernel[(triton.cdiv(columns, STRIP), plan.splits)](
        flat, weight, weight if bias is None else bias, target, rows, columns, depth, flat.stride(0), weight.stride(0),
        BIAS=bias is not None, **tile(rows), num_warps=4, num_stages=plan.stages, **early(x.device),
    )  # fmt: skip
    return target.view(shape) if plan.splits == 1 else Parts(target, shape, x.dtype)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `linear` computes, in float32 and rounded once."""
    return functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def fits(x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan) -> bool:
    """Whether the kernel can do this product under this plan."""
    depth = weight.shape[1]
    return (
        runs(x, weight, bias)
        and x.dtype != torch.float32  # torch's own float32 products are the exact ones
        and 0 < x.numel() <= MOST_ROWS * depth
        and depth % BLOCK == 0
        and depth // BLOCK >= plan.splits
        and x.stride(-1) == weight.stride(-1) == 1
    )


def tile(rows: int) -> dict[str, int]:
    """What a program multiplies at a time."""
    return {"ROWS": 16 if rows <= 16 else 32, "STRIP": STRIP, "BLOCK": BLOCK}


@varying("rows")
def _product_kernel(
    x: Value,
    weight: Value,
    bias: Value,
    target: Value,
    rows: Value,
    columns: Value,
    depth: Value,
    x_row: Value,
    weight_row: Value,
    BIAS: constexpr,
    ROWS: constexpr,
    STRIP: constexpr,
    BLOCK: constexpr,
    EARLY: constexpr,
) -> None:
    start_next(EARLY)
    column = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    split, splits = tl.program_id(1), tl.num_programs(1)
    steps = depth // BLOCK
    begin, end = split * steps // splits, (split + 1) * steps // splits
    strip = tl.minimum(column, columns - 1)  # the last may stand over the edge
    result = streamed(x, weight, strip, begin, end, rows, x_row, weight_row, ROWS, STRIP, BLOCK, EARLY)
    if BIAS:
        if split == 0:
            result += tl.load(bias + strip).to(tl.float32)[:, None]
    row = tl.arange(0, ROWS)
    place = (split * rows + row)[None, :].to(tl.int64) * columns + column[:, None]
    inside = (row < rows)[None, :] & (column < columns)[:, None]
    tl.store(target + place, result.to(target.dtype.element_ty), mask=inside)


@jit
def streamed(
    x: Value,
    weight: Value,
    strip: Value,
    begin: Value,
    end: Value,
    rows: Value,
    x_row: Value,
    weight_row: Value,
    ROWS: constexpr,
    STRIP: constexpr,
    BLOCK: constexpr,
    EARLY: constexpr,
) -> Value:
    """Some rows of W times the rows of x, over blocks `begin` to `end` of the inner dimension: [STRIP, ROWS].

    W stands on the left: tensor cores then read it where the copies put it, and threads have next to nothing to do.
    Its first block is asked for while the kernel that makes x may still run; more than one would be in that one's way.
    """
    inner = begin * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)
    left = weight + strip.to(tl.int64)[:, None] * weight_row + inner[None, :]
    right = x + row[None, :] * x_row + inner[:, None]
    if EARLY:
        ask_for(weight + strip.to(tl.int64)[:, None] * weight_row + (begin * BLOCK + _lines(weight, BLOCK))[None, :])
    wait_for_last(EARLY)
    result = tl.zeros((STRIP, ROWS), tl.float32)
    for _ in range(begin, end):
        result = tl.dot(tl.load(left), tl.load(right, mask=(row < rows)[None, :], other=0.0), result)
        left += BLOCK
        right += BLOCK
    return result


@jit
def _lines(values: Value, BLOCK: constexpr) -> Value:
    """The first of each cache line's values, in a row of BLOCK."""
    LINE: tl.constexpr = 1024 // values.dtype.element_ty.primitive_bitwidth
    return tl.arange(0, BLOCK // LINE) * LINE


@jit
def added(parts: Value, apart: Value, inside: Value, dtype: constexpr, SPLITS: constexpr) -> Value:
    """Elements of a product, rounded once. A whole one is a single part."""
    result = tl.load(parts, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        result += tl.load(parts + split * apart, mask=inside, other=0.0)
    return result.to(dtype)
