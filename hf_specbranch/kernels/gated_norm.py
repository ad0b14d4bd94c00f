"""RMSNorm of the heads of a recurrent layer, multiplied by a gate: norm(x) * silu(z)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

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


def gated_norm(x: Tensor, weight: Tensor, eps: float, gate: Tensor, columns: Tensor) -> Tensor:
    """Normalise each head, scale it and multiply it by its gate.

    Args:
        x: [B, Q, H, V].
        weight: [V].
        eps: added to the mean square.
        gate: [B, Q, N], a product that holds the gate.
        columns: [H * V] the columns of the gate.

    Returns:
        [B, Q, H * V].

    Example:
        >>> gated_norm(torch.ones(1, 1, 2, 4), torch.ones(4), 0.0, torch.zeros(1, 1, 8), torch.arange(8)).sum()
        tensor(0.)
    """
    if not can_run(x, weight, gate):
        return gated_norm_reference(x, weight, eps, gate, columns)
    heads, size = x.shape[2:]
    out = x.new_empty((*x.shape[:2], heads * size))
    _gated_norm_kernel[(x.shape[0] * x.shape[1], heads)](
        x.contiguous(), weight, gate.contiguous(), columns, out, gate.shape[-1], size, eps,
        BLOCK=power_of_two(size), num_warps=1, **dependent_launch(x.device),
    )  # fmt: skip
    return out


def gated_norm_reference(x: Tensor, weight: Tensor, eps: float, gate: Tensor, columns: Tensor) -> Tensor:
    """Compute what `gated_norm` does, in plain torch."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    scaled = weight * wide.to(x.dtype)
    return (scaled.flatten(2) * functional.silu(gate[..., columns].float())).to(x.dtype)


@varying()
def _gated_norm_kernel(
    x: Value,
    weight: Value,
    gate: Value,
    columns: Value,
    out: Value,
    width: Value,
    size: Value,
    eps: Value,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < size
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    gate_column = tl.load(columns + head * size + column, mask=inside, other=0)
    wait_for_dependencies(PDL)
    place = (token * tl.num_programs(1) + head) * size + column
    value = tl.load(x + place, mask=inside, other=0.0)
    opened = tl.load(gate + token * width + gate_column, mask=inside, other=0.0).to(tl.float32)
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    scaled = (wide.to(value.dtype).to(tl.float32) * scale).to(value.dtype).to(tl.float32)
    result = scaled * (opened / (1.0 + tl.exp(-opened)))
    tl.store(out + place, result.to(value.dtype), mask=inside)
