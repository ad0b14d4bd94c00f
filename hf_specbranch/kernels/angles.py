"""Cosines and sines of rotary positions in one kernel; torch takes nine, which matters in a draft of two layers."""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import (
    FLOATS,
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


def angles(
    positions: Tensor, frequencies: Tensor, scaling: float, dtype: torch.dtype, neighbours: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute cos and sin of position times frequency.

    Args:
        positions: [B, Q].
        frequencies: [R / 2], in float32.
        scaling: factor of both.
        dtype: of the result.
        neighbours: each angle is repeated at 2i and 2i + 1; otherwise at i and i + R / 2.

    Returns:
        Two tensors [B, Q, R].

    Example:
        >>> cos, sin = angles(torch.arange(5)[None], torch.rand(32), 1.0, torch.float32)
        >>> cos.shape
        torch.Size([1, 5, 64])
    """
    if not _fits(positions, frequencies, dtype):
        return angles_reference(positions, frequencies, scaling, dtype, neighbours)
    rows, tokens = positions.shape
    half = frequencies.shape[0]
    out = frequencies.new_empty((2, rows, tokens, 2 * half), dtype=dtype)
    _angles_kernel[(rows * tokens,)](
        positions.contiguous(),
        frequencies,
        out,
        rows * tokens,
        half,
        1 if neighbours else half,
        float(scaling),
        STEP=2 if neighbours else 1,
        BLOCK=power_of_two(half),
        num_warps=1,
        **dependent_launch(out.device),
    )
    return out[0], out[1]


def angles_reference(
    positions: Tensor, frequencies: Tensor, scaling: float, dtype: torch.dtype, neighbours: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute what `angles` does, in plain torch."""
    angle = positions[..., None].float() * frequencies
    angle = angle.repeat_interleave(2, dim=-1) if neighbours else torch.cat((angle, angle), dim=-1)
    return (angle.cos() * scaling).to(dtype), (angle.sin() * scaling).to(dtype)


def _fits(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> bool:
    return (
        can_run(frequencies)
        and frequencies.dtype == torch.float32
        and frequencies.is_contiguous()
        and dtype in FLOATS
        and positions.dim() == 2
        and positions.dtype == torch.long
        and positions.device == frequencies.device
    )


@varying("tokens", "scaling")
def _angles_kernel(
    positions: Value,
    frequencies: Value,
    out: Value,
    tokens: Value,
    half: Value,
    gap: Value,
    scaling: Value,
    STEP: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < half
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + lane, mask=inside, other=0.0)
    cos, sin = (tl.cos(angle) * scaling).to(out.dtype.element_ty), (tl.sin(angle) * scaling).to(out.dtype.element_ty)
    target = out + token * 2 * half + lane * STEP
    tl.store(target, cos, mask=inside)
    tl.store(target + gap, cos, mask=inside)
    target += tokens.to(tl.int64) * 2 * half
    tl.store(target, sin, mask=inside)
    tl.store(target + gap, sin, mask=inside)
