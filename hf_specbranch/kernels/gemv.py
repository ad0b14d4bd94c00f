"""y = x W^T for one to four rows of x, without tensor cores (GEMV): a product bound by reading W once.

Each program reads a few rows of W straight into registers: no shared memory, no pipeline to fill, and no partials for
the next kernel to sum. The elements of W may be quantised; `gemv_words.py` unpacks them.

Where a product stands in a decoder layer, the same kernel does what is before and after it:

    y = residual + scale * act(norm(x) W^T + bias)        or        act(x W_gate^T) * (x W_up^T)

where everything but x and W is optional, and adapters may add low-rank terms to W. Values are rounded where separate
torch operations round.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .activation import MlpActivation, activate, code_of
from .backend import can_run, dependent_launch, power_of_two, triton
from .gated import Activation, gated_reference
from .gemv_kernel import gemv_kernel
from .gemv_words import BYTES_PER_LOAD, format_of
from .linear import Plan
from .low_rank import LowRank, add_terms_reference, epilogue_arguments, inner_rows
from .norm import Norm, add_norm_reference, norm_reference
from .packed import Packed, dequantise

IN_USE = False  # by default: not timed on a GPU yet
MOST_ROWS = 4
LANES = 32
# Few rows of W per program fill the GPU with small weights; many share the loads of x.
GEMV_PLANS = tuple(Plan(1, 1, strip, warps) for strip, warps in ((4, 4), (8, 4), (8, 2), (16, 4)))


class Around(NamedTuple):
    """What is computed with a product, before it and after it."""

    norm: Norm | None = None  # of x: RMSNorm
    activation: MlpActivation | None = None
    gate: Activation | None = None  # W holds the rows of gate and up
    residual: Tensor | None = None  # [..., N], added to the product
    scale: float = 1.0  # of the product
    terms: LowRank | None = None  # adapters


PLAIN_PRODUCT = Around()


def gemv(x: Tensor, weight: Tensor | Packed, bias: Tensor | None, plan: Plan, around: Around = PLAIN_PRODUCT) -> Tensor:
    """Compute a product, by the kernel if it `fits`.

    Args:
        x: [..., K], at most `MOST_ROWS` rows.
        weight: [N, K].
        bias: [N] or None.
        plan: one of `GEMV_PLANS`.
        around: what else to compute.

    Returns:
        [..., N], or [..., N / 2] with a gate.
    """
    if not fits(x, weight, bias, plan, around):
        return gemv_reference(x, weight, bias, around)
    flat, form = x.reshape(-1, x.shape[-1]), format_of(weight)
    (rows, depth), columns = flat.shape, weight.shape[0] // (1 if around.gate is None else 2)
    out = flat.new_empty((rows, columns))
    data, scale, zero = (weight.data, weight.scale, weight.zero) if isinstance(weight, Packed) else (weight, None, None)
    if form.CODE != "plain" and data.dtype != torch.int32:
        data = data.view(torch.int32)
    scale = data if scale is None else scale
    zero = scale if zero is None else zero
    norm, residual = around.norm, out if around.residual is None else around.residual.reshape(rows, columns)
    terms = around.terms or LowRank((flat,), (flat,), (0.0,), (0,))
    low = flat if around.terms is None else inner_rows(flat, around.terms)
    block = form.per_load * LANES * plan.warps
    gemv_kernel[(triton.cdiv(columns, plan.strip if around.gate is None else plan.strip // 2),)](
        flat, data, scale, zero, data if bias is None else bias, flat if norm is None else norm.weight, residual, out,
        rows, columns, depth, flat.stride(0), data.shape[1], data.stride(0), *scale.stride(), *zero.stride(),
        residual.stride(0), 0.0 if norm is None else norm.eps, around.scale, low, *epilogue_arguments(terms),
        terms.downs[0].shape[0],
        NORM=norm is not None, OFFSET=0.0 if norm is None else norm.form.offset,
        WIDE=norm is not None and norm.form.wide, BIAS=bias is not None, ACTIVATION=code_of(around.activation),
        GATED=around.gate is not None, TANH=around.gate == "gelu_tanh", SCALED=around.scale != 1.0,
        RESIDUAL=around.residual is not None, TERMS=0 if around.terms is None else len(terms.downs),
        RANK=power_of_two(terms.downs[0].shape[0], 16), **form._asdict(), ROWS=rows if rows < 3 else 4,
        STRIP=plan.strip, PER_LOAD=form.per_load, BLOCK=block, EVEN=depth % block == 0, num_warps=plan.warps,
        **dependent_launch(x.device),
    )  # fmt: skip
    return out.view(*x.shape[:-1], columns)


def gemv_reference(x: Tensor, weight: Tensor | Packed, bias: Tensor | None, around: Around = PLAIN_PRODUCT) -> Tensor:
    """Compute what `gemv` does, in plain torch."""
    normed = x if around.norm is None else norm_reference(x, around.norm)
    dense = dequantise(weight).to(x.dtype) if isinstance(weight, Packed) else weight
    product = functional.linear(normed, dense, bias)
    if around.terms is not None:
        product = add_terms_reference(product, normed, around.terms)
    if around.gate is not None:
        product = gated_reference(product, around.gate)
    if around.activation is not None:
        product = activate(product, around.activation)
    _, total = add_norm_reference(product, around.residual, None, scale=around.scale)
    return total


def fits(x: Tensor, weight: Tensor | Packed, bias: Tensor | None, plan: Plan, around: Around = PLAIN_PRODUCT) -> bool:
    """Return whether the kernel can compute this product with this plan."""
    data = weight.data if isinstance(weight, Packed) else weight
    used = [x, bias, around.residual, *([] if isinstance(weight, Packed) else [weight])]
    if around.norm is not None:
        used.append(around.norm.weight)
    return (
        (around.norm is None or (normalises(around.norm) and around.terms is None))
        and plan.warps > 0
        and can_run(*used)
        and data.device == x.device
        and 0 < x.numel() <= MOST_ROWS * x.shape[-1]
        and x.stride(-1) == 1
        and kernel_takes(weight)
    )


def normalises(norm: Norm) -> bool:
    """Return whether the kernel computes such a norm of x."""
    return norm.bias is None and not norm.form.centred


def kernel_takes(weight: Tensor | Packed) -> bool:
    """Return whether the kernel reads such a weight: rows of whole aligned loads, each within one group."""
    data = weight.data if isinstance(weight, Packed) else weight
    if data.stride(1) != 1 or (isinstance(weight, Packed) and (weight.code == "table" or weight.high_first)):
        return False
    form, row_bytes = format_of(weight), data.stride(0) * data.element_size()
    aligned = data.data_ptr() % BYTES_PER_LOAD == row_bytes % BYTES_PER_LOAD == 0
    return aligned and weight.shape[1] % form.per_load == form.GROUP % form.per_load == 0
