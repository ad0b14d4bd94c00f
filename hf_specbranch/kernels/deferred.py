"""What a kernel leaves to the next: norms that the product that reads them computes, sums that a product includes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .norm import Norm, add_norm


class DeferredNorm(NamedTuple):
    """norm(value), not computed yet: the product that reads it may normalise while it loads."""

    value: Tensor  # [..., K]
    norm: Norm

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    def computed(self) -> Tensor:
        """Return the normalised tensor."""
        normed, _ = add_norm(self.value, None, self.norm)
        assert normed is not None
        return normed


class WithResidual(NamedTuple):
    """A product to which the residual is added already."""

    total: Tensor  # [..., N]


def computed(x: Tensor | DeferredNorm) -> Tensor:
    """Return a tensor, for readers that do not normalise."""
    return x.computed() if isinstance(x, DeferredNorm) else x
