"""Replacement forwards: a decoder layer and its modules through the kernels, for modules built like Llama's.

Each replaces a module's own `forward` inside a `fused` context, takes the same arguments and returns the same values.
Whether a module is built that way is not known from its class: `recognise.py` checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from .angles import angles
from .attention_interface import specbranch_attention
from .autotune import Kind, autotune, known_plan
from .gated import Activation, gated, gated_product
from .linear import Partials, Plan, linear, linear_split_k
from .norm import NormForm, rms_norm
from .rotary import HeadNorm, Slots, rotary
from .storage import joined

FIRST_LAYERS = 2  # in the first graph of a captured stage
Weights = dict[tuple[torch.Size, torch.dtype], list[Tensor]]


class Shared:
    """What the replacement forwards of one model share during a pass."""

    def __init__(self) -> None:
        self.find_weights: Callable[[], Weights] = dict  # of the model, by shape, for autotuning
        self.ahead: tuple[Tensor, nn.Module, Tensor] | None = None  # (x, norm, norm(x)) computed with x by one kernel
        self.sums_partials = False  # the next norm of the layer that runs sums split-K partials

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x W^T + bias with the autotuned plan."""
        return linear(x, weight, bias, self._plan(x, weight, "whole"))

    def split_k_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | Partials:
        """Compute x W^T + bias for a kernel that sums split-K partials."""
        return linear_split_k(x, weight, bias, self._plan(x, weight, "split-k"))

    def output_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | Partials:
        """Compute the output product of attention or mlp; partials if the next norm sums them."""
        return self.split_k_product(x, weight, bias) if self.sums_partials else self.product(x, weight, bias)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        """Compute act(gate) * up, where W holds the rows of both."""
        return gated_product(x, weight, bias, activation, self._plan(x, weight, "gated"))

    def _plan(self, x: Tensor, weight: Tensor, kind: Kind) -> Plan | None:
        if not x.is_cuda:
            return None
        rows = x.numel() // x.shape[-1]
        found, plan = known_plan(weight, rows, kind)
        if not found:
            alike = self.find_weights().get((weight.shape, weight.dtype)) or [weight]
            plan = autotune(alike, rows, kind)
        return plan

    def add_norm(self, x: Tensor | Partials, residual: Tensor, norm: Any, form: NormForm) -> tuple[Tensor, Tensor]:
        """Return norm(x + residual) and x + residual."""
        return rms_norm(x, norm.weight, epsilon(norm), residual, form)

    def normed(self, x: Tensor, norm: Any, form: NormForm) -> Tensor:
        """Return norm(x), which the kernel that computed x may have computed too."""
        if self.ahead is not None and self.ahead[0] is x and self.ahead[1] is norm:
            return self.ahead[2]
        return rms_norm(x, norm.weight, epsilon(norm), form=form)[0]


class NormForward:
    """Replaces RMSNorm, or LayerNorm without a bias."""

    def __init__(self, module: nn.Module, shared: Shared, form: NormForm) -> None:
        self.module, self.shared, self.form = module, shared, form

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return self.shared.normed(hidden_states, self.module, self.form)


class AnglesForward:
    """Replaces the module that computes cosines and sines of rotary positions."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return angles(position_ids, self.module.inv_freq, self.module.attention_scaling, x.dtype)


class LinearForward:
    """Replaces a linear layer; few rows run through our product."""

    def __init__(self, module: nn.Linear, shared: Shared) -> None:
        self.module, self.shared = module, shared

    def __call__(self, input: Tensor) -> Tensor:
        return self.shared.product(input, self.module.weight, self.module.bias)


class MlpForward:
    """Replaces an MLP: down(act(gate(x)) * up(x)), gate and up as one product."""

    def __init__(self, module: Any, shared: Shared, activation: Activation) -> None:
        self.module, self.shared, self.activation = module, shared, activation
        self.inputs = mlp_inputs(module)

    def __call__(self, x: Tensor) -> Tensor | Partials:
        down: nn.Linear = self.module.down_proj
        return self.shared.output_product(self._gated(x), down.weight, down.bias)

    def _gated(self, x: Tensor) -> Tensor:
        if (both := as_one(self.inputs)) is not None:
            return self.shared.gated(x, *both, self.activation)
        return gated(concatenated(x, self.inputs, self.shared), self.activation)


class AttentionForward:
    """Replaces self-attention: q, k and v as one product, rotary with the cache write, split attention."""

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
    ) -> tuple[Tensor | Partials, None]:
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
        return self.shared.output_product(out.flatten(2), projection.weight, projection.bias), None

    def _heads(self, hidden_states: Tensor, whole: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, Hq, Q, D], k and v [B, Hkv, Q, D]: views of one product or of its partials [S, B, H, Q, D]."""
        product: Tensor | Partials
        if (every := as_one(self.inputs)) is None:
            product = concatenated(hidden_states, self.inputs, self.shared)
        elif whole:
            product = self.shared.product(hidden_states, *every)
        else:
            product = self.shared.split_k_product(hidden_states, *every)
        splits, terms = ((len(product.terms),), product.terms) if isinstance(product, Partials) else ((), product)
        heads = terms.view(*splits, *hidden_states.shape[:2], -1, self.module.head_dim).transpose(-2, -3)
        query = self.module.o_proj.in_features // self.module.head_dim
        shared = (heads.shape[-3] - query) // 2
        first, second, third = torch.split(heads, [query, shared, shared], dim=-3)
        return first, second, third


