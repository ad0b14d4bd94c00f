"""The kernel of `gemv_rotary.py` by tiles in registers (`tiles.py`).

The upper rows of a tile are dimensions i of a head, the lower ones i + D/2: each thread has both.
"""

from __future__ import annotations

from .backend import Value, constexpr, jit, launch_dependents, tl, varying, wait_for_dependencies, zero_after_wait
from .gemv_loads import store_one
from .tile_loads import load_here, load_right, rows_of_tile
from .tile_sums import constants_of_tile, places, sums_of_tile


@varying(
    "rows", "heads", "shared", "tokens", "cos_row", "cos_token", "sin_row", "sin_token", "out_row", "out_head",
    "keys_row", "values_row", "places_row",
)  # fmt: skip
def rotary_tile_kernel(
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
    cos: Value,
    sin: Value,
    out: Value,
    keys: Value,
    values: Value,
    slots: Value,
    heads: Value,
    shared: Value,
    tokens: Value,
    cos_row: Value,
    cos_token: Value,
    sin_row: Value,
    sin_token: Value,
    out_row: Value,
    out_head: Value,
    out_token: Value,
    keys_row: Value,
    keys_head: Value,
    keys_slot: Value,
    values_row: Value,
    values_head: Value,
    values_slot: Value,
    places_row: Value,
    query_weight: Value,
    key_weight: Value,
    squares: Value,
    BIAS: constexpr,
    HEAD_HALF: constexpr,
    ONCE: constexpr,
    HEAD_NORM: constexpr,
    HEAD_OFFSET: constexpr,
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
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    every = (heads + 2 * shared) * HEAD_HALF
    words, group, gain = constants_of_tile(
        tile, data, scale, zero, norm_weight, depth, every, tiles, data_row, scale_n, scale_k, zero_n, zero_k, False,
        HEAD_HALF, NORM, BITS, GROUP, SCALE_ROWS, ZEROS, ZERO_OFFSET, EXPONENTS, ROWS, WARPS, SPANS, PLAIN,
    )  # fmt: skip
    place = tl.arange(0, 8)[:, None]
    upper, lower = rows_of_tile(tile, place, every, False, HEAD_HALF)
    biases: Value = ()
    if BIAS:
        biases += (load_here(bias + upper, upper >= 0, PLAIN).to(tl.float32),)
        biases += (load_here(bias + lower, lower >= 0, PLAIN).to(tl.float32),)
    pair = tile * 8 + place
    head, low = pair // HEAD_HALF, pair % HEAD_HALF
    is_query, is_key = head < heads, (head >= heads) & (head < heads + shared)
    if HEAD_NORM:
        weight = tl.where(is_query, query_weight, key_weight) + low
        scales = load_here(weight, is_query | is_key, PLAIN), load_here(weight + HEAD_HALF, is_query | is_key, PLAIN)
    wait_for_dependencies(PDL)
    after = zero_after_wait(PDL)
    warp, g, q = places(WARPS)
    x += after + tl.minimum(g % ROWS, rows - 1) * x_row
    found: Value = ()
    angles: Value = ()
    for odd in tl.static_range(2 if ROWS > 1 else 1):
        row = _rows_of_x(odd, ROWS)
        token, batch = row % tokens, tl.minimum(row, rows - 1) // tokens
        turn = cos + after + batch * cos_row + token * cos_token + low
        tilt = sin + after + batch * sin_row + token * sin_token + low
        given = (is_query | is_key) & (row < rows)
        found += (load_here(slots + after + batch.to(tl.int64) * places_row + token, row < rows, PLAIN),)
        cosines = load_here(turn, given, PLAIN), load_here(turn + HEAD_HALF, given, PLAIN)
        sines = load_here(tilt, given, PLAIN), load_here(tilt + HEAD_HALF, given, PLAIN)
        angles += (cosines + sines,)
    states = load_right(x, warp, g, q, depth, ROWS, BITS, WARPS, SPANS, PLAIN)
    sums, factors = sums_of_tile(
        words, group, gain, states, tile, x, data, scale, zero, norm_weight, rows, depth, every, tiles, data_row,
        scale_n, scale_k, zero_n, zero_k, eps, False, HEAD_HALF, NORM, OFFSET, FLOAT16, CODE, BITS, GROUP, SCALE_ROWS,
        ZEROS, ZERO_OFFSET, EXPONENTS, ROWS, WARPS, SPANS, STEPS, PLAIN,
    )  # fmt: skip
    slot_stride = tl.where(is_query, 0, tl.where(is_key, keys_slot, values_slot))
    for odd in tl.static_range(2 if ROWS > 1 else 1):
        one, two = sums[odd], sums[2 + odd]
        if NORM:
            one, two = one * factors[odd], two * factors[odd]
        if BIAS:
            one, two = one + biases[0], two + biases[1]
        one, two = one.to(out.dtype.element_ty), two.to(out.dtype.element_ty)
        cos_one, cos_two, sin_one, sin_two = angles[odd]
        turns = is_query | is_key
        if HEAD_NORM:  # but for the division by the root mean square; see `pending_norms.py`
            wide_one, wide_two = one.to(tl.float32), two.to(tl.float32)
            square = tl.sum(wide_one * wide_one + wide_two * wide_two, 0)
            tl.store(squares + tile + tl.arange(0, 1), square, mask=tile * 8 < (heads + shared) * HEAD_HALF)
            one = tl.where(turns, wide_one * (scales[0].to(tl.float32) + HEAD_OFFSET), wide_one).to(one.dtype)
            two = tl.where(turns, wide_two * (scales[1].to(tl.float32) + HEAD_OFFSET), wide_two).to(two.dtype)
        first = tl.where(turns, turned(one, two, cos_one, sin_one, -1.0, ONCE), one)
        second = tl.where(turns, turned(two, one, cos_two, sin_two, 1.0, ONCE), two)
        row = _rows_of_x(odd, ROWS)
        token, batch = row % tokens, (tl.minimum(row, rows - 1) // tokens).to(tl.int64)
        query = out + batch * out_row + head * out_head + token * out_token
        key = keys + batch * keys_row + (head - heads) * keys_head
        value = values + batch * values_row + (head - heads - shared) * values_head
        target = tl.where(is_query, query, tl.where(is_key, key, value)) + low + found[odd] * slot_stride
        inside = (pair < every) & (row < rows)
        store_one(target, first, inside, PLAIN)
        store_one(target + HEAD_HALF, second, inside, PLAIN)


@jit
def _rows_of_x(odd: constexpr, ROWS: constexpr) -> Value:
    """Return the even or odd rows of x: [1, rows]."""
    return tl.arange(0, ROWS // 2 if ROWS > 1 else 1)[None, :] * 2 + odd


@jit
def turned(x: Value, other: Value, cos: Value, sin: Value, sign: constexpr, ONCE: constexpr) -> Value:
    """Return x cos + sign * other sin, rounded as `rotary` does."""
    dtype: tl.constexpr = x.dtype
    along, across = x.to(tl.float32) * cos.to(tl.float32), other.to(tl.float32) * sin.to(tl.float32)
    if ONCE:
        return (along + sign * across).to(dtype)
    else:
        return (along.to(dtype).to(tl.float32) + sign * across.to(dtype).to(tl.float32)).to(dtype)
