"""The arithmetic of `tiles.py`: right operands from x, products of spans, sums over threads.

A tile has eight columns, and x has one to eight rows. With fewer than eight, the columns take x at different depths: a
register then holds the right operands of several tiles, and a mask selects the columns that belong to the elements of W
at hand. So x takes few registers, and each of its elements is loaded once by a program. Column n is row n % ROWS of x.
"""

from __future__ import annotations

from .backend import Value, constexpr, jit, tl
from .tile_fragments import codes_base, elements_of_tile, multiply_tile, narrow, numbers, scale_to_half
from .tile_loads import load_right, load_rows


@jit
def right_operands(
    states: Value,
    gain: Value,
    square: Value,
    NORM: constexpr,
    OFFSET: constexpr,
    FLOAT16: constexpr,
    BITS: constexpr,
    WARPS: constexpr,
    PLAIN: constexpr,
) -> Value:
    """Return the right operands of all tiles: x, multiplied by the weights of the norm.

    For packed elements they are in float16, and multiplied by the power of two that brings the largest of a warp to
    between 2^14 and 2^15. Numbers of bfloat16 are exact then, unless they are 2^28 times smaller than the largest one.
    Dense weights of float16 get the same.

    Returns:
        Two words for each register, `square` and the squares of x, and what undoes the power of two.
    """
    BFLOAT16: tl.constexpr = BITS == 16 and not FLOAT16
    largest = tl.zeros_like(square)
    products: Value = ()
    for i in tl.static_range(len(states)):
        parts = numbers(states[i], FLOAT16)
        if NORM:
            square += parts[0] * parts[0] + parts[1] * parts[1] + parts[2] * parts[2] + parts[3] * parts[3]
            factors = numbers(gain[i], FLOAT16)
            parts = (
                parts[0] * (factors[0] + OFFSET), parts[1] * (factors[1] + OFFSET),
                parts[2] * (factors[2] + OFFSET), parts[3] * (factors[3] + OFFSET),
            )  # fmt: skip
        for place in tl.static_range(4):
            largest = tl.maximum(largest, tl.abs(parts[place]))
        products += (parts,)
    right: Value = ()
    if BFLOAT16:
        unscaled = square
        for i in tl.static_range(len(states)):
            if NORM:
                one, two, three, four = products[i]
                right += ((narrow(one, two, True, PLAIN), narrow(three, four, True, PLAIN)),)
            else:
                right += (states[i],)
    else:
        scale, unscaled = scale_to_half(largest, WARPS)
        # With 4 bits: elements 0 and 4 of a word, then 1 and 5, whose codes are 16 times as large.
        later = scale * (0.0625 if BITS == 4 else 1.0)
        for i in tl.static_range(len(states)):
            one, two, three, four = products[i]
            if BITS == 4:
                two, three = three, two
            low = narrow(one * scale, two * scale, False, PLAIN)
            right += ((low, narrow(three * later, four * later, False, PLAIN)),)
    return right, square, unscaled


@jit
def sums_of_right(
    right: Value,
    none: Value,
    CODE: constexpr,
    ZEROS: constexpr,
    ROWS: constexpr,
    WARPS: constexpr,
    SPANS: constexpr,
    PLAIN: constexpr,
) -> Value:
    """Return what the sums of each span begin with, by column, and the sums of x.

    A code becomes 1024 plus itself, or plus 16 times itself. The sums begin with minus what codes of 8, or of 0 with
    zero points in memory, would add.
    """
    begin: Value = ()
    word = none.to(tl.int32)
    if CODE == "float8" or CODE == "dense":
        begin += ((none, none, none, none),)
    else:
        one, sixteen = word + 0x3C003C00, word + 0x4C004C00
        low, high = word + 0x64086408, word + 0x64806480
        if ZEROS == "words":
            low, high = word + 0x64006400, word + 0x64006400
        for i in tl.static_range(SPANS):
            sums = none, none, none, none
            total = none, none, none, none
            for k in tl.static_range(ROWS):
                sums = multiply_tile(sums, (low, low, high, high), right[i * ROWS + k], False, WARPS, PLAIN)
                if ZEROS != "none":
                    total = multiply_tile(total, (one, one, sixteen, sixteen), right[i * ROWS + k], False, WARPS, PLAIN)
            begin += ((-sums[0], -sums[1], total[0], total[1]),)
    return begin


