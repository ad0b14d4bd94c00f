"""Gated MLPs through our kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..kernels.gated import Activation
from ..kernels.gated import recognise as recognise_activation
from ..kernels.linear import Partials
from .base import Replacement, submodules
from .norm import Ahead
from .product import Product, Tuned
from .products import product_of


class MlpForward(Replacement):
    """Replaces an MLP: down(act(gate(x)) * up(x)), gate and up as one product."""

    gives_partials = True

    def __init__(self, inputs: Product, output: Product, activation: Activation, ahead: Ahead) -> None:
        super().__init__([*inputs.bypassed, *output.bypassed])
        self.inputs, self.output, self.activation, self.ahead = inputs, output, activation, ahead

    def __call__(self, x: Tensor) -> Tensor | Partials:
        product = self.output.split_k if self.ahead.sums_partials else self.output
        return product(self.inputs.gated(x, self.activation))


def recognise_mlp(module: Any, tuned: Tuned, ahead: Ahead) -> MlpForward | None:
    """Return a replacement if this looks like a gated MLP."""
    if not (layers := mlp_inputs(module)):
        return None
    inputs, output = product_of(layers, tuned), product_of([module.down_proj], tuned)
    activation = recognise_activation(getattr(module, "act_fn", None) or getattr(module, "activation_fn", None))
    if inputs is None or output is None or activation is None or inputs.out_features != 2 * output.in_features:
        return None
    return MlpForward(inputs, output, activation, ahead)


def mlp_inputs(module: Any) -> Sequence[Any]:
    """Return the layers that read a gated MLP's input: gate and up, or one for both; nothing for other modules."""
    names = ("gate_up_proj",) if hasattr(module, "gate_up_proj") else ("gate_proj", "up_proj")
    return submodules(module, names) if submodules(module, ("down_proj",)) else []
