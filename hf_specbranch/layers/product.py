"""What a product is: the interface that attention and MLP call, and the plans that its kinds share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.activation import MlpActivation, activate
from ..kernels.autotune import Kind, autotune, known_plan
from ..kernels.deferred import DeferredNorm, WithResidual
from ..kernels.dense import add_product, dense_product
from ..kernels.gated import Activation, gated
from ..kernels.linear import Partials, Plan

Input = Tensor | DeferredNorm
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

    def whole(self, x: Input, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x W^T + bias."""
        return _whole(dense_product(x, weight, bias, self.plan(x, weight, "whole")))

    def split_k(self, x: Input, weight: Tensor, bias: Tensor | None) -> Tensor | Partials:
        """Compute x W^T + bias for a kernel that sums split-K partials."""
        return dense_product(x, weight, bias, self.plan(x, weight, "split-k"))

    def gated(self, x: Input, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        """Compute act(gate) * up, where W holds the rows of both."""
        return _whole(dense_product(x, weight, bias, self.plan(x, weight, "gated"), gate=activation))

    def activated(self, x: Input, weight: Tensor, bias: Tensor | None, activation: MlpActivation) -> Tensor:
        """Compute act(x W^T + bias)."""
        return _whole(dense_product(x, weight, bias, self.plan(x, weight, "whole"), activation))

    def added(
        self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float
    ) -> WithResidual | None:
        """Compute residual + scale * (x W^T + bias), if one kernel does; None otherwise."""
        return add_product(residual, x, weight, bias, self.plan(x, weight, "split-k"), scale)

    def plan(self, x: Input, weight: Tensor, kind: Kind) -> Plan | None:
        """Return the plan of a product; None where torch computes it."""
        if not weight.is_cuda:
            return None
        rows = x.shape.numel() // x.shape[-1]
        found, plan = known_plan(weight, rows, kind)
        if not found:
            alike = self.find_weights().get((weight.shape, weight.dtype)) or [weight]
            plan = autotune(alike, rows, kind)
        return plan


def _whole(product: Tensor | Partials) -> Tensor:
    assert not isinstance(product, Partials)
    return product


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

    def __call__(self, x: Input) -> Tensor:
        """Compute the product."""
        raise NotImplementedError

    def split_k(self, x: Input) -> Tensor | Partials:
        """Compute the product for a kernel that sums split-K partials."""
        return self(x)

    def added(self, residual: Tensor, x: Tensor, scale: float) -> WithResidual | None:
        """Compute residual + scale * product, if one kernel does; None otherwise."""
        return None

    def gated(self, x: Input, activation: Activation) -> Tensor:
        """Compute act(gate) * up, where the first half of the product is the gate."""
        return gated(self(x), activation)

    def activated(self, x: Input, activation: MlpActivation) -> Tensor:
        """Compute act(product)."""
        return activate(self(x), activation)