@jit
def norm_factors(square: Value, depth: Value, eps: Value, NORM: constexpr, ROWS: constexpr, WARPS: constexpr) -> Value:
    """Return the factors of RMSNorm for even and odd rows of x, as `sums_of_threads` returns the sums: [1, rows]."""
    factors: Value = ()
    if NORM:
        square = tl.sum(tl.reshape(square, (WARPS, 8 // ROWS, ROWS, 4)), 3)
        square = tl.sum(tl.sum(square, 1), 0)  # [ROWS]
        factor = tl.rsqrt(square / depth + eps)
        if ROWS == 1:
            factors += (factor[None, :],)
        else:
            one, two = tl.split(tl.reshape(factor, (ROWS // 2, 2)))
            factors += (one[None, :], two[None, :])
    return factors


@jit
def product_of_spans(
    words: Value,
    values: Value,
    right: Value,
    begin: Value,
    unscaled: Value,
    base: Value,
    g: Value,
    FLOAT16: constexpr,
    BITS: constexpr,
    GROUP: constexpr,
    ZEROS: constexpr,
    ROWS: constexpr,
    WARPS: constexpr,
    SPANS: constexpr,
    PLAIN: constexpr,
    NARROW: constexpr = False,
) -> Value:
    """Multiply the spans of a tile that a warp has."""
    BFLOAT16: tl.constexpr = BITS == 16 and not FLOAT16
    SHARE: tl.constexpr = 8 // ROWS  # tiles, or with several rows pairs of tiles, that share a register
    none = begin[0][0] * 0.0
    total = none, none, none, none
    for i in tl.static_range(SPANS // 2 if NARROW else SPANS):
        upper, lower = words[i]
        sums = none, none, none, none
        if BITS == 4:
            one, two, x_one, x_two = begin[i]
            sums = one, two, one, two
            if ZEROS == "words":
                above, below = values[i][0][1], values[i][1][1]
                sums = one - above * x_one, two - above * x_two, one - below * x_one, two - below * x_two
        for tile in tl.static_range(8):
            if NARROW:
                first, second = right[2 * i + tile // 4]
                own = g % 4 == tile % 4
            elif ROWS == 1:
                first, second = right[i]
                own = g == tile
            else:
                first, second = right[i * ROWS + tile // 2 // SHARE * 2 + tile % 2]
                own = g // ROWS == tile // 2 % SHARE
            if SHARE > 1:
                first, second = tl.where(own, first, 0), tl.where(own, second, 0)
            left = elements_of_tile(upper, lower, base, tile, BITS, PLAIN)
            sums = multiply_tile(sums, left, (first, second), BFLOAT16, WARPS, PLAIN)
        if GROUP > 0:
            above, below = values[i]
            sums = _scaled(sums, values[i])
            if ZEROS == "shift":
                x_one, x_two = begin[i][2], begin[i][3]
                sums = (
                    sums[0] + above[1] * x_one, sums[1] + above[1] * x_two,
                    sums[2] + below[1] * x_one, sums[3] + below[1] * x_two,
                )  # fmt: skip
        total = total[0] + sums[0], total[1] + sums[1], total[2] + sums[2], total[3] + sums[3]
    if BITS < 16 and GROUP == 0:
        total = _scaled(total, values[0])
    if not BFLOAT16:
        total = total[0] * unscaled, total[1] * unscaled, total[2] * unscaled, total[3] * unscaled
    return total


@jit
def _scaled(sums: Value, values: Value) -> Value:
    """Multiply sums by the scales of their rows."""
    above, below = values
    return sums[0] * above[0], sums[1] * above[0], sums[2] * below[0], sums[3] * below[0]


@jit
def sums_of_threads(sums: Value, ROWS: constexpr, WARPS: constexpr, NARROW: constexpr = False) -> Value:
    """Add up what threads have of the same element of the result: [8, rows] for even and odd rows of x, twice."""
    if NARROW:  # columns 0 to 3 of the upper rows belong to them, and columns 4 to 7 of the lower ones
        total = tl.where(tl.arange(0, WARPS * 32) % 4 < 2, sums[0] + sums[1], sums[2] + sums[3])
        total = tl.sum(tl.sum(tl.reshape(total, (WARPS, 8, 4)), 2), 0)[:, None]
        return total, total, total, total
    elif ROWS == 1:
        upper, lower = sums[0] + sums[1], sums[2] + sums[3]
        upper, lower = tl.reduce((tl.reshape(upper, (WARPS, 8, 4)), tl.reshape(lower, (WARPS, 8, 4))), 2, _add_two)
        upper, lower = tl.reduce((upper, lower), 0, _add_two)
        return upper[:, None], upper[:, None], lower[:, None], lower[:, None]
    else:
        SHAPE: tl.constexpr = (WARPS, 8, 8 // ROWS, ROWS // 2)
        parts: Value = ()
        for i in tl.static_range(4):
            parts += (tl.reshape(sums[i], SHAPE),)
        return tl.reduce(tl.reduce(parts, 2, _add_four), 0, _add_four)


@jit
def _add_two(a: Value, b: Value, other_a: Value, other_b: Value) -> Value:
    return a + other_a, b + other_b


@jit
def _add_four(
    a: Value, b: Value, c: Value, d: Value, other_a: Value, other_b: Value, other_c: Value, other_d: Value
) -> Value:
    return a + other_a, b + other_b, c + other_c, d + other_d


@jit
def constants_of_tile(
    tile: Value,
    data: Value,
    scale: Value,
    zero: Value,
    norm_weight: Value,
    depth: Value,
    columns: Value,
    tiles: Value,
    data_row: Value,
    scale_n: Value,
    scale_k: Value,
    zero_n: Value,
    zero_k: Value,
    GATED: constexpr,
    HEAD_HALF: constexpr,
    NORM: constexpr,
    BITS: constexpr,
    GROUP: constexpr,
    SCALE_ROWS: constexpr,
    ZEROS: constexpr,
    ZERO_OFFSET: constexpr,
    EXPONENTS: constexpr,
    ROWS: constexpr,
    WARPS: constexpr,
    SPANS: constexpr,
    PLAIN: constexpr,
    NARROW: constexpr = False,
) -> Value:
    """Load what is constant for the first spans of a tile: words of W, values of their groups, weights of the norm."""
    warp, g, q = places(WARPS)
    words, values = load_rows(
        tile, tiles, warp, g, q, data, scale, zero, depth, columns, data_row, scale_n, scale_k, zero_n, zero_k, GATED,
        HEAD_HALF, BITS, GROUP, SCALE_ROWS, ZEROS, ZERO_OFFSET, EXPONENTS, WARPS, SPANS, PLAIN, NARROW,
    )  # fmt: skip
    gain: Value = ()
    if NORM:
        gain = load_right(norm_weight, warp, g, q, depth, ROWS, BITS, WARPS, SPANS, PLAIN, NARROW)
    return words, values, gain


@jit
def places(WARPS: constexpr) -> Value:
    """Return the warp of each thread, and g and q."""
    thread = tl.arange(0, WARPS * 32)
    return thread // 32, thread // 4 % 8, thread % 4


@jit
def sums_of_tile(
    words: Value,
    values: Value,
    gain: Value,
    states: Value,
    tile: Value,
    x: Value,
    data: Value,
    scale: Value,
    zero: Value,
    norm_weight: Value,
    rows: Value,
    depth: Value,
    columns: Value,
    tiles: Value,
    data_row: Value,
    scale_n: Value,
    scale_k: Value,
    zero_n: Value,
    zero_k: Value,
    eps: Value,
    GATED: constexpr,
    HEAD_HALF: constexpr,
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
    NARROW: constexpr = False,
) -> Value:
    """Multiply a tile by x. Each step loads the spans of the next one.

    The first arguments are those of `constants_of_tile`, and of `load_right` for the first spans; `x` points to a row.

    Returns:
        The sums of `sums_of_threads`, and the factors of `norm_factors`.
    """
    warp, g, q = places(WARPS)
    base = codes_base(warp * 0 + (rows >> 24), CODE)
    none = warp.to(tl.float32) * 0.0
    square = none
    total = none, none, none, none
    for first in range(0, STEPS * SPANS * WARPS, SPANS * WARPS):
        next_words, next_values, next_gain, next_states = words, values, gain, states
        if STEPS > 1:
            span = first + SPANS * WARPS + warp
            next_words, next_values = load_rows(
                tile, tiles, span, g, q, data, scale, zero, depth, columns, data_row, scale_n, scale_k, zero_n, zero_k,
                GATED, HEAD_HALF, BITS, GROUP, SCALE_ROWS, ZEROS, ZERO_OFFSET, EXPONENTS, WARPS, SPANS, PLAIN, NARROW,
            )  # fmt: skip
            next_states = load_right(x, span, g, q, depth, ROWS, BITS, WARPS, SPANS, PLAIN, NARROW)
            if NORM:
                next_gain = load_right(norm_weight, span, g, q, depth, ROWS, BITS, WARPS, SPANS, PLAIN, NARROW)
        right, square, unscaled = right_operands(states, gain, square, NORM, OFFSET, FLOAT16, BITS, WARPS, PLAIN)
        begin = sums_of_right(right, none, CODE, ZEROS, ROWS, WARPS, SPANS, PLAIN)
        sums = product_of_spans(
            words, values, right, begin, unscaled, base, g, FLOAT16, BITS, GROUP, ZEROS, ROWS, WARPS, SPANS, PLAIN,
            NARROW,
        )  # fmt: skip
        total = total[0] + sums[0], total[1] + sums[1], total[2] + sums[2], total[3] + sums[3]
        words, values, gain, states = next_words, next_values, next_gain, next_states
    return sums_of_threads(total, ROWS, WARPS, NARROW), norm_factors(square, depth, eps, NORM, ROWS, WARPS)
