"""act(gate) * up, SwiGLU and GeGLU: as the epilogue of the gate and up product, or as a kernel of its own."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor
from torch.nn import functional

from .activation import activate, activated, recognise_activation
from .backend import (
    Value,
    can_run,
    constexpr,
    dependent_launch,
    jit,
    launch_dependents,
    tl,
    triton,
    varying,
    wait_for_dependencies,
)
from .linear import STRIP, Plan, fits, streamed, tile

Activation = Literal["silu", "gelu_tanh"]  # of a gate; `activation.py` has them and others
_BLOCK = 1024


def gated_product(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation, plan: Plan | None) -> Tensor:
    """Compute act(x W_gate^T) * (x W_up^T), where W holds the rows of both.

    Args:
        x: [..., K].
        weight: [2 * I, K], the gate's rows before the up projection's.
        bias: [2 * I] or None.
        activation: "silu" or "gelu_tanh".
        plan: from `autotune`, without split-K; None: torch computes the product.

    Returns:
        [..., I].

    Example:
        >>> gated_product(torch.randn(3, 64), torch.randn(16, 64), None, "silu", None).shape
        torch.Size([3, 8])
    """
    if plan is None or not fits(x, weight, bias, plan):
        return gated(functional.linear(x, weight, bias), activation)
    flat, size = x.reshape(-1, x.shape[-1]), weight.shape[0] // 2
    rows, depth = flat.shape
    out = flat.new_empty((rows, size))
    _gated_product_kernel[(triton.cdiv(size, STRIP // 2),)](
        flat, weight, weight if bias is None else bias, out, rows, size, depth, flat.stride(0), weight.stride(0),
        BIAS=bias is not None, TANH=activation == "gelu_tanh", **tile(rows), num_warps=4, num_stages=plan.stages,
        **dependent_launch(x.device),
    )  # fmt: skip
    return out.view(*x.shape[:-1], size)


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """Multiply the second half of the last dimension by the activated first half.

    Args:
        gate_up: [..., 2 * I], the gate's columns before the up projection's.
        activation: "silu" or "gelu_tanh".

    Returns:
        [..., I].

    Example:
        >>> gated(torch.randn(3, 16), "silu").shape
        torch.Size([3, 8])
    """
    if not can_run(gate_up):
        return gated_reference(gate_up, activation)
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], size))
    _gated_kernel[(out.numel() // size, triton.cdiv(size, _BLOCK))](
        gate_up.contiguous(), out, size, TANH=activation == "gelu_tanh", BLOCK=_BLOCK, **dependent_launch(out.device)
    )
    return out


def gated_reference(gate_up: Tensor, activation: Activation) -> Tensor:
    """Compute what `gated` does, in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate, activation) * up


def recognise(activate_module: Any) -> Activation | None:
    """Return which activation of a gate a callable computes, judged by its values; None for others."""
    found = recognise_activation(activate_module)
    return found if found == "silu" or found == "gelu_tanh" else None


@varying("rows")
def _gated_product_kernel(
    x: Value,
    weight: Value,
    bias: Value,
    out: Value,
    rows: Value,
    size: Value,
    depth: Value,
    x_row: Value,
    weight_row: Value,
    BIAS: constexpr,
    TANH: constexpr,
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
    result = streamed(x, weight, strip, 0, depth // BLOCK, rows, x_row, weight_row, ROWS, STRIP, BLOCK, PDL)
    if BIAS:
        result += added.to(tl.float32)[:, None]
    both = result.to(out.dtype.element_ty)
    gate, up = tl.split(tl.permute(tl.reshape(both, (2, HALF, ROWS)), (1, 2, 0)))
    row = tl.arange(0, ROWS)[None, :]
    column = (tl.program_id(0) * HALF + tl.arange(0, HALF))[:, None]
    tl.store(out + row.to(tl.int64) * size + column, apply_gate(gate, up, TANH), mask=(row < rows) & (column < size))


@varying()
def _gated_kernel(gate_up: Value, out: Value, size: Value, TANH: constexpr, BLOCK: constexpr, PDL: constexpr) -> None:
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=inside, other=0.0)
    tl.store(out + row * size + column, apply_gate(gate, up, TANH), mask=inside)


@jit
def apply_gate(gate: Value, up: Value, TANH: constexpr) -> Value:
    """Compute act(gate) * up, rounded where separate torch operations round."""
    if TANH:
        active = activated(gate, 2)
    else:
        active = activated(gate, 1)
    return (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
