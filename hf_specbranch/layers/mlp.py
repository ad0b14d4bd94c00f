"""MLPs through our kernels, with a gate and without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..kernels.activation import MlpActivation, recognise_activation
from ..kernels.gated import Activation
from ..kernels.gated import recognise as recognise_gate
from ..kernels.linear import Partials
from .base import Replacement, submodules
from .norm import Ahead
from .product import Product, Tuned
from .products import product_of

ACTIVATIONS = ("act_fn", "activation_fn", "act")
WITHOUT_GATE = (("c_fc", "c_proj"), ("fc1", "fc2"), ("dense_h_to_4h", "dense_4h_to_h"), ("up_proj", "down_proj"))


class MlpForward(Replacement):
    """Replaces an MLP: down(act(gate(x)) * up(x)) with gate and up as one product, or down(act(up(x))).

    Args:
        inputs: the product that reads the input.
        output: the product that gives the output.
        gate: the activation of the gate, if there is one.
        activation: otherwise.
        ahead: shared by the replacements of the model.
    """

    gives_partials = True

    def __init__(
        self, inputs: Product, output: Product, gate: Activation | None, activation: MlpActivation | None, ahead: Ahead
    ) -> None:
        super().__init__([*inputs.bypassed, *output.bypassed])
        self.inputs, self.output, self.gate, self.activation, self.ahead = inputs, output, gate, activation, ahead

    def __call__(self, x: Tensor) -> Tensor | Partials:
        if (around := self.ahead.around) is not None and self.gate is not None:
            return self.output.added(self.inputs.normed_gated(x, self.gate, around.norm), around.residual)
        product = self.output.split_k if self.ahead.sums_partials else self.output
        if self.gate is not None:
            return product(self.inputs.gated(x, self.gate))
        assert self.activation is not None
        return product(self.inputs.activated(x, self.activation))

    def fuses_around(self, x: Tensor) -> bool:
        return self.gate is not None and self.inputs.fuses(x, "normed-gated") and self.output.fuses(x, "whole")


def recognise_mlp(module: Any, tuned: Tuned, ahead: Ahead) -> MlpForward | None:
    """Return a replacement if this looks like an MLP."""
    layers, last = mlp_inputs(module), mlp_output(module)
    if not layers or last is None:
        return None
    inputs, output = product_of(layers, tuned), product_of([last], tuned)
    if inputs is None or output is None:
        return None
    function = next((getattr(module, name) for name in ACTIVATIONS if hasattr(module, name)), None)
    gate, plain = recognise_gate(function), recognise_activation(function)
    if gate is not None and inputs.out_features == 2 * output.in_features:
        return MlpForward(inputs, output, gate, None, ahead)
    if plain is not None and inputs.out_features == output.in_features:
        return MlpForward(inputs, output, None, plain, ahead)
    return None


def mlp_inputs(module: Any) -> Sequence[Any]:
    """Return the layers that read an MLP's input: gate and up, or one for both or without a gate; or nothing."""
    if submodules(module, ("down_proj",)):
        names = ("gate_up_proj",) if hasattr(module, "gate_up_proj") else ("gate_proj", "up_proj")
        if layers := submodules(module, names):
            return layers
    return next((layers[:1] for names in WITHOUT_GATE if (layers := submodules(module, names))), [])


def mlp_output(module: Any) -> Any:
    """Return the last layer of an MLP; None for other modules."""
    return next((layer for _, name in WITHOUT_GATE for layer in submodules(module, (name,))), None)
