"""RMSNorm, with the residual addition before it, in one kernel; and LayerNorm without a bias.

total = x + residual
out = total / sqrt(mean(total^2) + eps) * weight

LayerNorm subtracts mean(total) from total first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .backend import (
    Value,
    can_run,
    constexpr,
    dependent_launch,
    launch_dependents,
    power_of_two,
    tl,
    varying,
    wait_for_dependencies,
)
from .linear import MOST_ROWS, Partials, as_partials, sum_partials


class NormForm(NamedTuple):
    """A variant of the norm. Variants differ in rounding, in the meaning of a zero weight and in the mean."""

    offset: float = 0.0  # Gemma scales by 1 + weight
    wide: bool = False  # multiplies by the weight in float32 and rounds once; otherwise rounds before and after it
    centred: bool = False  # subtracts the mean: LayerNorm


PLAIN, WIDE, GEMMA = NormForm(), NormForm(wide=True), NormForm(offset=1.0, wide=True)
LAYER_NORM = NormForm(wide=True, centred=True)
FORMS = (PLAIN, GEMMA, WIDE, LAYER_NORM)


def rms_norm(
    x: Tensor | Partials, weight: Tensor, eps: float, residual: Tensor | None = None, form: NormForm = PLAIN
) -> tuple[Tensor, Tensor]:
    """Add the residual, if any, and normalise over the last dimension.

    Args:
        x: [..., N], or split-K partials of it.
        weight: [N].
        eps: added to the mean square.
        residual: [..., N], added to `x` first.
        form: the variant.

    Returns:
        The normalised tensor, and the sum it was computed from (`x` itself where there is no residual).

    Example:
        >>> x, weight = torch.randn(2, 8), torch.ones(8)
        >>> out, total = rms_norm(x, weight, 1e-6, residual=torch.randn(2, 8))
    """
    if isinstance(x, Partials) and not (residual is not None and x.dtype == weight.dtype == residual.dtype):
        x = x.sum()
    if not isinstance(x, Partials) and not can_run(x, weight, residual):
        return rms_norm_reference(x, weight, eps, residual, form)
    terms, splits = as_partials(x)
    columns = x.shape[-1]
    rows = x.shape.numel() // columns
    out = weight.new_empty(x.shape)
    if residual is None:
        total = residual = terms
    else:
        residual, total = residual.contiguous(), torch.empty_like(out)
    block = power_of_two(columns)
    share = 128 if rows <= MOST_ROWS else 512  # elements per warp: few rows need latency, many fill the GPU anyway
    _norm_kernel[(rows,)](
        terms, residual, weight, out, total, rows * columns, columns, eps,
        SPLITS=splits, ADD=total is not terms, OFFSET=form.offset, WIDE=form.wide, CENTRED=form.centred,
        BLOCK=block,
        num_warps=min(32, max(1, block // share)), **dependent_launch(out.device),
    )  # fmt: skip
    return out, total


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, form: NormForm = PLAIN
) -> tuple[Tensor, Tensor]:
    """Compute what `rms_norm` does, in plain torch."""
    total = x if residual is None else residual + x
    wide = total.float()
    if form.centred:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if form.wide:
        return (wide * (form.offset + weight.float())).to(total.dtype), total
    return weight * wide.to(total.dtype), total


@varying("partial_stride")
def _norm_kernel(
    x: Value,
    residual: Value,
    weight: Value,
    out: Value,
    total: Value,
    partial_stride: Value,
    columns: Value,
    eps: Value,
    SPLITS: constexpr,
    ADD: constexpr,
    OFFSET: constexpr,
    WIDE: constexpr,
    CENTRED: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    place = tl.program_id(0).to(tl.int64) * columns + column
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_dependencies(PDL)
    value = sum_partials(x + place, partial_stride, inside, out.dtype.element_ty, SPLITS)
    if ADD:
        before = tl.load(residual + place, mask=inside, other=0.0)
        value = (value.to(tl.float32) + before.to(tl.float32)).to(value.dtype)
        tl.store(total + place, value, mask=inside)
    wide = value.to(tl.float32)
    if CENTRED:
        wide = tl.where(inside, wide - tl.sum(wide, 0) / columns, 0.0)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / columns + eps)
    if WIDE:
        result = wide * (scale + OFFSET)
    else:
        result = wide.to(value.dtype).to(tl.float32) * scale
    tl.store(out + place, result.to(value.dtype), mask=inside)
