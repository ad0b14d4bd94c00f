"""y = x W^T for a few rows of x: a product bound by reading W once.

Libraries tile such products for many rows and leave bandwidth unused. Here each program streams a strip of W through
tensor cores. Where the strips are too few to fill the GPU, the inner dimension is split as well (split-K); the kernel
that reads the result then sums the partials. Which plan is fastest depends on the shape and the GPU, so it is
autotuned (`autotune.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .activation import MlpActivation, activate, activated, code_of
from .backend import (
    Value,
    can_run,
    constexpr,
    dependent_launch,
    jit,
    launch_dependents,
    prefetch,
    tl,
    triton,
    varying,
    wait_for_dependencies,
)

MOST_ROWS = 32
STRIP = 64  # rows of W per program: the fewest that tensor cores take directly from shared memory
BLOCK = 128  # elements of the inner dimension per step


class Plan(NamedTuple):
    """How a product is divided into programs."""

    splits: int  # of the inner dimension (split-K); 1: not split
    stages: int  # of the software pipeline: loads in flight; of `tiles.py`: programs per multiprocessor, 0: one a tile
    strip: int = STRIP  # rows of W per program; products with quantised weights vary it
    warps: int = 0  # of a program of `gemv.py` or `tiles.py`; 0: of another kernel
    spans: int = 0  # of a row that a warp of `tiles.py` has at a time; 0: of another kernel
    next: int = 0  # when the next kernel may start, see `backend.EARLY`; 0: as is usual for the kernel
    registers: int = 0  # that a thread of `tiles.py` may have; 0: as is usual


# Over 106 shapes of models from 68M to 70B on an H200, the fastest of these is within 1%, on average, of the fastest
# of all that were measured, with other strips, blocks, stages and numbers of warps.
PLANS = tuple(Plan(splits, stages) for splits in (1, 2, 4, 8) for stages in (3, 4, 6))


class Partials(NamedTuple):
    """The split-K partials of a product: their sum over S is the product."""

    terms: Tensor  # [S, rows, N] of float32
    shape: torch.Size  # of the product
    dtype: torch.dtype

    def sum(self) -> Tensor:
        """Return the product, for readers that cannot sum partials themselves."""
        return self.terms.sum(0).to(self.dtype).view(self.shape)


def as_partials(product: Tensor | Partials) -> tuple[Tensor, int]:
    """Return what a kernel that sums partials reads, and the number of partials: 1 for a plain tensor."""
    return (product.terms, product.terms.shape[0]) if isinstance(product, Partials) else (product.contiguous(), 1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan | None) -> Tensor:
    """Compute x W^T + bias.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N] or None.
        plan: from `autotune`, without split-K; None: torch.

    Returns:
        [..., N].

    Example:
        >>> linear(torch.randn(3, 64), torch.randn(8, 64), None, None).shape
        torch.Size([3, 8])
    """
    product = linear_split_k(x, weight, bias, plan)
    assert not isinstance(product, Partials)
    return product


def linear_split_k(x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan | None) -> Tensor | Partials:
    """Compute x W^T + bias for a reader that sums split-K partials."""
    if plan is None or not fits(x, weight, bias, plan):
        return functional.linear(x, weight, bias)
    return _run(x, weight, bias, plan, None)


def activated_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: MlpActivation, plan: Plan | None
) -> Tensor:
    """Compute act(x W^T + bias), for a plan without split-K."""
    if plan is None or not fits(x, weight, bias, plan):
        return activate(functional.linear(x, weight, bias), activation)
    product = _run(x, weight, bias, plan, activation)
    assert not isinstance(product, Partials)
    return product


def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, activation: MlpActivation | None
) -> Tensor | Partials:
    flat = x.reshape(-1, x.shape[-1])
    rows, depth = flat.shape
    columns = weight.shape[0]
    shape = torch.Size((*x.shape[:-1], columns))
    dtype = x.dtype if plan.splits == 1 else torch.float32
    target = flat.new_empty((plan.splits, rows, columns), dtype=dtype)
    _product_kernel[(triton.cdiv(columns, STRIP), plan.splits)](
        flat, weight, weight if bias is None else bias, target, rows, columns, depth, flat.stride(0), weight.stride(0),
        BIAS=bias is not None, ACTIVATION=code_of(activation), **tile(rows), num_warps=4, num_stages=plan.stages,
        **dependent_launch(x.device),
    )  # fmt: skip
    return target.view(shape) if plan.splits == 1 else Partials(target, shape, x.dtype)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute what `linear` does, in float32 and rounded once."""
    return functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def fits(x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan) -> bool:
    """Return whether the kernel can compute this product with this plan."""
    depth = weight.shape[1]
    return (
        can_run(x, weight, bias)
        and x.dtype != torch.float32  # torch's own float32 products are the exact ones
        and 0 < x.numel() <= MOST_ROWS * depth
        and depth % BLOCK == 0
        and depth // BLOCK >= plan.splits
        and x.stride(-1) == weight.stride(-1) == 1
    )


