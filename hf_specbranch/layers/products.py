"""Products of a pass with few tokens: linear layers that read one input, as one product where that is possible.

A `Product` says how a kind of linear layer is computed. Attention and MLP do not know which kind they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.activation import MlpActivation
from ..kernels.autotune import Kind
from ..kernels.backend import FLOATS
from ..kernels.few_rows import fits
from ..kernels.gated import Activation
from ..kernels.linear import Partials, Plan
from ..kernels.lora import USUAL_PLAN, lora_fits, lora_gated_product, lora_product
from ..kernels.low_rank import LowRank
from ..kernels.packed import dense
from .base import Replacement, untouched
from .lora import Term, add_terms, base_of, is_wrapped, low_rank, terms_of
from .product import FewRows, Product, Tuned
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

    def fuses(self, x: Tensor, kind: Kind) -> bool:
        return self.few_rows(x, kind) is not None

    def few_rows(self, x: Tensor, kind: Kind) -> FewRows | None:
        if (one := self._as_one()) is None or (plan := self.tuned.fused(x, one[0], kind)) is None:
            return None
        weight, bias = dense(one[0]), one[1]
        return FewRows(weight, bias, plan) if fits(x, weight, bias, plan) else None

    def _as_one(self) -> tuple[Tensor, Tensor | None] | None:
        """Return weight and bias of all layers, if they are joined. They may have been replaced since the last pass."""
        weight = joined([layer.weight for layer in self.layers])
        biases = [layer.bias for layer in self.layers if layer.bias is not None]
        bias = joined(biases) if biases else None
        return None if weight is None or (bias is None) == bool(biases) else (weight, bias)


class LoraProduct(Product):
    """The product of linear layers, some or all of them with LoRA adapters around them.

    Which adapters are active may change from pass to pass. The kernels take one adapter per layer; torch adds others.

    Args:
        layers: the layers, with adapters.
        base: the product of the layers without adapters.
        tuned: finds plans.
    """

    def __init__(self, layers: Sequence[Any], base: Product, tuned: Tuned) -> None:
        super().__init__(layers)
        self.base, self.tuned = base, tuned
        self.sizes = [int(layer.out_features) for layer in layers]

    @property
    def bypassed(self) -> list[nn.Module]:
        inner = {module for layer in self.base.layers for module in layer.modules()}
        return [*self.base.bypassed, *(module for module in super().bypassed if module not in inner)]

    def __call__(self, x: Tensor) -> Tensor:
        if (terms := self._terms()) is None:
            return torch.cat([layer(x) for layer in self.layers], dim=-1)
        if not any(terms):
            return self.base(x)
        if (found := self._for_kernel(x, terms, "whole")) is None:
            return add_terms(self.base(x), x, terms, self.sizes)
        product = lora_product(x, *found)
        assert not isinstance(product, Partials)
        return product

    def split_k(self, x: Tensor) -> Tensor | Partials:
        if (terms := self._terms()) is None or not any(terms):
            return self(x) if terms is None else self.base.split_k(x)
        found = self._for_kernel(x, terms, "split-k")
        return self(x) if found is None else lora_product(x, *found)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        if (terms := self._terms()) is None or not any(terms):
            return super().gated(x, activation) if terms is None else self.base.gated(x, activation)
        found = self._for_kernel(x, terms, "gated")
        return super().gated(x, activation) if found is None else lora_gated_product(x, *found, activation)

    def _terms(self) -> list[list[Term]] | None:
        """Return what adapters add to each layer now; None where only their own code will do."""
        terms = [found for layer in self.layers if (found := terms_of(layer)) is not None]
        return terms if len(terms) == len(self.layers) else None

    def _for_kernel(
        self, x: Tensor, terms: list[list[Term]], kind: Kind
    ) -> tuple[Tensor, Tensor | None, LowRank, Plan] | None:
        """Return weight, bias, adapters and plan, if the kernels can compute this product."""
        one = self.base._as_one() if isinstance(self.base, PlainProduct) else None
        adapters = low_rank(terms, self.sizes)
        if one is None or adapters is None or not lora_fits(x, *one, adapters, USUAL_PLAN):
            return None
        plan = self.tuned.plan(x, one[0], kind) or USUAL_PLAN
        return (*one, adapters, plan) if lora_fits(x, *one, adapters, plan) else None


class SideBySide(Product):
    """Products of different kinds that read one input, concatenated."""

    def __init__(self, products: Sequence[Product]) -> None:
        super().__init__([layer for product in products for layer in product.layers])
        self.products = products

    @property
    def bypassed(self) -> list[nn.Module]:
        return [module for product in self.products for module in product.bypassed]

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
    bases = [base_of(layer) for layer in layers]
    if any(base is not layer for base, layer in zip(bases, layers)):
        base = product_of(bases, tuned)
        return None if base is None else LoraProduct(layers, base, tuned)
    from .quantised import quantised_product  # loaded for quantised models only

    if (quantised := quantised_product(layers, tuned)) is not None:
        return quantised
    if len(layers) == 1:
        return OwnProduct(layers) if _is_leaf(layers[0]) or is_wrapped(layers[0]) else None
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
