"""Whether a decoder layer runs faster with its norms and sums in the launches of its products: both ways are timed.

Products timed one by one do not tell. In a layer the next kernel loads its weights early if it finds room beside the
programs of this one, and kernels differ in the room that they leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.autotune import gpu_and_versions, name_of, plans, seconds_of_each, unit_norm
from ..kernels.few_rows import MOST_ROWS
from ..kernels.gated import Activation
from ..kernels.linear import Partials, Plan
from ..kernels.norm import Norm, add_norm
from ..kernels.parallel_build import is_dry_run
from .product import Product

FUSED = Plan(splits=1, stages=0)  # stored where a layer is faster with norms and sums in its products
MOST_LAYERS = 24  # that are timed: enough that no cache holds their weights


class FusedProducts(NamedTuple):
    """The products of an attention or an MLP that can be one launch each, with a norm or a sum."""

    inputs: Product
    output: Product
    gate: Activation | None = None


class LayerProducts(NamedTuple):
    """The products of a layer."""

    attention: FusedProducts
    mlp: FusedProducts

    @property
    def names(self) -> str:
        """The names of the products."""
        return ", ".join(product.name for part in self for product in (part.inputs, part.output))


def fused_is_faster(x: Tensor, layer: LayerProducts, find_alike: Callable[[], Sequence[LayerProducts]]) -> bool:
    """Return whether this layer is faster with norms and sums in its products; measured once per shape and GPU.

    Args:
        x: [..., K], few tokens.
        layer: its products.
        find_alike: returns those of all layers of the model; called only if something is measured.
    """
    rows = x.numel() // x.shape[-1]
    alike = next((most for most in (1, 4, MOST_ROWS) if rows <= most), 0)
    if not x.is_cuda or not alike:
        return alike > 0
    names = layer.names
    key = f"{gpu_and_versions(x.device)}|{name_of(x.dtype)} layer|{alike} rows|{names}|fused"
    found, plan = plans.find(key)
    if found or torch.cuda.is_current_stream_capturing():
        return plan is not None
    x = x.new_ones((alike, x.shape[-1]))
    if is_dry_run():
        _products(x, unit_norm(x), layer, FUSED)
        return False
    layers = [each for each in find_alike() if each.names == names]
    seconds = seconds_of_each(_products, (layers or [layer])[:MOST_LAYERS], x, [None, FUSED])
    plan = min(seconds, key=lambda each: seconds[each]) if seconds else None
    plans.store(key, plan)
    return plan is not None


def _products(x: Tensor, norm: Norm, layer: LayerProducts, plan: Plan | None) -> Tensor | Partials:
    """Compute the products of a layer without attention, fused with norms and sums (with a plan) or not."""
    attention, mlp = layer
    assert mlp.gate is not None
    heads = x.new_empty((len(x), attention.output.in_features))
    if plan is not None:
        attention.inputs.normed(x, norm)
        x = attention.output.added(heads, x)
        return mlp.output.added(mlp.inputs.normed_gated(x, mlp.gate, norm), x)
    normed, _ = add_norm(x, x, norm)
    assert normed is not None
    attention.inputs.split_k(normed)
    normed, _ = add_norm(attention.output.split_k(heads), x, norm)
    assert normed is not None
    return mlp.output.split_k(mlp.inputs.gated(normed, mlp.gate))
