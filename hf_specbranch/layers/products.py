"""Products of a pass with few tokens: linear layers that read one input, as one product where that is possible.

A `Product` says how a kind of linear layer is computed. Attention and MLP do not know which kind they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.activation import MlpActivation
from ..kernels.backend import FLOATS
from ..kernels.gated import Activation
from ..kernels.linear import Partials
from .base import Replacement, untouched
from .product import Product, Tuned
from .storage import joined


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


class OwnProduct(Product):
    """Layers that run their own code, concatenated: formats that no kernel of ours reads."""

    @property
    def bypassed(self) -> list[nn.Module]:
        return []

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.layers], dim=-1) if len(self.layers) > 1 else self.layers[0](x)


def product_of(layers: Sequence[Any], tuned: Tuned) -> Product | None:
    """Return how linear layers that read one input are computed; None if one of them is of an unknown kind."""
    if not layers or len({getattr(layer, "in_features", None) for layer in layers}) > 1:
        return None
    if all(is_plain(layer) for layer in layers):
        alike = len({layer.bias is None for layer in layers}) == 1
        return PlainProduct(layers, tuned) if alike else SideBySide([PlainProduct([layer], tuned) for layer in layers])
    from .quantised import quantised_product  # loaded for quantised models only

    if (quantised := quantised_product(layers, tuned)) is not None:
        return quantised
    if len(layers) == 1:
        return OwnProduct(layers) if _is_leaf(layers[0]) else None
    products = [product for layer in layers if (product := product_of([layer], tuned)) is not None]
    return SideBySide(products) if len(products) == len(layers) else None


def is_plain(layer: Any) -> bool:
    """Return whether this is a plain linear layer: not wrapped, quantised or hooked."""
    return (
        type(layer) is nn.Linear
        and untouched(layer)
        and layer.weight.dtype in FLOATS
        and not hasattr(layer.weight, "qdata")  # torchao keeps the class of the layer
    )


def _is_leaf(layer: Any) -> bool:
    """Return whether a module has the sizes of a linear layer and consists of tensors alone: no adapter wraps it."""
    sizes = getattr(layer, "in_features", None), getattr(layer, "out_features", None)
    leaf = isinstance(layer, nn.Module) and untouched(layer) and not any(True for _ in layer.children())
    return leaf and all(isinstance(size, int) for size in sizes)


def tensors_to_join(layers: Sequence[Any]) -> list[list[Any]]:
    """Return the tensors of layers that read one input, group by group, that make them one product when joined."""
    if all(is_plain(layer) for layer in layers):
        names = ("weight",) if layers[0].bias is None else ("weight", "bias")
        alike = len({layer.bias is None for layer in layers}) == 1
        return [[layer.get_parameter(name) for layer in layers] for name in names] if alike else []
    if not all(_is_leaf(layer) for layer in layers):
        return []
    from .quantised import tensors_to_join as quantised_tensors

    return quantised_tensors(layers)


def quantised_layers(modules: Sequence[nn.Module], tuned: Tuned) -> dict[nn.Module, Product]:
    """Return products for the linear layers among these modules that hold quantised weights of known formats."""
    unknown = [module for module in modules if _is_leaf(module) and not is_plain(module)]
    if not unknown:
        return {}
    from .quantised import quantised_product

    return {module: product for module in unknown if (product := quantised_product([module], tuned)) is not None}


class LinearForward(Replacement):
    """Replaces a linear layer; few rows run through our product."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def __call__(self, input: Tensor) -> Tensor:
        return self.product(input)
