"""y = x W^T + scale * (x A^T) B^T for a few rows of x: low-rank adapters in the epilogue of the product.

One small kernel computes x A^T for all layers that read x, with a split inner dimension. The product kernel loads its
rows of B before it multiplies x by W. Then it sums the partials of x A^T and adds their product with B.

Both run at the same time. The small kernel lets the next one start when x is complete, and the product kernel waits for
the small one only after it has multiplied x by W.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .backend import (
    FLOATS,
    Value,
    can_run,
    constexpr,
    dependent_launch,
    launch_dependents,
    tl,
    triton,
    varying,
    wait_for_dependencies,
)
from .gated import Activation, apply_gate, gated_reference
from .linear import STRIP, Partials, Plan, fits, streamed, tile
from .low_rank import (
    MOST_TERMS,
    LowRank,
    add_terms,
    epilogue_arguments,
    epilogue_constants,
    inner_product,
    load_terms,
)

MOST_RANK = 64
USUAL_PLAN = Plan(1, 4)  # where torch's product without adapters is faster than every plan


def lora_fits(x: Tensor, weight: Tensor, bias: Tensor | None, terms: LowRank, plan: Plan) -> bool:
    """Return whether the kernels can compute this product: one rank and one dtype of all adapters."""
    adapters = (*terms.downs, *terms.ups)
    return (
        fits(x, weight, bias, plan)
        and 0 < len(terms.downs) <= MOST_TERMS
        and can_run(*adapters)
        and adapters[0].device == x.device
        and adapters[0].dtype in FLOATS
        and all(adapter.is_contiguous() for adapter in adapters)
        and len({down.shape for down in terms.downs}) == 1
        and terms.downs[0].shape[0] <= MOST_RANK
    )


def lora_product(x: Tensor, weight: Tensor, bias: Tensor | None, terms: LowRank, plan: Plan) -> Tensor | Partials:
    """Compute x W^T + bias plus the low-rank terms; see `linear_split_k`.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N] or None.
        terms: the adapters of layers whose weights are rows of W.
        plan: one for which `lora_fits`.

    Returns:
        [..., N], or partials where the plan splits the inner dimension.
    """
    flat, columns = x.reshape(-1, x.shape[-1]), weight.shape[0]
    rows, depth = flat.shape
    inner = inner_product(flat, terms)
    shape = torch.Size((*x.shape[:-1], columns))
    target = flat.new_empty((plan.splits, rows, columns), dtype=x.dtype if plan.splits == 1 else torch.float32)
    _lora_product_kernel[(triton.cdiv(columns, STRIP), plan.splits)](
        flat, weight, weight if bias is None else bias, target, inner, *epilogue_arguments(terms), rows, columns, depth,
        flat.stride(0), weight.stride(0), terms.downs[0].shape[0], BIAS=bias is not None,
        **epilogue_constants(inner, terms), **tile(rows), num_warps=4, num_stages=plan.stages,
        **dependent_launch(x.device),
    )  # fmt: skip
    return target.view(shape) if plan.splits == 1 else Partials(target, shape, x.dtype)


def lora_gated_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, terms: LowRank, plan: Plan, activation: Activation
) -> Tensor:
    """Compute act(gate) * up with the low-rank terms of both; see `gated_product`."""
    flat, size = x.reshape(-1, x.shape[-1]), weight.shape[0] // 2
    rows, depth = flat.shape
    inner, out = inner_product(flat, terms), flat.new_empty((rows, size))
    _lora_gated_kernel[(triton.cdiv(size, STRIP // 2),)](
        flat, weight, weight if bias is None else bias, out, inner, *epilogue_arguments(terms), rows, size, depth,
        flat.stride(0), weight.stride(0), terms.downs[0].shape[0], BIAS=bias is not None,
        TANH=activation == "gelu_tanh", **epilogue_constants(inner, terms), **tile(rows), num_warps=4,
        num_stages=plan.stages, **dependent_launch(x.device),
    )  # fmt: skip
    return out.view(*x.shape[:-1], size)


def lora_reference(x: Tensor, weight: Tensor, bias: Tensor | None, terms: LowRank) -> Tensor:
    """Compute what `lora_product` does, in float32 and rounded once."""
    wide = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    for down, up, scale, start in zip(*terms):
        wide[..., start : start + len(up)] += x.float() @ down.float().T @ up.float().T * scale
    return wide.to(x.dtype)


def lora_gated_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, terms: LowRank, activation: Activation
) -> Tensor:
    """Compute what `lora_gated_product` does, in plain torch."""
    return gated_reference(lora_reference(x, weight, bias, terms), activation)


@varying("rows")
def _lora_product_kernel(
    x: Value,
    weight: Value,
    bias: Value,
    target: Value,
    inner: Value,
    up_0: Value,
    scale_0: Value,
    start_0: Value,
    end_0: Value,
    up_1: Value,
    scale_1: Value,
    start_1: Value,
    end_1: Value,
    up_2: Value,
    scale_2: Value,
    start_2: Value,
    end_2: Value,
    rows: Value,
    columns: Value,
    depth: Value,
    x_row: Value,
    weight_row: Value,
    rank: Value,
    BIAS: constexpr,
    TERMS: constexpr,
    GROUP: constexpr,
    PARTIALS: constexpr,
    POWER: constexpr,
    RANK: constexpr,
    ONE_ROW: constexpr,
    ROWS: constexpr,
    STRIP: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    column = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    split, splits = tl.program_id(1), tl.num_programs(1)
    steps = depth // BLOCK
    begin, end = split * steps // splits, (split + 1) * steps // splits
    strip = tl.minimum(column, columns - 1)  # the last strip may exceed the edge
    if BIAS:
        added = tl.load(bias + strip, mask=(column >= 0) & (split == 0), other=0.0)
    ours = tl.where(split == 0, strip, -1)  # one of the partials has the terms
    weights = load_terms(
        up_0, scale_0, start_0, end_0, up_1, scale_1, start_1, end_1, up_2, scale_2, start_2, end_2, ours, rank,
        0, TERMS, GROUP, RANK, STRIP,
    )  # fmt: skip
    result = streamed(x, weight, strip, begin, end, rows, x_row, weight_row, ROWS, STRIP, BLOCK, PDL=False)
    wait_for_dependencies(PDL)
    if split == 0:
        result = add_terms(
            result, weights, inner, up_0, scale_0, start_0, end_0, up_1, scale_1, start_1, end_1, up_2, scale_2,
            start_2, end_2, ours, rows, rank, TERMS, GROUP, PARTIALS, POWER, RANK, ROWS, STRIP, ONE_ROW,
        )  # fmt: skip
    if BIAS:
        result += added.to(tl.float32)[:, None]
    row = tl.arange(0, ROWS)
    place = (split * rows + row)[None, :].to(tl.int64) * columns + column[:, None]
    inside = (row < rows)[None, :] & (column < columns)[:, None]
    tl.store(target + place, result.to(target.dtype.element_ty), mask=inside)


@varying("rows")
def _lora_gated_kernel(
    x: Value,
    weight: Value,
    bias: Value,
    out: Value,
    inner: Value,
    up_0: Value,
    scale_0: Value,
    start_0: Value,
    end_0: Value,
    up_1: Value,
    scale_1: Value,
    start_1: Value,
    end_1: Value,
    up_2: Value,
    scale_2: Value,
    start_2: Value,
    end_2: Value,
    rows: Value,
    size: Value,
    depth: Value,
    x_row: Value,
    weight_row: Value,
    rank: Value,
    BIAS: constexpr,
    TANH: constexpr,
    TERMS: constexpr,
    GROUP: constexpr,
    PARTIALS: constexpr,
    POWER: constexpr,
    RANK: constexpr,
    ONE_ROW: constexpr,
    ROWS: constexpr,
    STRIP: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    HALF: tl.constexpr = STRIP // 2
    place = tl.arange(0, STRIP)
    column = tl.minimum(tl.program_id(0) * HALF + place % HALF, size - 1)  # the last strip may exceed the edge
    strip = column + place // HALF * size  # the gate's rows, then the up projection's for the same columns
    if BIAS:
        added = tl.load(bias + strip)
    weights = load_terms(
        up_0, scale_0, start_0, end_0, up_1, scale_1, start_1, end_1, up_2, scale_2, start_2, end_2, strip, rank,
        0, TERMS, GROUP, RANK, STRIP,
    )  # fmt: skip
    result = streamed(x, weight, strip, 0, depth // BLOCK, rows, x_row, weight_row, ROWS, STRIP, BLOCK, PDL=False)
    wait_for_dependencies(PDL)
    result = add_terms(
        result, weights, inner, up_0, scale_0, start_0, end_0, up_1, scale_1, start_1, end_1, up_2, scale_2, start_2,
        end_2, strip, rows, rank, TERMS, GROUP, PARTIALS, POWER, RANK, ROWS, STRIP, ONE_ROW,
    )  # fmt: skip
    if BIAS:
        result += added.to(tl.float32)[:, None]
    both = result.to(out.dtype.element_ty)
    gate, up = tl.split(tl.permute(tl.reshape(both, (2, HALF, ROWS)), (1, 2, 0)))
    row = tl.arange(0, ROWS)[None, :]
    column = (tl.program_id(0) * HALF + tl.arange(0, HALF))[:, None]
    tl.store(out + row.to(tl.int64) * size + column, apply_gate(gate, up, TANH), mask=(row < rows) & (column < size))
