"""What rotary position embeddings of different models rotate, and the reference in torch."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Table = Literal["halves", "neighbours", "once"]  # cos and sin hold angle i at i and i + R/2, at 2i and 2i + 1, or at i


class Rotation(NamedTuple):
    """Which dimensions are rotated together, and where cos and sin hold the angle of pair i."""

    neighbours: bool = False  # dimensions 2i and 2i + 1; otherwise i and i + R/2
    table: Table = "halves"

    def size(self, cos: Tensor) -> int:
        """Return R, the number of dimensions that are rotated."""
        return 2 * cos.shape[-1] if self.table == "once" else cos.shape[-1]


HALVES = Rotation()
NO_ROTATION = None
ROTATIONS = (
    HALVES,
    NO_ROTATION,
    Rotation(neighbours=True),
    Rotation(neighbours=True, table="neighbours"),
    Rotation(table="once"),
)


def rounds_once(rotation: Rotation | None, cos: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the rotated dimensions are computed in float32 and rounded once.

    Otherwise each product is rounded before the sum, as separate torch operations round it.
    """
    return (rotation is not None and rotation.neighbours) or cos.dtype != dtype


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor, rotation: Rotation | None = HALVES) -> Tensor:
    """Rotate [B, H, Q, D] by cos and sin [B, Q, R], in plain torch."""
    if rotation is None:
        return x
    size, dtype = rotation.size(cos), x.dtype
    turned, passed = x[..., :size], x[..., size:]
    if rounds_once(rotation, cos, dtype):
        turned = turned.float()
    cos, sin = (_over_heads(table, rotation) for table in (cos, sin))
    if rotation.neighbours:
        crossed = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        crossed = torch.cat((-second, first), dim=-1)
    turned = (turned * cos + crossed * sin).to(dtype)
    return torch.cat((turned, passed), dim=-1) if passed.shape[-1] else turned


def _over_heads(table: Tensor, rotation: Rotation) -> Tensor:
    """Return cos or sin with an entry for each dimension of a head: [B, 1, Q, R]."""
    table = table[:, None]
    if rotation.table == "once":
        table = torch.cat((table, table), dim=-1)
    if rotation.neighbours and rotation.table != "neighbours":
        table = table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1)
    return table
