"""Self-attention through our kernels: q, k and v as one product, rotary with the cache write, split attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.attention_interface import specbranch_attention
from ..kernels.linear import Partials
from ..kernels.norm import NormForm
from ..kernels.rotary import HeadNorm, Slots, rotary
from .base import Arguments, Replacement, submodules
from .norm import Ahead, epsilon, looks_like_norm, shared_form
from .product import Product, Tuned
from .products import product_of


class AttentionForward(Replacement):
    """Replaces self-attention.

    Args:
        module: the attention.
        inputs: the product that gives q, k and v.
        output: the product that reads the heads.
        ahead: shared by the replacements of the model.
        form: of the norms of heads, where there are any.
        uncapped: the model's own attention ignores soft caps and sinks.
        halved: cosines and sines are given once, not for each half of a head.
    """

    gives_partials = True

    def __init__(
        self,
        module: Any,
        inputs: Product,
        output: Product,
        ahead: Ahead,
        form: NormForm,
        uncapped: bool,
        halved: bool = False,
    ) -> None:
        norms = head_norms(module)
        super().__init__([*inputs.bypassed, *output.bypassed, *norms])
        self.module, self.inputs, self.output, self.ahead = module, inputs, output, ahead
        self.halved = halved
        self.norm: HeadNorm | None = None
        if norms:
            self.norm = HeadNorm(module.q_norm.weight, module.k_norm.weight, epsilon(module.q_norm), form)
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
            query, _ = rotary(query, key, value, cos, sin, self.norm, slots, self.halved)
            shown = past_key_values.layers[layer].address.shown
            key, value = slots.keys[:, :, :shown], slots.values[:, :, :shown]
        else:
            query, turned = rotary(query, key, None, cos, sin, self.norm, halved=self.halved)
            assert turned is not None
            key = turned
            if past_key_values is not None:
                key, value = past_key_values.update(key, value, layer)
        out, _ = specbranch_attention(
            self.module, query, key, value, attention_mask, self.module.scaling, softcap=self.softcap, s_aux=self.sinks
        )
        product = self.output.split_k if self.ahead.sums_partials else self.output
        return product(out.flatten(2)), None

    def _heads(self, hidden_states: Tensor, whole: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, Hq, Q, D], k and v [B, Hkv, Q, D]: views of one product or of its partials [S, B, H, Q, D]."""
        product = self.inputs(hidden_states) if whole else self.inputs.split_k(hidden_states)
        splits, terms = ((len(product.terms),), product.terms) if isinstance(product, Partials) else ((), product)
        heads = terms.view(*splits, *hidden_states.shape[:2], -1, self.module.head_dim).transpose(-2, -3)
        query = self.output.in_features // self.module.head_dim
        shared = (heads.shape[-3] - query) // 2
        first, second, third = torch.split(heads, [query, shared, shared], dim=-3)
        return first, second, third

    def telling_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Make attention sharp: where all tokens get nearly the same weight, positions make no difference."""
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": self._sharp(kwargs["hidden_states"])}
        return (self._sharp(args[0]), *args[1:]), kwargs

    def _sharp(self, hidden_states: Tensor) -> Tensor:
        """Scale up until the scores differ by about 1."""
        products = [layer(hidden_states).float().pow(2).mean().sqrt() for layer in self.inputs.layers]
        spread = products[0] * products[min(1, len(products) - 1)] * self.module.head_dim**0.5 * self.module.scaling
        factor: Tensor = spread.clamp(1e-4, 1).rsqrt()
        return (hidden_states.float() * factor).to(hidden_states.dtype)


def recognise_attention(
    module: Any, tuned: Tuned, ahead: Ahead, forms: dict[nn.Module, NormForm], uncapped: bool, halved: bool
) -> AttentionForward | None:
    """Return a replacement if this looks like self-attention, with at most norms of the heads of q and k."""
    if not (layers := attention_inputs(module)):
        return None
    inputs, output = product_of(layers, tuned), product_of([module.o_proj], tuned)
    form = shared_form(forms, head_norms(module))
    if inputs is None or output is None or form is None:
        return None
    shared = inputs.out_features - output.in_features
    if output.in_features % module.head_dim or shared <= 0 or shared % (2 * module.head_dim):
        return None
    if any(norm.weight.shape != (module.head_dim,) for norm in head_norms(module)):
        return None
    return AttentionForward(module, inputs, output, ahead, form, uncapped, halved)


def attention_inputs(module: Any) -> Sequence[Any]:
    """Return the layers that read an attention's input: q, k and v, or one for all; nothing for other modules."""
    names = ("qkv_proj",) if hasattr(module, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
    wanted = all(hasattr(module, name) for name in ("head_dim", "scaling", "layer_idx"))
    return submodules(module, names) if wanted and submodules(module, ("o_proj",)) and _norms_fit(module) else []


def head_norms(module: Any) -> list[Any]:
    """Return the norms of the heads of q and k; nothing where there are none."""
    return [norm for norm in (getattr(module, name, None) for name in ("q_norm", "k_norm")) if norm is not None]


def _norms_fit(module: Any) -> bool:
    norms = head_norms(module)
    return len(norms) in (0, 2) and all(looks_like_norm(norm) for norm in norms)


def slots_of(cache: Any, layer: int) -> Slots | None:
    """Return where a slot cache takes the next keys and values; None for other caches, and during prefill."""
    layers = getattr(cache, "layers", ())
    if layer >= len(layers) or (address := getattr(layers[layer], "address", None)) is None:
        return None
    held = layers[layer]
    if address.slots is None or not held.is_initialized:
        return None
    return Slots(held.keys, held.values, address.slots_on(held.keys.device))
