"""Tiles of a product by tensor cores, whose operands go straight from memory into the registers that need them.

The code is written for one thread: a tensor has one element for each thread of a program. A warp multiplies a tile: 16
rows of W by 8 columns, 16 elements deep (`mma.sync`). Thread (g, q) of a warp, with g < 8 and q < 4, holds four
elements of W in rows g and g + 8 each, four elements of column g of the right operand, and of the result columns 2 q
and 2 q + 1 of rows g and g + 8. A sum may be taken in any order. So each thread loads 16 bytes of its two rows of W, as
they are stored, and the elements of x that belong to them: nothing is exchanged between threads.

Dense weights are multiplied as they are. Packed elements become float16, two of them in one instruction. Four bits are
masked and put below the bits of 1024: at bits 0 to 3 that is 1024 plus the code, at bits 4 to 7 1024 plus 16 times the
code. CUDA devices convert FP8 numbers.
"""

from __future__ import annotations

from .backend import Value, constexpr, jit, tl
from .gemv_loads import number

ROWS_OF_W = 16  # of a tile
DEPTH = 128  # elements of a row of W in a span: eight tiles


@jit
def multiply_tile(
    sums: Value, left: Value, right: Value, BFLOAT16: constexpr, WARPS: constexpr, PLAIN: constexpr
) -> Value:
    """Add the product of a tile to `sums`.

    Args:
        sums: four of float32: row g by columns 2 q and 2 q + 1, then row g + 8.
        left: four words, two elements each: rows g and g + 8 at depths 2 q and 2 q + 1, then both at 8 more.
        right: two words: column g at the same depths.
        BFLOAT16: the elements are of bfloat16, not of float16.
        WARPS: of the program.
        PLAIN: compute in plain code.
    """
    if PLAIN:
        upper = _plain_product(left[0], left[2], right, BFLOAT16, WARPS)
        lower = _plain_product(left[1], left[3], right, BFLOAT16, WARPS)
        return sums[0] + upper[0], sums[1] + upper[1], sums[2] + lower[0], sums[3] + lower[1]
    else:
        KIND: tl.constexpr = "bf16.bf16" if BFLOAT16 else "f16.f16"
        return tl.inline_asm_elementwise(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{KIND}.f32"
            " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", left + right + sums, (tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True, pack=1,
        )  # fmt: skip


@jit
def _plain_product(first: Value, second: Value, right: Value, BFLOAT16: constexpr, WARPS: constexpr) -> Value:
    """Multiply the eight rows whose elements are `first` and `second` by the columns: two columns for each thread."""
    total = tl.zeros((WARPS, 8, 8, 4), tl.float32)
    for half in tl.static_range(2):
        column, next_column = _element(right[0], half, BFLOAT16, WARPS), _element(right[1], half, BFLOAT16, WARPS)
        total += _element(first, half, BFLOAT16, WARPS)[:, :, None, :] * column[:, None, :, :]
        total += _element(second, half, BFLOAT16, WARPS)[:, :, None, :] * next_column[:, None, :, :]
    return tl.split(tl.reshape(tl.sum(total, 3), (WARPS * 32, 2)))


@jit
def _element(words: Value, half: constexpr, BFLOAT16: constexpr, WARPS: constexpr) -> Value:
    return tl.reshape(wide(words, half, BFLOAT16), (WARPS, 8, 4))


@jit
def wide(words: Value, half: constexpr, BFLOAT16: constexpr) -> Value:
    """Return one of the two numbers of half precision in each word, in float32."""
    if not BFLOAT16:
        return (words >> (16 * half)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif half == 0:
        return number(words << 16)
    else:
        return number(words & -65536)


@jit
def numbers(words: Value, FLOAT16: constexpr) -> Value:
    """Return the four numbers of two words in float32."""
    one, two = words
    BFLOAT16: tl.constexpr = not FLOAT16
    return wide(one, 0, BFLOAT16), wide(one, 1, BFLOAT16), wide(two, 0, BFLOAT16), wide(two, 1, BFLOAT16)


@jit
def scale_to_half(largest: Value, WARPS: constexpr) -> Value:
    """Return the power of two that brings the largest of a warp to between 2^14 and 2^15, and what undoes it."""
    exponent = tl.max(tl.reshape(largest.to(tl.int32, bitcast=True), (WARPS, 32)), 1) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 15), 254)
    exponent = tl.reshape(tl.broadcast_to(exponent[:, None], (WARPS, 32)), (WARPS * 32,))
    return number((268 - exponent) << 23), number((exponent - 14) << 23)


