"""Bytes of weights and caches."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from .ways import Pair


def cache_bytes(model: PreTrainedModel, length: int) -> int:
    """Keys and values of `length` tokens in every layer."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * length * model.dtype.itemsize)


def needed(pair: Pair, length: int) -> dict[str, Any]:
    """Bytes that a run needs at the least: weights, and caches of `length` tokens."""
    needs = {}
    for role, model in (("target", pair.target), ("draft", pair.draft)):
        needs[f"{role}_weights"] = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        needs[f"{role}_cache"] = cache_bytes(model, length)
    return {**needs, "total": sum(needs.values()), "tokens": length}
