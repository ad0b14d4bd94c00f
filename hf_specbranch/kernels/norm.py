"""RMSNorm and LayerNorm in one kernel with the sums of a decoder layer before them.

    total = residual + scale * first(x) + also
    out = norm(total)

where everything but x is optional. RMSNorm is x / sqrt(mean(x^2) + eps) * weight. LayerNorm subtracts mean(x) from x
first, and may add a bias.
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
    jit,
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


class Norm(NamedTuple):
    """The parameters of a norm over the last dimension."""

    weight: Tensor  # [N]
    eps: float
    form: NormForm = PLAIN
    bias: Tensor | None = None  # [N]


def rms_norm(
    x: Tensor | Partials,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    form: NormForm = PLAIN,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add the residual, if any, and normalise over the last dimension.

    Args:
        x: [..., N], or split-K partials of it.
        weight: [N].
        eps: added to the mean square.
        residual: [..., N], added to `x` first.
        form: the variant.
        bias: [N], added at the end.

    Returns:
        The normalised tensor, and the sum it was computed from (`x` itself where there is no residual).

    Example:
        >>> x, weight = torch.randn(2, 8), torch.ones(8)
        >>> out, total = rms_norm(x, weight, 1e-6, residual=torch.randn(2, 8))
    """
    out, total = add_norm(x, residual, Norm(weight, eps, form, bias))
    assert out is not None
    return out, total


