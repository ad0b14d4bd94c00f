"""q, k and v of few tokens in one launch: norm, product, rotary embedding, and the write to the KV cache.

A program has rows of W whose dimensions are rotated together: i of a head, and i + D/2 of the same head. What it
computes it rotates in registers, and stores queries for attention, keys and values in their slots. Norms of heads are
left to attention in part (`pending_norms.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .backend import (
    LATE,
    Value,
    can_run,
    constexpr,
    dependent_launch,
    launch_dependents,
    power_of_two,
    tl,
    triton,
    varying,
    wait_after,
    zero_after_wait,
)
from .gemv import kernel_arguments
from .gemv_loads import store_one
from .gemv_rows import constants_of_rows, product_of_rows
from .linear import Plan
from .norm import Norm
from .packed import Packed
from .pending_norms import DIMENSIONS, PendingNorms
from .rotary import HeadNorm, Slots
from .rotation import HALVES, Rotation, rounds_once
from .tile_fragments import ROWS_OF_W
from .tile_rotary import rotary_tile_kernel, turned
from .tiles import kernel_arguments as tile_arguments


class Turn(NamedTuple):
    """Rotary embedding of q and k, and where keys and values go."""

    cos: Tensor  # [B or 1, Q, D], in float32 or in the dtype of x
    sin: Tensor
    slots: Slots
    size: int  # D
    rotation: Rotation | None = HALVES
    norm: HeadNorm | None = None  # of the heads of q and k


class Queries(NamedTuple):
    """The rotated queries [B, Hq, Q, D], and what is missing of the norms of heads."""

    query: Tensor
    pending: PendingNorms | None = None


def rotary_fits(x: Tensor, turn: Turn) -> bool:
    """Return whether the kernel can rotate q and k of x [B, Q, K] so, and write to this cache."""
    cos, sin, (keys, values, places), size, rotation, norm = turn
    return (
        (norm is None or _norm_fits(x, norm, size))
        and rotation == HALVES
        and cos.shape[-1] == size
        and cos.dtype in (x.dtype, torch.float32)
        and can_run(cos, sin)
        and can_run(x, keys, values)
        and places.dtype == torch.long
        and all(tensor.stride(-1) == 1 for tensor in (cos, sin, keys, values, places))
    )


def _norm_fits(x: Tensor, norm: HeadNorm, size: int) -> bool:
    """Return whether attention can finish the norms of heads: those of one token, whose parts are powers of two."""
    whole = size >= DIMENSIONS and size == power_of_two(size)
    return x.numel() == x.shape[-1] and whole and not norm.form.centred and can_run(x, norm.query, norm.key)


def rotary_gemv(x: Tensor, weight: Packed, bias: Tensor | None, plan: Plan, norm: Norm, turn: Turn) -> Queries:
    """Compute q, k and v, rotate q and k, write keys and values to the cache, and return the queries.

    Args:
        x: [B, Q, K], few tokens.
        weight: [N, K]: the rows of all query heads, all key heads, all value heads.
        bias: [N] or None.
        plan: for which the product `fits`; one of tiles, if heads have norms.
        norm: of x.
        turn: for which `rotary_fits`.
    """
    batch, tokens, depth = x.shape
    (keys, values, places), size = turn.slots, turn.size
    shared = keys.shape[1]
    heads = weight.shape[0] // size - 2 * shared
    out = x.new_empty((batch, heads, tokens, size))
    cos, sin = (table.expand(batch, -1, -1) for table in (turn.cos, turn.sin))
    flat, tables = x.reshape(-1, depth), (*cos.stride()[:2], *sin.stride()[:2])
    places_of_all = (*tables, *out.stride()[:3], *keys.stride()[:3], *values.stride()[:3], places.stride(0))
    rotated = cos, sin, out, keys, values, places, heads, shared, tokens, *places_of_all
    pending = None
    if turn.norm is not None:
        squares = x.new_empty((heads + shared, size // DIMENSIONS), dtype=torch.float32)
        pending = PendingNorms(squares, turn.norm.eps, places)
    options = {
        **dict(HEAD_HALF=size // 2, ONCE=rounds_once(turn.rotation, cos, x.dtype)),
        **dependent_launch(x.device, next=LATE),
    }
    if plan.spans > 0:
        arguments, constants = tile_arguments(flat, x.dtype, weight, plan, norm)
        tiles = triton.cdiv(weight.shape[0], ROWS_OF_W)
        normed = (out, out, out) if turn.norm is None else (turn.norm.query, turn.norm.key, squares)
        rotary_tile_kernel[(tiles,)](
            *arguments, weight.data if bias is None else bias, *rotated, *normed, BIAS=bias is not None,
            HEAD_NORM=turn.norm is not None, HEAD_OFFSET=0.0 if turn.norm is None else turn.norm.form.offset,
            **constants, **options,
        )  # fmt: skip
    else:
        assert turn.norm is None
        arguments, constants = kernel_arguments(flat, weight, bias, plan, norm)
        _rotary_gemv_kernel[(triton.cdiv(weight.shape[0], plan.strip),)](*arguments, *rotated, **constants, **options)
    return Queries(out, pending)


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
    HEAD_HALF: constexpr,
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
    THREADS: constexpr,
    ASSEMBLY: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    PAIRS: tl.constexpr = STRIP // 2
    strip, every = tl.arange(0, STRIP), (heads + 2 * shared) * HEAD_HALF
    pair = tl.minimum(tl.program_id(0) * PAIRS + strip % PAIRS, every - 1)  # the last strip may exceed the edge
    n = pair // HEAD_HALF * (2 * HEAD_HALF) + pair % HEAD_HALF + strip // PAIRS * HEAD_HALF
    words, gain, group, whole, begin = constants_of_rows(
        n, data, scale, zero, bias, norm_weight, depth, row_words, data_row, scale_n, scale_k, zero_n, zero_k, NORM,
        OFFSET, BIAS, CODE, BITS, GROUP, SCALE_ROWS, ZEROS, ZERO_OFFSET, EXPONENTS, STRIP, PER_LOAD, BLOCK, EVEN,
        ASSEMBLY is None,
    )  # fmt: skip
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    head, low = pair // HEAD_HALF, pair % HEAD_HALF
    is_query, is_key = head < heads, (head >= heads) & (head < heads + shared)
    slot_stride = tl.where(is_query, 0, tl.where(is_key, keys_slot, values_slot))
    targets: Value = ()
    known = pair.to(tl.int64)
    for row in tl.static_range(ROWS):
        token, batch = row % tokens, (tl.minimum(row, rows - 1) // tokens).to(tl.int64)
        query = out + batch * out_row + head * out_head + token * out_token
        key = keys + batch * keys_row + (head - heads) * keys_head
        value = values + batch * values_row + (head - heads - shared) * values_head
        target = tl.where(is_query, query, tl.where(is_key, key, value)) + low
        targets += (target,)
        known += target.to(tl.int64)
    wait_after(known, PDL)
    x += zero_after_wait(PDL)
    turns = is_query | is_key
    slots: Value = ()
    angles: Value = ()
    for row in tl.static_range(ROWS):
        token, batch = row % tokens, tl.minimum(row, rows - 1) // tokens
        turn, tilt = batch * cos_row + token * cos_token + low, batch * sin_row + token * sin_token + low
        slots += (tl.load(places + batch.to(tl.int64) * places_row + token),)
        cosines = tl.load(cos + turn, mask=turns, other=1.0), tl.load(cos + HEAD_HALF + turn, mask=turns, other=1.0)
        sines = tl.load(sin + tilt, mask=turns, other=0.0), tl.load(sin + HEAD_HALF + tilt, mask=turns, other=0.0)
        angles += (cosines + sines,)
    products = product_of_rows(
        words, gain, group, whole, begin, n, x, data, scale, zero, norm_weight, rows, depth, x_row, row_words, data_row,
        scale_n, scale_k, zero_n, zero_k, eps, NORM, OFFSET, CODE, BITS, GROUP, SCALE_ROWS, ZEROS, ZERO_OFFSET,
        EXPONENTS, ROWS, STRIP, PER_LOAD, BLOCK, EVEN, ONE_STEP, THREADS, ASSEMBLY,
    )  # fmt: skip
    for row in tl.static_range(ROWS):
        one, two = tl.split(tl.permute(tl.reshape(products[row].to(out.dtype.element_ty), (2, PAIRS)), (1, 0)))
        cos_one, cos_two, sin_one, sin_two = angles[row]
        target, inside = targets[row] + slots[row] * slot_stride, (pair < every) & (row < rows)
        store_one(target, turned(one, two, cos_one, sin_one, -1.0, ONCE), inside, ASSEMBLY is None)
        store_one(target + HEAD_HALF, turned(two, one, cos_two, sin_two, 1.0, ONCE), inside, ASSEMBLY is None)
