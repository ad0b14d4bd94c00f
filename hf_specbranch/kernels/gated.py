"""act(gate) * up in one kernel, from one tensor that holds both: SwiGLU and GeGLU."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from .backend import Value, constexpr, early, runs, start_next, tl, triton, varying, wait_for_last
from .linear import Parts, added, opened

Activation = Literal["silu", "gelu_tanh"]
_BLOCK = 1024


def gated(gate_up: Tensor | Parts, activation: Activation) -> Tensor:
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
    if not isinstance(gate_up, Parts) and not runs(gate_up):
        return gated_reference(gate_up, activation)
    terms, splits = opened(gate_up)
    size = gate_up.shape[-1] // 2
    out = terms.new_empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype)
    rows = out.numel() // size
    _gated_kernel[(rows, triton.cdiv(size, _BLOCK))](
        terms,
        out,
        rows * 2 * size,
        size,
        SPLITS=splits,
        TANH=activation == "gelu_tanh",
        BLOCK=_BLOCK,
        **early(out.device),
    )
    return out


def gated_reference(gate_up: Tensor, activation: Activation) -> Tensor:
    """What `gated` computes, in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate, activation) * up


def activate(gate: Tensor, activation: Activation) -> Tensor:
    """The activation alone."""
    return functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")


@torch.no_grad()
def recognise(activate_module: Any) -> Activation | None:
    """Which of the known activations a callable computes, found by trying it."""
    probe = torch.linspace(-6, 6, 64)
    try:
        got = activate_module(probe)
    except (RuntimeError, TypeError):
        return None
    if torch.allclose(got, activate(probe, "silu"), atol=1e-6):
        return "silu"
    return "gelu_tanh" if torch.allclose(got, activate(probe, "gelu_tanh"), atol=1e-6) else None


@varying("apart")
def _gated_kernel(
    gate_up: Value,
    out: Value,
    apart: Value,
    size: Value,
    SPLITS: constexpr,
    TANH: constexpr,
    BLOCK: constexpr,
    EARLY: constexpr,
) -> None:
    start_next(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = added(gate_up + row * 2 * size + column, apart, inside, out.dtype.element_ty, SPLITS)
    up = added(gate_up + row * 2 * size + size + column, apart, inside, out.dtype.element_ty, SPLITS)
    wide = gate.to(tl.float32)
    # Both activations are x * sigmoid(z): 1 + tanh(y) = 2 sigmoid(2y), so GELU's z is 2 sqrt(2/pi) (x + 0.044715 x^3).
    if TANH:
        steep = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    else:
        steep = wide
    active = (wide / (1.0 + tl.exp(-steep))).to(gate.dtype)
    tl.store(out + row * size + column, (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside)
