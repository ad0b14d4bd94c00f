"""y = x W^T for one to four rows of x and quantised W, without tensor cores (GEMV): a product bound by reading W once.

Each program reads a few rows of W straight into registers: no shared memory, no pipeline to fill, and no partials for
the next kernel to sum. `gemv_rows.py` has the loop, `gemv_words.py` unpacks the elements of W, and `gemv_rotary.py` is
the product of q, k and v with their rotary embedding.

With a gate, W holds the rows of gate and up, and the kernel computes act(x W_gate^T) * (x W_up^T).

A product can also normalise x, and add a residual to its result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .backend import (
    EARLY,
    Value,
    can_run,
    constexpr,
    converts_float8,
    dependent_launch,
    jit,
    launch_dependents,
    multiprocessors,
    power_of_two,
    tl,
    triton,
    varying,
    wait_for_dependencies,
    zero_after_wait,
)
from .gated import Activation, apply_gate
from .gemv_loads import load_one, store_one
from .gemv_rows import constants_of_rows, product_of_rows
from .gemv_words import BYTES_PER_LOAD, assembly, format_of
from .linear import Plan
from .norm import Norm
from .packed import Packed

MOST_ROWS = 4
LANES = 32
MOST_WORDS, MOST_STATES = 16, 64  # that a thread has at a time: loads of W, and elements of x
# Few rows of W per program fill the GPU with small weights; many share the loads of x.
GEMV_PLANS = tuple(
    Plan(1, 1, strip, warps) for strip, warps in ((4, 4), (4, 2), (4, 8), (8, 4), (8, 2), (8, 1), (16, 4))
)


def gemv(
    x: Tensor,
    weight: Packed,
    bias: Tensor | None,
    plan: Plan,
    gate: Activation | None = None,
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute a product by the kernel.

    Args:
        x: [..., K], at most `MOST_ROWS` rows.
        weight: [N, K].
        bias: [N] or None.
        plan: one of `GEMV_PLANS`, for which `fits`.
        gate: the activation of a gate, whose rows come before those of the up projection.
        norm: an RMSNorm of x, for which `takes_norm`.
        residual: of the shape of the result, added to it.

    Returns:
        [..., N], or [..., N / 2] with a gate.
    """
    flat = x.reshape(-1, x.shape[-1])
    rows, columns = len(flat), weight.shape[0] // (1 if gate is None else 2)
    out = flat.new_empty((rows, columns))
    added = out if residual is None else residual.reshape(rows, columns)
    arguments, constants = kernel_arguments(flat, weight, bias, plan, norm)
    _gemv_kernel[(triton.cdiv(columns, plan.strip if gate is None else plan.strip // 2),)](
        *arguments, added, out, columns, added.stride(0),
        RESIDUAL=residual is not None, GATED=gate is not None, TANH=gate == "gelu_tanh", **constants,
        **dependent_launch(flat.device, plan.next or EARLY),
    )  # fmt: skip
    return out.view(*x.shape[:-1], columns)


def kernel_arguments(
    flat: Tensor, weight: Packed, bias: Tensor | None, plan: Plan, norm: Norm | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what `product_of_rows` needs for x [rows, K]: the first arguments of a kernel, and its constants."""
    (rows, depth), form = flat.shape, format_of(weight)
    data, scale = weight.data, weight.scale
    if data.dtype != torch.int32:
        data = data.view(torch.int32)
    if form.CODE == "float8" and flat.is_cuda and converts_float8(flat.device):
        form = form._replace(CODE="converted")
    zero = scale if weight.zero is None else weight.zero
    block = form.per_load * LANES * plan.warps * _loads(depth, rows, form.per_load, plan)
    tensors = flat, data, scale, zero, data if bias is None else bias, flat if norm is None else norm.weight
    strides = flat.stride(0), data.shape[1], data.stride(0), *scale.stride(), *zero.stride()
    constants = {
        **dict(NORM=norm is not None, OFFSET=0.0 if norm is None else norm.form.offset, BIAS=bias is not None),
        **form._asdict(),
        **dict(ROWS=rows if rows < 3 else 4, STRIP=plan.strip, PER_LOAD=form.per_load),
        **dict(BLOCK=block, EVEN=depth % block == 0, num_warps=plan.warps),
        **dict(ONE_STEP=depth <= block, THREADS=_threads(weight.shape[0], plan, flat.device)),
        **dict(ASSEMBLY=assembly(form.CODE, min(rows, 2)) if flat.is_cuda else None),
    }
    return (*tensors, rows, depth, *strides, 0.0 if norm is None else norm.eps), constants


def _loads(depth: int, rows: int, per_load: int, plan: Plan) -> int:
    """Return how often each thread loads from a row of W at a time.

    The fastest is all at once, before the wait for x. Where registers do not suffice for that, half of them receive
    the next loads.
    """
    needed = power_of_two(triton.cdiv(depth, per_load * LANES * plan.warps))
    most = min(MOST_WORDS // plan.strip, MOST_STATES // (per_load * min(rows, 2)))
    return needed if needed <= most else max(1, most // 2)


def _threads(rows: int, plan: Plan, device: torch.device) -> int:
    """Return the threads of a program if all its loads of x are to come first, else 0; see `all_loaded`.

    Few programs must wait for the latency of the memory only once. Many hide it from each other, and need the registers
    that early loads take.
    """
    return LANES * plan.warps if triton.cdiv(rows, plan.strip) <= 2 * multiprocessors(device) else 0


def fits(x: Tensor, weight: Packed, bias: Tensor | None, plan: Plan) -> bool:
    """Return whether the kernel can compute this product with this plan."""
    return (
        plan.warps > 0
        and plan.spans == 0
        and can_run(x, bias)
        and weight.data.device == x.device
        and 0 < x.numel() <= MOST_ROWS * x.shape[-1]
        and x.stride(-1) == 1
        and aligned(x)
        and kernel_takes(weight)
    )


def kernel_takes(weight: Packed) -> bool:
    """Return whether the kernel reads such a weight: rows of whole aligned loads, each within one group."""
    data = weight.data
    if data.stride(1) != 1 or weight.code == "table" or weight.high_first:
        return False
    form, row_bytes = format_of(weight), data.stride(0) * data.element_size()
    aligned = data.data_ptr() % BYTES_PER_LOAD == row_bytes % BYTES_PER_LOAD == 0
    return aligned and weight.shape[1] % form.per_load == form.GROUP % form.per_load == 0


def takes_norm(norm: Norm) -> bool:
    """Return whether a product can compute a norm of its input: RMSNorm without a bias."""
    return not norm.form.centred and norm.bias is None and aligned(norm.weight)


def aligned(x: Tensor) -> bool:
    """Return whether each row begins at an address that whole loads can be made from."""
    rows = x.stride(-2) * x.element_size() if x.ndim > 1 else 0
    return x.data_ptr() % BYTES_PER_LOAD == rows % BYTES_PER_LOAD == 0


@varying("rows")
def _gemv_kernel(
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
    residual: Value,
    out: Value,
    columns: Value,
    residual_row: Value,
    RESIDUAL: constexpr,
    GATED: constexpr,
    TANH: constexpr,
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
    HALF: tl.constexpr = STRIP // 2 if GATED else STRIP
    strip = tl.arange(0, STRIP)
    n = tl.minimum(tl.program_id(0) * HALF + strip % HALF, columns - 1)  # the last strip may exceed the edge
    if GATED:  # the gate's rows, then the up projection's for the same columns
        n += strip // HALF * columns
    words, gain, group, whole, begin = constants_of_rows(
        n, data, scale, zero, bias, norm_weight, depth, row_words, data_row, scale_n, scale_k, zero_n, zero_k, NORM,
        OFFSET, BIAS, CODE, BITS, GROUP, SCALE_ROWS, ZEROS, ZERO_OFFSET, EXPONENTS, STRIP, PER_LOAD, BLOCK, EVEN,
        ASSEMBLY is None,
    )  # fmt: skip
    wait_for_dependencies(PDL)
    x += zero_after_wait(PDL)
    residual += zero_after_wait(PDL)
    place = tl.program_id(0) * HALF + tl.arange(0, HALF)
    inside = place < columns
    added: Value = ()
    for row in tl.static_range(ROWS):
        if RESIDUAL:
            added += (load_one(residual + row * residual_row + place, inside & (row < rows), ASSEMBLY is None),)
        else:
            added += (0.0,)
    products = product_of_rows(
        words, gain, group, whole, begin, n, x, data, scale, zero, norm_weight, rows, depth, x_row, row_words, data_row,
        scale_n, scale_k, zero_n, zero_k, eps, NORM, OFFSET, CODE, BITS, GROUP, SCALE_ROWS, ZEROS, ZERO_OFFSET,
        EXPONENTS, ROWS, STRIP, PER_LOAD, BLOCK, EVEN, ONE_STEP, THREADS, ASSEMBLY,
    )  # fmt: skip
    for row in tl.static_range(ROWS):
        result = _finished(products[row], added[row], out.dtype.element_ty, RESIDUAL, GATED, TANH, HALF)
        store_one(out + row * columns + place, result, inside & (row < rows), ASSEMBLY is None)


@jit
def _finished(
    values: Value,
    added: Value,
    dtype: constexpr,
    RESIDUAL: constexpr,
    GATED: constexpr,
    TANH: constexpr,
    HALF: constexpr,
) -> Value:
    """Return one row of the product, or what is computed from it."""
    result = values.to(dtype)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(result, (2, HALF)), (1, 0)))
        result = apply_gate(gate, up, TANH)
    if RESIDUAL:
        result = (added.to(tl.float32) + result.to(tl.float32)).to(dtype)
    return result
