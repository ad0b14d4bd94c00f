"""y = x W^T for one to four rows of x, without tensor cores (GEMV): a product bound by reading W once.

Each program reads a few rows of W straight into registers: no shared memory, no pipeline to fill, and no partials for
the next kernel to sum. The elements of W may be quantised; `gemv_words.py` unpacks them.

Where a product stands in a decoder layer, the same kernel does what is before and after it:

    y = residual + scale * act(norm(x) W^T + bias)        or        act(x W_gate^T) * (x W_up^T)

where everything but x and W is optional. Values are rounded where separate torch operations round.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .activation import MlpActivation, activated, code_of
from .backend import (
    Value,
    can_run,
    constexpr,
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


class Around(NamedTuple):
    """What is computed with a product, before it and after it."""

    norm: Norm | None = None  # of x: RMSNorm
    activation: MlpActivation | None = None
    gate: Activation | None = None  # W holds the rows of gate and up
    residual: Tensor | None = None  # [..., N], added to the product
    scale: float = 1.0  # of the product


PLAIN_PRODUCT = Around()


def gemv(x: Tensor, weight: Tensor | Packed, bias: Tensor | None, plan: Plan, around: Around = PLAIN_PRODUCT) -> Tensor:
    """Compute a product by the kernel.

    Args:
        x: [..., K], at most `MOST_ROWS` rows.
        weight: [N, K].
        bias: [N] or None.
        plan: one of `GEMV_PLANS`, for which `fits`.
        around: what else to compute.

    Returns:
        [..., N], or [..., N / 2] with a gate.
    """
    flat, form = x.reshape(-1, x.shape[-1]), format_of(weight)
    (rows, depth), columns = flat.shape, weight.shape[0] // (1 if around.gate is None else 2)
    out = flat.new_empty((rows, columns))
    data, scale, zero = (weight.data, weight.scale, weight.zero) if isinstance(weight, Packed) else (weight, None, None)
    if form.CODE != "plain" and data.dtype != torch.int32:
        data = data.view(torch.int32)
    scale = data if scale is None else scale
    zero = scale if zero is None else zero
    norm, residual = around.norm, out if around.residual is None else around.residual.reshape(rows, columns)
    block = form.per_load * LANES * plan.warps
    _gemv_kernel[(triton.cdiv(columns, plan.strip if around.gate is None else plan.strip // 2),)](
        flat, data, scale, zero, data if bias is None else bias, flat if norm is None else norm.weight, residual, out,
        rows, columns, depth, flat.stride(0), data.shape[1], data.stride(0), *scale.stride(), *zero.stride(),
        residual.stride(0), 0.0 if norm is None else norm.eps, around.scale,
        NORM=norm is not None, OFFSET=0.0 if norm is None else norm.form.offset,
        WIDE=norm is not None and norm.form.wide, BIAS=bias is not None, ACTIVATION=code_of(around.activation),
        GATED=around.gate is not None, TANH=around.gate == "gelu_tanh", SCALED=around.scale != 1.0,
        RESIDUAL=around.residual is not None, **form._asdict(), ROWS=rows if rows < 3 else 4, STRIP=plan.strip,
        PER_LOAD=form.per_load, BLOCK=block, EVEN=depth % block == 0, num_warps=plan.warps,
        **dependent_launch(x.device),
    )  # fmt: skip
    return out.view(*x.shape[:-1], columns)


def fits(x: Tensor, weight: Tensor | Packed, bias: Tensor | None, plan: Plan, around: Around = PLAIN_PRODUCT) -> bool:
    """Return whether the kernel can compute this product with this plan."""
    data = weight.data if isinstance(weight, Packed) else weight
    used = [x, bias, around.residual, *([] if isinstance(weight, Packed) else [weight])]
    if around.norm is not None:
        if around.norm.bias is not None or around.norm.form.centred:
            return False
        used.append(around.norm.weight)
    return (
        plan.warps > 0
        and can_run(*used)
        and data.device == x.device
        and 0 < x.numel() <= MOST_ROWS * x.shape[-1]
        and x.stride(-1) == 1
        and kernel_takes(weight)
    )


def kernel_takes(weight: Tensor | Packed) -> bool:
    """Return whether the kernel reads such a weight: rows of whole aligned loads, each within one group."""
    data = weight.data if isinstance(weight, Packed) else weight
    if data.stride(1) != 1 or (isinstance(weight, Packed) and (weight.code == "table" or weight.high_first)):
        return False
    form, row_bytes = format_of(weight), data.stride(0) * data.element_size()
    aligned = data.data_ptr() % BYTES_PER_LOAD == row_bytes % BYTES_PER_LOAD == 0
    return aligned and weight.shape[1] % form.per_load == form.GROUP % form.per_load == 0


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
    factor: Value,
    NORM: constexpr,
    OFFSET: constexpr,
    WIDE: constexpr,
    BIAS: constexpr,
    ACTIVATION: constexpr,
    GATED: constexpr,
    TANH: constexpr,
    SCALED: constexpr,
    RESIDUAL: constexpr,
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
    PER_WORD: tl.constexpr = 1 if CODE == "plain" else 32 // BITS
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
    root_0 = _root(x, inner, depth, eps, NORM, BLOCK, EVEN)
    root_1, root_2, root_3 = root_0, root_0, root_0
    if ROWS > 1:
        root_1 = _root(x_1, inner, depth, eps, NORM, BLOCK, EVEN)
    if ROWS > 2:
        root_2 = _root(x_2, inner, depth, eps, NORM, BLOCK, EVEN)
        root_3 = _root(x_3, inner, depth, eps, NORM, BLOCK, EVEN)
    sum_0 = tl.zeros((STRIP, LOADS), tl.float32)
    sum_1, sum_2, sum_3 = sum_0, sum_0, sum_0
    for start in range(0, depth, BLOCK):
        left += BLOCK // PER_WORD
        row_words -= BLOCK // PER_WORD
        following = _load(left, word[None, :], row_words, EVEN)
        weights = elements(words, STRIP, BLOCK, CODE)
        rest = depth - start
        gain = inner
        if NORM:
            gain = _load(norm_weight + start + inner, inner, rest, EVEN).to(tl.float32) + OFFSET
        factors, centres, shifts = group_values(
            scale, zero, n, start + tl.arange(0, LOADS) * PER_LOAD, depth, scale_n, scale_k, zero_n, zero_k,
            CODE, GROUP, SCALE_ROWS, ZEROS, ZERO_OFFSET, EXPONENTS,
        )  # fmt: skip
        states = _states(x + start, inner, rest, root_0, gain, NORM, WIDE, EVEN)
        sum_0 += products(weights, states, inner, factors, centres, shifts, CODE, GROUP, ZEROS, STRIP, LOADS, PER_LOAD)
        if ROWS > 1:
            states = _states(x_1 + start, inner, rest, root_1, gain, NORM, WIDE, EVEN)
            sum_1 += products(
                weights, states, inner, factors, centres, shifts, CODE, GROUP, ZEROS, STRIP, LOADS, PER_LOAD
            )
        if ROWS > 2:
            states = _states(x_2 + start, inner, rest, root_2, gain, NORM, WIDE, EVEN)
            sum_2 += products(
                weights, states, inner, factors, centres, shifts, CODE, GROUP, ZEROS, STRIP, LOADS, PER_LOAD
            )
            states = _states(x_3 + start, inner, rest, root_3, gain, NORM, WIDE, EVEN)
            sum_3 += products(
                weights, states, inner, factors, centres, shifts, CODE, GROUP, ZEROS, STRIP, LOADS, PER_LOAD
            )
        words = following
    whole = tl.full((STRIP,), 1.0, tl.float32) * unit(CODE)
    if GROUP == 0 and BITS < 16:
        whole *= scale_of(scale + n // SCALE_ROWS * scale_n, EXPONENTS)
    begin = tl.zeros((STRIP,), tl.float32)
    if BIAS:
        begin = tl.load(bias + n).to(tl.float32)
    place = tl.program_id(0) * HALF + tl.arange(0, HALF)
    inside = place < columns
    _finish(sum_0, whole, begin, residual, out, place, inside, factor, ACTIVATION, GATED, TANH, SCALED, RESIDUAL, HALF)
    if ROWS > 1:
        _finish(
            sum_1, whole, begin, residual + residual_row, out + columns, place, inside & (rows > 1), factor,
            ACTIVATION, GATED, TANH, SCALED, RESIDUAL, HALF,
        )  # fmt: skip
    if ROWS > 2:
        _finish(
            sum_2, whole, begin, residual + 2 * residual_row, out + 2 * columns, place, inside & (rows > 2), factor,
            ACTIVATION, GATED, TANH, SCALED, RESIDUAL, HALF,
        )  # fmt: skip
        _finish(
            sum_3, whole, begin, residual + 3 * residual_row, out + 3 * columns, place, inside & (rows > 3), factor,
            ACTIVATION, GATED, TANH, SCALED, RESIDUAL, HALF,
        )  # fmt: skip


@jit
def _load(pointers: Value, place: Value, rest: Value, EVEN: constexpr) -> Value:
    """Load what is before the end, `rest` places away. Beyond are zeros, or anything where a whole step is (EVEN)."""
    if EVEN:
        return tl.load(pointers, mask=rest > 0)
    else:
        return tl.load(pointers, mask=place < rest, other=0)


@jit
def _root(
    x: Value, inner: Value, depth: Value, eps: Value, NORM: constexpr, BLOCK: constexpr, EVEN: constexpr
) -> Value:
    """Return 1 / sqrt(mean(x^2) + eps) of one row of x."""
    if NORM:
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, depth, BLOCK):
            value = _load(x + start + inner, inner, depth - start, EVEN).to(tl.float32)
            total += value * value
        return tl.rsqrt(tl.sum(total, 0) / depth + eps)
    else:
        return eps


@jit
def _states(
    x: Value,
    inner: Value,
    rest: Value,
    root: Value,
    gain: Value,
    NORM: constexpr,
    WIDE: constexpr,
    EVEN: constexpr,
) -> Value:
    """Load columns of one row of x and normalise them, rounded as `norm.normalised` does."""
    value = _load(x + inner, inner, rest, EVEN)
    if NORM:
        wide = value.to(tl.float32) * root
        if not WIDE:
            wide = wide.to(value.dtype).to(tl.float32)
        value = (wide * gain).to(value.dtype)
    return value


@jit
def _finish(
    sums: Value,
    whole: Value,
    begin: Value,
    residual: Value,
    out: Value,
    place: Value,
    inside: Value,
    factor: Value,
    ACTIVATION: constexpr,
    GATED: constexpr,
    TANH: constexpr,
    SCALED: constexpr,
    RESIDUAL: constexpr,
    HALF: constexpr,
) -> None:
    """Add up one row of the product, and store it with what comes after it."""
    dtype: tl.constexpr = out.dtype.element_ty
    result = (tl.sum(sums, 1) * whole + begin).to(dtype)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(result, (2, HALF)), (1, 0)))
        result = apply_gate(gate, up, TANH)
    if ACTIVATION > 0:
        result = activated(result, ACTIVATION)
    if SCALED:
        result = (result.to(tl.float32) * factor).to(dtype)
    if RESIDUAL:
        result = (tl.load(residual + place, mask=inside, other=0.0).to(tl.float32) + result.to(tl.float32)).to(dtype)
    tl.store(out + place, result, mask=inside)