def tile(rows: int) -> dict[str, int]:
    """Return the tile sizes of a program, as kernel constants."""
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
    ACTIVATION: constexpr,
    ROWS: constexpr,
    STRIP: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    column = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    split, splits = tl.program_id(1), tl.num_programs(1)
    steps = depth // BLOCK
    begin, end = split * steps // splits, (split + 1) * steps // splits
    strip = tl.minimum(column, columns - 1)  # the last strip may exceed the edge
    if BIAS:  # one of the partials has it
        added = tl.load(bias + strip, mask=(column >= 0) & (split == 0), other=0.0)
    result = streamed(x, weight, strip, begin, end, rows, x_row, weight_row, ROWS, STRIP, BLOCK, PDL)
    if BIAS:
        result += added.to(tl.float32)[:, None]
    if ACTIVATION > 0:
        result = activated(result.to(target.dtype.element_ty), ACTIVATION)
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
    PDL: constexpr,
) -> Value:
    """Multiply rows `strip` of W by the rows of x, over blocks `begin` to `end` of the inner dimension: [STRIP, ROWS].

    W is the left operand: tensor cores read it from shared memory, without passing through registers. Its first block
    is prefetched while the kernel that computes x may still run; more would compete with that kernel for bandwidth.
    x is read past L1, which may hold old values before a wait: `lora.py` calls this without PDL, and waits later.
    """
    inner = begin * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)
    left = weight + strip.to(tl.int64)[:, None] * weight_row + inner[None, :]
    right = x + row[None, :] * x_row + inner[:, None]
    if PDL:
        prefetch(weight + strip.to(tl.int64)[:, None] * weight_row + (begin * BLOCK + _lines(weight, BLOCK))[None, :])
    wait_for_dependencies(PDL)
    result = tl.zeros((STRIP, ROWS), tl.float32)
    for _ in range(begin, end):
        states = tl.load(right, mask=(row < rows)[None, :], other=0.0, cache_modifier=".cg")
        result = tl.dot(tl.load(left), states, result)
        left += BLOCK
        right += BLOCK
    return result


@jit
def _lines(values: Value, BLOCK: constexpr) -> Value:
    """Return the offset of each cache line in a row of BLOCK values."""
    LINE: tl.constexpr = 1024 // values.dtype.element_ty.primitive_bitwidth
    return tl.arange(0, (BLOCK + LINE - 1) // LINE) * LINE


@jit
def sum_partials(partials: Value, partial_stride: Value, inside: Value, dtype: constexpr, SPLITS: constexpr) -> Value:
    """Load elements of a product as the sum of its SPLITS partials, rounded once."""
    result = tl.load(partials, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        result += tl.load(partials + split * partial_stride, mask=inside, other=0.0)
    return result.to(dtype)
