"""The kernel of products of one to four rows; see `gemv.py`."""

from __future__ import annotations

from .activation import activated
from .backend import Value, constexpr, jit, launch_dependents, tl, varying, wait_for_dependencies
from .gated import apply_gate
from .gemv_words import elements, group_values, products, scale_of, unit
from .low_rank import rows_of_up, times_inner


@varying("rows")
def gemv_kernel(
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
    low: Value,
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
    rank: Value,
    NORM: constexpr,
    OFFSET: constexpr,
    WIDE: constexpr,
    BIAS: constexpr,
    ACTIVATION: constexpr,
    GATED: constexpr,
    TANH: constexpr,
    SCALED: constexpr,
    RESIDUAL: constexpr,
    TERMS: constexpr,
    RANK: constexpr,
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
    up = rows_of_up(
        n,
        up_0,
        scale_0,
        start_0,
        end_0,
        up_1,
        scale_1,
        start_1,
        end_1,
        up_2,
        scale_2,
        start_2,
        end_2,
        rank,
        TERMS,
        RANK,
    )
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
    first = begin + times_inner(up, low, 0, rows, n, start_1, start_2, rank, TERMS, RANK)
    _finish(sum_0, whole, first, residual, out, place, inside, factor, ACTIVATION, GATED, TANH, SCALED, RESIDUAL, HALF)
    if ROWS > 1:
        second = begin + times_inner(up, low, 1, rows, n, start_1, start_2, rank, TERMS, RANK)
        _finish(
            sum_1, whole, second, residual + residual_row, out + columns, place, inside & (rows > 1), factor,
            ACTIVATION, GATED, TANH, SCALED, RESIDUAL, HALF,
        )  # fmt: skip
    if ROWS > 2:
        third = begin + times_inner(up, low, 2, rows, n, start_1, start_2, rank, TERMS, RANK)
        _finish(
            sum_2, whole, third, residual + 2 * residual_row, out + 2 * columns, place, inside & (rows > 2), factor,
            ACTIVATION, GATED, TANH, SCALED, RESIDUAL, HALF,
        )  # fmt: skip
        fourth = begin + times_inner(up, low, 3, rows, n, start_1, start_2, rank, TERMS, RANK)
        _finish(
            sum_3, whole, fourth, residual + 3 * residual_row, out + 3 * columns, place, inside & (rows > 3), factor,
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
