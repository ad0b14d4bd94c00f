"""Loads of `tiles.py`, by the threads that use the elements.

A row of W is read in spans of 128 elements. The warps of a program take turns: span 0 goes to the first warp, span 1 to
the second. The code is written for one thread (`tile_fragments.py`).

All loads are assembly that the compiler leaves where it is. It would move others to where their result is needed, which
is after the wait for the kernel before, and load one after the other.
"""

from __future__ import annotations

from .backend import Value, constexpr, jit, tl
from .gemv_words import scale_value
from .tile_fragments import first_column


@jit
def rows_of_tile(
    tile: Value, place: Value, columns: Value, GATED: constexpr, HEAD_HALF: constexpr, NARROW: constexpr = False
) -> Value:
    """Return the two rows of W at `place` < 8 of a tile.

    Args:
        tile: which one.
        place: of the rows.
        columns: of the result; with HEAD_HALF, pairs of rows of W.
        GATED: the rows of gate and up for one column.
        HEAD_HALF: if not 0, half the size of a head: the two rows that are rotated together.
        NARROW: both are the same row, of which each takes other spans.
    """
    if NARROW:
        row = tl.minimum(tile * 8 + place, columns - 1)
        return row, row
    elif HEAD_HALF > 0:
        pair = tl.minimum(tile * 8 + place, columns - 1)
        row = pair // HEAD_HALF * (2 * HEAD_HALF) + pair % HEAD_HALF
        return row, row + HEAD_HALF
    elif GATED:
        row = tl.minimum(tile * 8 + place, columns - 1)
        return row, row + columns
    else:
        return tl.minimum(tile * 16 + place, columns - 1), tl.minimum(tile * 16 + 8 + place, columns - 1)


@jit
def load_rows(
    tile: Value,
    tiles: Value,
    first: Value,
    g: Value,
    q: Value,
    data: Value,
    scale: Value,
    zero: Value,
    depth: Value,
    columns: Value,
    data_row: Value,
    scale_n: Value,
    scale_k: Value,
    zero_n: Value,
    zero_k: Value,
    GATED: constexpr,
    HEAD_HALF: constexpr,
    BITS: constexpr,
    GROUP: constexpr,
    SCALE_ROWS: constexpr,
    ZEROS: constexpr,
    ZERO_OFFSET: constexpr,
    EXPONENTS: constexpr,
    WARPS: constexpr,
    SPANS: constexpr,
    PLAIN: constexpr,
    NARROW: constexpr = False,
) -> Value:
    """Load what a thread has of its two rows of W, from span `first` on: words, and the scales of packed elements.

    If NARROW, the upper row of a tile has one span and the lower row the warp's next one.
    """
    upper, lower = rows_of_tile(tile, g, columns, GATED, HEAD_HALF, NARROW)
    upper_data, lower_data = data + upper.to(tl.int64) * data_row, data + lower.to(tl.int64) * data_row
    words: Value = ()
    values: Value = ()
    for i in tl.static_range(0, SPANS, 2 if NARROW else 1):
        span = first + i * WARPS
        other = span + WARPS if NARROW else span
        given, other_given = (span * 128 < depth) & (tile < tiles), (other * 128 < depth) & (tile < tiles)
        place, other_place = span * (4 * BITS) + q * 4, other * (4 * BITS) + q * 4
        one = load_words(upper_data + place, given, False, PLAIN)
        two = load_words(lower_data + other_place, other_given, False, PLAIN)
        for load in tl.static_range(16, 4 * BITS, 16):
            one += load_words(upper_data + place + load, given, False, PLAIN)
            two += load_words(lower_data + other_place + load, other_given, False, PLAIN)
        words += ((one, two),)
        group, other_group = span * 0, span * 0
        if GROUP > 0:
            group = tl.minimum(span * 128, depth - 1) // GROUP
            other_group = tl.minimum(other * 128, depth - 1) // GROUP
        if BITS < 16 and (GROUP > 0 or i == 0):
            above = _load_values(
                upper, group, scale, zero, scale_n, scale_k, zero_n, zero_k, SCALE_ROWS, ZEROS, ZERO_OFFSET, EXPONENTS,
                PLAIN,
            )  # fmt: skip
            below = _load_values(
                lower, other_group, scale, zero, scale_n, scale_k, zero_n, zero_k, SCALE_ROWS, ZEROS, ZERO_OFFSET,
                EXPONENTS, PLAIN,
            )  # fmt: skip
        if BITS < 16:
            values += ((above, below),)
    return words, values


