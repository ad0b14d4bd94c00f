"""Which caches of transformers, brought to a call, can be read by slot."""

from __future__ import annotations

from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .kv_cache import EMPTY_LAYER, past_length

RECURRENT = LinearAttentionLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer


def why_not_loaded(past: Cache) -> str:
    """Return why `SlotCache` cannot replace this cache; empty if it can.

    A cache that changes what it stores (a quantized one) gives other logits than a `SlotCache`, even while it is empty.
    """
    kinds = {type(layer) for layer in past.layers}
    if isinstance(later := getattr(past, "layer_class_to_replicate", None), type):
        kinds.add(later)
    known = {DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, EMPTY_LAYER, *RECURRENT}
    if past_length(past) == 0:
        known.add(StaticSlidingWindowLayer)  # `store` writes it through its own update; `load` does not read it
    if any(any(layer.has_previous_state.values()) for layer in past.layers if isinstance(layer, LinearAttentionLayer)):
        if past_length(past) == 0:
            return "past_key_values holds recurrent states alone, which do not say how many tokens were read"
    if past_length(past) > 0 and getattr(past, "offloading", False):
        return "past_key_values is offloaded, layer by layer, to the CPU"
    if type(past).update is not Cache.update:
        return f"past_key_values is a {type(past).__name__}, which stores keys and values in its own way"
    if unknown := sorted(kind.__name__ for kind in kinds - known):
        return f"past_key_values has layers of type {', '.join(unknown)}, which cannot be read by slot"
    return ""
