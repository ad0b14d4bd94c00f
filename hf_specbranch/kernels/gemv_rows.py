"""The loop of a GEMV: a few rows of W times one to four rows of x, which may be normalised on the way.

RMSNorm of x takes no launch of its own, and no program reads x before it multiplies. The factor of a row is the same
for all columns, so it is taken out of the product:

    norm(x) W^T = ((x * weight) W^T) / sqrt(mean(x^2) + eps)

and each program adds up x^2 while it multiplies.

A step of a small model is a chain of short kernels, each of which waits for the one before it. So a program loads
everything constant before it waits (`constants_of_rows`), and everything else as soon as it has waited. A load that
comes later adds the whole latency of the memory.
"""

from __future__ import annotations

from .backend import Value, constexpr, jit, tl
from .gemv_words import group_values, products_of_words, scale_of, scaled, unit


@jit
def constants_of_rows(
    n: Value,
    data: Value,
    scale: Value,
    zero: Value,
    bias: Value,
    norm_weight: Value,
    depth: Value,
    row_words: Value,
    data_row: Value,
    scale_n: Value,
    scale_k: Value,
    zero_n: Value,
    zero_k: Value,
    NORM: constexpr,
    BIAS: constexpr,
    CODE: constexpr,
    BITS: constexpr,
    GROUP: constexpr,
    SCALE_ROWS: constexpr,
    ZEROS: constexpr,
    ZERO_OFFSET: constexpr,
    EXPONENTS: constexpr,
    STRIP: constexpr,
    PER_LOAD: constexpr,
    BLOCK: constexpr,
    EVEN: constexpr,
) -> Value:
    """Load what is constant for rows `n` [STRIP] of W.

    Returns:
        The words of their first step, and for that step the weights of the norm and the result of `group_values`; the
        scales of whole rows and the biases [STRIP] in float32.
    """
    word, inner = tl.arange(0, BLOCK // (32 // BITS)), tl.arange(0, BLOCK)
    words = _load(data + n.to(tl.int64)[:, None] * data_row + word[None, :], word[None, :], row_words, EVEN)
    gain = inner
    if NORM:
        gain = _load(norm_weight + inner, inner, depth, EVEN)
    values = group_values(
        scale, zero, n, tl.arange(0, BLOCK // PER_LOAD) * PER_LOAD, depth, scale_n, scale_k, zero_n, zero_k,
        CODE, GROUP, SCALE_ROWS, ZEROS, ZERO_OFFSET, EXPONENTS,
    )  # fmt: skip
    whole = tl.full((STRIP,), 1.0, tl.float32) * unit(CODE)
    if GROUP == 0:
        whole *= scale_of(scale + n // SCALE_ROWS * scale_n, EXPONENTS)
    begin = tl.zeros((STRIP,), tl.float32)
    if BIAS:
        begin = tl.load(bias + n).to(tl.float32)
    return words, gain, values, whole, begin


@jit
def product_of_rows(
    words: Value,
    gain: Value,
    values: Value,
    whole: Value,
    begin: Value,
    n: Value,
    x: Value,
    data: Value,
    scale: Value,
    zero: Value,
    norm_weight: Value,
    rows: Value,
    depth: Value,
    x_row: Value,
    row_words: Value,
    data_row: Value,
    scale_n: Value,
    scale_k: Value,
    zero_n: Value,
    zero_k: Value,
    eps: Value,
    NORM: constexpr,
    OFFSET: constexpr,
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
    ONE_STEP: constexpr,
    ASSEMBLY: constexpr,
) -> Value:
    """Multiply rows `n` [STRIP] of W by the rows of x: the columns `n` of four rows of the product, in float32.

    Those beyond ROWS are worth nothing. The first arguments are those of `constants_of_rows`. Each step loads the
    words of the next one.
    """
    PER_WORD: tl.constexpr = 32 // BITS
    LOADS: tl.constexpr = BLOCK // PER_LOAD  # per row of W
    word, inner = tl.arange(0, BLOCK // PER_WORD), tl.arange(0, BLOCK)
    left = data + n.to(tl.int64)[:, None] * data_row + word[None, :]
    x_1 = x + tl.minimum(1, rows - 1) * x_row
    x_2 = x + tl.minimum(2, rows - 1) * x_row
    x_3 = x + tl.minimum(3, rows - 1) * x_row
    sum_0 = tl.zeros((STRIP, LOADS), tl.float32)
    sum_1, sum_2, sum_3 = sum_0, sum_0, sum_0
    square_0 = tl.zeros((LOADS,), tl.float32)  # of x, where it is normalised
    square_1, square_2, square_3 = square_0, square_0, square_0
    for start in range(0, BLOCK if ONE_STEP else depth, BLOCK):
        left += BLOCK // PER_WORD
        row_words -= BLOCK // PER_WORD
        rest = depth - start
        following, next_gain, next_values = words, gain, values
        if not ONE_STEP:
            following = _load(left, word[None, :], row_words, EVEN)
            next_values = group_values(
                scale, zero, n, start + BLOCK + tl.arange(0, LOADS) * PER_LOAD, depth, scale_n, scale_k, zero_n, zero_k,
                CODE, GROUP, SCALE_ROWS, ZEROS, ZERO_OFFSET, EXPONENTS,
            )  # fmt: skip
            if NORM:
                next_gain = _load(norm_weight + start + BLOCK + inner, inner, rest - BLOCK, EVEN)
        first = _load(x + start + inner, inner, rest, EVEN)
        first, square_0 = _normed(first, gain, square_0, NORM, OFFSET, LOADS, PER_LOAD)
        second = first
        if ROWS > 1:
            second = _load(x_1 + start + inner, inner, rest, EVEN)
            second, square_1 = _normed(second, gain, square_1, NORM, OFFSET, LOADS, PER_LOAD)
        one, two = products_of_words(words, first, second, ROWS, CODE, BITS, ASSEMBLY)
        sum_0 += scaled(one, first, values, CODE, GROUP, ZEROS, STRIP, LOADS, PER_LOAD)
        if ROWS > 1:
            sum_1 += scaled(two, second, values, CODE, GROUP, ZEROS, STRIP, LOADS, PER_LOAD)
        if ROWS > 2:
            third = _load(x_2 + start + inner, inner, rest, EVEN)
            third, square_2 = _normed(third, gain, square_2, NORM, OFFSET, LOADS, PER_LOAD)
            fourth = _load(x_3 + start + inner, inner, rest, EVEN)
            fourth, square_3 = _normed(fourth, gain, square_3, NORM, OFFSET, LOADS, PER_LOAD)
            one, two = products_of_words(words, third, fourth, ROWS, CODE, BITS, ASSEMBLY)
            sum_2 += scaled(one, third, values, CODE, GROUP, ZEROS, STRIP, LOADS, PER_LOAD)
            sum_3 += scaled(two, fourth, values, CODE, GROUP, ZEROS, STRIP, LOADS, PER_LOAD)
        words, gain, values = following, next_gain, next_values
    first = tl.sum(sum_0, 1) * (whole * _root(square_0, depth, eps, NORM)) + begin
    second, third, fourth = first, first, first
    if ROWS > 1:
        second = tl.sum(sum_1, 1) * (whole * _root(square_1, depth, eps, NORM)) + begin
    if ROWS > 2:
        third = tl.sum(sum_2, 1) * (whole * _root(square_2, depth, eps, NORM)) + begin
        fourth = tl.sum(sum_3, 1) * (whole * _root(square_3, depth, eps, NORM)) + begin
    return first, second, third, fourth


@jit
def _load(pointers: Value, place: Value, rest: Value, EVEN: constexpr) -> Value:
    """Load what is before the end, `rest` places away. Beyond are zeros, or anything where a whole step is (EVEN)."""
    if EVEN:
        return tl.load(pointers, mask=rest > 0)
    else:
        return tl.load(pointers, mask=place < rest, other=0)


@jit
def _normed(
    states: Value,
    gain: Value,
    square: Value,
    NORM: constexpr,
    OFFSET: constexpr,
    LOADS: constexpr,
    PER_LOAD: constexpr,
) -> Value:
    """Multiply some columns of a row of x by the weights of a norm, and add their squares to those so far [L]."""
    if NORM:
        wide = states.to(tl.float32)
        return wide * (gain.to(tl.float32) + OFFSET), square + tl.sum(tl.reshape(wide * wide, (LOADS, PER_LOAD)), 1)
    else:
        return states, square


@jit
def _root(square: Value, depth: Value, eps: Value, NORM: constexpr) -> Value:
    """Return the factor of RMSNorm for one row."""
    if NORM:
        return tl.rsqrt(tl.sum(square, 0) / depth + eps)
    else:
        return 1.0
