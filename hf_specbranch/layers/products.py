"""Products of a pass with few tokens: linear layers that read one input, as one product where that is possible.

A `Product` says how a kind of linear layer is computed. Attention and MLP do not know which kind they have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.activation import MlpActivation, activate
from ..kernels.autotune import Kind, autotune, known_plan
from ..kernels.backend import FLOATS
from ..kernels.gated import Activation, gated, gated_product
from ..kernels.linear import Partials, Plan, activated_product, linear, linear_split_k
from .base import Replacement, untouched
from .storage import joined

Weights = dict[tuple[torch.Size, torch.dtype], list[Tensor]]


class Tuned:
    """Products with the plan that was autotuned for their shape.

    Attributes:
        find_weights: returns the weights of the model by shape, for autotuning.
    """

    def __init__(self) -> None:
        self.find_weights: Callable[[], Weights] = dict

    def whole(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x W^T + bias."""
        return linear(x, weight, bias, self._plan(x, weight, "whole"))

    def split_k(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | Partials:
        """Compute x W^T + bias for a kernel that sums split-K partials."""
        return linear_split_k(x, weight, bias, self._plan(x, weight, "split-k"))

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        """Compute act(gate) * up, where W holds the rows of both."""
        return gated_product(x, weight, bias, activation, self._plan(x, weight, "gated"))

    def activated(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: MlpActivation) -> Tensor:
        """Compute act(x W^T + bias)."""
        return activated_product(x, weight, bias, activation, self._plan(x, weight, "whole"))

    def _plan(self, x: Tensor, weight: Tensor, kind: Kind) -> Plan | None:
        if not x.is_cuda:
            return None
        rows = x.numel() // x.shape[-1]
        found, plan = known_plan(weight, rows, kind)
        if not found:
            alike = self.find_weights().get((weight.shape, weight.dtype)) or [weight]
            plan = autotune(alike, rows, kind)
        return plan


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

    def activated(self, x: Tensor, activation: MlpActivation) -> Tensor:
        """Compute act(product)."""
        return activate(self(x), activation)


class PlainProduct(Product):
    """The product of plain linear layers; one product if their weights are joined in one storage (`fuse`)."""

    def __init__(self, layers: Sequence[nn.Linear], tuned: Tuned) -> None:
        super().__init__(layers)
        self.tuned = tuned

    def __call__(self, x: Tensor) -> Tensor:
        if (one := self._as_one()) is not None:
            return self.tuned.whole(x, *one)
        return torch.cat([self.tuned.whole(x, layer.weight, layer.bias) for layer in self.layers], dim=-1)

    def split_k(self, x: Tensor) -> Tensor | Partials:
        return self(x) if (one := self._as_one()) is None else self.tuned.split_k(x, *one)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        if (one := self._as_one()) is None:
            return super().gated(x, activation)
        return self.tuned.gated(x, *one, activation)

    def activated(self, x: Tensor, activation: MlpActivation) -> Tensor:
        if (one := self._as_one()) is None:
            return super().activated(x, activation)
        return self.tuned.activated(x, *one, activation)

    def _as_one(self) -> tuple[Tensor, Tensor | None] | None:
        """Return weight and bias of all layers, if they are joined. They may have been replaced since the last pass."""
        weight = joined([layer.weight for layer in self.layers])
        biases = [layer.bias for layer in self.layers if layer.bias is not None]
        bias = joined(biases) if biases else None
        return None if weight is None or (bias is None) == bool(biases) else (weight, bias)


class SideBySide(Product):
    """Products of different kinds that read one input, concatenated."""

    def __init__(self, products: Sequence[Product]) -> None:
        super().__init__([layer for product in products for layer in product.layers])
        self.products = products

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([product(x) for product in self.products], dim=-1)


def product_of(layers: Sequence[Any], tuned: Tuned) -> Product | None:
    """Return how linear layers that read one input are computed; None if one of them is of an unknown kind."""
    if not layers or len({getattr(layer, "in_features", None) for layer in layers}) > 1:
        return None
    if all(is_plain(layer) for layer in layers):
        alike = len({layer.bias is None for layer in layers}) == 1
        return PlainProduct(layers, tuned) if alike else SideBySide([PlainProduct([layer], tuned) for layer in layers])
    return None


def is_plain(layer: Any) -> bool:
    """Return whether this is a plain linear layer: not wrapped, quantised or hooked."""
    return type(layer) is nn.Linear and untouched(layer) and layer.weight.dtype in FLOATS


class LinearForward(Replacement):
    """Replaces a linear layer; few rows run through our product."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def __call__(self, input: Tensor) -> Tensor:
        return self.product(input)
