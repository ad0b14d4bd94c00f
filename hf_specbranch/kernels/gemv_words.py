"""Unpacks the weights of a GEMV in registers: 32-bit words to elements in float32, in few instructions.

An integer code is not shifted down and converted: the other bits of its word are masked, and what remains is read as a
float32. Below 2^24 such bits are a subnormal number, or one with the smallest exponent; both are worth the same integer
times 2^-149, exactly. Code c at bit p of its word becomes c * 2^(p - 149), so x is multiplied by 2^(90 - p) before, and
the sum by 2^59 after. A code at bit 24 or higher is shifted down by 8 bits first. An FP8 number is shifted until its
exponent lies where float32 has it: that is its value times 2^-120.

CUDA devices convert FP8 numbers themselves from compute capability 8.9 on, in fewer instructions: `CODE` is "converted"
there.
"""

from __future__ import annotations

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


@jit
def elements(words: Value, STRIP: constexpr, BLOCK: constexpr, CODE: constexpr) -> Value:
    """Return the elements [STRIP, BLOCK] of words [STRIP, W] in float32, each times its own power of two."""
    if CODE == "converted":
        e0, e1, e2, e3 = tl.inline_asm_elementwise(  # by way of float16
            "{ .reg .b16 low, high, even, odd; .reg .b32 first, second; mov.b32 {low, high}, $4; "
            "cvt.rn.f16x2.e4m3x2 first, low; cvt.rn.f16x2.e4m3x2 second, high; "
            "mov.b32 {even, odd}, first; cvt.f32.f16 $0, even; cvt.f32.f16 $1, odd; "
            "mov.b32 {even, odd}, second; cvt.f32.f16 $2, even; cvt.f32.f16 $3, odd; }",
            "=f,=f,=f,=f,r", [words], (tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True, pack=1,
        )  # fmt: skip
        result = tl.join(tl.join(e0, e2), tl.join(e1, e3))
    elif CODE == "int8":
        codes = words ^ -2139062144  # 0x80808080: two's complement becomes an unsigned code plus 128
        even = tl.join(_number(codes & 0xFF), _number(codes & 0xFF0000))
        odd = tl.join(_number(codes & 0xFF00), _number((codes >> 8) & 0xFF0000))
        result = tl.join(even, odd)
    elif CODE == "float8":
        even = tl.join(_float8(words << 24), _float8(words << 8))
        odd = tl.join(_float8(words << 16), _float8(words))
        result = tl.join(even, odd)
    else:
        codes = words
        if CODE == "signed":
            codes = words ^ -2004318072  # 0x88888888
        high = codes >> 8
        zero_four = tl.join(_number(codes & 0xF), _number(codes & 0xF0000))
        one_five = tl.join(_number(codes & 0xF0), _number(codes & 0xF00000))
        two_six = tl.join(_number(codes & 0xF00), _number(high & 0xF0000))
        three_seven = tl.join(_number(codes & 0xF000), _number(high & 0xF00000))
        result = tl.join(tl.join(zero_four, two_six), tl.join(one_five, three_seven))
    return tl.reshape(result, (STRIP, BLOCK))


@jit
def scaled_states(states: Value, index: Value, CODE: constexpr) -> Value:
    """Return x in float32, times what makes up for the powers of two of `elements`, up to `unit`.

    Args:
        states: [BLOCK] of x.
        index: [BLOCK] 0, 1, 2, and so on.
        CODE: of the weight.
    """
    wide = states.to(tl.float32)
    if CODE == "int8":
        place = tl.minimum(index % 4, 2) * 8
        wide = wide * _number((217 - place) << 23)  # 2^(90 - place)
    elif CODE == "float8":
        wide = wide * 1152921504606846976.0  # 2^60
    elif CODE == "offset" or CODE == "signed":
        element = index % 8
        place = tl.where(element < 6, element, element - 2) * 4
        wide = wide * _number((217 - place) << 23)
    return wide


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
def products(
    weights: Value,
    states: Value,
    index: Value,
    factors: Value,
    centres: Value,
    shifts: Value,
    CODE: constexpr,
    GROUP: constexpr,
    ZEROS: constexpr,
    STRIP: constexpr,
    LOADS: constexpr,
    PER_LOAD: constexpr,
) -> Value:
    """Multiply elements of W [STRIP, BLOCK] by one row of x [BLOCK], and add up those that a thread has: [STRIP, L]."""
    terms = weights * scaled_states(states, index, CODE)[None, :]
    part = tl.sum(tl.reshape(terms, (STRIP, LOADS, PER_LOAD)), 2)
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
    """Return what a sum of products with `elements` and `scaled_states` must be multiplied by."""
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
