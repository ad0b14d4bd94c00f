"""The product of linear layers with quantised weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from ..kernels.autotune import Kind, autotune_quantised, faster_dequantised
from ..kernels.backend import HALF_PRECISION, serves
from ..kernels.dequantise import fits as can_dequantise
from ..kernels.dequantise import product_of_many_rows
from ..kernels.few_rows import MOST_ROWS as FEW_ROWS
from ..kernels.few_rows import few_rows, few_rows_plans, fits
from ..kernels.gated import Activation
from ..kernels.gemv import GEMV_PLANS
from ..kernels.linear import BLOCK, MOST_ROWS, Partials, Plan
from ..kernels.norm import Norm, normalise
from ..kernels.packed import WORD, Packed
from ..kernels.quantised import QUANTISED_PLANS, quantised_gated, quantised_linear
from ..kernels.tile_plans import WIDEST, suits
from .product import FewRows, Product, Tuned
from .quantised_formats import Format, possible_formats, recognise_format
from .storage import joined


class Operands(NamedTuple):
    """The weights of several layers and their biases; one of each where the layers are joined in one storage."""

    weights: list[Packed]
    biases: list[Tensor | None]

    def product(self, x: Tensor, plan: Plan, norm: Norm | None = None) -> Tensor | Partials:
        """Compute x W^T + bias of all layers, of norm(x) if it is given."""
        if len(self.weights) == 1 and fits(x, self.weights[0], self.biases[0], plan):
            return few_rows(x, self.weights[0], self.biases[0], plan, norm=norm)
        x = x if norm is None else normalise(x, norm)
        return quantised_linear(x, self.weights, self.biases, with_tensor_cores(plan))

    def of_many_rows(self, x: Tensor) -> Tensor:
        """Compute x W^T + bias of all layers, one weight dequantised after the other."""
        products = [product_of_many_rows(x, weight, bias) for weight, bias in zip(self.weights, self.biases)]
        return torch.cat(products, -1) if len(products) > 1 else products[0]

    def gated(self, x: Tensor, activation: Activation, plan: Plan, norm: Norm | None = None) -> Tensor:
        """Compute act(gate) * up of layers that are one product, of norm(x) if it is given."""
        (weight,), (bias,) = self
        if fits(x, weight, bias, plan):
            return few_rows(x, weight, bias, plan, activation, norm)
        x = x if norm is None else normalise(x, norm)
        return quantised_gated(x, weight, bias, activation, with_tensor_cores(plan))


def with_tensor_cores(plan: Plan) -> Plan:
    """Return the plan, or another one if it is for products of few rows, which do not take these operands."""
    return plan if plan.warps == 0 else QUANTISED_PLANS[0]


def candidate_plans(x: Tensor, products: Sequence[Operands], kind: Kind) -> list[Plan]:
    """Return the plans that may be the fastest for products of x [rows, K] with operands of one shape and format."""
    plans = [plan for plan in QUANTISED_PLANS if x.shape[1] // BLOCK >= plan.splits]
    plans = [plan for plan in plans if plan.splits == 1 or kind in ("split-k", "normed")]
    if any(len(operands.weights) > 1 for operands in products):
        return [] if kind in ("gated", "normed-gated") else plans
    operands = [(each.weights[0], each.biases[0]) for each in products]
    of_few = [plan for plan in few_rows_plans(x, *operands[0]) if all(fits(x, *each, plan) for each in operands)]
    return [*plans, *(plan for plan in of_few if suits(plan, kind))]


class QuantisedProduct(Product):
    """The product of linear layers with quantised weights.

    Few rows in half precision run through the kernels. For more rows the weights are dequantised where that is faster
    than the layers' own forward. Float32 is left to the layers themselves, unless they are our own (`PackedLinear`).

    Args:
        layers: the linear layers.
        formats: of each.
        tuned: the plans of the model's products.
    """

    def __init__(self, layers: Sequence[Any], formats: Sequence[Format], tuned: Tuned) -> None:
        super().__init__(layers)
        self.formats = formats
        operands = self._operands()
        weights = [] if operands is None else operands.weights
        self.name = "+".join(dict.fromkeys(weight.name for weight in weights))
        self.alike = tuned.quantised.setdefault((self.name, self.in_features, self.out_features), [])
        self.alike.append(self)

    def __call__(self, x: Tensor) -> Tensor:
        product = self._product(x, "whole")
        assert not isinstance(product, Partials)
        return product

    def split_k(self, x: Tensor) -> Tensor | Partials:
        return self._product(x, "split-k")

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        operands = self._operands() if _takes(x) else None
        if operands is None or len(operands.weights) > 1 or (plan := self._plan(x, "gated")) is None:
            return super().gated(x, activation)
        return operands.gated(x, activation, plan)

    def fuses(self, x: Tensor, kind: Kind) -> bool:
        if x.dtype not in HALF_PRECISION or not 0 < x.numel() <= FEW_ROWS * x.shape[-1]:
            return False
        plan = self._plan(x, kind)
        return plan is not None and plan.warps > 0

    def few_rows(self, x: Tensor, kind: Kind) -> FewRows | None:
        operands, plan = self._operands(), self._plan(x, kind)
        if operands is None or plan is None or len(operands.weights) > 1:
            return None
        (weight,), (bias,) = operands
        return FewRows(weight, bias, plan) if fits(x, weight, bias, plan) else None

    def _product(self, x: Tensor, kind: Kind) -> Tensor | Partials:
        operands = self._operands() if _takes(x) else None
        if operands is not None and (plan := self._plan(x, kind)) is not None:
            return operands.product(x, plan)
        operands = self._to_dequantise(x)
        return self._own(x) if operands is None else operands.of_many_rows(x)

    def _own(self, x: Tensor) -> Tensor:
        """Compute the product by the layers' own forwards; the attribute `forward` of a layer may be this product."""
        own = [type(layer).forward(layer, x) for layer in self.layers]
        return torch.cat(own, -1) if len(own) > 1 else own[0]

    def _to_dequantise(self, x: Tensor) -> Operands | None:
        """Return the operands of a product over many rows, if to dequantise them is the fastest way."""
        if not serves(x.device) or x.numel() == 0 or (operands := self._operands()) is None:
            return None
        if not all(can_dequantise(weight, x.dtype) for weight in operands.weights):
            return None
        if all(getattr(layer, "dequantises", False) for layer in self.layers):
            return operands
        if not x.is_cuda or x.dtype not in HALF_PRECISION:
            return None
        flat = x.reshape(-1, x.shape[-1])
        faster = faster_dequantised(operands.of_many_rows, self._own, flat, self.name, self.out_features)
        return operands if faster else None

    def _operands(self) -> Operands | None:
        """Return weights and biases as they are now: tensors may have been replaced since the last pass."""
        weights = [weight for read, layer in zip(self.formats, self.layers) if (weight := read(layer)) is not None]
        if len(weights) < len(self.layers):
            return None
        biases = [getattr(layer, "bias", None) for layer in self.layers]
        given = [bias for bias in biases if bias is not None]
        bias = joined(given) if given else None
        if len(weights) > 1 and (bias is None) == (not given) and len(given) in (0, len(biases)):
            if (one := _as_one(weights)) is not None:
                return Operands([one], [bias])
        return Operands(weights, biases)

    def _plan(self, x: Tensor, kind: Kind) -> Plan | None:
        if not x.is_cuda:
            return None

        shape = self.out_features, self.in_features
        normed, narrow = kind in ("normed", "normed-gated"), min(shape) <= WIDEST

        def product(x: Tensor, norm: Norm, operands: Operands, plan: Plan | None) -> Tensor | Partials:
            """Compute what is measured: in a narrow layer between a small kernel and a large one.

            A program of the next kernel can load its weights early if it finds room beside those of this one, and
            tiles, which narrow layers can choose, differ in the room that they leave.
            """
            assert plan is not None
            if narrow or not normed:
                x = normalise(x, norm)
            fused = norm if normed else None
            if kind in ("gated", "normed-gated"):
                result: Tensor | Partials = operands.gated(x, "silu", plan, fused)
            else:
                result = operands.product(x, plan, fused)
            if narrow:
                operands.product(x, GEMV_PLANS[0])
            return result

        return autotune_quantised(product, self._operands_alike, candidate_plans, x, self.name, shape, kind)

    def _operands_alike(self) -> list[Operands]:
        return [operands for each in self.alike if (operands := each._operands()) is not None]


