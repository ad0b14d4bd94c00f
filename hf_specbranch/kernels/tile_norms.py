"""Gate and up of a normalised sum, whose second term is normalised itself, for one row by tiles in registers.

    y = x + first(o)
    result = act(gate) * up, of norm(y)

With a = offset + first.weight and b = offset + norm.weight, all but two scalars is known before the sums over a row:

    f = 1 / sqrt(mean(o^2) + eps),  W (b y) = W (b x) + f W (b a o)
    sum(y^2) = sum(x^2) + 2 f sum(x a o) + f^2 sum((a o)^2)

So this is a product of two rows, b x and b a o (`tiles.py`), with four sums beside it. y is not rounded in it. One more
program stores y, which is added to what the MLP returns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .backend import (
    EARLY,
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
    zero_after_wait,
)
from .gated import Activation, apply_gate, gated_reference
from .gemv import aligned, takes_norm
from .gemv_loads import store_one
from .linear import Plan
from .norm import Norm, add_norm_reference, normalised
from .packed import Packed
from .tile_fragments import ROWS_OF_W, narrow, numbers, scale_to_half
from .tile_loads import load_edges, load_right, load_rows
from .tile_plans import most_registers, needed
from .tile_sums import add_four, places, product_of_spans, sums_of_threads


class NormedSum(NamedTuple):
    """norm(residual + first(added)): what an MLP reads where the layer has norms after attention and before the MLP."""

    residual: Tensor  # [..., K]
    added: Tensor  # [..., K]
    first: Norm
    norm: Norm

    def reference(self) -> tuple[Tensor, Tensor]:
        """Return this and the sum, in plain torch."""
        normed, total = add_norm_reference(self.added, self.residual, self.norm, self.first)
        assert normed is not None
        return normed, total


def gated_of_sum(
    x: NormedSum, weight: Packed, bias: Tensor | None, plan: Plan, gate: Activation
) -> tuple[Tensor, Tensor]:
    """Compute act(gate) * up of a normed sum in one launch.

    Args:
        x: of one row.
        weight: [N, K] of both, the rows of the gate first; with x and the plan it `fits`.
        bias: [N] or None.
        plan: one of `tile_plans`, for which `takes_sum`.
        gate: the activation.

    Returns:
        [..., N / 2], and the sum [..., K].
    """
    total, columns, depth = torch.empty_like(x.residual), weight.shape[0] // 2, weight.shape[1]
    out = total.new_empty((*total.shape[:-1], columns))
    constants = {} if (most := most_registers(weight, plan, 16, rows=2)) is None else {"maxnreg": most}
    parts = x.residual, x.added, x.first.weight, x.norm.weight
    _sum_kernel[(triton.cdiv(columns, ROWS_OF_W // 2) + 1,)](
        *parts, *(each.view(torch.int32) for each in (*parts, weight.data)), out if bias is None else bias, out, total,
        depth, columns, weight.data.stride(0) // 2, x.first.eps, x.norm.eps,
        BIAS=bias is not None, TANH=gate == "gelu_tanh", OFFSET=x.norm.form.offset, WIDE=x.norm.form.wide,
        FLOAT16=out.dtype == torch.float16, WARPS=plan.warps, SPANS=plan.spans, BLOCK=power_of_two(depth),
        STEPS=triton.cdiv(needed(depth, plan.warps), plan.spans), PLAIN=not out.is_cuda, num_warps=plan.warps,
        **constants, **dependent_launch(out.device, plan.next or EARLY),
    )  # fmt: skip
    return out, total


def gated_of_sum_reference(
    x: NormedSum, weight: Tensor, bias: Tensor | None, gate: Activation
) -> tuple[Tensor, Tensor]:
    """Compute what `gated_of_sum` does, in plain torch."""
    normed, total = x.reference()
    return gated_reference(torch.nn.functional.linear(normed, weight, bias), gate), total


def takes_sum(x: Tensor, weight: Packed, plan: Plan) -> bool:
    """Return whether the kernel can multiply a normed sum of as many rows as x: by tiles that each have a program."""
    return x.numel() == x.shape[-1] and weight.code == "dense" and plan.spans > 0 and plan.stages == 0


def fits(x: NormedSum, weight: Packed, plan: Plan) -> bool:
    """Return whether the kernel can compute this product, if `tile_plans.fits` holds for each term of the sum."""
    residual, added, first, norm = x
    return (
        takes_sum(residual, weight, plan)
        and residual.shape == added.shape
        and residual.is_contiguous()
        and added.is_contiguous()
        and aligned(added)
        and first.form == norm.form
        and takes_norm(first)
        and takes_norm(norm)
        and can_run(residual, added, first.weight, norm.weight)
    )


@varying("columns")
def _sum_kernel(
    residual: Value,
    added: Value,
    first_weight: Value,
    norm_weight: Value,
    x: Value,
    o: Value,
    inner: Value,
    outer: Value,
    data: Value,
    bias: Value,
    out: Value,
    total: Value,
    depth: Value,
    columns: Value,
    data_row: Value,
    first_eps: Value,
    eps: Value,
    BIAS: constexpr,
    TANH: constexpr,
    OFFSET: constexpr,
    WIDE: constexpr,
    FLOAT16: constexpr,
    WARPS: constexpr,
    SPANS: constexpr,
    BLOCK: constexpr,
    STEPS: constexpr,
    PLAIN: constexpr,
    PDL: constexpr,
) -> None:
    """The arguments from `x` to `data` are words of two elements, the first four those of the arguments before."""
    launch_dependents(PDL)
    tile, tiles = tl.program_id(0), tl.num_programs(0) - 1
    if tile == tiles:
        _store_sum(residual, added, first_weight, total, depth, first_eps, OFFSET, WIDE, BLOCK, PDL)
    else:
        _store_tile(
            tile, tiles, x, o, inner, outer, data, bias, out, depth, columns, data_row, first_eps, eps, BIAS, TANH,
            OFFSET, FLOAT16, WARPS, SPANS, STEPS, PLAIN, PDL,
        )  # fmt: skip


@jit
def _store_sum(
    residual: Value,
    added: Value,
    first_weight: Value,
    total: Value,
    depth: Value,
    first_eps: Value,
    OFFSET: constexpr,
    WIDE: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    """Store residual + first(added), rounded as `add_norm` does."""
    column = tl.arange(0, BLOCK)
    inside = column < depth
    scale = tl.load(first_weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_dependencies(PDL)
    value = tl.load(added + column, mask=inside, other=0.0)
    before = tl.load(residual + column, mask=inside, other=0.0)
    value = normalised(value, scale, scale, inside, depth, first_eps, False, OFFSET, WIDE, False)
    tl.store(total + column, (before.to(tl.float32) + value.to(tl.float32)).to(total.dtype.element_ty), mask=inside)


@jit
def _store_tile(
    tile: Value,
    tiles: Value,
    x: Value,
    o: Value,
    inner: Value,
    outer: Value,
    data: Value,
    bias: Value,
    out: Value,
    depth: Value,
    columns: Value,
    data_row: Value,
    first_eps: Value,
    eps: Value,
    BIAS: constexpr,
    TANH: constexpr,
    OFFSET: constexpr,
    FLOAT16: constexpr,
    WARPS: constexpr,
    SPANS: constexpr,
    STEPS: constexpr,
    PLAIN: constexpr,
    PDL: constexpr,
) -> None:
    """Multiply a tile by both rows, and store its results. Each step loads the spans of the next one."""
    warp, g, q = places(WARPS)
    words, constants = _load_constants(
        tile, tiles, warp, g, q, inner, outer, data, depth, columns, data_row, WARPS, SPANS, PLAIN
    )
    edges = load_edges(tile, bias, out, 1, columns, columns, False, True, BIAS, 1, PLAIN)
    wait_for_dependencies(PDL)
    x += zero_after_wait(PDL)
    o += zero_after_wait(PDL)
    states = _load_states(warp, g, q, x, o, depth, WARPS, SPANS, PLAIN)
    none = warp.to(tl.float32) * 0.0
    squares = none, none, none, none
    sums = none, none, none, none
    for first in range(0, STEPS * SPANS * WARPS, SPANS * WARPS):
        next_words, next_constants, next_states = words, constants, states
        if STEPS > 1:
            span = first + SPANS * WARPS + warp
            next_words, next_constants = _load_constants(
                tile, tiles, span, g, q, inner, outer, data, depth, columns, data_row, WARPS, SPANS, PLAIN
            )
            next_states = _load_states(span, g, q, x, o, depth, WARPS, SPANS, PLAIN)
        right, squares, unscaled = _right_operands(
            states, constants, squares, g, depth >> 24, OFFSET, FLOAT16, WARPS, PLAIN
        )
        products = product_of_spans(
            words, words, right, ((none,),), unscaled, words, g, FLOAT16, 16, 0, "none", 2, WARPS, SPANS, PLAIN
        )
        sums = sums[0] + products[0], sums[1] + products[1], sums[2] + products[2], sums[3] + products[3]
        words, constants, states = next_words, next_constants, next_states
    sums = sums_of_threads(sums, 2, WARPS)
    x_x, o_o, x_ao, ao_ao = tl.reduce(squares, 0, add_four)  # twice: threads of even and of odd g have the same
    inner_factor = tl.rsqrt(0.5 * o_o / depth + first_eps)
    y_y = tl.maximum(x_x + inner_factor * (2.0 * x_ao + inner_factor * ao_ao), 0.0)
    factor = tl.rsqrt(0.5 * y_y / depth + eps)
    gate, up = (sums[0] + inner_factor * sums[1]) * factor, (sums[2] + inner_factor * sums[3]) * factor
    if BIAS:
        gate, up = gate + edges[0][0], up + edges[0][1]
    dtype: tl.constexpr = out.dtype.element_ty
    column = (tile * 8 + tl.arange(0, 8))[:, None]
    store_one(out + column, apply_gate(gate.to(dtype), up.to(dtype), TANH), column < columns, PLAIN)


@jit
def _load_constants(
    tile: Value,
    tiles: Value,
    first: Value,
    g: Value,
    q: Value,
    inner: Value,
    outer: Value,
    data: Value,
    depth: Value,
    columns: Value,
    data_row: Value,
    WARPS: constexpr,
    SPANS: constexpr,
    PLAIN: constexpr,
) -> Value:
    """Load what a thread has of W and of the weights of both norms, from span `first` on."""
    words, _values = load_rows(
        tile, tiles, first, g, q, data, data, data, depth, columns, data_row, 0, 0, 0, 0, True, 0, 16, 0, 1, "none", 0,
        False, WARPS, SPANS, PLAIN,
    )  # fmt: skip
    inside = load_right(inner, first, g, q, depth, 2, 16, WARPS, SPANS, PLAIN)
    return words, (inside, load_right(outer, first, g, q, depth, 2, 16, WARPS, SPANS, PLAIN))


@jit
def _load_states(
    first: Value,
    g: Value,
    q: Value,
    x: Value,
    o: Value,
    depth: Value,
    WARPS: constexpr,
    SPANS: constexpr,
    PLAIN: constexpr,
) -> Value:
    """Load what a thread has of both terms: threads of even and of odd g load the same."""
    before = load_right(x, first, g, q, depth, 2, 16, WARPS, SPANS, PLAIN)
    return before, load_right(o, first, g, q, depth, 2, 16, WARPS, SPANS, PLAIN)


@jit
def _right_operands(
    states: Value,
    constants: Value,
    squares: Value,
    g: Value,
    zero: Value,
    OFFSET: constexpr,
    FLOAT16: constexpr,
    WARPS: constexpr,
    PLAIN: constexpr,
) -> Value:
    """Return right operands: b x in even columns, b a o in odd ones. See `right_operands`.

    `zero` is 0, which the compiler does not know, and all operands wait for it with all of `states`: the compiler would
    otherwise load some of them after the first products.

    Returns:
        The operands, `squares` and the sums of x^2, o^2, x a o and (a o)^2, and what undoes the power of two.
    """
    loaded = g * 0
    for i in tl.static_range(len(states[0])):
        loaded |= states[0][i][0] | states[1][i][0]
    even = (g + (loaded & zero)) % 2 == 0
    x_x, o_o, x_ao, ao_ao = squares
    largest = tl.zeros_like(x_x)
    products: Value = ()
    for i in tl.static_range(len(states[0])):
        x, o = numbers(states[0][i], FLOAT16), numbers(states[1][i], FLOAT16)
        a, b = numbers(constants[0][i], FLOAT16), numbers(constants[1][i], FLOAT16)
        parts: Value = ()
        for place in tl.static_range(4):
            ao = o[place] * (a[place] + OFFSET)
            x_x, o_o = x_x + x[place] * x[place], o_o + o[place] * o[place]
            x_ao, ao_ao = x_ao + x[place] * ao, ao_ao + ao * ao
            part = tl.where(even, x[place], ao) * (b[place] + OFFSET)
            largest = tl.maximum(largest, tl.abs(part))
            parts += (part,)
        products += (parts,)
    scale, unscaled = largest, largest
    if FLOAT16:
        scale, unscaled = scale_to_half(largest, WARPS)
    right: Value = ()
    for i in tl.static_range(len(products)):
        one, two, three, four = products[i]
        if FLOAT16:
            one, two, three, four = one * scale, two * scale, three * scale, four * scale
        right += ((narrow(one, two, not FLOAT16, PLAIN), narrow(three, four, not FLOAT16, PLAIN)),)
    return right, (x_x, o_o, x_ao, ao_ao), unscaled
