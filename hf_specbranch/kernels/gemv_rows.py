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
from .gemv_loads import all_loaded, load_states, sum_of_loads, wide_states
from .gemv_words import group_values, products_of_words, scale_value, scaled, unit


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
    OFFSET: constexpr,
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
    PLAIN: constexpr,
) -> Value:
    """Load what is constant for rows `n` [STRIP] of W.

    Returns:
        The words of their first step, and for that step the weights of the norm by `_load_gain` and the result of
        `group_values`; the scales of whole rows and the biases [STRIP] in float32.
    """
    word = tl.arange(0, BLOCK // (32 // BITS))[None, :]
    data_row = data_row // 4 * 4  # the same; now the compiler lets a thread load four words, as `load_states` needs
    words = _load(data + n.to(tl.int64)[:, None] * data_row + word, word, row_words, EVEN)
    gain: Value = ()
    if NORM:
        gain = _load_gain(norm_weight, word, row_words, OFFSET, BITS, EVEN, PLAIN)
    values = group_values(
        scale, zero, n, tl.arange(0, BLOCK // PER_LOAD) * PER_LOAD, depth, scale_n, scale_k, zero_n, zero_k,
        CODE, GROUP, SCALE_ROWS, ZEROS, ZERO_OFFSET, EXPONENTS, PLAIN,
    )  # fmt: skip
    whole = tl.full((STRIP,), 1.0, tl.float32) * unit(CODE)
    if GROUP == 0:
        whole *= scale_value(tl.load(scale + n // SCALE_ROWS * scale_n), EXPONENTS)
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
    THREADS: constexpr,
    ASSEMBLY: constexpr,
) -> Value:
    """Multiply rows `n` [STRIP] of W by the rows of x: the columns `n` of four rows of the product, in float32.

    Those beyond ROWS are worth nothing. The first arguments are those of `constants_of_rows`. Each step loads the
    words of the next one.
    """
    PER_WORD: tl.constexpr = 32 // BITS
    LOADS: tl.constexpr = BLOCK // PER_LOAD  # per row of W
    PLAIN: tl.constexpr = ASSEMBLY is None
    word = tl.arange(0, BLOCK // PER_WORD)[None, :]
    data_row = data_row // 4 * 4
    left = data + n.to(tl.int64)[:, None] * data_row + word
    x_1 = x + tl.minimum(1, rows - 1) * x_row
    x_2 = x + tl.minimum(2, rows - 1) * x_row
    x_3 = x + tl.minimum(3, rows - 1) * x_row
    sum_0 = tl.zeros((STRIP, LOADS), tl.float32)
    sum_1, sum_2, sum_3 = sum_0, sum_0, sum_0
    square_0, square_1, square_2, square_3 = sum_0, sum_0, sum_0, sum_0  # of x, where it is normalised
    for start in range(0, BLOCK if ONE_STEP else depth, BLOCK):
        first = load_states(x + start, word, row_words, EVEN, BITS, PLAIN)
        second, third, fourth = first, first, first
        if ROWS > 1:
            second = load_states(x_1 + start, word, row_words, EVEN, BITS, PLAIN)
        if ROWS > 2:
            third = load_states(x_2 + start, word, row_words, EVEN, BITS, PLAIN)
            fourth = load_states(x_3 + start, word, row_words, EVEN, BITS, PLAIN)
        loaded = word * 0
        if THREADS > 0 and not PLAIN:
            every = first
            if ROWS > 1:
                every += second
            if ROWS > 2:
                every += third + fourth
            loaded = all_loaded(every, rows >> 16, THREADS)
        left += BLOCK // PER_WORD
        row_words -= BLOCK // PER_WORD
        following, next_gain, next_values = words, gain, values
        if not ONE_STEP:
            following = _load(left, word, row_words, EVEN)
            next_values = group_values(
                scale, zero, n, start + BLOCK + tl.arange(0, LOADS) * PER_LOAD, depth, scale_n, scale_k, zero_n, zero_k,
                CODE, GROUP, SCALE_ROWS, ZEROS, ZERO_OFFSET, EXPONENTS, PLAIN,
            )  # fmt: skip
            if NORM:
                next_gain = _load_gain(norm_weight + start + BLOCK, word, row_words, OFFSET, BITS, EVEN, PLAIN)
        first, square_0 = _normed(first, x, loaded, words, gain, square_0, NORM, BITS, PLAIN)
        if ROWS > 1:
            second, square_1 = _normed(second, x, loaded, words, gain, square_1, NORM, BITS, PLAIN)
        one, two = products_of_words(words, first, second, ROWS, CODE, ASSEMBLY)
        sum_0 += scaled(one, words, first, values, CODE, GROUP, ZEROS, LOADS, PLAIN)
        if ROWS > 1:
            sum_1 += scaled(two, words, second, values, CODE, GROUP, ZEROS, LOADS, PLAIN)
        if ROWS > 2:
            third, square_2 = _normed(third, x, loaded, words, gain, square_2, NORM, BITS, PLAIN)
            fourth, square_3 = _normed(fourth, x, loaded, words, gain, square_3, NORM, BITS, PLAIN)
            one, two = products_of_words(words, third, fourth, ROWS, CODE, ASSEMBLY)
            sum_2 += scaled(one, words, third, values, CODE, GROUP, ZEROS, LOADS, PLAIN)
            sum_3 += scaled(two, words, fourth, values, CODE, GROUP, ZEROS, LOADS, PLAIN)
        words, gain, values = following, next_gain, next_values
    first, second = _totals(sum_0, sum_1, square_0, square_1, depth, eps, ROWS, NORM)
    first, second = first * whole + begin, second * whole + begin
    third, fourth = first, second
    if ROWS > 2:
        third, fourth = _totals(sum_2, sum_3, square_2, square_3, depth, eps, ROWS, NORM)
        third, fourth = third * whole + begin, fourth * whole + begin
    return first, second, third, fourth


@jit
def _load(pointers: Value, place: Value, rest: Value, EVEN: constexpr) -> Value:
    """Load what is before the end, `rest` places away. Beyond are zeros, or anything where a whole step is (EVEN)."""
    if EVEN:
        return tl.load(pointers, mask=rest > 0)
    else:
        return tl.load(pointers, mask=place < rest, other=0)


@jit
def _load_gain(
    weights: Value,
    word: Value,
    rest: Value,
    OFFSET: constexpr,
    BITS: constexpr,
    EVEN: constexpr,
    PLAIN: constexpr,
) -> Value:
    """Load the weights of a norm by their place in a word, in float32; see `load_states`."""
    gain = wide_states(load_states(weights, word, rest, EVEN, BITS, PLAIN), word * 0, weights, BITS, PLAIN)
    if OFFSET != 0.0:
        added: Value = ()
        for place in tl.static_range(32 // BITS):
            added += (gain[place] + OFFSET,)
        return added
    else:
        return gain


@jit
def _normed(
    states: Value,
    x: Value,
    loaded: Value,
    words: Value,
    gain: Value,
    square: Value,
    NORM: constexpr,
    BITS: constexpr,
    PLAIN: constexpr,
) -> Value:
    """Widen some columns of a row of x, multiply them by the weights of a norm, and add their squares to `square`.

    `states` are those of `load_states`, `loaded` those of `all_loaded`, `gain` those of `_load_gain`.
    """
    wide = wide_states(states, loaded, x, BITS, PLAIN)
    if NORM:
        normed: Value = ()
        squares = wide[0] * wide[0]
        for place in tl.static_range(32 // BITS):
            normed += (wide[place] * gain[place],)
            if place > 0:
                squares += wide[place] * wide[place]
        return normed, square + sum_of_loads(squares, words, square.shape[1], PLAIN)
    else:
        return wide, square


@jit
def _totals(
    one: Value,
    two: Value,
    square_one: Value,
    square_two: Value,
    depth: Value,
    eps: Value,
    ROWS: constexpr,
    NORM: constexpr,
) -> Value:
    """Add up the products [STRIP, L] of one or two rows of x, and apply the factors of their RMSNorm.

    The squares of x are repeated for each row of W, so that all sums are taken at once: threads exchange them once.
    """
    if ROWS == 1:
        if NORM:
            sums = tl.reduce((one, square_one), 1, _add_two)
            total = sums[0] * tl.rsqrt(sums[1] / depth + eps)
        else:
            total = tl.sum(one, 1)
        return total, total
    elif NORM:
        sums = tl.reduce((one, two, square_one, square_two), 1, _add_four)
        return sums[0] * tl.rsqrt(sums[2] / depth + eps), sums[1] * tl.rsqrt(sums[3] / depth + eps)
    else:
        return tl.reduce((one, two), 1, _add_two)


@jit
def _add_two(a: Value, b: Value, other_a: Value, other_b: Value) -> Value:
    return a + other_a, b + other_b


@jit
def _add_four(
    a: Value, b: Value, c: Value, d: Value, other_a: Value, other_b: Value, other_c: Value, other_d: Value
) -> Value:
    return a + other_a, b + other_b, c + other_c, d + other_d