@jit
def narrow(low: Value, high: Value, BFLOAT16: constexpr, PLAIN: constexpr) -> Value:
    """Round two float32 numbers to half precision, in one word."""
    DTYPE: tl.constexpr = tl.bfloat16 if BFLOAT16 else tl.float16
    KIND: tl.constexpr = "bf16x2" if BFLOAT16 else "f16x2"
    if PLAIN:
        low_bits = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        high_bits = high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        return (low_bits & 0xFFFF) | (high_bits << 16)
    else:
        return tl.inline_asm_elementwise(f"cvt.rn.{KIND}.f32 $0, $2, $1;", "=r,f,f", (low, high), tl.int32, True, 1)


@jit
def elements_of_tile(
    upper: Value, lower: Value, base: Value, tile: constexpr, BITS: constexpr, PLAIN: constexpr
) -> Value:
    """Return the left operand of a tile.

    Args:
        upper: the words of a span that a thread has of row g.
        lower: of row g + 8.
        base: of `codes_base`.
        tile: which of the eight tiles.
        BITS: of an element.
        PLAIN: convert FP8 numbers in plain code.
    """
    if BITS == 4:  # elements 0 and 4 of a word, then 1 and 5; or 2 and 6, then 3 and 7
        above, below = upper[tile // 2], lower[tile // 2]
        if tile % 2 == 1:
            above, below = above >> 8, below >> 8
        return (
            (above & 0x000F000F) ^ base[0], (below & 0x000F000F) ^ base[0],
            (above & 0x00F000F0) ^ base[1], (below & 0x00F000F0) ^ base[1],
        )  # fmt: skip
    elif BITS == 16:  # elements as they are: of one word, then of the next
        return upper[2 * tile], lower[2 * tile], upper[2 * tile + 1], lower[2 * tile + 1]
    else:  # elements 0 and 1 of a word, then 2 and 3
        first, second = _from_float8(upper[tile], PLAIN), _from_float8(lower[tile], PLAIN)
        return first[0], second[0], first[1], second[1]


@jit
def codes_base(zero: Value, CODE: constexpr) -> Value:
    """Return what codes at bits 0 to 3 and at bits 4 to 7 are combined with, in registers.

    An instruction takes one constant at most, so `zero` is 0 that the compiler does not know.
    """
    if CODE == "signed":  # two's complement: 8 is added
        return zero ^ 0x64086408, zero ^ 0x64806480
    else:
        return zero ^ 0x64006400, zero ^ 0x64006400


@jit
def _from_float8(words: Value, PLAIN: constexpr) -> Value:
    """Return the four FP8 numbers of a word as float16: two words."""
    if PLAIN:
        return _plain_float16(words), _plain_float16(words >> 16)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2;"
            " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
            "=&r,=r,r", [words], (tl.int32, tl.int32), True, 1,
        )  # fmt: skip


@jit
def _plain_float16(words: Value) -> Value:
    low, high = _plain_float8(words & 0xFF), _plain_float8(words >> 8 & 0xFF)
    return (low & 0xFFFF) | (high << 16)


@jit
def _plain_float8(byte: Value) -> Value:
    """Return the bits in float16: the exponent's bias is 7 in FP8 and 15 in float16."""
    small = (((byte & 0x7F) << 7) | ((byte & 0x80) << 8)).to(tl.int16).to(tl.float16, bitcast=True)
    return (small.to(tl.float32) * 256.0).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)


@jit
def first_column(tile: Value, q: Value, BITS: constexpr) -> Value:
    """Return the first element of a span that thread q multiplies in a tile: this one and the next one of a row.

    The other two are four elements further on with 4 bits, and two with 8 or 16.
    """
    if BITS == 4:
        return q * 32 + tile // 2 * 8 + tile % 2 * 2
    elif BITS == 16:
        return tile // 2 * 32 + q * 8 + tile % 2 * 4
    else:
        return tile // 4 * 64 + q * 16 + tile % 4 * 4
