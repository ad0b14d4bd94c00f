"""Rotary position embedding of queries and keys in one kernel, which can also write keys and values to the cache.

    x -> x * cos + rotate_half(x) * sin

over the first R dimensions of a head. Two dimensions are rotated together: i and i + R/2, or the neighbours 2i and
2i + 1. Some layers do not rotate at all. The same kernel normalises each head of q and k first, where a model does so,
and sums the split-K partials of the product that computed them.
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
    jit,
    launch_dependents,
    power_of_two,
    tl,
    varying,
    wait_after,
)
from .linear import sum_partials
from .norm import PLAIN, NormForm, rms_norm_reference
from .parallel_build import is_dry_run
from .rotation import HALVES, Rotation, rotary_reference, rounds_once

MANY_PROGRAMS = 4096  # of one warp; a multiprocessor runs 32 at a time


class HeadNorm(NamedTuple):
    """RMSNorm over each head of the queries and of the keys."""

    query: Tensor  # [D]
    key: Tensor  # [D]
    eps: float
    form: NormForm = PLAIN


class Slots(NamedTuple):
    """Where keys and values go: token t of row b into slot `places[b, t]`."""

    keys: Tensor  # [B, Hkv, S, D]
    values: Tensor  # [B, Hkv, S, D]
    places: Tensor  # [B, Q] of int64


def rotary(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    norm: HeadNorm | None = None,
    slots: Slots | None = None,
    rotation: Rotation | None = HALVES,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotate queries and keys.

    Args:
        query: [B, Hq, Q, D], of any strides whose last is 1; or split-K partials [S, B, Hq, Q, D] in float32.
        key: [B, Hkv, Q, D], or partials of the same product.
        value: as `key`; needed with `slots` only.
        cos: [B or 1, Q, R], R at most D and even; dimensions beyond R are not rotated. In float32 or in the dtype of
            the result.
        sin: as `cos`.
        norm: normalise heads first.
        slots: write keys and values there and return no keys.
        rotation: what is rotated together; None: nothing is rotated.
        dtype: of the result; that of `cos` if it is not given.

    Returns:
        The rotated queries, and the rotated keys or None.
    """
    dtype = cos.dtype if dtype is None else dtype
    if not _fits(query, key, value, cos, sin, norm, slots, dtype):
        return _rotary_in_steps(query, key, value, cos, sin, norm, slots, rotation, dtype)
    rows, heads, tokens, size = query.shape[-4:]
    shared = key.shape[-3]
    out = cos.new_empty((rows, heads, tokens, size), dtype=dtype)
    if slots is None:
        keys = cos.new_empty((rows, shared, tokens, size), dtype=dtype)
        values = index = keys
        value = key
        programs = heads + shared
    else:
        assert value is not None
        keys, values, index = slots
        programs = heads + 2 * shared
    splits, partial_stride = (query.shape[0], query.stride(0)) if query.dim() == 5 else (1, 0)
    half = 0 if rotation is None else rotation.size(cos) // 2
    block, rest = power_of_two(max(1, half)), power_of_two(max(1, size - 2 * half))
    at_once = heads_at_once(programs, rows * tokens)
    step, gap = (2, 1) if rotation is not None and rotation.neighbours else (1, half)
    angle_step, angle_gap = {"halves": (1, half), "neighbours": (2, 1), "once": (1, 0)}[(rotation or HALVES).table]
    cos, sin = (table.expand(rows, -1, -1) for table in (cos, sin))
    _rotary_kernel[(tokens, programs // at_once, rows)](
        query, key, value, cos, sin, out, keys, values, index,
        norm.query if norm else cos, norm.key if norm else cos, norm.eps if norm else 0.0,
        heads, shared, size, half, gap, angle_gap, partial_stride,
        *query.stride()[-4:-1], *key.stride()[-4:-1], *value.stride()[-4:-1], *cos.stride()[:2], *sin.stride()[:2],
        *out.stride()[:3], *keys.stride()[:3], *values.stride()[:3], index.stride(0),
        HEADS=at_once, NORM=norm is not None, OFFSET=norm.form.offset if norm else 0.0,
        WIDE=norm.form.wide if norm else False, SPLITS=splits, SCATTER=slots is not None, BLOCK=block, REST=rest,
        PARTIAL=size > 2 * half, STEP=step, ANGLE_STEP=angle_step, ONCE=rounds_once(rotation, cos, dtype), num_warps=1,
        enable_fp_fusion=False,  # in float32 too each product is rounded before the sum
        **dependent_launch(query.device, next=LATE),
    )  # fmt: skip
    return out, None if slots is not None else keys


def heads_at_once(heads: int, tokens: int) -> int:
    """Return how many heads a program has: more where there are too many programs to run at a time.

    Example:
        >>> heads_at_once(96, tokens=1), heads_at_once(96, tokens=64), heads_at_once(18, tokens=512)
        (1, 4, 2)
    """
    return next(each for each in (4, 2, 1) if heads % each == 0 and (each == 1 or heads * tokens >= MANY_PROGRAMS))


def _rotary_in_steps(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    norm: HeadNorm | None,
    slots: Slots | None,
    rotation: Rotation | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    if query.dim() == 5:
        query, key = (terms.sum(0).to(dtype) for terms in (query, key))
        value = None if value is None else value.sum(0).to(dtype)
    if norm is not None:
        query, _ = rms_norm_reference(query, norm.query, norm.eps, form=norm.form)
        key, _ = rms_norm_reference(key, norm.key, norm.eps, form=norm.form)
    query, key = (rotary_reference(heads, cos, sin, rotation) for heads in (query, key))
    if slots is None:
        return query, key
    assert value is not None
    if is_dry_run():
        return query, None
    rows = torch.arange(key.shape[0], device=key.device)[:, None]
    slots.keys[rows, :, slots.places] = key.transpose(1, 2).to(slots.keys.dtype)
    slots.values[rows, :, slots.places] = value.transpose(1, 2).to(slots.values.dtype)
    return query, None


def _fits(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    norm: HeadNorm | None,
    slots: Slots | None,
    dtype: torch.dtype,
) -> bool:
    used = [] if query.dim() == 5 else [query, key, value]
    if norm is not None:
        if norm.form.centred:
            return False
        used += [norm.query, norm.key]
    if slots is not None:
        used += [slots.keys, slots.values]
        if slots.places.dtype != torch.long or slots.places.stride(-1) != 1:
            return False
    return (
        can_run(cos, sin)
        and cos.dtype in (dtype, torch.float32)
        and all(tensor is None or tensor.dtype == dtype for tensor in used)
        and (not used or can_run(*used))
        and all(tensor.stride(-1) == 1 for tensor in (*used, cos, sin) if tensor is not None)
    )


@varying(
    "heads", "key_heads", "partial_stride", "query_row", "key_row", "value_row", "cos_row",
    "cos_token", "sin_row", "sin_token", "out_row", "out_head", "keys_row", "values_row", "index_row",
)  # fmt: skip
def _rotary_kernel(
    query: Value,
    key: Value,
    value: Value,
    cos: Value,
    sin: Value,
    out: Value,
    keys: Value,
    values: Value,
    index: Value,
    query_weight: Value,
    key_weight: Value,
    eps: Value,
    heads: Value,
    key_heads: Value,
    size: Value,
    half: Value,
    gap: Value,
    angle_gap: Value,
    partial_stride: Value,
    query_row: Value,
    query_head: Value,
    query_token: Value,
    key_row: Value,
    key_head: Value,
    key_token: Value,
    value_row: Value,
    value_head: Value,
    value_token: Value,
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
    index_row: Value,
    HEADS: constexpr,
    NORM: constexpr,
    OFFSET: constexpr,
    WIDE: constexpr,
    SPLITS: constexpr,
    SCATTER: constexpr,
    BLOCK: constexpr,
    REST: constexpr,
    PARTIAL: constexpr,
    STEP: constexpr,
    ANGLE_STEP: constexpr,
    ONCE: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    # A program has some heads of a token: first those of the queries come, then of the keys, then of the values.
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    dtype = out.dtype.element_ty
    pair, rest = tl.arange(0, BLOCK), 2 * half + tl.arange(0, REST)
    inside, low = pair < half, pair * STEP
    turn = cos + row * cos_row + token * cos_token + pair * ANGLE_STEP
    tilt = sin + row * sin_row + token * sin_token + pair * ANGLE_STEP
    for each in tl.static_range(HEADS):
        program = tl.program_id(1) * HEADS + each
        turns = program < heads + key_heads
        if program < heads:
            source = query + row * query_row + program * query_head + token * query_token
            target = out + row * out_row + program * out_head
            token_stride, weight = out_token, query_weight
        elif turns:
            source = key + row * key_row + (program - heads) * key_head + token * key_token
            target = keys + row * keys_row + (program - heads) * keys_head
            token_stride, weight = keys_slot, key_weight
        else:
            source = value + row * value_row + (program - heads - key_heads) * value_head + token * value_token
            target = values + row * values_row + (program - heads - key_heads) * values_head
            token_stride, weight = values_slot, key_weight
        if NORM:
            first_weight = tl.load(weight + low, mask=inside & turns, other=0.0)
            second_weight = tl.load(weight + gap + low, mask=inside & turns, other=0.0)
            if PARTIAL:
                rest_weight = tl.load(weight + rest, mask=(rest < size) & turns, other=0.0)
        if each == 0:
            wait_after(source.to(tl.int64), PDL)
        slot = token
        if SCATTER:
            slot = tl.load(index + row * index_row + token, mask=program >= heads, other=token)
        cos_first = tl.load(turn, mask=inside & turns, other=0.0).to(tl.float32)
        cos_second = tl.load(turn + angle_gap, mask=inside & turns, other=0.0).to(tl.float32)
        sin_first = tl.load(tilt, mask=inside & turns, other=0.0).to(tl.float32)
        sin_second = tl.load(tilt + angle_gap, mask=inside & turns, other=0.0).to(tl.float32)
        first = sum_partials(source + low, partial_stride, inside, dtype, SPLITS)
        second = sum_partials(source + gap + low, partial_stride, inside, dtype, SPLITS)
        if PARTIAL:
            beyond = sum_partials(source + rest, partial_stride, rest < size, dtype, SPLITS)
        if turns:
            if NORM:
                one, two = first.to(tl.float32), second.to(tl.float32)
                square = tl.sum(one * one, 0) + tl.sum(two * two, 0)
                if PARTIAL:
                    three = beyond.to(tl.float32)
                    square += tl.sum(three * three, 0)
                root = tl.rsqrt(square / size + eps)
                first = _scaled(one * root, first_weight, OFFSET, WIDE)
                second = _scaled(two * root, second_weight, OFFSET, WIDE)
                if PARTIAL:
                    beyond = _scaled(three * root, rest_weight, OFFSET, WIDE)
            one, two = first.to(tl.float32), second.to(tl.float32)
            if ONCE:
                left, right = one * cos_first - two * sin_first, two * cos_second + one * sin_second
            else:
                left = (one * cos_first).to(dtype).to(tl.float32) - (two * sin_first).to(dtype).to(tl.float32)
                right = (two * cos_second).to(dtype).to(tl.float32) + (one * sin_second).to(dtype).to(tl.float32)
            first, second = left.to(dtype), right.to(dtype)
        target += slot * token_stride
        tl.store(target + low, first, mask=inside)
        tl.store(target + gap + low, second, mask=inside)
        if PARTIAL:
            tl.store(target + rest, beyond, mask=rest < size)


@jit
def _scaled(wide: Value, weight: Value, OFFSET: constexpr, WIDE: constexpr) -> Value:
    scale = weight.to(tl.float32)
    if WIDE:
        return (wide * (scale + OFFSET)).to(weight.dtype)
    else:
        return (wide.to(weight.dtype).to(tl.float32) * scale).to(weight.dtype)
