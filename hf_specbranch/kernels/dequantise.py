"""Dequantises a packed weight in one launch, for products over many tokens.

Products over few tokens unpack the elements in registers (`quantised.py`, `gemv.py`). With many tokens the product is
bound by arithmetic, which the library does best, and the weight is dequantised once for all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .backend import (
    FLOATS,
    Value,
    constexpr,
    converts_float8,
    dependent_launch,
    launch_dependents,
    serves,
    tl,
    triton,
    varying,
    wait_for_dependencies,
)
from .gemv_words import scale_value
from .linear import BLOCK
from .packed import Packed, dequantise
from .quantised import groups_of_step, kernel_takes

STRIP = 64  # rows of W per program


def dequantised(weight: Packed, dtype: torch.dtype) -> Tensor:
    """Return a weight [N, K] in a dtype: what `dequantise` returns, rounded once.

    Example:
        >>> words = torch.full((1, 16), 0x76543210, dtype=torch.int32)
        >>> dequantised(Packed(words, torch.tensor([[0.5]]), "offset", group=128), torch.bfloat16)[0, :4].tolist()
        [-4.0, -3.5, -3.0, -2.5]
    """
    return _by_kernel(weight, dtype) if fits(weight, dtype) else dequantise(weight).to(dtype)


def product_of_many_rows(x: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:
    """Compute x W^T + bias [..., N], with W dequantised to the dtype of x.

    The weight is freed when the product has been launched. So the next layer gets the same memory, also in a captured
    graph: memory for one weight is enough for a pass.
    """
    return functional.linear(x, dequantised(weight, x.dtype), bias)


def fits(weight: Packed, dtype: torch.dtype) -> bool:
    """Return whether the kernel dequantises such a weight where it is."""
    plain = all(type(part) in (Tensor, nn.Parameter) for part in (weight.data, weight.scale))
    return (
        plain
        and serves(weight.data.device)
        and dtype in FLOATS
        and kernel_takes(weight)
        and (weight.code != "float8" or converts_float8(weight.data.device))
    )


def _by_kernel(weight: Packed, dtype: torch.dtype) -> Tensor:
    (rows, depth), data, scale = weight.shape, weight.data, weight.scale
    zero = scale if weight.zero is None else weight.zero
    target = torch.empty((rows, depth), dtype=dtype, device=data.device)
    steps = depth // BLOCK
    _dequantise_kernel[(triton.cdiv(rows, STRIP) * steps,)](
        data, scale, zero, scale if weight.table is None else weight.table, target,
        rows, steps, *data.stride(), *scale.stride(), *zero.stride(),
        CODE=weight.code, ZEROS=weight.zeros, OFFSET=weight.zero_offset, HIGH_FIRST=weight.high_first,
        GROUP=min(weight.group, depth), SCALE_ROWS=weight.scale_rows, EXPONENTS=scale.dtype == torch.uint8,
        WHOLE=weight.group >= depth, STRIP=STRIP, BLOCK=BLOCK, num_warps=4,
        enable_fp_fusion=False,  # a product and a sum are rounded one after the other, as by the reference
        **dependent_launch(data.device),
    )  # fmt: skip
    return target


@varying("rows")
def _dequantise_kernel(
    data: Value,
    scale: Value,
    zero: Value,
    table: Value,
    target: Value,
    rows: Value,
    steps: Value,
    data_n: Value,
    data_k: Value,
    scale_n: Value,
    scale_k: Value,
    zero_n: Value,
    zero_k: Value,
    CODE: constexpr,
    ZEROS: constexpr,
    OFFSET: constexpr,
    HIGH_FIRST: constexpr,
    GROUP: constexpr,
    SCALE_ROWS: constexpr,
    EXPONENTS: constexpr,
    WHOLE: constexpr,
    STRIP: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    BYTES: tl.constexpr = CODE == "int8" or CODE == "float8"
    WIDTH: tl.constexpr = BLOCK if BYTES else BLOCK // 8  # elements of `data` per row
    step = tl.program_id(0) % steps
    row = tl.program_id(0) // steps * STRIP + tl.arange(0, STRIP)
    n = tl.minimum(row, rows - 1).to(tl.int64)  # the last strip may exceed the edge
    place = tl.arange(0, WIDTH)
    codes = tl.load(data + n[:, None] * data_n + (step * WIDTH + place).to(tl.int64)[None, :] * data_k)
    group = groups_of_step(step, place, GROUP, BLOCK, WHOLE)
    factors = tl.load(scale + (n // SCALE_ROWS)[:, None] * scale_n + group[None, :] * scale_k)
    factor = scale_value(factors, EXPONENTS)
    if BYTES:
        value = codes.to(tl.float32) * factor
    else:
        shift = tl.arange(0, 8) * 4
        if HIGH_FIRST:
            shift = shift ^ 4
        code = codes[:, :, None] >> shift[None, None, :] & 15  # [STRIP, WIDTH, 8]
        if CODE == "table":
            value = tl.load(table + code)
        elif CODE == "signed":
            value = ((code ^ 8) - 8).to(tl.float32)
        elif ZEROS == "words":
            points = tl.load(zero + (n // 8)[:, None] * zero_n + group[None, :] * zero_k)
            centre = (points >> (n % 8 * 4).to(tl.int32)[:, None] & 15) + OFFSET
            value = (code - centre[:, :, None]).to(tl.float32)
        else:
            value = (code - 8).to(tl.float32)
        value = value * factor[:, :, None]
        if ZEROS == "shift":
            added = tl.load(zero + n[:, None] * zero_n + group[None, :] * zero_k).to(tl.float32)
            value = value + added[:, :, None]
        value = tl.reshape(value, (STRIP, BLOCK))
    # Weights are constant, but the memory of the target may still be read by the product before.
    wait_for_dependencies(PDL)
    columns = step * BLOCK + tl.arange(0, BLOCK)
    address = row.to(tl.int64)[:, None] * (steps * BLOCK) + columns[None, :]
    tl.store(target + address, value.to(target.dtype.element_ty), mask=(row < rows)[:, None])
