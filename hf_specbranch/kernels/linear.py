"""y = x W^T for a few rows of x, where the time is that of reading W once.

Libraries tile such products for many rows and leave bandwidth unused. Here each program streams a strip of W through
tensor cores; where a strip alone has too few programs to fill the GPU, the inner dimension is split as well, and the
kernel that reads the result adds the parts, or one of its own. Which is faster depends on the shape and the GPU, so it
is measured, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .backend import Value, constexpr, early, jit, runs, start_next, tl, triton, varying, wait_for_last

MOST_ROWS = 32


class Plan(NamedTuple):
    """How to cut a product into programs."""

    columns: int  # rows of W in a strip
    depth: int  # elements of the inner dimension read at a time
    splits: int  # parts of the inner dimension
    warps: int
    stages: int  # reads under way at the same time


# The fastest of some twenty on an H200, over the shapes of models from 68M to 33B: each is compiled where it is tried.
PLANS = (
    Plan(32, 128, 1, 4, 8),
    Plan(32, 128, 2, 4, 6),
    Plan(64, 128, 2, 4, 6),
    Plan(64, 128, 1, 4, 6),
    Plan(32, 256, 1, 4, 5),
    Plan(64, 128, 4, 4, 6),
)


class Parts(NamedTuple):
    """A product whose inner dimension was split: what is to be added."""

    terms: Tensor  # [S, rows, N] of float32
    shape: torch.Size  # of the product
    dtype: torch.dtype

    def sum(self) -> Tensor:
        """The product."""
        splits, rows, columns = self.terms.shape
        out = self.terms.new_empty(self.shape, dtype=self.dtype)
        _sum_kernel[(rows, triton.cdiv(columns, 512))](
            self.terms, out, rows, columns, SPLITS=splits, BLOCK=512, num_warps=1, **early(out.device)
        )
        return out


def whole(product: Tensor | Parts) -> Tensor:
    """The product, added up if need be."""
    return product.sum() if isinstance(product, Parts) else product


def opened(product: Tensor | Parts) -> tuple[Tensor, int]:
    """What a kernel that can add is given, and how many parts that is."""
    return (product.terms, product.terms.shape[0]) if isinstance(product, Parts) else (product.contiguous(), 1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan | None) -> Tensor:
    """x W^T + bias.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N] or None.
        plan: what `choose` said; None leaves it to torch.

    Returns:
        [..., N].

    Example:
        >>> linear(torch.randn(3, 64), torch.randn(8, 64), None, None).shape
        torch.Size([3, 8])
    """
    return whole(linear_in_parts(x, weight, bias, plan))


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
    _product_kernel[(triton.cdiv(columns, plan.columns), plan.splits)](
        flat, weight, weight if bias is None else bias, target, rows, columns, depth, flat.stride(0), weight.stride(0),
        BIAS=bias is not None, SPLITS=plan.splits, EVEN=columns % plan.columns == 0,
        ROWS=16 if rows <= 16 else 32, COLUMNS=plan.columns, DEPTH=plan.depth,
        num_warps=plan.warps, num_stages=plan.stages, **early(x.device),
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
        and depth % plan.depth == 0
        and depth // plan.depth >= plan.splits
        and x.stride(-1) == weight.stride(-1) == 1
    )


@torch.no_grad()
def measure(weights: Sequence[Tensor], rows: int, plan: Plan | None) -> float:
    """Seconds of one product on this GPU.

    Args:
        weights: of one shape; taken in turn, so that they come from memory rather than from a cache.
        rows: of x.
        plan: the plan to measure, None for torch.
    """
    x = torch.randn((rows, weights[0].shape[1]), device=weights[0].device, dtype=weights[0].dtype)
    if plan is not None and not fits(x, weights[0], None, plan):
        return float("inf")
    calls = min(24, max(8, len(weights)))
    linear(x, weights[0], None, plan)  # compiled outside the capture
    stream, graph = torch.cuda.Stream(x.device), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(x.device))
    times: list[float] = []
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for call in range(calls):
                linear(x, weights[call % len(weights)], None, plan)
        finally:
            graph.capture_end()
        for _ in range(4):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end))
    torch.cuda.current_stream(x.device).wait_stream(stream)
    return min(times) / calls / 1e3


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
    SPLITS: constexpr,
    EVEN: constexpr,
    ROWS: constexpr,
    COLUMNS: constexpr,
    DEPTH: constexpr,
    EARLY: constexpr,
) -> None:
    start_next(EARLY)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(1)
    row = tl.arange(0, ROWS)
    steps = depth // DEPTH
    begin, end = split * steps // SPLITS, (split + 1) * steps // SPLITS
    inner = begin * DEPTH + tl.arange(0, DEPTH)
    strip = column if EVEN else tl.minimum(column, columns - 1)  # the last strip may stand over the edge
    left = x + row[:, None] * x_row + inner[None, :]
    right = weight + strip.to(tl.int64)[None, :] * weight_row + inner[:, None]
    real = (row < rows)[:, None]
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    wait_for_last(EARLY)
    for _ in range(begin, end):
        result = tl.dot(tl.load(left, mask=real, other=0.0), tl.load(right), result)
        left += DEPTH
        right += DEPTH
    if BIAS:
        if split == 0:
            result += tl.load(bias + strip).to(tl.float32)[None, :]
    place = (split * rows + row)[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(target + place, result.to(target.dtype.element_ty), mask=real & (column < columns)[None, :])


@varying("rows")
def _sum_kernel(
    parts: Value, out: Value, rows: Value, columns: Value, SPLITS: constexpr, BLOCK: constexpr, EARLY: constexpr
) -> None:
    start_next(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    result = added(parts + row * columns + column, rows * columns, inside, out.dtype.element_ty, SPLITS)
    tl.store(out + row * columns + column, result, mask=inside)


@jit
def added(parts: Value, apart: Value, inside: Value, dtype: constexpr, SPLITS: constexpr) -> Value:
    """Elements of a product, rounded once. A whole one is a single part."""
    result = tl.load(parts, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        result += tl.load(parts + split * apart, mask=inside, other=0.0)
    return result.to(dtype)