def quantised_product(layers: Sequence[Any], tuned: Tuned) -> QuantisedProduct | None:
    """Return the product of layers that all hold quantised weights of known formats, or None."""
    formats = [recognise_format(layer) for layer in layers]
    known = [each for each in formats if each is not None]
    return QuantisedProduct(layers, known, tuned) if len(known) == len(formats) else None


def tensors_to_join(layers: Sequence[Any]) -> list[list[Tensor]]:
    """Return the tensors of quantised layers that may be joined, so that the layers are one product.

    All tensors must have the rows of the weight first: GPTQ's have them last.
    """
    names = ("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point", "bias")
    weights = [possible[0](layer) for layer in layers if (possible := possible_formats(layer))]
    packed = [weight for weight in weights if weight is not None]
    if len(packed) < len(layers) or not _alike(packed) or any(weight.data.stride(1) != 1 for weight in packed):
        return []
    given = [[getattr(layer, name, None) for layer in layers] for name in names]
    held = [group for group in given if any(tensor is not None for tensor in group)]
    groups = [[tensor for tensor in group if _is_plain_tensor(tensor)] for group in held]
    return groups if all(len(group) == len(layers) for group in groups) else []


def _is_plain_tensor(tensor: Any) -> TypeGuard[Tensor]:
    return type(tensor) in (Tensor, nn.Parameter)


def _as_one(weights: Sequence[Packed]) -> Packed | None:
    """Return the one weight that several fill together, if all their tensors are joined."""
    if not _alike(weights):
        return None
    first = weights[0]
    data, scale = joined([weight.data for weight in weights]), joined([weight.scale for weight in weights])
    zeros = [weight.zero for weight in weights if weight.zero is not None]
    zero = joined(zeros) if zeros else None
    if data is None or scale is None or (zero is None) == bool(zeros):
        return None
    return first._replace(data=data, scale=scale, zero=zero)


def _alike(weights: Sequence[Packed]) -> bool:
    """Return whether weights differ in nothing but their rows, which are whole blocks of scales and zero points."""
    first = weights[0]
    return len({(weight.name, weight.zero_offset, weight.high_first) for weight in weights}) == 1 and all(
        weight.table is None and weight.shape[0] % max(WORD, first.scale_rows) == 0 for weight in weights
    )


def _takes(x: Tensor) -> bool:
    return x.dtype in HALF_PRECISION and 0 < x.numel() <= MOST_ROWS * x.shape[-1]
