"""Norms of all queries and of all keys of a token, over their whole width, before they are split into heads.

One kernel takes the product that holds q, k and v (or its split-K partials), normalises q and k, and copies v.
"""

from __future__ import annotations

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
from .linear import Partials, as_partials, sum_partials
from .norm import Norm, norm_reference, normalised


def norm_widths(product: Tensor | Partials, query: Norm, key: Norm) -> Tensor:
    """Normalise the queries and the keys in a product.

    Args:
        product: [..., Nq + 2 * Nk], q before k before v; or split-K partials of it.
        query: of the first Nq columns.
        key: of the Nk columns after them; of the same form, without a bias.

    Returns:
        A tensor like the product.

    Example:
        >>> product = torch.randn(3, 8)
        >>> norm_widths(product, Norm(torch.ones(4), 1e-6), Norm(torch.ones(2), 1e-6)).shape
        torch.Size([3, 8])
    """
    whole = [] if isinstance(product, Partials) else [product]
    fits = query.form == key.form and query.bias is None and key.bias is None and query.eps == key.eps
    if not fits or query.weight.dtype != product.dtype or not can_run(query.weight, key.weight, *whole):
        return norm_widths_reference(product.sum() if isinstance(product, Partials) else product, query, key)
    terms, splits = as_partials(product)
    columns, (width, key_width) = product.shape[-1], (len(query.weight), len(key.weight))
    rows = product.shape.numel() // columns
    out = query.weight.new_empty(product.shape)
    block = power_of_two(max(width, key_width))
    _width_kernel[(rows, 3)](
        terms, query.weight, key.weight, out, rows * columns, columns, width, key_width, query.eps,
        SPLITS=splits, OFFSET=query.form.offset, WIDE=query.form.wide, CENTRED=query.form.centred, BLOCK=block,
        num_warps=min(32, max(1, block // 128)), **dependent_launch(out.device),
    )  # fmt: skip
    return out


def norm_widths_reference(product: Tensor, query: Norm, key: Norm) -> Tensor:
    """Compute what `norm_widths` does, in plain torch."""
    width, key_width = len(query.weight), len(key.weight)
    first, second, third = torch.tensor_split(product, (width, width + key_width), dim=-1)
    return torch.cat((norm_reference(first, query), norm_reference(second, key), third), dim=-1)


@varying("partial_stride")
def _width_kernel(
    x: Value,
    query_weight: Value,
    key_weight: Value,
    out: Value,
    partial_stride: Value,
    columns: Value,
    width: Value,
    key_width: Value,
    eps: Value,
    SPLITS: constexpr,
    OFFSET: constexpr,
    WIDE: constexpr,
    CENTRED: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    # One program per row and part: q, k, v.
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    if part == 0:
        start, size = width * 0, width
        weight = query_weight + column
    elif part == 1:
        start, size = width, key_width
        weight = key_weight + column
    else:
        start, size = width + key_width, columns - width - key_width
        weight = key_weight + column
    inside = column < size
    place = row * columns + start + column
    scale = tl.load(weight, mask=inside & (part < 2), other=0.0).to(tl.float32)
    wait_for_dependencies(PDL)
    value = sum_partials(x + place, partial_stride, inside, out.dtype.element_ty, SPLITS)
    if part < 2:
        value = normalised(value, scale, scale, inside, size, eps, False, OFFSET, WIDE, CENTRED)
    tl.store(out + place, value, mask=inside)
