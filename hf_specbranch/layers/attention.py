"""Self-attention through our kernels: q, k and v as one product, rotary with the cache write, split attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.attention import finishes_norms
from ..kernels.attention_interface import attend_by_spans, specbranch_attention
from ..kernels.combine import Reader, SplitHeads
from ..kernels.gemv_rotary import Queries, Turn
from ..kernels.linear import Partials
from ..kernels.norm import Norm, NormForm
from ..kernels.rotary import HeadNorm, Slots, rotary
from ..kernels.rotation import HALVES, ROTATIONS, Rotation
from ..kernels.spans import SPANS
from ..kernels.width_norm import norm_widths
from .base import Arguments, Replacement, submodules
from .norm import Ahead, looks_like_norm, parameters_of, shared_form
from .product import Product, Tuned
from .products import product_of

OUTPUT_NAMES = ("o_proj", "dense")
INPUT_NAMES = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("query_key_value",))


class AttentionForm(NamedTuple):
    """What cannot be seen from the submodules of an attention."""

    rotation: Rotation | None = HALVES
    by_head: bool = False  # a joint projection holds q, k and v of the first head, then of the next; otherwise all q


class AttentionForward(Replacement):
    """Replaces self-attention.

    Args:
        module: the attention.
        inputs: the product that gives q, k and v.
        output: the product that reads the heads.
        ahead: shared by the replacements of the model.
        form: the variant.
        norms: of q and k, where there are any: of each head, or of the whole width.
        uncapped: the model's own attention ignores soft caps and sinks.
    """

    gives_partials = True

    def __init__(
        self,
        module: Any,
        inputs: Product,
        output: Product,
        ahead: Ahead,
        form: AttentionForm,
        norms: list[Norm],
        uncapped: bool,
    ) -> None:
        super().__init__([*inputs.bypassed, *output.bypassed, *head_norms(module)])
        self.module, self.inputs, self.output, self.ahead, self.form = module, inputs, output, ahead, form
        self.size = head_size(module)
        of_heads = len(norms) == 2 and all(norm.weight.shape == (self.size,) for norm in norms)
        self.norm = HeadNorm(norms[0].weight, norms[1].weight, norms[0].eps, norms[0].form) if of_heads else None
        self.width_norms = [] if of_heads else norms
        self.softcap = None if uncapped else getattr(module, "attn_logit_softcapping", None)
        self.sinks = None if uncapped else getattr(module, "sinks", None)

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        layer_past: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor | Partials, None]:
        cos, sin = position_embeddings
        layer, dtype = self.module.layer_idx, hidden_states.dtype
        cache = past_key_values if layer_past is None else layer_past
        slots, pending = slots_of(cache, layer), None
        by_spans = attention_mask is not None and attention_mask.dtype == SPANS
        if slots is not None:
            query, pending = self._write_to_cache(hidden_states, cos, sin, slots, by_spans)
            shown = cache.layers[layer].address.shown
            key, value = slots.keys[:, :, :shown], slots.values[:, :, :shown]
        else:
            query, key, value = self._heads(hidden_states, whole=True)
            query, turned = rotary(query, key, None, cos, sin, self.norm, None, self.form.rotation, dtype)
            assert turned is not None
            key = turned
            if cache is not None:
                key, value = cache.update(key, value, layer)
        if (around := self.ahead.around) is not None:
            reader = self.output.as_reader(hidden_states)
            heads = self._heads_to_add(Queries(query, pending), key, value, attention_mask, reader)
            return self.output.added(heads, around.residual), None
        out = self._attend(query, key, value, attention_mask)
        product = self.output.split_k if self.ahead.sums_partials else self.output
        return product(out.flatten(2)), None

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return the heads [B, Q, Hq, D]."""
        scaling, softcap, sinks = self.module.scaling, self.softcap, self.sinks
        out, _ = specbranch_attention(self.module, query, key, value, mask, scaling, softcap=softcap, s_aux=sinks)
        return out

    def _heads_to_add(
        self, queries: Queries, key: Tensor, value: Tensor, mask: Tensor | None, reader: Reader
    ) -> Tensor | SplitHeads:
        """Return the heads [B, Q, Hq * D], under spans in splits."""
        query, pending = queries
        if mask is None or mask.dtype != SPANS:
            return self._attend(query, key, value, mask).flatten(2)
        scaling, softcap, sinks = self.module.scaling, self.softcap, self.sinks
        return attend_by_spans(query, key, value, mask, scaling, softcap, sinks, reader, pending)

    def fuses_around(self, x: Tensor) -> bool:
        return not self.width_norms and self.inputs.fuses(x, "normed") and self.output.fuses(x, "whole")

    def _write_to_cache(self, hidden_states: Tensor, cos: Tensor, sin: Tensor, slots: Slots, by_spans: bool) -> Queries:
        """Compute q, k and v, write keys and values to the cache, and return the queries."""
        heads = self.output.in_features // self.size
        left = self.norm is None or (by_spans and finishes_norms(heads, slots.keys.shape[1], hidden_states.dtype))
        if (around := self.ahead.around) is not None and left and not self.form.by_head:
            turn = Turn(cos, sin, slots, self.size, self.form.rotation, self.norm)
            if (rotated := self.inputs.rotated(hidden_states, around.norm, turn)) is not None:
                return rotated
        query, key, value = self._heads(hidden_states, whole=False)
        dtype = hidden_states.dtype
        query, _ = rotary(query, key, value, cos, sin, self.norm, slots, self.form.rotation, dtype)
        return Queries(query)

    def _heads(self, hidden_states: Tensor, whole: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, Hq, Q, D], k and v [B, Hkv, Q, D]: views of one product or of its partials [S, B, H, Q, D]."""
        if self.ahead.around is not None:
            product: Tensor | Partials = self.inputs.normed(hidden_states, self.ahead.around.norm)
        else:
            product = self.inputs(hidden_states) if whole else self.inputs.split_k(hidden_states)
        if self.width_norms:
            product = norm_widths(product, *self.width_norms)
        splits, terms = ((len(product.terms),), product.terms) if isinstance(product, Partials) else ((), product)
        heads = terms.view(*splits, *hidden_states.shape[:2], -1, self.size).transpose(-2, -3)
        if self.form.by_head:
            return heads[..., 0::3, :, :], heads[..., 1::3, :, :], heads[..., 2::3, :, :]
        query = self.output.in_features // self.size
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
        spread = products[0] * products[min(1, len(products) - 1)] * self.size**0.5 * self.module.scaling
        factor: Tensor = spread.clamp(1e-4, 1).rsqrt()
        return (hidden_states.float() * factor).to(hidden_states.dtype)


def recognise_attention(
    module: Any, tuned: Tuned, ahead: Ahead, forms: dict[nn.Module, NormForm], uncapped: bool
) -> list[AttentionForward]:
    """Return a replacement for each variant that this may be if it looks like self-attention; otherwise nothing."""
    if not (layers := attention_inputs(module)):
        return []
    inputs, output = product_of(layers, tuned), product_of([attention_output(module)], tuned)
    modules, size = head_norms(module), head_size(module)
    form = shared_form(forms, modules)
    if inputs is None or output is None or form is None:
        return []
    shared = inputs.out_features - output.in_features
    if output.in_features % size or shared <= 0 or shared % (2 * size):
        return []
    norms = [parameters_of(norm, form) for norm in modules]
    widths = [len(norm.weight) for norm in norms]
    if widths not in ([], [size, size], [output.in_features, shared // 2]):
        return []
    orders = (False, True) if len(layers) == 1 and shared == 2 * output.in_features and not norms else (False,)
    variants = [AttentionForm(rotation, by_head) for by_head in orders for rotation in ROTATIONS]
    return [AttentionForward(module, inputs, output, ahead, variant, norms, uncapped) for variant in variants]


def attention_inputs(module: Any) -> Sequence[Any]:
    """Return the layers that read an attention's input: q, k and v, or one for all; nothing for other modules."""
    known = all(hasattr(module, name) for name in ("scaling", "layer_idx")) and head_size(module)
    if not known or attention_output(module) is None or not _norms_fit(module):
        return []
    return next((layers for names in INPUT_NAMES if (layers := submodules(module, names))), [])


def attention_output(module: Any) -> Any:
    """Return the layer that reads the heads; None for other modules."""
    return next((layer for name in OUTPUT_NAMES for layer in submodules(module, (name,))), None)


def head_size(module: Any) -> int:
    """Return the dimensions of a head, under either of its names; 0 for other modules."""
    size = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    return size if isinstance(size, int) else 0


def head_norms(module: Any) -> list[Any]:
    """Return the norms of q and k; nothing where there are none."""
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
