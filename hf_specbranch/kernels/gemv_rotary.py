"""q, k and v of one to four tokens in one launch: norm, product, rotary embedding, and the write to the KV cache.

A program has rows of W whose dimensions are rotated together: i of a head, and i + D/2 of the same head. What it
computes it rotates in registers, and stores queries for attention, keys and values in their slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .backend import Value, can_run, constexpr, jit, launch_dependents, tl, triton, varying
from .gemv import kernel_arguments
from .gemv_rows import product_of_rows
from .linear import Plan
from .norm import Norm
from .packed import Packed
from .rotary import Slots
from .rotation import HALVES, Rotation, rounds_once


class Turn(NamedTuple):
    """Rotary embedding of q and k, and where keys and values go."""

    cos: Tensor  # [B or 1, Q, D], in float32 or in the dtype of x
    sin: Tensor
    slots: Slots
    size: int  # D
    rotation: Rotation | None = HALVES


def rotary_fits(x: Tensor, turn: Turn) -> bool:
    """Return whether the kernel can rotate q and k of x [B, Q, K] so, and write to this cache."""
    cos, sin, (keys, values, places), size, rotation = turn
    return (
        rotation == HALVES
        and cos.shape[-1] == size
        and cos.dtype in (x.dtype, torch.float32)
        and can_run(cos, sin)
        and can_run(x, keys, values)
        and places.dtype == torch.long
        and all(tensor.stride(-1) == 1 for tensor in (cos, sin, keys, values, places))
    )


def rotary_gemv(x: Tensor, weight: Packed, bias: Tensor | None, plan: Plan, norm: Norm, turn: Turn) -> Tensor:
    """Compute q, k and v, rotate q and k, write keys and values to the cache, and return the queries.

    Args:
        x: [B, Q, K], at most `MOST_ROWS` tokens.
        weight: [N, K]: the rows of all query heads, all key heads, all value heads.
        bias: [N] or None.
        plan: for which the product `fits`.
        norm: of x.
        turn: for which `rotary_fits`.

    Returns:
        The rotated queries [B, Hq, Q, D].
    """
    batch, tokens, depth = x.shape
    (keys, values, places), size = turn.slots, turn.size
    shared = keys.shape[1]
    heads = weight.shape[0] // size - 2 * shared
    out = x.new_empty((batch, heads, tokens, size))
    cos, sin = (table.expand(batch, -1, -1) for table in (turn.cos, turn.sin))
    arguments, constants = kernel_arguments(x.reshape(-1, depth), weight, bias, plan, norm)
    _rotary_gemv_kernel[(triton.cdiv(weight.shape[0], plan.strip),)](
        *arguments, cos, sin, out, keys, values, places, heads, shared, size // 2, tokens,
        *cos.stride()[:2], *sin.stride()[:2], *out.stride()[:3], *keys.stride()[:3], *values.stride()[:3],
        places.stride(0), ONCE=rounds_once(turn.rotation, cos, x.dtype), **constants,
    )  # fmt: skip
    return out


@varying(
    "rows", "heads", "shared", "tokens", "cos_row", "cos_token", "sin_row", "sin_token", "out_row", "out_head",
    "keys_row", "values_row", "places_row",
)  # fmt: skip
def _rotary_gemv_kernel(
    x: Value,
    data: Value,
    scale: Value,
    zero: Value,
    bias: Value,
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
    cos: Value,
    sin: Value,
    out: Value,
    keys: Value,
    values: Value,
    places: Value,
    heads: Value,
    shared: Value,
    half: Value,
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
    ONCE: constexpr,
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
    ROWS: constexpr,
    STRIP: constexpr,
    PER_LOAD: constexpr,
    BLOCK: constexpr,
    EVEN: constexpr,
    ONE_STEP: constexpr,
    ASSEMBLY: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    PAIRS: tl.constexpr = STRIP // 2
    strip, every = tl.arange(0, STRIP), (heads + 2 * shared) * half
    pair = tl.minimum(tl.program_id(0) * PAIRS + strip % PAIRS, every - 1)  # the last strip may exceed the edge
    n = pair // half * (2 * half) + pair % half + strip // PAIRS * half
    first, second, third, fourth = product_of_rows(
        n, x, data, scale, zero, bias, norm_weight, rows, depth, x_row, row_words, data_row, scale_n, scale_k,
        zero_n, zero_k, eps, NORM, OFFSET, BIAS, CODE, BITS, GROUP, SCALE_ROWS, ZEROS, ZERO_OFFSET, EXPONENTS,
        ROWS, STRIP, PER_LOAD, BLOCK, EVEN, ONE_STEP, ASSEMBLY, PDL,
    )  # fmt: skip
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    for row in tl.static_range(ROWS):
        result = first
        if row == 1:
            result = second
        if row == 2:
            result = third
        if row == 3:
            result = fourth
        inside = (pair < every) & (row < rows)
        token, batch = row % tokens, tl.minimum(row, rows - 1) // tokens
        head, low = pair // half, pair % half
        turns = inside & (head < heads + shared)  # not the values
        turn, tilt = batch * cos_row + token * cos_token + low, batch * sin_row + token * sin_token + low
        slot = tl.load(places + batch.to(tl.int64) * places_row + token)
        query = out + batch * out_row + head * out_head + token * out_token
        key = keys + batch.to(tl.int64) * keys_row + (head - heads) * keys_head + slot * keys_slot
        value = values + batch.to(tl.int64) * values_row + (head - heads - shared) * values_head + slot * values_slot
        target = tl.where(head < heads, query, tl.where(head < heads + shared, key, value)) + low
        one, two = tl.split(tl.permute(tl.reshape(result.to(out.dtype.element_ty), (2, PAIRS)), (1, 0)))
        left = _turned(one, two, cos + turn, sin + tilt, turns, -1.0, ONCE)
        right = _turned(two, one, cos + half + turn, sin + half + tilt, turns, 1.0, ONCE)
        tl.store(target, left, mask=inside)
        tl.store(target + half, right, mask=inside)


@jit
def _turned(x: Value, other: Value, cos: Value, sin: Value, turns: Value, sign: constexpr, ONCE: constexpr) -> Value:
    """Return x cos + sign * other sin, rounded as `rotary` does; x itself where nothing is rotated."""
    dtype: tl.constexpr = x.dtype
    along = x.to(tl.float32) * tl.load(cos, mask=turns, other=1.0).to(tl.float32)
    across = other.to(tl.float32) * tl.load(sin, mask=turns, other=0.0).to(tl.float32)
    if ONCE:
        return (along + sign * across).to(dtype)
    else:
        return (along.to(dtype).to(tl.float32) + sign * across.to(dtype).to(tl.float32)).to(dtype)
