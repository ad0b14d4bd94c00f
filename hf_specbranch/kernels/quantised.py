"""y = x W^T for a few rows of x and a quantised W: a product bound by reading the packed weight once.

Each program streams a strip of W as `linear.streamed` does. The elements are unpacked in registers, where tensor cores
take their left operand from (`quantised_words.py`).

Codes of few bits are exact in half precision. Where a group has at least `BLOCK` elements, its scale is applied to the
sum in float32. Smaller groups are scaled before they are rounded, as the reference is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .backend import (
    Value,
    can_run,
    constexpr,
    dependent_launch,
    fewest_columns,
    jit,
    launch_dependents,
    power_of_two,
    prefetch,
    tl,
    triton,
    varying,
    wait_for_dependencies,
)
from .gated import Activation, apply_gate
from .linear import BLOCK, MOST_ROWS, Partials, Plan
from .packed import WORD, Packed, dequantise
from .quantised_words import assembly, product_of_words

# Wider strips unpack more elements per load of x, and narrower ones make more programs. Eight of these were the fastest
# for some product of Llama-3.1-8B on an H200 (FP8 and 4 bits, 4 to 16 rows of x). (2, 64) and (4, 128) are neighbours.
QUANTISED_PLANS = (
    *(Plan(1, stages, strip) for stages, strip in ((4, 32), (4, 64), (4, 128), (8, 32), (8, 64))),
    *(Plan(splits, 4, strip) for splits, strip in ((2, 64), (4, 32), (4, 128), (8, 32), (8, 128))),
)


def quantised_linear(
    x: Tensor, weights: Sequence[Packed], biases: Sequence[Tensor | None], plan: Plan
) -> Tensor | Partials:
    """Compute x W^T + bias by the kernel, for several weights one after the other.

    Args:
        x: [..., K], at most `MOST_ROWS` rows.
        weights: [N_i, K] each.
        biases: [N_i] or None each.
        plan: with split-K the result is partials.

    Returns:
        [..., sum of N_i].
    """
    flat = x.reshape(-1, x.shape[-1])
    rows, total = flat.shape[0], sum(weight.shape[0] for weight in weights)
    shape = torch.Size((*x.shape[:-1], total))
    target = flat.new_empty((plan.splits, rows, total), dtype=x.dtype if plan.splits == 1 else torch.float32)
    start = 0
    for weight, bias in zip(weights, biases, strict=True):
        _launch(flat, weight, bias, plan, target[:, :, start:], total, None)
        start += weight.shape[0]
    return target.view(shape) if plan.splits == 1 else Partials(target, shape, x.dtype)


def quantised_gated(x: Tensor, weight: Packed, bias: Tensor | None, activation: Activation, plan: Plan) -> Tensor:
    """Compute act(x W_gate^T) * (x W_up^T) by the kernel, where W holds the rows of both.

    Args:
        x: [..., K], at most `MOST_ROWS` rows.
        weight: [2 * I, K], the gate's rows before the up projection's.
        bias: [2 * I] or None.
        activation: "silu" or "gelu_tanh".
        plan: without split-K.

    Returns:
        [..., I].
    """
    flat, size = x.reshape(-1, x.shape[-1]), weight.shape[0] // 2
    target = flat.new_empty((flat.shape[0], size))
    _launch(flat, weight, bias, plan, target, size, activation)
    return target.view(*x.shape[:-1], size)


def _launch(
    x: Tensor,
    weight: Packed,
    bias: Tensor | None,
    plan: Plan,
    target: Tensor,
    target_row: int,
    activation: Activation | None,
) -> None:
    (rows, depth), columns = x.shape, weight.shape[0]
    data, scale, zero = weight.data, weight.scale, weight.scale if weight.zero is None else weight.zero
    device = dependent_launch(x.device)
    _quantised_kernel[(triton.cdiv(columns, plan.strip), plan.splits)](
        x, data, scale, zero, scale if weight.table is None else weight.table, x if bias is None else bias,
        target, rows, columns, depth, x.stride(0), *data.stride(), *scale.stride(), *zero.stride(), target_row,
        BIAS=bias is not None, CODE=weight.code, ZEROS=weight.zeros, OFFSET=weight.zero_offset,
        HIGH_FIRST=weight.high_first, GROUP=min(weight.group, depth), SCALE_ROWS=weight.scale_rows,
        EXPONENTS=scale.dtype == torch.uint8, WHOLE=weight.group >= depth,
        ASSEMBLY=assembly(weight, x.dtype) if device["PDL"] else "",
        GATED=activation is not None, TANH=activation == "gelu_tanh",
        ROWS=_height(rows), STRIP=plan.strip, BLOCK=BLOCK,
        num_warps=4 if plan.strip >= 64 else 2, num_stages=plan.stages, **device,
    )  # fmt: skip


def _height(rows: int) -> int:
    """Return the rows of x in a tile."""
    return power_of_two(rows, fewest_columns())


def quantised_reference(x: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:
    """Compute what `quantised_linear` does, in float32 and rounded once."""
    return functional.linear(x.float(), dequantise(weight), None if bias is None else bias.float()).to(x.dtype)


def fits(x: Tensor, weight: Packed, bias: Tensor | None, plan: Plan) -> bool:
    """Return whether the kernel can compute this product with this plan."""
    depth = weight.shape[1]
    return (
        can_run(x, bias)
        and weight.data.device == x.device
        and 0 < x.numel() <= MOST_ROWS * depth
        and depth % BLOCK == 0
        and depth // BLOCK >= plan.splits
        and x.stride(-1) == 1
        and kernel_takes(weight)
    )


def kernel_takes(weight: Packed) -> bool:
    """Return whether the kernel reads this format."""
    depth, group = weight.shape[1], weight.group
    whole_blocks = group >= depth or group % BLOCK == 0
    if weight.code in ("int8", "float8"):
        return depth % BLOCK == 0 and whole_blocks and weight.zero is None
    return depth % BLOCK == 0 and (whole_blocks or (group % WORD == 0 and BLOCK % group == 0))


@varying("rows")
def _quantised_kernel(
    x: Value,
    data: Value,
    scale: Value,
    zero: Value,
    table: Value,
    bias: Value,
    target: Value,
    rows: Value,
    columns: Value,
    depth: Value,
    x_row: Value,
    data_n: Value,
    data_k: Value,
    scale_n: Value,
    scale_k: Value,
    zero_n: Value,
    zero_k: Value,
    target_row: Value,
    BIAS: constexpr,
    CODE: constexpr,
    ZEROS: constexpr,
    OFFSET: constexpr,
    HIGH_FIRST: constexpr,
    GROUP: constexpr,
    SCALE_ROWS: constexpr,
    EXPONENTS: constexpr,
    WHOLE: constexpr,
    ASSEMBLY: constexpr,
    GATED: constexpr,
    TANH: constexpr,
    ROWS: constexpr,
    STRIP: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    BYTES: tl.constexpr = CODE == "int8" or CODE == "float8"
    LARGE: tl.constexpr = WHOLE or GROUP % BLOCK == 0  # at least a block has one scale, which is applied to the sum
    WIDTH: tl.constexpr = BLOCK if BYTES else BLOCK // 8  # elements of `data` per row and step
    HALF: tl.constexpr = STRIP // 2
    column = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    split, splits = tl.program_id(1), tl.num_programs(1)
    steps = depth // BLOCK
    begin, end = split * steps // splits, (split + 1) * steps // splits
    strip = tl.minimum(column, columns - 1)  # the last strip may exceed the edge
    if GATED:  # the gate's rows, then the up projection's for the same columns
        half = tl.arange(0, STRIP)
        strip = tl.minimum(tl.program_id(0) * HALF + half % HALF, target_row - 1) + half // HALF * target_row
    n = strip.to(tl.int64)
    row, inner, place = tl.arange(0, ROWS), tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    left = data + n[:, None] * data_n + (begin * WIDTH + place).to(tl.int64)[None, :] * data_k
    right = x + row[:, None] * x_row + (begin * BLOCK + inner)[None, :]
    scales, points = scale + n // SCALE_ROWS * scale_n, zero + n * zero_n
    if ZEROS == "words":
        points = zero + n // 8 * zero_n
    shifts = (strip % 8 * 4)[:, None]
    group = groups_of_step(begin, place, GROUP, BLOCK, WHOLE)
    factor = _scale(scales[:, None] + group[None, :] * scale_k, EXPONENTS)  # [STRIP, 1 or WIDTH]
    point = group
    if ZEROS != "none":
        point = tl.load(points[:, None] + group[None, :] * zero_k)
    if PDL:
        prefetch(data + n * data_n + (begin * WIDTH).to(tl.int64) * data_k)
    if BIAS:  # one of the partials has it
        added = tl.load(bias + strip, mask=(column >= 0) & (split == 0), other=0.0)
    wait_for_dependencies(PDL)
    result = tl.zeros((STRIP, ROWS), tl.float32)
    for step in range(begin, end):
        codes = tl.load(left)  # [STRIP, WIDTH]
        states = tl.load(right, mask=(row < rows)[:, None], other=0.0)  # [ROWS, BLOCK]
        # Scales and zero points are loaded one step ahead: a few bytes each, which cannot be copied asynchronously.
        group = groups_of_step(tl.minimum(step + 1, end - 1), place, GROUP, BLOCK, WHOLE)
        next_factor = _scale(scales[:, None] + group[None, :] * scale_k, EXPONENTS)
        next_point = point
        if ZEROS != "none":
            next_point = tl.load(points[:, None] + group[None, :] * zero_k)
        if BYTES:
            # By way of float32: the direct conversion to bfloat16 takes a slow instruction for each element.
            elements = codes.to(tl.float32).to(x.dtype.element_ty)
            part = tl.dot(elements, tl.trans(states), input_precision="ieee")
        else:
            centre = tl.full((STRIP, 1), 8, tl.int32)
            shift = tl.zeros((STRIP, 1), tl.float32)
            if ZEROS == "words":
                centre = (point >> shifts & 15) + OFFSET
                shift = (8 - centre).to(tl.float32) * factor  # a large group is centred at 8 and shifted by its sum
            elif ZEROS == "shift":
                shift = point.to(tl.float32)
            part = product_of_words(
                codes, states, centre, factor, shift, table, CODE, ZEROS, HIGH_FIRST, LARGE, ASSEMBLY,
                ROWS, STRIP, WIDTH,
            )  # fmt: skip
        if LARGE:
            result += part * factor
            if ZEROS != "none":
                result += shift * tl.sum(states.to(tl.float32), 1)[None, :]
        else:
            result += part
        factor, point = next_factor, next_point
        left += WIDTH * data_k
        right += BLOCK
    if BIAS:
        result += added.to(tl.float32)[:, None]
    if GATED:
        both = tl.reshape(result.to(target.dtype.element_ty), (2, HALF, ROWS))
        gate, up = tl.split(tl.permute(both, (1, 2, 0)))
        place = (tl.program_id(0) * HALF + tl.arange(0, HALF))[:, None]
        there = (row < rows)[None, :] & (place < target_row)
        tl.store(target + row[None, :].to(tl.int64) * target_row + place, apply_gate(gate, up, TANH), mask=there)
    else:
        address = (split * rows + row)[None, :].to(tl.int64) * target_row + column[:, None]
        inside = (row < rows)[None, :] & (column < columns)[:, None]
        tl.store(target + address, result.to(target.dtype.element_ty), mask=inside)


@jit
def groups_of_step(step: Value, place: Value, GROUP: constexpr, BLOCK: constexpr, WHOLE: constexpr) -> Value:
    """Return the groups of a step: [1] for all of it, or [WIDTH] for each word."""
    if WHOLE:
        return tl.zeros((1,), tl.int32)
    elif GROUP % BLOCK == 0:
        return tl.zeros((1,), tl.int32) + step * BLOCK // GROUP
    else:
        return (step * BLOCK + place * 8) // GROUP


@jit
def _scale(pointers: Value, EXPONENTS: constexpr) -> Value:
    """Load scales in float32."""
    value = tl.load(pointers)
    if EXPONENTS:
        return tl.exp2(value.to(tl.float32) - 127.0)
    else:
        return value.to(tl.float32)