def rms_norm_reference(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    form: NormForm = PLAIN,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute what `rms_norm` does, in plain torch."""
    total = x if residual is None else residual + x
    return norm_reference(total, Norm(weight, eps, form, bias)), total


def add_norm(
    x: Tensor | Partials,
    residual: Tensor | None,
    norm: Norm | None,
    first: Norm | None = None,
    also: Tensor | Partials | None = None,
    scale: float = 1.0,
) -> tuple[Tensor | None, Tensor]:
    """Compute total = residual + scale * first(x) + also, and norm(total).

    Args:
        x: [..., N], or split-K partials of it: what attention or the MLP returned.
        residual: [..., N]; None: `x` alone is the total, and there is nothing else to add.
        norm: of the total; None: only the total is computed.
        first: a norm of `x` alone, of the same form as `norm`.
        also: as `x`, added unchanged: a parallel block adds attention and MLP at once.
        scale: factor of `x`.

    Returns:
        The normalised total, if asked for, and the total.

    Example:
        >>> x, weight = torch.randn(2, 8), torch.ones(8)
        >>> _, total = add_norm(x, torch.randn(2, 8), None, first=Norm(weight, 1e-6))
    """
    if not _fits(x, residual, norm, first, also):
        whole, more = (each.sum() if isinstance(each, Partials) else each for each in (x, also))
        assert whole is not None
        if not _fits(whole, residual, norm, first, more):
            return add_norm_reference(whole, residual, norm, first, more, scale)
        x, also = whole, more
    terms, splits = as_partials(x)
    more_terms, more_splits = (terms, 0) if also is None else as_partials(also)
    columns = x.shape[-1]
    rows = x.shape.numel() // columns
    if residual is None:
        assert norm is not None and first is None and also is None and scale == 1.0
        total = residual = terms
    else:
        residual, total = residual.contiguous(), residual.new_empty(x.shape)
    out = total if norm is None else total.new_empty(x.shape)
    outer, inner = norm or first or Norm(total, 0.0), first or norm or Norm(total, 0.0)
    form = outer.form
    block = power_of_two(columns)
    share = 128 if rows <= MOST_ROWS else 512  # elements per warp: few rows need latency, many fill the GPU anyway
    _norm_kernel[(rows,)](
        terms, more_terms, residual, outer.weight, _or(outer.bias, outer.weight), inner.weight,
        _or(inner.bias, inner.weight), out, total, rows, columns, outer.eps, inner.eps, scale,
        SPLITS=splits, MORE=more_splits, ADD=total is not terms, SCALED=scale != 1.0,
        NORM=norm is not None, BIAS=outer.bias is not None, FIRST=first is not None, FIRST_BIAS=inner.bias is not None,
        OFFSET=form.offset, WIDE=form.wide, CENTRED=form.centred, BLOCK=block,
        num_warps=min(32, max(1, block // share)), **dependent_launch(out.device),
    )  # fmt: skip
    return None if norm is None else out, total


def normalise(x: Tensor, norm: Norm) -> Tensor:
    """Return norm(x)."""
    normed, _ = add_norm(x, None, norm)
    assert normed is not None
    return normed


def add_norm_reference(
    x: Tensor,
    residual: Tensor | None,
    norm: Norm | None,
    first: Norm | None = None,
    also: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor | None, Tensor]:
    """Compute what `add_norm` does, in plain torch."""
    total = x if first is None else norm_reference(x, first)
    if scale != 1.0:
        total = total * scale
    if residual is not None and also is not None:  # rounded once
        total = (residual.float() + total.float() + also.float()).to(residual.dtype)
    elif residual is not None:
        total = residual + total
    return None if norm is None else norm_reference(total, norm), total


def norm_reference(x: Tensor, norm: Norm) -> Tensor:
    """Normalise over the last dimension, in plain torch."""
    weight, eps, form, bias = norm
    wide = x.float()
    if form.centred:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if form.wide:
        wide = wide * (form.offset + weight.float())
        return (wide if bias is None else wide + bias.float()).to(x.dtype)
    out = weight * wide.to(x.dtype)
    return out if bias is None else out + bias


def _or(given: Tensor | None, otherwise: Tensor) -> Tensor:
    return otherwise if given is None else given


def _fits(
    x: Tensor | Partials, residual: Tensor | None, norm: Norm | None, first: Norm | None, also: Tensor | Partials | None
) -> bool:
    partials = [each for each in (x, also) if isinstance(each, Partials)]
    parameters = [each for one in (norm, first) if one is not None for each in (one.weight, one.bias)]
    used = [each for each in (residual, x, also, *parameters) if isinstance(each, Tensor)]
    if partials and residual is None:
        return False
    forms = {one.form for one in (norm, first) if one is not None}
    narrow = [one for one in (norm, first) if one is not None and one.bias is not None and not one.form.wide]
    return len(forms) <= 1 and not narrow and can_run(*used) and all(each.dtype == used[0].dtype for each in partials)


@varying("rows")
def _norm_kernel(
    x: Value,
    also: Value,
    residual: Value,
    weight: Value,
    bias: Value,
    first_weight: Value,
    first_bias: Value,
    out: Value,
    total: Value,
    rows: Value,
    columns: Value,
    eps: Value,
    first_eps: Value,
    factor: Value,
    SPLITS: constexpr,
    MORE: constexpr,
    ADD: constexpr,
    SCALED: constexpr,
    NORM: constexpr,
    BIAS: constexpr,
    FIRST: constexpr,
    FIRST_BIAS: constexpr,
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
    dtype = out.dtype.element_ty
    partial_stride = rows * columns  # so the compiler knows that it is as aligned as the columns are
    if NORM:
        scale, shift = _parameters(weight, bias, column, inside, BIAS)
    if FIRST:
        first_scale, first_shift = _parameters(first_weight, first_bias, column, inside, FIRST_BIAS)
    wait_for_dependencies(PDL)
    value = sum_partials(x + place, partial_stride, inside, dtype, SPLITS)
    if FIRST:
        value = normalised(
            value, first_scale, first_shift, inside, columns, first_eps, FIRST_BIAS, OFFSET, WIDE, CENTRED
        )
    if SCALED:
        value = (value.to(tl.float32) * factor).to(dtype)
    if ADD:
        wide = value.to(tl.float32) + tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        if MORE > 0:
            wide += sum_partials(also + place, partial_stride, inside, dtype, MORE).to(tl.float32)
        value = wide.to(dtype)
        tl.store(total + place, value, mask=inside)
    if NORM:
        result = normalised(value, scale, shift, inside, columns, eps, BIAS, OFFSET, WIDE, CENTRED)
        tl.store(out + place, result, mask=inside)


@jit
def _parameters(weight: Value, bias: Value, column: Value, inside: Value, BIAS: constexpr) -> Value:
    """Load the weights and biases of a norm in float32; without biases, the weights take their place."""
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    shift = scale
    if BIAS:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return scale, shift


@jit
def normalised(
    value: Value,
    scale: Value,
    shift: Value,
    inside: Value,
    columns: Value,
    eps: Value,
    BIAS: constexpr,
    OFFSET: constexpr,
    WIDE: constexpr,
    CENTRED: constexpr,
) -> Value:
    """Normalise the values of one row; `scale` and `shift` are the weights and the biases in float32."""
    wide = value.to(tl.float32)
    if CENTRED:
        wide = tl.where(inside, wide - tl.sum(wide, 0) / columns, 0.0)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / columns + eps)
    if WIDE:
        result = wide * (scale + OFFSET)
        if BIAS:
            result += shift
    else:
        result = wide.to(value.dtype).to(tl.float32) * scale
    return result.to(value.dtype)
