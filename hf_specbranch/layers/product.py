"""What a product is: the interface that attention and MLP call, and the plans that its kinds share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.activation import MlpActivation, activate
from ..kernels.autotune import Kind, autotune, known_plan
from ..kernels.autotune_fused import autotune_fused
from ..kernels.combine import COMBINED, Reader, SplitHeads, combined
from ..kernels.few_rows import few_rows
from ..kernels.gated import Activation, gated, gated_product
from ..kernels.gemv_rotary import Queries, Turn, rotary_fits, rotary_gemv
from ..kernels.linear import Partials, Plan, activated_product, linear, linear_split_k
from ..kernels.norm import Norm, normalise
from ..kernels.packed import Packed
from ..kernels.tile_plans import combines

Weights = dict[tuple[torch.Size, torch.dtype], list[Tensor]]


class Tuned:
    """Products with the plan that was autotuned for their shape.

    Attributes:
        find_weights: returns the weights of the model by shape, for autotuning.
        quantised: the products with quantised weights, by format and shape, for autotuning.
    """

    def __init__(self) -> None:
        self.find_weights: Callable[[], Weights] = dict
        self.quantised: dict[tuple[str, int, int], list[Any]] = {}

    def whole(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x W^T + bias."""
        return linear(x, weight, bias, self.plan(x, weight, "whole"))

    def split_k(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | Partials:
        """Compute x W^T + bias for a kernel that sums split-K partials."""
        return linear_split_k(x, weight, bias, self.plan(x, weight, "split-k"))

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        """Compute act(gate) * up, where W holds the rows of both."""
        return gated_product(x, weight, bias, activation, self.plan(x, weight, "gated"))

    def activated(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: MlpActivation) -> Tensor:
        """Compute act(x W^T + bias)."""
        return activated_product(x, weight, bias, activation, self.plan(x, weight, "whole"))

    def plan(self, x: Tensor, weight: Tensor, kind: Kind) -> Plan | None:
        """Return the plan of a product; None where torch computes it."""
        if not x.is_cuda:
            return None
        rows = x.numel() // x.shape[-1]
        found, plan = known_plan(weight, rows, kind)
        if not found:
            plan = autotune(self._alike(weight), rows, kind)
        return plan

    def fused(self, x: Tensor, weight: Tensor, kind: Kind) -> Plan | None:
        """Return the plan for one launch of a product and what is fused with it; None where there is none.

        Args:
            x: the input, or any tensor of as many rows.
            weight: [N, K].
            kind: what is fused.
        """
        return autotune_fused(weight, x.numel() // x.shape[-1], kind, partial(self._alike, weight))

    def _alike(self, weight: Tensor) -> list[Tensor]:
        """Return all weights of one shape."""
        return self.find_weights().get((weight.shape, weight.dtype)) or [weight]


class FewRows(NamedTuple):
    """A product of few rows that is one launch with what is fused with it."""

    weight: Packed
    bias: Tensor | None
    plan: Plan


class Product:
    """The outputs of linear layers that read one input, concatenated: [..., K] -> [..., N].

    Args:
        layers: the linear layers.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = layers
        self.in_features: int = layers[0].in_features
        self.out_features = sum(int(layer.out_features) for layer in layers)

    @property
    def bypassed(self) -> list[nn.Module]:
        """The modules that this product does not call."""
        return [module for layer in self.layers for module in layer.modules()]

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the product."""
        raise NotImplementedError

    def split_k(self, x: Tensor) -> Tensor | Partials:
        """Compute the product for a kernel that sums split-K partials."""
        return self(x)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """Compute act(gate) * up, where the first half of the product is the gate."""
        return gated(self(x), activation)

    def fuses(self, x: Tensor, kind: Kind) -> bool:
        """Return whether `normed`, `normed_gated` or, for a "whole" product, `added` is one launch, and a fast one.

        Args:
            x: the input, or any tensor of as many rows.
            kind: "normed", "normed-gated" or "whole".
        """
        return False

    def few_rows(self, x: Tensor, kind: Kind) -> FewRows | None:
        """Return how one launch computes this product of x and what is fused with it, or None."""
        return None

    def normed(self, x: Tensor, norm: Norm) -> Tensor:
        """Compute the product of norm(x)."""
        found = self.few_rows(x, "normed")
        return self(normalise(x, norm)) if found is None else few_rows(x, *found, norm=norm)

    def normed_gated(self, x: Tensor, activation: Activation, norm: Norm) -> Tensor:
        """Compute act(gate) * up of norm(x)."""
        found = self.few_rows(x, "normed-gated")
        return self.gated(normalise(x, norm), activation) if found is None else few_rows(x, *found, activation, norm)

    def rotated(self, x: Tensor, norm: Norm, turn: Turn) -> Queries | None:
        """Compute q, k and v of norm(x) [B, Q, K] with their rotary embedding, in one launch.

        Returns:
            The queries; keys and values are in the KV cache. None where a kernel by itself must rotate them.
        """
        found = self.few_rows(x, "normed") if rotary_fits(x, turn) else None
        if found is None or (turn.norm is not None and found.plan.spans == 0):
            return None
        return rotary_gemv(x, *found, norm, turn)

    def as_reader(self, x: Tensor) -> Reader:
        """Return how `added` reads the heads of attention; x: the input, or any tensor of as many rows."""
        if (found := self.few_rows(x, "whole")) is None:
            return COMBINED
        rows = x.numel() // x.shape[-1]
        return Reader(combines(found.weight, found.plan, rows), needs_l1=found.plan.spans > 0)

    def added(self, x: Tensor | SplitHeads, residual: Tensor) -> Tensor:
        """Compute residual + product, of heads that may be in splits."""
        found = self.few_rows(residual if isinstance(x, SplitHeads) else x, "whole")
        return residual + self(combined(x)) if found is None else few_rows(x, *found, residual=residual)

    def activated(self, x: Tensor, activation: MlpActivation) -> Tensor:
        """Compute act(product)."""
        return activate(self(x), activation)
