"""Unpacks 4-bit words in registers and multiplies them: the inner step of the kernel for quantised products.

A word holds eight elements of one row of W. The sum over the inner dimension may be taken in any order, so it runs over
the places in a word, then over the words: no element of W moves to another thread. A step is one product, since on
compute capability 9 each of several would wait until the one before is done.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .backend import HALF_PRECISION, Value, constexpr, jit, tl
from .linear import BLOCK
from .packed import WORD, Packed


@lru_cache
def _centred(magic: int, kind: str) -> str:
    """Return the assembly that takes 4-bit codes from two words at a time: three instructions for two elements.

    Four bits below the bits of 128 in bfloat16, or 1024 in float16, are that number plus the code. The centre that is
    subtracted contains the same number.
    """
    lines = ["prmt.b32 low, $8, $9, 0x5410;", "prmt.b32 high, $8, $9, 0x7632;"]
    for element in range(WORD):
        half, shift = ("low", "high")[element // 4], element % 4 * 4
        lines += [f"shr.u32 bits, {half}, {shift};"] if shift else []
        lines += [f"lop3.b32 bits, {'bits' if shift else half}, 0x000F000F, {magic:#x}, 0x6A;"]  # (a & b) ^ c
        lines += [f"sub.{kind} ${element}, bits, $10;"]
    return "{ .reg .b32 low, high, bits; " + " ".join(lines) + " }"


def assembly(weight: Packed, dtype: torch.dtype) -> str:
    """Return the assembly that unpacks this format, or nothing where plain code does it."""
    small = weight.group < weight.shape[1] and weight.group % BLOCK != 0
    if small or weight.code not in ("offset", "signed") or weight.high_first or dtype not in HALF_PRECISION:
        return ""
    flipped = 0x00080008 if weight.code == "signed" else 0  # two's complement becomes an unsigned code plus 8
    return (
        _centred(0x64006400 ^ flipped, "f16x2")
        if dtype == torch.float16
        else _centred(0x43004300 ^ flipped, "rn.bf16x2")
    )


@jit
def product_of_words(
    words: Value,
    states: Value,
    centre: Value,
    factor: Value,
    shift: Value,
    table: Value,
    CODE: constexpr,
    ZEROS: constexpr,
    HIGH_FIRST: constexpr,
    LARGE: constexpr,
    ASSEMBLY: constexpr,
    ROWS: constexpr,
    STRIP: constexpr,
    WIDTH: constexpr,
) -> Value:
    """Multiply words [STRIP, WIDTH] of 4-bit codes by x [ROWS, 8 WIDTH]: [STRIP, ROWS], without scales if LARGE."""
    dtype: tl.constexpr = states.dtype
    if ASSEMBLY != "":
        wide = tl.full((STRIP, WIDTH), 1032.0 if dtype == tl.float16 else 136.0, dtype)
        w0, w1, w2, w3, w4, w5, w6, w7 = _centred_elements(words, wide, ASSEMBLY)
    else:
        w0 = _element(words, 0, centre, factor, shift, table, CODE, ZEROS, HIGH_FIRST, LARGE, dtype)
        w1 = _element(words, 1, centre, factor, shift, table, CODE, ZEROS, HIGH_FIRST, LARGE, dtype)
        w2 = _element(words, 2, centre, factor, shift, table, CODE, ZEROS, HIGH_FIRST, LARGE, dtype)
        w3 = _element(words, 3, centre, factor, shift, table, CODE, ZEROS, HIGH_FIRST, LARGE, dtype)
        w4 = _element(words, 4, centre, factor, shift, table, CODE, ZEROS, HIGH_FIRST, LARGE, dtype)
        w5 = _element(words, 5, centre, factor, shift, table, CODE, ZEROS, HIGH_FIRST, LARGE, dtype)
        w6 = _element(words, 6, centre, factor, shift, table, CODE, ZEROS, HIGH_FIRST, LARGE, dtype)
        w7 = _element(words, 7, centre, factor, shift, table, CODE, ZEROS, HIGH_FIRST, LARGE, dtype)
    low, high = tl.join(tl.join(w0, w1), tl.join(w2, w3)), tl.join(tl.join(w4, w5), tl.join(w6, w7))
    left = tl.reshape(tl.permute(tl.join(low, high), (0, 4, 3, 2, 1)), (STRIP, 8 * WIDTH))
    right = tl.reshape(tl.permute(tl.reshape(states, (ROWS, WIDTH, 8)), (0, 2, 1)), (ROWS, 8 * WIDTH))
    return tl.dot(left, tl.trans(right), input_precision="ieee")


@jit
def _centred_elements(words: Value, centre: Value, ASSEMBLY: constexpr) -> Value:
    """Return the eight elements of each word minus the centre; see `_centred`."""
    if centre.dtype == tl.float16:
        return tl.inline_asm_elementwise(
            ASSEMBLY, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r", [words, centre],
            (tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            ASSEMBLY, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r", [words, centre],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip


@jit
def _element(
    words: Value,
    index: constexpr,
    centre: Value,
    factor: Value,
    shift: Value,
    table: Value,
    CODE: constexpr,
    ZEROS: constexpr,
    HIGH_FIRST: constexpr,
    LARGE: constexpr,
    dtype: constexpr,
) -> Value:
    """Return one of the eight elements of each word, scaled where groups are small."""
    code = words >> 4 * ((index ^ 1) if HIGH_FIRST else index) & 15
    if CODE == "table":
        value = tl.load(table + code)
    elif CODE == "signed":
        value = ((code ^ 8) - 8).to(tl.float32)
    else:
        value = (code - (8 if LARGE else centre)).to(tl.float32)
    if not LARGE:
        value = value * factor
        if ZEROS == "shift":
            value += shift
    return value.to(dtype)
