"""y = x W^T for one to eight rows of x, by tensor cores in registers.

A program multiplies 16 rows of W by all rows of x; its warps divide the inner dimension. Elements go straight from
memory into the registers of the threads that multiply them (`tile_loads.py`, `tile_fragments.py`). So there is no
shared memory to fill, and an element takes few instructions: about half of those of `gemv.py` for one row of x.

A plan either has a program for each tile, or a few programs per multiprocessor that keep x and take tile after tile.
Where registers do not suffice for all of a row, a program takes some spans of it at a time. Narrow tiles are for
products with fewer tiles than multiprocessors: they have eight rows of W, whose upper and lower half are the same rows
at other depths.

As in `gemv.py`, a product can also normalise x, compute a gated activation, and add a residual to its result. The
product that reads the heads of attention can combine its splits (`tile_splits.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .backend import (
    EARLY,
    Value,
    constexpr,
    dependent_launch,
    jit,
    launch_dependents,
    multiprocessors,
    power_of_two,
    tl,
    triton,
    varying,
    wait_after,
    wait_for_dependencies,
    zero_after_wait,
)
from .combine import SplitHeads
from .gated import Activation, apply_gate
from .gemv_loads import store_one
from .gemv_words import format_of
from .linear import Plan
from .norm import Norm, normalise
from .packed import Packed
from .spans import blocks_of_spans, splits_in_use
from .tile_fragments import ROWS_OF_W, codes_base
from .tile_loads import load_edges, load_right, load_rows
from .tile_plans import most_registers, needed
from .tile_splits import LOADS, combine_right
from .tile_sums import (
    constants_of_tile,
    norm_factors,
    places,
    product_of_spans,
    right_operands,
    sums_of_right,
    sums_of_threads,
    sums_of_tile,
)


def tile_product(
    x: Tensor | SplitHeads,
    weight: Packed,
    bias: Tensor | None,
    plan: Plan,
    gate: Activation | None = None,
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute a product by the kernel.

    Args:
        x: [..., K], at most `MOST_ROWS` rows; or the splits of that, if it `combines`.
        weight: [N, K].
        bias: [N] or None.
        plan: one of `tile_plans`, for which `fits`.
        gate: the activation of a gate, whose rows come before those of the up projection.
        norm: an RMSNorm of x, for which `gemv.takes_norm`.
        residual: of the shape of the result, added to it.

    Returns:
        [..., N], or [..., N / 2] with a gate.
    """
    flat = x.results.flatten(0, 1).flatten(1) if isinstance(x, SplitHeads) else x.reshape(-1, x.shape[-1])
    rows, columns = len(flat), weight.shape[0] // (1 if gate is None else 2)
    out = flat.new_empty((rows, columns), dtype=x.dtype)
    added = out if residual is None else residual.reshape(rows, columns)
    arguments, constants = kernel_arguments(flat, x.dtype, weight, plan, norm)
    narrow = plan.strip < ROWS_OF_W and gate is None
    tiles = triton.cdiv(columns, ROWS_OF_W if gate is None and not narrow else ROWS_OF_W // 2)
    programs = min(tiles, plan.stages * multiprocessors(flat.device)) if plan.stages else tiles
    _tile_kernel[(programs,)](
        *arguments, out if bias is None else bias, added, out, columns, added.stride(0), tiles, *_splits(x, constants),
        BIAS=bias is not None, RESIDUAL=residual is not None, GATED=gate is not None, TANH=gate == "gelu_tanh",
        LOOP=programs < tiles, NARROW=narrow, **constants, **dependent_launch(flat.device, plan.next or EARLY),
    )  # fmt: skip
    return out.view(*x.shape[:-1], columns)


def kernel_arguments(
    flat: Tensor, dtype: torch.dtype, weight: Packed, plan: Plan, norm: Norm | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a kernel of tiles needs for x [rows, K] of `dtype`: its first arguments, and constants.

    `flat` is x, or its splits in float32 [rows, S * K].
    """
    rows, depth, form = len(flat), weight.shape[1], format_of(weight)
    if norm is not None and norm.weight.dtype != dtype:
        flat, norm = normalise(flat, norm).to(dtype), None
    data, scale = weight.data.view(torch.int32), weight.scale
    zero = scale if weight.zero is None else weight.zero
    words = flat.view(torch.int32)  # two elements each
    gain = words if norm is None else norm.weight.view(torch.int32)
    strides = words.stride(0), data.stride(0), *scale.stride(), *zero.stride()
    constants = {
        **dict(NORM=norm is not None, OFFSET=0.0 if norm is None else norm.form.offset),
        **dict(FLOAT16=dtype == torch.float16, **form._asdict()),
        **dict(ROWS=power_of_two(rows), WARPS=plan.warps, SPANS=plan.spans),
        **dict(STEPS=triton.cdiv(needed(depth, plan.warps), plan.spans)),
        **dict(PLAIN=not flat.is_cuda, num_warps=plan.warps),
    }
    if (most := most_registers(weight, plan, form.BITS, constants["ROWS"])) is not None:
        constants["maxnreg"] = most
    return (words, data, scale, zero, gain, rows, depth, *strides, 0.0 if norm is None else norm.eps), constants


def _splits(x: Tensor | SplitHeads, constants: dict[str, Any]) -> tuple[Any, ...]:
    """Return what the kernel needs of splits, and add constants."""
    if not isinstance(x, SplitHeads):
        constants |= dict(HEADS=0, SIZE=0, BLOCK=1, LEAST=1, LOADS=1)
        return x, x, 1
    constants |= dict(HEADS=x.sums.shape[2], SIZE=x.size, BLOCK=x.block, LEAST=x.least, LOADS=LOADS)
    return x.sums, x.spans, x.sums.shape[3]


@varying("rows", "splits")
def _tile_kernel(
    x: Value,
    data: Value,
    scale: Value,
    zero: Value,
    norm_weight: Value,
    rows: Value,
    depth: Value,
    x_row: Value,
    data_row: Value,
    scale_n: Value,
    scale_k: Value,
    zero_n: Value,
    zero_k: Value,
    eps: Value,
    bias: Value,
    residual: Value,
    out: Value,
    columns: Value,
    residual_row: Value,
    tiles: Value,
    logarithms: Value,
    spans: Value,
    splits: Value,
    HEADS: constexpr,
    SIZE: constexpr,
    BLOCK: constexpr,
    LEAST: constexpr,
    LOADS: constexpr,
    BIAS: constexpr,
    RESIDUAL: constexpr,
    GATED: constexpr,
    TANH: constexpr,
    LOOP: constexpr,
    NARROW: constexpr,
    NORM: constexpr,
    OFFSET: constexpr,
    FLOAT16: constexpr,
    CODE: constexpr,
    BITS: constexpr,
    GROUP: constexpr,
    SCALE_ROWS: constexpr,
    ZEROS: constexpr,
    ZERO_OFFSET: constexpr,
    EXPONENTS: constexpr,
    ROWS: constexpr,
    WARPS: constexpr,
    SPANS: constexpr,
    STEPS: constexpr,
    PLAIN: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    tile = tl.program_id(0)
    warp, g, q = places(WARPS)
    words, values, gain = constants_of_tile(
        tile, data, scale, zero, norm_weight, depth, columns, tiles, data_row, scale_n, scale_k, zero_n, zero_k, GATED,
        0, NORM, BITS, GROUP, SCALE_ROWS, ZEROS, ZERO_OFFSET, EXPONENTS, ROWS, WARPS, SPANS, PLAIN, NARROW,
    )  # fmt: skip
    if SIZE > 0:
        _first, number, _last = blocks_of_spans(spans, 1, 0, BLOCK)
        used = splits_in_use(number, splits, LEAST)
        if not LOOP:  # a residual is older than q, k and v, as spans are
            edges = load_edges(
                tile, bias, residual, rows, columns, residual_row, RESIDUAL, GATED, BIAS, ROWS, PLAIN, NARROW
            )
        wait_after(used, PDL)
        states = combine_right(
            x + zero_after_wait(PDL), logarithms + zero_after_wait(PDL), used, splits, warp, g, q, HEADS, SIZE, FLOAT16,
            BITS, WARPS, SPANS, LOADS, PLAIN, NARROW,
        )  # fmt: skip
    else:
        wait_for_dependencies(PDL)
        x += zero_after_wait(PDL) + tl.minimum(g % ROWS, rows - 1) * x_row
        residual += zero_after_wait(PDL)
        if not LOOP:
            edges = load_edges(
                tile, bias, residual, rows, columns, residual_row, RESIDUAL, GATED, BIAS, ROWS, PLAIN, NARROW
            )
        states = load_right(x, warp, g, q, depth, ROWS, BITS, WARPS, SPANS, PLAIN, NARROW)
    if not LOOP:
        sums, factors = sums_of_tile(
            words, values, gain, states, tile, x, data, scale, zero, norm_weight, rows, depth, columns, tiles, data_row,
            scale_n, scale_k, zero_n, zero_k, eps, GATED, 0, NORM, OFFSET, FLOAT16, CODE, BITS, GROUP, SCALE_ROWS,
            ZEROS, ZERO_OFFSET, EXPONENTS, ROWS, WARPS, SPANS, STEPS, PLAIN, NARROW,
        )  # fmt: skip
        _store(sums, factors, edges, tile, out, rows, columns, RESIDUAL, GATED, TANH, NORM, BIAS, ROWS, PLAIN, NARROW)
    else:
        base = codes_base(warp * 0 + (rows >> 24), CODE)
        none = warp.to(tl.float32) * 0.0
        right, square, unscaled = right_operands(states, gain, none, NORM, OFFSET, FLOAT16, BITS, WARPS, PLAIN)
        begin = sums_of_right(right, none, CODE, ZEROS, ROWS, WARPS, SPANS, PLAIN)
        factors = norm_factors(square, depth, eps, NORM, ROWS, WARPS)
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            edges = load_edges(
                tile, bias, residual, rows, columns, residual_row, RESIDUAL, GATED, BIAS, ROWS, PLAIN, NARROW
            )
            next_words, next_values = load_rows(
                tile + tl.num_programs(0), tiles, warp, g, q, data, scale, zero, depth, columns, data_row, scale_n,
                scale_k, zero_n, zero_k, GATED, 0, BITS, GROUP, SCALE_ROWS, ZEROS, ZERO_OFFSET, EXPONENTS, WARPS, SPANS,
                PLAIN, NARROW,
            )  # fmt: skip
            # What is added to g is 0. Without it the compiler would keep all masked operands of x in registers.
            sums = product_of_spans(
                words, values, right, begin, unscaled, base, g + (tile >> 24), FLOAT16, BITS, GROUP, ZEROS, ROWS, WARPS,
                SPANS, PLAIN, NARROW,
            )  # fmt: skip
            sums = sums_of_threads(sums, ROWS, WARPS, NARROW)
            _store(
                sums, factors, edges, tile, out, rows, columns, RESIDUAL, GATED, TANH, NORM, BIAS, ROWS, PLAIN, NARROW
            )
            words, values = next_words, next_values


@jit
def _store(
    sums: Value,
    factors: Value,
    edges: Value,
    tile: Value,
    out: Value,
    rows: Value,
    columns: Value,
    RESIDUAL: constexpr,
    GATED: constexpr,
    TANH: constexpr,
    NORM: constexpr,
    BIAS: constexpr,
    ROWS: constexpr,
    PLAIN: constexpr,
    NARROW: constexpr,
) -> None:
    """Store the result of a tile, or what is computed from it. `edges` are those of `load_edges`."""
    biases, residuals = edges
    dtype: tl.constexpr = out.dtype.element_ty
    for odd in tl.static_range(2 if ROWS > 1 else 1):
        above, below = sums[odd], sums[2 + odd]
        if NORM:
            above, below = above * factors[odd], below * factors[odd]
        if BIAS:
            above, below = above + biases[0], below + biases[1]
        above, below = above.to(dtype), below.to(dtype)
        row = tl.arange(0, ROWS // 2 if ROWS > 1 else 1)[None, :] * 2 + odd
        if GATED:
            column = (tile * 8 + tl.arange(0, 8))[:, None] + row * 0
            inside = (row < rows) & (column < columns)
            store_one(out + row * columns + column, apply_gate(above, below, TANH), inside, PLAIN)
        else:
            if RESIDUAL:
                above = (residuals[odd][0].to(tl.float32) + above.to(tl.float32)).to(dtype)
                below = (residuals[odd][1].to(tl.float32) + below.to(tl.float32)).to(dtype)
            column = (tile * (8 if NARROW else 16) + tl.arange(0, 8))[:, None] + row * 0
            store_one(out + row * columns + column, above, (row < rows) & (column < columns), PLAIN)
            if not NARROW:
                store_one(out + row * columns + column + 8, below, (row < rows) & (column + 8 < columns), PLAIN)