@jit
def _load_values(
    n: Value,
    group: Value,
    scale: Value,
    zero: Value,
    scale_n: Value,
    scale_k: Value,
    zero_n: Value,
    zero_k: Value,
    SCALE_ROWS: constexpr,
    ZEROS: constexpr,
    ZERO_OFFSET: constexpr,
    EXPONENTS: constexpr,
    PLAIN: constexpr,
) -> Value:
    """Return the scale of a group of row `n`, and its zero point or shift."""
    factor = load_here(scale + n // SCALE_ROWS * scale_n + group * scale_k, n >= 0, PLAIN)
    factor = scale_value(factor, EXPONENTS)
    point = factor
    if ZEROS == "words":
        point = load_here(zero + n // 8 * zero_n + group * zero_k, n >= 0, PLAIN)
        point = ((point >> (n % 8 * 4) & 15) + ZERO_OFFSET).to(tl.float32)
    elif ZEROS == "shift":
        point = load_here(zero + n * zero_n + group * zero_k, n >= 0, PLAIN).to(tl.float32)
    return factor, point


@jit
def load_right(
    x: Value,
    first: Value,
    g: Value,
    q: Value,
    depth: Value,
    ROWS: constexpr,
    BITS: constexpr,
    WARPS: constexpr,
    SPANS: constexpr,
    PLAIN: constexpr,
    NARROW: constexpr = False,
) -> Value:
    """Load what a thread has of the right operands, from span `first` of a row on: two words for each register.

    Two tiles in turn take four consecutive words of x. With several rows a thread has both: one load in place of four.
    """
    SHARE: tl.constexpr = 8 // ROWS  # tiles, or with several rows pairs of tiles, that share a register
    parts: Value = ()
    for i in tl.static_range(SPANS):
        if ROWS == 1:
            column = column_of_right(i, first, g, q, BITS, WARPS, NARROW)
            place, given = x + column // 2, column < depth
            parts += ((load_here(place, given, PLAIN), load_here(place + (2 if BITS == 4 else 1), given, PLAIN)),)
        else:
            span = first + i * WARPS
            given = span * 128 < depth
            for k in tl.static_range(ROWS // 2):
                tile = 2 * (k * SHARE + g // ROWS)
                place = x + span * 64 + first_column(tile, q, BITS) // 2
                one, two, three, four = load_words(place, given, True, PLAIN)
                if BITS == 4:
                    two, three = three, two
                parts += ((one, two), (three, four))
    return parts


@jit
def column_of_right(
    i: constexpr, first: Value, g: Value, q: Value, BITS: constexpr, WARPS: constexpr, NARROW: constexpr
) -> Value:
    """Return the first element of x that a thread has in its register `i` for one row, from span `first` on.

    A register holds the operands of eight tiles in turn, one in each column. If NARROW, it holds those of four tiles
    and of two spans: columns 0 to 3 are multiplied by the upper rows, columns 4 to 7 by the lower rows.
    """
    if NARROW:
        span = first + (i // 2 * 2 + g // 4) * WARPS
        return span * 128 + first_column(g % 4 + i % 2 * 4, q, BITS)
    else:
        return (first + i * WARPS) * 128 + first_column(g, q, BITS)


@jit
def load_edges(
    tile: Value,
    bias: Value,
    residual: Value,
    rows: Value,
    columns: Value,
    residual_row: Value,
    RESIDUAL: constexpr,
    GATED: constexpr,
    BIAS: constexpr,
    ROWS: constexpr,
    PLAIN: constexpr,
    NARROW: constexpr = False,
) -> Value:
    """Load what is added to the result of a tile: biases [8, 1] of the upper and lower rows, residuals [8, rows]."""
    upper, lower = rows_of_tile(tile, tl.arange(0, 8)[:, None], columns, GATED, 0, NARROW)
    biases: Value = ()
    if BIAS:
        biases = (
            load_here(bias + upper, upper >= 0, PLAIN).to(tl.float32),
            load_here(bias + lower, upper >= 0, PLAIN).to(tl.float32),
        )
    residuals: Value = ()
    if RESIDUAL:
        for odd in tl.static_range(2 if ROWS > 1 else 1):
            row = tl.arange(0, ROWS // 2 if ROWS > 1 else 1)[None, :] * 2 + odd
            column = (tile * (8 if NARROW else 16) + tl.arange(0, 8))[:, None]
            place = residual + row * residual_row + column
            residuals += (
                (
                    load_here(place, (row < rows) & (column < columns), PLAIN, True),
                    load_here(place + 8, (row < rows) & (column + 8 < columns), PLAIN, True),
                ),
            )
    return biases, residuals


@jit
def load_words(pointers: Value, given: Value, KEEP: constexpr, PLAIN: constexpr) -> Value:
    """Load four consecutive words from each pointer, or zeros, here and not later. L1 keeps them only if KEEP."""
    WHERE: tl.constexpr = "" if KEEP else ".L1::no_allocate"
    if PLAIN:
        return (
            tl.load(pointers, mask=given, other=0), tl.load(pointers + 1, mask=given, other=0),
            tl.load(pointers + 2, mask=given, other=0), tl.load(pointers + 3, mask=given, other=0),
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
            f" @p ld.global{WHERE}.v4.b32 {{$0, $1, $2, $3}}, [$4]; }}",
            "=&r,=&r,=&r,=&r,l,r", (pointers.to(tl.int64), given.to(tl.int32)),
            (tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip


@jit
def load_here(pointers: Value, given: Value, PLAIN: constexpr, PAST_L1: constexpr = False) -> Value:
    """Load single elements, or zeros, here and not later: the compiler may move `load_one` to where it is needed.

    Before a wait L1 may hold old values of what is not constant: that must be loaded past it.
    """
    LEVEL: tl.constexpr = ".cg" if PAST_L1 else ""
    KIND: tl.constexpr = pointers.dtype.element_ty
    if PLAIN:
        return tl.load(pointers, mask=given, other=0)
    elif KIND.primitive_bitwidth == 64:
        return tl.inline_asm_elementwise(
            f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b64 $0, 0; @p ld.global{LEVEL}.b64 $0, [$1]; }}", "=&l,l,r",
            (pointers.to(tl.int64), given.to(tl.int32)), tl.int64, is_pure=False, pack=1,
        )  # fmt: skip
    elif KIND.primitive_bitwidth == 32:
        return tl.inline_asm_elementwise(
            f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.global{LEVEL}.b32 $0, [$1]; }}", "=&r,l,r",
            (pointers.to(tl.int64), given.to(tl.int32)), tl.int32, is_pure=False, pack=1,
        ).to(KIND, bitcast=True)  # fmt: skip
    elif KIND.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise(
            f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b16 $0, 0; @p ld.global{LEVEL}.b16 $0, [$1]; }}", "=&h,l,r",
            (pointers.to(tl.int64), given.to(tl.int32)), tl.int16, is_pure=False, pack=1,
        ).to(KIND, bitcast=True)  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b16 $0, 0; @p ld.global{LEVEL}.u8 $0, [$1]; }}", "=&h,l,r",
            (pointers.to(tl.int64), given.to(tl.int32)), tl.int16, is_pure=False, pack=1,
        )  # fmt: skip
