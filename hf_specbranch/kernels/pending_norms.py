"""Norms of heads that attention finishes.

RMSNorm divides a head by its root mean square and multiplies it by weights. A root mean square is known when all of a
head is computed, which takes many programs of the product that gives q, k and v. Everything else is elementwise, and a
rotation keeps factors. So the product for one token multiplies by the weights and rotates, and each program leaves the
sum of the squares that it has seen. Attention multiplies scores by the factors that are missing, and writes the new key
to the cache again when it is complete.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .backend import Value, constexpr, jit, tl

DIMENSIONS = 16  # of a head, per sum of squares: those of a tile


class PendingNorms(NamedTuple):
    """What is missing of the norms of one token's heads."""

    squares: Tensor  # [Hq + Hkv, D / 16] of float32: sums of squares, of all query heads and then of all key heads
    eps: float
    places: Tensor  # [1, 1] of int64: the slot of the new key


@jit
def head_factors(squares: Value, head: Value, inside: Value, size: Value, eps: Value, PARTS: constexpr) -> Value:
    """Return 1 / root mean square of some heads [N], from PARTS sums of squares of each."""
    parts = squares + head[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
    total = tl.sum(tl.load(parts, mask=inside[:, None], other=0.0, cache_modifier=".cg"), 1)
    return tl.rsqrt(total / size + eps)


@jit
def finish_key(key: Value, factor: Value, lane: Value, inside: Value) -> None:
    """Multiply a key in the cache by its factor."""
    value = tl.load(key + lane, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32) * factor
    tl.store(key + lane, value.to(key.dtype.element_ty), mask=inside)
