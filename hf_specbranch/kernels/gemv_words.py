"""Multiplies the words of a quantised weight by x in registers, in few instructions.

A word has four or eight elements of one row of W. Each is used as soon as it is unpacked: many rows of W fit in the
registers as words, few as numbers.

An integer code is not shifted down and converted: the other bits of its word are masked, and what remains is read as a
float32. Below 2^24 such bits are a subnormal number, or one with the smallest exponent; both are worth the same integer
times 2^-149, exactly. Code c at bit p of its word becomes c * 2^(p - 149), so x is multiplied by 2^(90 - p) before, and
the sum by 2^59 after. A code at bit 24 or higher is shifted down by 8 bits first. An FP8 number is shifted until its
exponent lies where float32 has it: that is its value times 2^-120.

CUDA devices convert FP8 numbers themselves from compute capability 8.9 on, in fewer instructions: `CODE` is "converted"
there.

On CUDA a word is unpacked and multiplied in assembly. From plain code the compiler unpacks all words first.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from .backend import Value, constexpr, jit, tl
from .packed import Packed

BYTES_PER_LOAD = 16  # of one row of W, by each thread


class Format(NamedTuple):
    """How the elements of a weight are stored, as kernel constants."""

    CODE: str  # of `Packed`, or "converted"
    BITS: int
    GROUP: int = 0  # elements of a row with one scale; 0: all of them
    SCALE_ROWS: int = 1
    ZEROS: str = "none"
    ZERO_OFFSET: int = 0
    EXPONENTS: bool = False  # scales are exponents of two

    @property
    def per_load(self) -> int:
        """Elements that a thread loads at a time."""
        return BYTES_PER_LOAD * 8 // self.BITS


def format_of(weight: Packed) -> Format:
    """Return the format of a weight."""
    bits = 8 if weight.code in ("int8", "float8") else 4
    whole = weight.group >= weight.shape[1] and weight.zeros != "shift"
    group = 0 if whole else min(weight.group, weight.shape[1])
    exponents = weight.scale.dtype == torch.uint8
    return Format(weight.code, bits, group, weight.scale_rows, weight.zeros, weight.zero_offset, exponents)


@lru_cache
def assembly(code: str, rows: int) -> str:
    """Return the assembly that multiplies a word by its part of one row of x, or of two.

    Its operands are a sum for each row, the word, and the parts of x, one row after the other.
    """
    unpacked = _unpacked(code)
    lines = []
    for place, element in enumerate(unpacked):
        lines.append(element)
        for row in range(rows):
            x, total = f"${rows + 1 + row * len(unpacked) + place}", f"sum{row}"
            lines.append(f"fma.rn.f32 {total}, e, {x}, {total};" if place else f"mul.rn.f32 {total}, e, {x};")
    lines += [f"mov.f32 ${row}, sum{row};" for row in range(rows)]
    registers = "{ .reg .b16 low, high, even, odd; .reg .b32 word, above, pair, e; .reg .f32 sum0, sum1; "
    return registers + f"mov.b32 word, ${rows}; " + " ".join(lines) + " }"


def _unpacked(code: str) -> list[str]:
    """Return the instructions that unpack `word`, for one element after the other: `e`, times its power of two."""
    if code == "converted":  # by way of float16
        second = "mov.b32 {even, odd}, pair; cvt.f32.f16 e, even;"
        return [
            f"mov.b32 {{low, high}}, word; cvt.rn.f16x2.e4m3x2 pair, low; {second}",
            "cvt.f32.f16 e, odd;",
            f"cvt.rn.f16x2.e4m3x2 pair, high; {second}",
            "cvt.f32.f16 e, odd;",
        ]
    if code == "float8":  # the sign, four bits of the exponent, three of the mantissa
        return [f"shl.b32 e, word, {shift}; shr.s32 e, e, 4; and.b32 e, e, 0x87F00000;" for shift in (24, 16, 8, 0)]
    bits, flipped = _CODES[code]
    places = range(0, 24, bits)
    lines = [f"and.b32 e, word, {((1 << bits) - 1) << place:#x};" for place in places]
    lines += [f"and.b32 e, above, {((1 << bits) - 1) << place:#x};" for place in places if place >= 16]
    return [f"xor.b32 word, word, {flipped:#x}; shr.u32 above, word, 8; {lines[0]}", *lines[1:]]


# Bits, and what makes unsigned codes of two's complement.
_CODES = {"int8": (8, 0x80808080), "signed": (4, 0x88888888), "offset": (4, 0)}


@jit
def products_of_words(
    words: Value, first: Value, second: Value, ROWS: constexpr, CODE: constexpr, BITS: constexpr, ASSEMBLY: constexpr
) -> Value:
    """Multiply words of W [STRIP, WORDS] by two rows of x [BLOCK] each, and add up within each word, up to `unit`.

    Args:
        words: of W.
        first: a row of x.
        second: another one; if ROWS is 1, its product is worth nothing.
        ROWS: of x.
        CODE: of the weight.
        BITS: of an element.
        ASSEMBLY: of `assembly`, or None.

    Returns:
        [STRIP, WORDS] twice, in float32.
    """
    WORDS: constexpr = words.shape[1]
    PLACES: constexpr = 32 // BITS
    first = _by_place(first, WORDS, CODE, BITS)
    if ROWS == 1:
        if ASSEMBLY is None:
            one = _product(words, first, CODE)
        else:
            one = tl.inline_asm_elementwise(
                ASSEMBLY, "=f,r" + ",f" * PLACES, (words,) + first, tl.float32, is_pure=True, pack=1
            )
        two = one
    else:
        second = _by_place(second, WORDS, CODE, BITS)
        if ASSEMBLY is None:
            one, two = _product(words, first, CODE), _product(words, second, CODE)
        else:
            one, two = tl.inline_asm_elementwise(
                ASSEMBLY, "=f,=f,r" + ",f" * (2 * PLACES), (words,) + first + second, (tl.float32, tl.float32),
                is_pure=True, pack=1,
            )  # fmt: skip
    return one, two


@jit
def _by_place(states: Value, WORDS: constexpr, CODE: constexpr, BITS: constexpr) -> Value:
    """Return x [BLOCK] by the place in a word that it is multiplied with: four or eight of [1, WORDS] in float32.

    They are multiplied by what makes up for the powers of two of the elements, up to `unit`.
    """
    wide = states.to(tl.float32)[None, :]  # without a dimension of rows, Triton moves W to the layout of x
    if BITS == 8:
        even, odd = tl.split(tl.reshape(wide, (1, WORDS, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        if CODE == "int8":
            x0, x1, x2, x3 = x0 * _power(90), x1 * _power(82), x2 * _power(74), x3 * _power(74)
        elif CODE == "float8":
            x0, x1, x2, x3 = x0 * _power(60), x1 * _power(60), x2 * _power(60), x3 * _power(60)
        return x0, x1, x2, x3
    else:
        even, odd = tl.split(tl.reshape(wide, (1, WORDS, 2, 2, 2)))
        even, even_high = tl.split(even)
        odd, odd_high = tl.split(odd)
        x0, x4 = tl.split(even)
        x1, x5 = tl.split(odd)
        x2, x6 = tl.split(even_high)
        x3, x7 = tl.split(odd_high)
        x0, x1, x2, x3 = x0 * _power(90), x1 * _power(86), x2 * _power(82), x3 * _power(78)
        x4, x5, x6, x7 = x4 * _power(74), x5 * _power(70), x6 * _power(74), x7 * _power(70)
        return x0, x1, x2, x3, x4, x5, x6, x7


@jit
def _product(words: Value, x: Value, CODE: constexpr) -> Value:
    """Compute in plain code what `assembly` does for one row."""
    if CODE == "float8":
        total = _float8(words << 24) * x[0] + _float8(words << 16) * x[1]
        return total + _float8(words << 8) * x[2] + _float8(words) * x[3]
    elif CODE == "int8":
        codes = words ^ -2139062144  # 0x80808080: two's complement becomes an unsigned code plus 128
        total = _number(codes & 0xFF) * x[0] + _number(codes & 0xFF00) * x[1]
        return total + _number(codes & 0xFF0000) * x[2] + _number((codes >> 8) & 0xFF0000) * x[3]
    else:
        codes = words
        if CODE == "signed":
            codes = words ^ -2004318072  # 0x88888888
        high = codes >> 8
        total = _number(codes & 0xF) * x[0] + _number(codes & 0xF0) * x[1]
        total += _number(codes & 0xF00) * x[2] + _number(codes & 0xF000) * x[3]
        total += _number(codes & 0xF0000) * x[4] + _number(codes & 0xF00000) * x[5]
        return total + _number(high & 0xF0000) * x[6] + _number(high & 0xF00000) * x[7]


@jit
def group_values(
    scale: Value,
    zero: Value,
    n: Value,
    column: Value,
    depth: Value,
    scale_n: Value,
    scale_k: Value,
    zero_n: Value,
    zero_k: Value,
    CODE: constexpr,
    GROUP: constexpr,
    SCALE_ROWS: constexpr,
    ZEROS: constexpr,
    ZERO_OFFSET: constexpr,
    EXPONENTS: constexpr,
) -> Value:
    """Return scale, code of zero and shift of the rows `n` of W at the columns `column` [L]: each [STRIP, L] or [1, 1].

    A scale for whole rows is not among them: it is applied to the sum.
    """
    factors = tl.full((1, 1), 1.0, tl.float32)
    centres, shifts = factors * (128.0 if CODE == "int8" else 8.0), factors
    group = column * 0
    if GROUP > 0:
        group = tl.minimum(column, depth - 1) // GROUP
        factors = scale_of(scale + (n // SCALE_ROWS)[:, None] * scale_n + group[None, :] * scale_k, EXPONENTS)
    if ZEROS == "words":
        points = tl.load(zero + (n // 8)[:, None] * zero_n + group[None, :] * zero_k)
        centres = ((points >> (n % 8 * 4)[:, None] & 15) + ZERO_OFFSET).to(tl.float32)
    elif ZEROS == "shift":
        shifts = tl.load(zero + n[:, None] * zero_n + group[None, :] * zero_k).to(tl.float32)
    return factors, centres, shifts


@jit
def scaled(
    part: Value,
    states: Value,
    values: Value,
    CODE: constexpr,
    GROUP: constexpr,
    ZEROS: constexpr,
    STRIP: constexpr,
    LOADS: constexpr,
    PER_LOAD: constexpr,
) -> Value:
    """Add up the products of words [STRIP, WORDS] with a row of x [BLOCK] that a thread has, and scale: [STRIP, L].

    `values` are those of `group_values`.
    """
    factors, centres, shifts = values
    part = tl.sum(tl.reshape(part, (STRIP, LOADS, part.shape[1] // LOADS)), 2)
    if CODE == "int8" or CODE == "offset" or CODE == "signed":
        # Codes are unsigned: sum of (c - centre) x = sum of c x - centre * sum of x.
        sums = tl.sum(tl.reshape(states.to(tl.float32), (LOADS, PER_LOAD)), 1)[None, :] / unit(CODE)
        part -= centres * sums
        if ZEROS == "shift":
            part = part * factors + shifts * sums
        elif GROUP > 0:
            part *= factors
    elif GROUP > 0:
        part *= factors
    return part


@jit
def scale_of(pointers: Value, EXPONENTS: constexpr) -> Value:
    """Load scales in float32."""
    value = tl.load(pointers).to(tl.float32)
    if EXPONENTS:
        return tl.exp2(value - 127.0)
    else:
        return value


@jit
def unit(CODE: constexpr) -> Value:
    """Return what a sum of products of words must be multiplied by."""
    if CODE == "converted":
        return 1.0
    elif CODE == "float8":
        return 1152921504606846976.0
    else:
        return 576460752303423488.0  # 2^59


@jit
def _number(bits: Value) -> Value:
    """Return the float32 with these bits."""
    return bits.to(tl.float32, bitcast=True)


@jit
def _float8(top: Value) -> Value:
    """Return the FP8 number in the highest byte, times 2^-120."""
    return _number((top >> 4) & -2014314496)  # 0x87F00000: the sign, four bits of the exponent, three of the mantissa


@jit
def _power(exponent: constexpr) -> Value:
    """Return a power of two in float32."""
    return _number(tl.full((1, 1), (exponent + 127) << 23, tl.int32))
