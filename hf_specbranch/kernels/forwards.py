"""Forwards of a decoder layer and its parts through the kernels, for modules built like Llama's.

Each stands in for a module's own `forward` while a `fused` context lasts, takes the same arguments and returns the
same values. Whether a module is built that way is not known from its class: `recognise.py` tries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .angles import angles
from .autotune import Kind, choose
from .gated import Activation, gated, gated_product
from .graph_split import layer_done
from .interface import specbranch_attention
from .linear import Parts, Plan, linear, linear_in_parts
from .norm import NormForm, rms_norm
from .rotary import HeadNorm, Slots, rotary
from .storage import joined


class Shared:
    """What the modules of one model know of each other during a pass."""

    def __init__(self) -> None:
        self.weights: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}  # by shape, for measuring
        self.ahead: tuple[Tensor, nn.Module, Tensor] | None = None  # (sum, norm, its output) computed with the sum
        self.adds_parts = False  # a layer is at work whose norms add up the products they read

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias in the fastest known way."""
        return linear(x, weight, bias, self._plan(x, weight, "whole"))

    def parts(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | Parts:
        """The same for a kernel that can add parts."""
        return linear_in_parts(x, weight, bias, self._plan(x, weight, "in parts"))

    def last_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | Parts:
        """The same for whoever reads a layer's attention or mlp."""
        return self.parts(x, weight, bias) if self.adds_parts else self.product(x, weight, bias)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        """act(gate) * up, where W is both."""
        return gated_product(x, weight, bias, activation, self._plan(x, weight, "gated"))

    def _plan(self, x: Tensor, weight: Tensor, kind: Kind) -> Plan | None:
        alike = self.weights.get((weight.shape, weight.dtype)) or [weight]
        return choose(alike, x.numel() // x.shape[-1], kind) if x.is_cuda else None

    def add_norm(self, x: Tensor | Parts, residual: Tensor, norm: Any, form: NormForm) -> tuple[Tensor, Tensor]:
        """norm(x + residual) and x + residual."""
        return rms_norm(x, norm.weight, epsilon(norm), residual, form)

    def normed(self, x: Tensor, norm: Any, form: NormForm) -> Tensor:
        """norm(x), taken from the kernel that made x if that computed it."""
        if self.ahead is not None and self.ahead[0] is x and self.ahead[1] is norm:
            return self.ahead[2]
        return rms_norm(x, norm.weight, epsilon(norm), form=form)[0]


class NormForward:
    """RMSNorm, or LayerNorm without a bias."""

    def __init__(self, module: nn.Module, shared: Shared, form: NormForm) -> None:
        self.module, self.shared, self.form = module, shared, form

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return self.shared.normed(hidden_states, self.module, self.form)


class AnglesForward:
    """Cosines and sines of rotary positions."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return angles(position_ids, self.module.inv_freq, self.module.attention_scaling, x.dtype)


class LinearForward:
    """A product with few rows."""

    def __init__(self, module: nn.Linear, shared: Shared) -> None:
        self.module, self.shared = module, shared

    def __call__(self, input: Tensor) -> Tensor:
        return self.shared.product(input, self.module.weight, self.module.bias)


class MlpForward:
    """down(act(gate(x)) * up(x)), gate and up as one product."""

    def __init__(self, module: Any, shared: Shared, activation: Activation) -> None:
        self.module, self.shared, self.activation = module, shared, activation
        self.inputs = mlp_inputs(module)

    def __call__(self, x: Tensor) -> Tensor | Parts:
        down: nn.Linear = self.module.down_proj
        return self.shared.last_product(self._gated(x), down.weight, down.bias)

    def _gated(self, x: Tensor) -> Tensor:
        if (both := as_one(self.inputs)) is not None:
            return self.shared.gated(x, *both, self.activation)
        return gated(beside_each_other(x, self.inputs, self.shared), self.activation)


class AttentionForward:
    """Self-attention: q, k and v as one product, rotary with the write to the cache, split attention."""

    def __init__(self, module: Any, shared: Shared, form: NormForm, uncapped: bool) -> None:
        self.module, self.shared = module, shared
        self.inputs = attention_inputs(module)
        self.norm: HeadNorm | None = None
        if (norm := getattr(module, "q_norm", None)) is not None:
            self.norm = HeadNorm(norm.weight, module.k_norm.weight, epsilon(norm), form)
        self.softcap = None if uncapped else getattr(module, "attn_logit_softcapping", None)
        self.sinks = None if uncapped else getattr(module, "sinks", None)

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor | Parts, None]:
        cos, sin = position_embeddings
        layer = self.module.layer_idx
        slots = slots_of(past_key_values, layer)
        query, key, value = self._heads(hidden_states, whole=slots is None)
        if slots is not None:
            query, _ = rotary(query, key, value, cos, sin, self.norm, slots)
            shown = past_key_values.layers[layer].address.shown
            key, value = slots.keys[:, :, :shown], slots.values[:, :, :shown]
        else:
            query, turned = rotary(query, key, None, cos, sin, self.norm)
            assert turned is not None
            key = turned
            if past_key_values is not None:
                key, value = past_key_values.update(key, value, layer)
        out, _ = specbranch_attention(
            self.module, query, key, value, attention_mask, self.module.scaling, softcap=self.softcap, s_aux=self.sinks
        )
        projection = self.module.o_proj
        return self.shared.last_product(out.flatten(2), projection.weight, projection.bias), None

    def _heads(self, hidden_states: Tensor, whole: bool) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, Hq, Q, D], k and v [B, Hkv, Q, D]: views of one product, or of its parts, [S, B, H, Q, D]."""
        product: Tensor | Parts
        if (every := as_one(self.inputs)) is None:
            product = beside_each_other(hidden_states, self.inputs, self.shared)
        elif whole:
            product = self.shared.product(hidden_states, *every)
        else:
            product = self.shared.parts(hidden_states, *every)
        splits, terms = ((len(product.terms),), product.terms) if isinstance(product, Parts) else ((), product)
        heads = terms.view(*splits, *hidden_states.shape[:2], -1, self.module.head_dim).transpose(-2, -3)
        query = self.module.o_proj.in_features // self.module.head_dim
        shared = (heads.shape[-3] - query) // 2
        first, second, third = torch.split(heads, [query, shared, shared], dim=-3)
        return first, second, third


class LayerForward:
    """A decoder layer: x + attention(norm(x)), then x + mlp(norm(x)); each sum is made by the kernel of the next norm.

    Gemma's later layers also normalise what attention and mlp return.
    """

    def __init__(self, module: Any, shared: Shared, form: NormForm, following: nn.Module | None) -> None:
        self.module, self.shared, self.form = module, shared, form
        self.following = following  # the norm that reads this layer's output, of the same form
        self.sandwich = hasattr(module, "pre_feedforward_layernorm")

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        module, shared, form = self.module, self.shared, self.form
        shared.adds_parts = not self.sandwich and stands_in(module.self_attn, AttentionForward)
        out, *_ = module.self_attn(
            hidden_states=shared.normed(hidden_states, module.input_layernorm, form),
            **dict(zip(("attention_mask", "position_ids", "past_key_values"), args)),
            **kwargs,
        )
        middle = module.post_attention_layernorm
        if self.sandwich:
            out, middle = shared.normed(out, middle, form), module.pre_feedforward_layernorm
        normed, residual = shared.add_norm(out, hidden_states, middle, form)
        shared.adds_parts = not self.sandwich and self.following is not None and stands_in(module.mlp, MlpForward)
        out = module.mlp(normed)
        shared.adds_parts = False
        if self.sandwich:
            out = shared.normed(out, module.post_feedforward_layernorm, form)
        if self.following is None:
            total = residual + torch.as_tensor(out)
        else:
            normed, total = shared.add_norm(out, residual, self.following, form)
            shared.ahead = total, self.following, normed
        layer_done()
        return total


def stands_in(module: nn.Module, kind: type) -> bool:
    """Whether a module runs through one of these now. If not, parts of it may, and must give it whole products."""
    return isinstance(vars(module).get("forward"), kind)


def epsilon(norm: Any) -> float:
    """The epsilon of an RMSNorm, under either of its names."""
    value: float = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return value


def attention_inputs(module: Any) -> Sequence[nn.Linear]:
    """The products that read an attention's input: q, k and v, or one for all."""
    if hasattr(module, "qkv_proj"):
        return (module.qkv_proj,)
    return module.q_proj, module.k_proj, module.v_proj


def mlp_inputs(module: Any) -> Sequence[nn.Linear]:
    """The products that read an MLP's input: gate and up, or one for both."""
    return (module.gate_up_proj,) if hasattr(module, "gate_up_proj") else (module.gate_proj, module.up_proj)


def as_one(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of several linear layers in one, if they are joined."""
    weight = joined([layer.weight for layer in layers])
    biases = [layer.bias for layer in layers if layer.bias is not None]
    bias = joined(biases) if biases else None
    return None if weight is None or (bias is None) == bool(biases) else (weight, bias)


def beside_each_other(x: Tensor, layers: Sequence[nn.Linear], shared: Shared) -> Tensor:
    """What several linear layers make of x."""
    return torch.cat([shared.product(x, layer.weight, layer.bias) for layer in layers], dim=-1)


def slots_of(cache: Any, layer: int) -> Slots | None:
    """Where a slot cache wants the next keys and values; None for any other cache, and while a prompt is read."""
    layers = getattr(cache, "layers", ())
    if layer >= len(layers) or (address := getattr(layers[layer], "address", None)) is None:
        return None
    held = layers[layer]
    if address.slots is None or not held.is_initialized:
        return None
    return Slots(held.keys, held.values, address.slots_on(held.keys.device))