class LayerForward:
    """Replaces a decoder layer: x + attention(norm(x)), then x + mlp(norm(x)). The next norm's kernel does each sum.

    Gemma 2 and 3 also normalise the outputs of attention and mlp ("sandwich").
    """

    def __init__(self, module: Any, shared: Shared, form: NormForm, following: nn.Module | None) -> None:
        self.module, self.shared, self.form = module, shared, form
        self.following = following  # the norm that reads this layer's output, of the same form
        self.sandwich = hasattr(module, "pre_feedforward_layernorm")

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        module, shared, form = self.module, self.shared, self.form
        shared.sums_partials = not self.sandwich and is_replaced(module.self_attn, AttentionForward)
        out, *_ = module.self_attn(
            hidden_states=shared.normed(hidden_states, module.input_layernorm, form),
            **dict(zip(("attention_mask", "position_ids", "past_key_values"), args)),
            **kwargs,
        )
        middle = module.post_attention_layernorm
        if self.sandwich:
            out, middle = shared.normed(out, middle, form), module.pre_feedforward_layernorm
        normed, residual = shared.add_norm(out, hidden_states, middle, form)
        shared.sums_partials = not self.sandwich and self.following is not None and is_replaced(module.mlp, MlpForward)
        out = module.mlp(normed)
        shared.sums_partials = False
        if self.sandwich:
            out = shared.normed(out, module.post_feedforward_layernorm, form)
        if self.following is None:
            total = residual + torch.as_tensor(out)
        else:
            normed, total = shared.add_norm(out, residual, self.following, form)
            shared.ahead = total, self.following, normed
        if (splitter := _splitter.get()) is not None:
            splitter.layer_done()
        return total


class _Splitter:
    def __init__(self, split: Callable[[], None]) -> None:
        self.split, self.layers = split, 0

    def layer_done(self) -> None:
        self.layers += 1
        if self.layers == FIRST_LAYERS:
            self.split()


_splitter: ContextVar[_Splitter | None] = ContextVar("splitter", default=None)


@contextmanager
def split_graph(split: Callable[[], None]) -> Iterator[None]:
    """Call `split` once, after the first layers: the stage that is captured continues in a second graph.

    The device starts a graph when the host has launched all of it, and a stage has hundreds of kernels. With a short
    first graph, the device works on it while the host launches the second.
    """
    before = _splitter.set(_Splitter(split))
    try:
        yield
    finally:
        _splitter.reset(before)


class ThreadForward:
    """Takes the place of a module's `forward`: ours in the thread that runs the kernels, the module's own in others."""

    def __init__(self, module: nn.Module, ours: Callable[..., Any]) -> None:
        self.ours, self.own, self.thread = ours, module.forward, get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.ours if get_ident() == self.thread else self.own)(*args, **kwargs)


def is_replaced(module: nn.Module, kind: type) -> bool:
    """Return whether a module runs through a replacement of this kind. If not, it needs whole products."""
    forward = vars(module).get("forward")
    return isinstance(forward, ThreadForward) and isinstance(forward.ours, kind)


def epsilon(norm: Any) -> float:
    """Return the epsilon of a norm, under either of its names."""
    value: float = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return value


def attention_inputs(module: Any) -> Sequence[nn.Linear]:
    """Return the linear layers that read an attention's input: q, k and v, or one for all."""
    if hasattr(module, "qkv_proj"):
        return (module.qkv_proj,)
    return module.q_proj, module.k_proj, module.v_proj


def mlp_inputs(module: Any) -> Sequence[nn.Linear]:
    """Return the linear layers that read an MLP's input: gate and up, or one for both."""
    return (module.gate_up_proj,) if hasattr(module, "gate_up_proj") else (module.gate_proj, module.up_proj)


def as_one(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None] | None:
    """Return weight and bias of several linear layers as one, if they are joined in one storage."""
    weight = joined([layer.weight for layer in layers])
    biases = [layer.bias for layer in layers if layer.bias is not None]
    bias = joined(biases) if biases else None
    return None if weight is None or (bias is None) == bool(biases) else (weight, bias)


def concatenated(x: Tensor, layers: Sequence[nn.Linear], shared: Shared) -> Tensor:
    """Return the outputs of several linear layers, concatenated."""
    return torch.cat([shared.product(x, layer.weight, layer.bias) for layer in layers], dim=-1)


def slots_of(cache: Any, layer: int) -> Slots | None:
    """Return where a slot cache takes the next keys and values; None for other caches, and during prefill."""
    layers = getattr(cache, "layers", ())
    if layer >= len(layers) or (address := getattr(layers[layer], "address", None)) is None:
        return None
    held = layers[layer]
    if address.slots is None or not held.is_initialized:
        return None
    return Slots(held.keys, held.values, address.slots_on(held.keys.device))
