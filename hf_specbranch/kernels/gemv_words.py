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
from .gemv_loads import load_one, number, sum_of_loads, sum_of_own_loads
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
    if weight.code == "dense":
        return Format("dense", 16)
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
    words: Value, first: Value, second: Value, ROWS: constexpr, CODE: constexpr, ASSEMBLY: constexpr
) -> Value:
    """Multiply words of W [STRIP, WORDS] by two rows of x, and add up within each word, up to `unit`.

    Args:
        words: of W.
        first: a row of x by `wide_states`.
        second: another one; if ROWS is 1, its product is worth nothing.
        ROWS: of x.
        CODE: of the weight.
        ASSEMBLY: of `assembly`, or None.

    Returns:
        [STRIP, WORDS] twice, in float32.
    """
    PLACES: constexpr = len(first)
    first = _balanced(first, CODE)
    if ROWS == 1:
        if ASSEMBLY is None:
            one = _product(words, first, CODE)
        else:
            one = tl.inline_asm_elementwise(
                ASSEMBLY, "=f,r" + ",f" * PLACES, (words,) + first, tl.float32, is_pure=True, pack=1
            )
        two = one
    else:
        second = _balanced(second, CODE)
        if ASSEMBLY is None:
            one, two = _product(words, first, CODE), _product(words, second, CODE)
        else:
            one, two = tl.inline_asm_elementwise(
                ASSEMBLY, "=f,=f,r" + ",f" * (2 * PLACES), (words,) + first + second, (tl.float32, tl.float32),
                is_pure=True, pack=1,
            )  # fmt: skip
    return one, two


@jit
def _balanced(x: Value, CODE: constexpr) -> Value:
    """Multiply x by what makes up for the powers of two of the elements, up to `unit`."""
    if CODE == "converted":
        return x
    elif CODE == "float8":
        return x[0] * _power(60), x[1] * _power(60), x[2] * _power(60), x[3] * _power(60)
    elif CODE == "int8":
        return x[0] * _power(90), x[1] * _power(82), x[2] * _power(74), x[3] * _power(74)
    else:
        low = x[0] * _power(90), x[1] * _power(86), x[2] * _power(82), x[3] * _power(78)
        return low + (x[4] * _power(74), x[5] * _power(70), x[6] * _power(74), x[7] * _power(70))


@jit
def _product(words: Value, x: Value, CODE: constexpr) -> Value:
    """Compute in plain code what `assembly` does for one row."""
    if CODE == "float8":
        total = _float8(words << 24) * x[0] + _float8(words << 16) * x[1]
        return total + _float8(words << 8) * x[2] + _float8(words) * x[3]
    elif CODE == "int8":
        codes = words ^ -2139062144  # 0x80808080: two's complement becomes an unsigned code plus 128
        total = number(codes & 0xFF) * x[0] + number(codes & 0xFF00) * x[1]
        return total + number(codes & 0xFF0000) * x[2] + number((codes >> 8) & 0xFF0000) * x[3]
    else:
        codes = words
        if CODE == "signed":
            codes = words ^ -2004318072  # 0x88888888
        high = codes >> 8
        total = number(codes & 0xF) * x[0] + number(codes & 0xF0) * x[1]
        total += number(codes & 0xF00) * x[2] + number(codes & 0xF000) * x[3]
        total += number(codes & 0xF0000) * x[4] + number(codes & 0xF00000) * x[5]
        return total + number(high & 0xF0000) * x[6] + number(high & 0xF00000) * x[7]


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
    PLAIN: constexpr,
) -> Value:
    """Return scale, code of zero and shift of the rows `n` of W at the columns `column` [L]: each [STRIP, L] or [1, 1].

    A scale for whole rows is not among them: it is applied to the sum.
    """
    factors = tl.full((1, 1), 1.0, tl.float32)
    centres, shifts = factors * (128.0 if CODE == "int8" else 8.0), factors
    group = column * 0
    if GROUP > 0:
        group = tl.minimum(column, depth - 1) // GROUP
        factors = load_one(
            scale + (n // SCALE_ROWS)[:, None] * scale_n + group[None, :] * scale_k, n[:, None] >= 0, PLAIN
        )
        factors = scale_value(factors, EXPONENTS)
    if ZEROS == "words":
        points = load_one(zero + (n // 8)[:, None] * zero_n + group[None, :] * zero_k, n[:, None] >= 0, PLAIN)
        centres = ((points >> (n % 8 * 4)[:, None] & 15) + ZERO_OFFSET).to(tl.float32)
    elif ZEROS == "shift":
        shifts = load_one(zero + n[:, None] * zero_n + group[None, :] * zero_k, n[:, None] >= 0, PLAIN).to(tl.float32)
    return factors, centres, shifts


@jit
def scaled(
    part: Value,
    words: Value,
    states: Value,
    values: Value,
    CODE: constexpr,
    GROUP: constexpr,
    ZEROS: constexpr,
    LOADS: constexpr,
    PLAIN: constexpr,
) -> Value:
    """Add up the products of words [STRIP, WORDS] with a row of x that a thread has, and scale: [STRIP, L].

    `states` are those of `wide_states`, `values` those of `group_values`.
    """
    factors, centres, shifts = values
    part = sum_of_own_loads(part, LOADS)
    if CODE == "int8" or CODE == "offset" or CODE == "signed":
        # Codes are unsigned: sum of (c - centre) x = sum of c x - centre * sum of x.
        every = states[0]
        for place in tl.static_range(1, len(states)):
            every += states[place]
        sums = sum_of_loads(every, words, LOADS, PLAIN) / unit(CODE)
        part -= centres * sums
        if ZEROS == "shift":
            part = part * factors + shifts * sums
        elif GROUP > 0:
            part *= factors
    elif GROUP > 0:
        part *= factors
    return part


@jit
def scale_value(stored: Value, EXPONENTS: constexpr) -> Value:
    """Return stored scales in float32."""
    if EXPONENTS:
        return tl.exp2(stored.to(tl.float32) - 127.0)
    else:
        return stored.to(tl.float32)


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
def _float8(top: Value) -> Value:
    """Return the FP8 number in the highest byte, times 2^-120."""
    return number((top >> 4) & -2014314496)  # 0x87F00000: the sign, four bits of the exponent, three of the mantissa


@jit
def _power(exponent: constexpr) -> Value:
    """Return a power of two in float32."""
    return number(tl.full((1, 1), (exponent + 127) << 23, tl.int32))
