"""y = x W^T for one to four rows of x and quantised W, without tensor cores (GEMV): a product bound by reading W once.

Each program reads a few rows of W straight into registers: no shared memory, no pipeline to fill, and no partials for
the next kernel to sum. `gemv_words.py` unpacks the elements of W.

With a gate, W holds the rows of gate and up, and the kernel computes act(x W_gate^T) * (x W_up^T).

RMSNorm of x takes no launch of its own, and no program reads x before it multiplies. The factor of a row is the same
for all columns, so it is taken out of the product:

    norm(x) W^T = ((x * weight) W^T) / sqrt(mean(x^2) + eps)

and each program adds up x^2 on its way. A product can also add a residual to its result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import (
    Value,
    can_run,
    constexpr,
    converts_float8,
    dependent_launch,
    jit,
    launch_dependents,
    tl,
    triton,
    varying,
    wait_for_dependencies,
)
from .gated import Activation, apply_gate
from .gemv_words import BYTES_PER_LOAD, elements, format_of, group_values, products, scale_of, unit
from .linear import Plan
from .norm import Norm
from .packed import Packed

MOST_ROWS = 4
LANES = 32
# Few rows of W per program fill the GPU with small weights; many share the loads of x.
GEMV_PLANS = tuple(Plan(1, 1, strip, warps) for strip, warps in ((4, 4), (8, 4), (8, 2), (16, 4)))


def gemv(
    x: Tensor,
    weight: Packed,
    bias: Tensor | None,
    plan: Plan,
    gate: Activation | None = None,
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute a product by the kernel.

    Args:
        x: [..., K], at most `MOST_ROWS` rows.
        weight: [N, K].
        bias: [N] or None.
        plan: one of `GEMV_PLANS`, for which `fits`.
        gate: the activation of a gate, whose rows come before those of the up projection.
        norm: an RMSNorm of x, for which `takes_norm`.
        residual: of the shape of the result, added to it.

    Returns:
        [..., N], or [..., N / 2] with a gate.
    """
    flat, form = x.reshape(-1, x.shape[-1]), format_of(weight)
    (rows, depth), columns = flat.shape, weight.shape[0] // (1 if gate is None else 2)
    out = flat.new_empty((rows, columns))
    added = out if residual is None else residual.reshape(rows, columns)
    data, scale = weight.data, weight.scale
    if data.dtype != torch.int32:
        data = data.view(torch.int32)
    if form.CODE == "float8" and x.is_cuda and converts_float8(x.device):
        form = form._replace(CODE="converted")
    zero = scale if weight.zero is None else weight.zero
    block = form.per_load * LANES * plan.warps
    _gemv_kernel[(triton.cdiv(columns, plan.strip if gate is None else plan.strip // 2),)](
        flat, data, scale, zero, data if bias is None else bias, flat if norm is None else norm.weight, added, out,
        rows, columns, depth, flat.stride(0), data.shape[1], data.stride(0), *scale.stride(), *zero.stride(),
        added.stride(0), 0.0 if norm is None else norm.eps,
        NORM=norm is not None, OFFSET=0.0 if norm is None else norm.form.offset, BIAS=bias is not None,
        RESIDUAL=residual is not None, GATED=gate is not None, TANH=gate == "gelu_tanh", **form._asdict(),
        ROWS=rows if rows < 3 else 4, STRIP=plan.strip, PER_LOAD=form.per_load, BLOCK=block, EVEN=depth % block == 0,
        num_warps=plan.warps, **dependent_launch(x.device),
    )  # fmt: skip
    return out.view(*x.shape[:-1], columns)


def fits(x: Tensor, weight: Packed, bias: Tensor | None, plan: Plan) -> bool:
    """Return whether the kernel can compute this product with this plan."""
    return (
        plan.warps > 0
        and can_run(x, bias)
        and weight.data.device == x.device
        and 0 < x.numel() <= MOST_ROWS * x.shape[-1]
        and x.stride(-1) == 1
        and kernel_takes(weight)
    )


def kernel_takes(weight: Packed) -> bool:
    """Return whether the kernel reads such a weight: rows of whole aligned loads, each within one group."""
    data = weight.data
    if data.stride(1) != 1 or weight.code == "table" or weight.high_first:
        return False
    form, row_bytes = format_of(weight), data.stride(0) * data.element_size()
    aligned = data.data_ptr() % BYTES_PER_LOAD == row_bytes % BYTES_PER_LOAD == 0
    return aligned and weight.shape[1] % form.per_load == form.GROUP % form.per_load == 0


def takes_norm(norm: Norm) -> bool:
    """Return whether a product can compute a norm of its input: RMSNorm without a bias."""
    return not norm.form.centred and norm.bias is None


@varying("rows")
def _gemv_kernel(
    x: Value,
    data: Value,
    scale: Value,
    zero: Value,
    bias: Value,
    norm_weight: Value,
    residual: Value,
    out: Value,
    rows: Value,
    columns: Value,
    depth: Value,
    x_row: Value,
    row_words: Value,
    data_row: Value,
    scale_n: Value,
    scale_k: Value,
    zero_n: Value,
    zero_k: Value,
    residual_row: Value,
    eps: Value,
    NORM: constexpr,
    OFFSET: constexpr,
    BIAS: constexpr,
    RESIDUAL: constexpr,
    GATED: constexpr,
    TANH: constexpr,
    CODE: constexpr,
    BITS: constexpr,
    GROUP: constexpr,
    SCALE_ROWS: constexpr,
    ZEROS: constexpr,
    ZERO_OFFSET: constexpr,
    EXPONENTS: constexpr,
    ROWS: constexpr,
    STRIP: constexpr,
    PER_LOAD: constexpr,
    BLOCK: constexpr,
    EVEN: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    PER_WORD: tl.constexpr = 32 // BITS
    LOADS: tl.constexpr = BLOCK // PER_LOAD  # per row of W
    HALF: tl.constexpr = STRIP // 2 if GATED else STRIP
    strip, word, inner = tl.arange(0, STRIP), tl.arange(0, BLOCK // PER_WORD), tl.arange(0, BLOCK)
    n = tl.minimum(tl.program_id(0) * HALF + strip % HALF, columns - 1)  # the last strip may exceed the edge
    if GATED:  # the gate's rows, then the up projection's for the same columns
        n += strip // HALF * columns
    left = data + n.to(tl.int64)[:, None] * data_row + word[None, :]
    # Each step loads the words of the next one. Weights are constant: the first load precedes the wait.
    words = _load(left, word[None, :], row_words, EVEN)
    wait_for_dependencies(PDL)
    x_1 = x + tl.minimum(1, rows - 1) * x_row
    x_2 = x + tl.minimum(2, rows - 1) * x_row
    x_3 = x + tl.minimum(3, rows - 1) * x_row
    sum_0 = tl.zeros((STRIP, LOADS), tl.float32)
    sum_1, sum_2, sum_3 = sum_0, sum_0, sum_0
    square_0 = tl.zeros((LOADS,), tl.float32)  # of x, where it is normalised
    square_1, square_2, square_3 = square_0, square_0, square_0
    for start in range(0, depth, BLOCK):
        left += BLOCK // PER_WORD
        row_words -= BLOCK // PER_WORD
        following = _load(left, word[None, :], row_words, EVEN)
        weights = elements(words, STRIP, BLOCK, CODE)
        rest = depth - start
        factors, centres, shifts = group_values(
            scale, zero, n, start + tl.arange(0, LOADS) * PER_LOAD, depth, scale_n, scale_k, zero_n, zero_k,
            CODE, GROUP, SCALE_ROWS, ZEROS, ZERO_OFFSET, EXPONENTS,
        )  # fmt: skip
        gain = inner
        if NORM:
            gain = _load(norm_weight + start + inner, inner, rest, EVEN).to(tl.float32) + OFFSET
        states = _load(x + start + inner, inner, rest, EVEN)
        states, square_0 = _scaled(states, gain, square_0, NORM, LOADS, PER_LOAD)
        sum_0 += products(weights, states, inner, factors, centres, shifts, CODE, GROUP, ZEROS, STRIP, LOADS, PER_LOAD)
        if ROWS > 1:
            states = _load(x_1 + start + inner, inner, rest, EVEN)
            states, square_1 = _scaled(states, gain, square_1, NORM, LOADS, PER_LOAD)
            sum_1 += products(
                weights, states, inner, factors, centres, shifts, CODE, GROUP, ZEROS, STRIP, LOADS, PER_LOAD
            )
        if ROWS > 2:
            states = _load(x_2 + start + inner, inner, rest, EVEN)
            states, square_2 = _scaled(states, gain, square_2, NORM, LOADS, PER_LOAD)
            sum_2 += products(
                weights, states, inner, factors, centres, shifts, CODE, GROUP, ZEROS, STRIP, LOADS, PER_LOAD
            )
            states = _load(x_3 + start + inner, inner, rest, EVEN)
            states, square_3 = _scaled(states, gain, square_3, NORM, LOADS, PER_LOAD)
            sum_3 += products(
                weights, states, inner, factors, centres, shifts, CODE, GROUP, ZEROS, STRIP, LOADS, PER_LOAD
            )
        words = following
    whole = tl.full((STRIP,), 1.0, tl.float32) * unit(CODE)
    if GROUP == 0:
        whole *= scale_of(scale + n // SCALE_ROWS * scale_n, EXPONENTS)
    begin = tl.zeros((STRIP,), tl.float32)
    if BIAS:
        begin = tl.load(bias + n).to(tl.float32)
    place = tl.program_id(0) * HALF + tl.arange(0, HALF)
    inside = place < columns
    root = _root(square_0, depth, eps, NORM)
    _finish(sum_0, whole * root, begin, residual, out, place, inside, RESIDUAL, GATED, TANH, HALF)
    if ROWS > 1:
        root, inside_1 = _root(square_1, depth, eps, NORM), inside & (rows > 1)
        residual += residual_row
        out += columns
        _finish(sum_1, whole * root, begin, residual, out, place, inside_1, RESIDUAL, GATED, TANH, HALF)
    if ROWS > 2:
        root, inside_2 = _root(square_2, depth, eps, NORM), inside & (rows > 2)
        residual += residual_row
        out += columns
        _finish(sum_2, whole * root, begin, residual, out, place, inside_2, RESIDUAL, GATED, TANH, HALF)
        root, inside_3 = _root(square_3, depth, eps, NORM), inside & (rows > 3)
        residual += residual_row
        out += columns
        _finish(sum_3, whole * root, begin, residual, out, place, inside_3, RESIDUAL, GATED, TANH, HALF)


@jit
def _load(pointers: Value, place: Value, rest: Value, EVEN: constexpr) -> Value:
    """Load what is before the end, `rest` places away. Beyond are zeros, or anything where a whole step is (EVEN)."""
    if EVEN:
        return tl.load(pointers, mask=rest > 0)
    else:
        return tl.load(pointers, mask=place < rest, other=0)


@jit
def _scaled(states: Value, gain: Value, square: Value, NORM: constexpr, LOADS: constexpr, PER_LOAD: constexpr) -> Value:
    """Multiply some columns of a row of x by the weights of a norm, and add their squares to those so far [L]."""
    if NORM:
        wide = states.to(tl.float32)
        return wide * gain, square + tl.sum(tl.reshape(wide * wide, (LOADS, PER_LOAD)), 1)
    else:
        return states, square


@jit
def _root(square: Value, depth: Value, eps: Value, NORM: constexpr) -> Value:
    """Return the factor of RMSNorm for one row."""
    if NORM:
        return tl.rsqrt(tl.sum(square, 0) / depth + eps)
    else:
        return 1.0


@jit
def _finish(
    sums: Value,
    whole: Value,
    begin: Value,
    residual: Value,
    out: Value,
    place: Value,
    inside: Value,
    RESIDUAL: constexpr,
    GATED: constexpr,
    TANH: constexpr,
    HALF: constexpr,
) -> None:
    """Add up one row of the product, and store it."""
    result = (tl.sum(sums, 1) * whole + begin).to(out.dtype.element_ty)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(result, (2, HALF)), (1, 0)))
        result = apply_gate(gate, up, TANH)
    if RESIDUAL:
        total = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32) + result.to(tl.float32)
        result = total.to(out.dtype.element_ty)
    tl.store(out + place, result, mask=inside)
