"""Enlarge a Llama-type model without changing the function it computes.

A grown model (a "twin") costs what a real model of that shape costs and gives the logits of the small one.
The rules, with `h` the hidden size, `d` the head size, `r = h_old / h_new` and `m = d_new / d_old`:

- Residual stream: the old dimensions come first, the new ones stay exactly zero. Rows that write to new dimensions
  are zero; columns that read them are free.
- RMSNorm: the mean of squares runs over `h_new` entries, of which only `h_old` are not zero, so it shrinks by
  `r`. With `eps * r` and `weight * sqrt(r)` the result is the old one:
  `x / sqrt(r * mean + r * eps) * sqrt(r) * w = x / sqrt(mean + eps) * w`.
- Rotary pairs: pair `i` of `d_old` rotates with `theta ** (-2i / d_old)`, which is the frequency of pair `i * m` of
  `d_new`. Old pairs are spread by `m`; keys are zero in the pairs between, so queries are free there.
- Scores are divided by `sqrt(d_new)` instead of `sqrt(d_old)`: queries are multiplied by `sqrt(m)`.
- Heads: an old key-value head and its queries move together. Where the new groups are narrower than the
  old ones, the key-value head is copied to several groups. New heads, and new value dimensions, meet zero
  columns of `o_proj`; new MLP units meet zero columns of `down_proj`.
- Few key-value heads: where the new layer has fewer of them than the old one, several old ones share the dimensions of
  a new one, each with its queries. Their rotary pairs need the same frequencies (`twin` sets them).
- New layers come first and write nothing (`o_proj` and `down_proj` are zero), so that the hidden states of the
  last layers are the old ones.

Every free entry keeps the random value of a newly initialised model.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported where they are used: the names of shapes need neither
    import torch
    from torch import Tensor
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

CONTEXT = 32768  # smallest context of a twin, so that long texts can be timed


@dataclass(frozen=True)
class Shape:
    """The sizes that determine the cost of a Llama-type model. Growing keeps the vocabulary.

    Args:
        hidden_size: width of the residual stream.
        num_hidden_layers: number of decoder layers.
        num_attention_heads: query heads per layer.
        num_key_value_heads: key and value heads per layer; must divide `num_attention_heads`.
        intermediate_size: width of the MLP.
        head_dim: width of one head; 0 means `hidden_size / num_attention_heads`.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    head_dim: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(
                f"num_key_value_heads ({kv_heads}) does not divide num_attention_heads ({heads}): "
                f"choose a divisor of {heads}"
            )
        if not self.head_dim:
            if self.hidden_size % heads:
                raise ValueError(
                    f"num_attention_heads ({heads}) does not divide hidden_size ({self.hidden_size}): "
                    "choose sizes that divide, or pass head_dim="
                )
            object.__setattr__(self, "head_dim", self.hidden_size // heads)
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even, since rotary embeddings turn pairs, got {self.head_dim}")


NAMED_SHAPES: dict[str, Shape] = {
    "68m": Shape(768, 2, 12, 12, 3072),  # JackFram/llama-68m
    "160m": Shape(768, 12, 12, 12, 3072),  # JackFram/llama-160m
    "1b": Shape(2048, 22, 32, 4, 5632),  # TinyLlama 1.1B
    "1.3b": Shape(2048, 24, 16, 16, 5504),  # DeepSeek-Coder 1.3B
    "7b": Shape(4096, 32, 32, 32, 11008),  # LLaMA, Vicuna 7B
    "13b": Shape(5120, 40, 40, 40, 13824),  # LLaMA, Vicuna 13B
    "33b": Shape(7168, 62, 56, 8, 19200),  # DeepSeek-Coder 33B
}


def resolve_shape(shape: Shape | str) -> Shape:
    """Return the shape itself, or the named one.

    Example:
        >>> resolve_shape("7b").num_hidden_layers
        32
    """
    if isinstance(shape, Shape):
        return shape
    if not isinstance(shape, str):
        raise TypeError(f"shape must be a Shape or one of {', '.join(NAMED_SHAPES)}, got {type(shape).__name__}")
    if shape not in NAMED_SHAPES:
        raise ValueError(f"unknown shape {shape!r}: use one of {', '.join(NAMED_SHAPES)}, or pass a Shape(...)")
    return NAMED_SHAPES[shape]


@dataclass(frozen=True)
class HeadLayout:
    """The places of the old heads: rows of `q_proj`, `k_proj` and `v_proj`, which are also columns of `o_proj`.

    Row `new[i]` of the grown projection takes row `old[i]` of the small one.
    """

    query_new: Tensor  # [H_old * d_old]
    value_query_new: Tensor  # [H_old * d_old] the same heads in `o_proj`, whose dimensions carry no rotation
    key_new: Tensor  # [copies * d_old]
    key_old: Tensor  # [copies * d_old]
    value_new: Tensor  # [copies * d_old]
    key_heads: int  # new key-value heads that hold old ones
    query_heads: Tensor | None = None  # [H_old] where key-value heads are packed: their queries are zero elsewhere


def grow(
    model: LlamaForCausalLM,
    shape: Shape | str,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> LlamaForCausalLM:
    """Enlarge a Llama model to `shape`; the grown model gives the same logits for the same tokens.

    The large weights are made directly on `device`: the host holds only the small model.

    Args:
        model: a `LlamaForCausalLM`, tied or untied, with or without grouped key-value heads.
        shape: a [`Shape`] or one of "68m", "160m", "1b", "1.3b", "7b", "13b", "33b". Nothing may be smaller
            than in `model`, and `head_dim` must be a multiple of the model's.
        dtype: of the grown weights; default: the model's own.
        device: of the grown weights; default: the model's own.

    Returns:
        A new `LlamaForCausalLM` with the model's vocabulary, an untied output layer and its generation config.

    Example:
        >>> from hf_specbranch import load_demo_pair
        >>> target, draft, tokenizer = load_demo_pair()
        >>> twin = grow(target, "160m")
        >>> twin.config.hidden_size
        768
    """
    import torch
    from transformers import AutoModelForCausalLM

    wanted = resolve_shape(shape)
    check_growth(model, wanted)
    old: LlamaConfig = model.config
    if packed_heads(old, wanted) > 1:
        raise ValueError(
            f"shape has {wanted.num_key_value_heads} key-value heads, the model {old.num_key_value_heads}: choose a "
            "shape with more key-value heads, a model with fewer, or the name of a real model"
        )
    config = grown_config(old, wanted)
    with torch.device(device if device is not None else model.device), torch.no_grad():
        # The initialisation of a new model fills every free entry.
        grown: LlamaForCausalLM = AutoModelForCausalLM.from_config(config, dtype=dtype or model.dtype)
        grown.eval()
        layout, scale = head_layout(old, wanted), math.sqrt(wanted.head_dim / old.head_dim)
        new_layers = wanted.num_hidden_layers - old.num_hidden_layers
        for layer in grown.model.layers[:new_layers]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        for small, large in zip(model.model.layers, grown.model.layers[new_layers:], strict=True):
            fill_attention(small.self_attn, large.self_attn, old.hidden_size, layout, scale)
            fill_dense_mlp(small.mlp, large.mlp)
            fill_norm(small.input_layernorm, large.input_layernorm)
            fill_norm(small.post_attention_layernorm, large.post_attention_layernorm)
        fill_norm(model.model.norm, grown.model.norm)
        hidden = old.hidden_size
        grown.model.embed_tokens.weight.zero_()
        grown.model.embed_tokens.weight[:, :hidden] = model.model.embed_tokens.weight.to(grown.device)
        grown.lm_head.weight[:, :hidden] = model.lm_head.weight.to(grown.device)
    grown.generation_config = copy.deepcopy(model.generation_config)
    return grown


def check_growth(model: LlamaForCausalLM, shape: Shape) -> None:
    """Raise before any work if `model` cannot be grown to `shape` exactly."""
    config = getattr(model, "config", None)
    if getattr(config, "model_type", None) != "llama" or not hasattr(model, "lm_head"):
        found = getattr(config, "model_type", None)
        raise TypeError(
            f"grow() takes a LlamaForCausalLM, got {type(model).__name__} (model_type {found!r}): "
            "the growth rules hold for the Llama architecture only"
        )
    assert config is not None
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "head_dim"):
        has, wanted = getattr(config, name), getattr(shape, name)
        if wanted < has:
            raise ValueError(
                f"shape has {name} {wanted}, the model has {has}: growing cannot shrink, choose {has} or more"
            )
    if shape.head_dim % config.head_dim:
        raise ValueError(
            f"head_dim {shape.head_dim} of the shape is no multiple of the model's {config.head_dim}: rotary "
            f"frequencies would change, choose a multiple of {config.head_dim}"
        )
    needed = key_value_copies(config, shape) * config.num_key_value_heads
    if needed > shape.num_key_value_heads and packed_heads(config, shape) == 1:
        raise ValueError(
            f"shape has {shape.num_key_value_heads} key-value heads of {group_size(shape)} queries each; the model's "
            f"{config.num_key_value_heads} key-value heads of {group_size(config)} queries need {needed}: choose a "
            "shape with more key-value heads, or a model with fewer"
        )
    if config.attention_bias or config.mlp_bias:
        raise ValueError("the model has attention_bias or mlp_bias: grow() knows Llama models without biases only")
    rope = config.rope_parameters["rope_type"]
    if rope != "default" and shape.head_dim != config.head_dim:
        raise ValueError(
            f"the model has rope_type {rope!r}: head_dim can be grown for 'default' only, "
            f"choose a shape with head_dim {config.head_dim}"
        )


def grown_config(old: LlamaConfig, shape: Shape) -> LlamaConfig:
    """Return the config of the grown model."""
    config = copy.deepcopy(old)
    config.hidden_size = shape.hidden_size
    config.num_hidden_layers = shape.num_hidden_layers
    config.num_attention_heads = shape.num_attention_heads
    config.num_key_value_heads = shape.num_key_value_heads
    config.intermediate_size = shape.intermediate_size
    config.head_dim = shape.head_dim
    if old.rope_parameters["rope_type"] == "default":  # its angles do not depend on the context length
        config.max_position_embeddings = max(old.max_position_embeddings, CONTEXT)
    config.rms_norm_eps = old.rms_norm_eps * old.hidden_size / shape.hidden_size
    config.tie_word_embeddings = False  # as in all models that the shapes are named after
    return config


def group_size(config: LlamaConfig | Shape) -> int:
    """Return the number of query heads that share one key-value head."""
    return config.num_attention_heads // config.num_key_value_heads


def key_value_copies(old: LlamaConfig | Shape, shape: Shape) -> int:
    """Return how many new key-value heads one old key-value head needs to serve all its queries."""
    return -(-group_size(old) // group_size(shape))


def packed_heads(old: LlamaConfig | Shape, shape: Shape) -> int:
    """Return how many old key-value heads share a new one: 1, unless there are too few new ones.

    Example:
        >>> packed_heads(Shape(128, 2, 4, 4, 384), Shape(896, 24, 14, 2, 4864))
        2
    """
    if key_value_copies(old, shape) * old.num_key_value_heads <= shape.num_key_value_heads:
        return 1
    packed = -(-old.num_key_value_heads // shape.num_key_value_heads)
    fits = packed * old.head_dim <= shape.head_dim and packed * group_size(old) <= group_size(shape)
    return packed if fits else 1


def head_layout(old: LlamaConfig, shape: Shape) -> HeadLayout:
    """Place the old heads in the new layer.

    Copy c of old key-value head g is new key-value head `g * copies + c`. Where heads are packed, old key-value head g
    is part `g % packed` of new one `g // packed`.
    """
    import torch

    copies, packed, group = key_value_copies(old, shape), packed_heads(old, shape), group_size(shape)
    queries, query_parts = [], []
    for head in range(old.num_attention_heads):
        key_value, rank = divmod(head, group_size(old))  # which old group, and where in it
        place = key_value * copies + rank // group
        queries.append(place // packed * group + place % packed * group_size(old) + rank % group)
        query_parts.append(place % packed)
    places = torch.arange(old.num_key_value_heads * copies)
    d_old, d_new = old.head_dim, shape.head_dim
    # Halves hold the first and second entry of each rotary pair; pair i of part p becomes new pair i * m + p.
    pairs = torch.arange(d_old // 2) * (d_new // d_old)
    rotary = torch.cat([pairs, pairs + d_new // 2])  # [d_old]
    plain = torch.arange(d_old)

    def rows(heads: Tensor, size: int, within: Tensor) -> Tensor:
        return (heads[:, None] * size + within).flatten()

    query_heads, parts, key_values = torch.tensor(queries), torch.tensor(query_parts)[:, None], places // packed
    return HeadLayout(
        query_new=rows(query_heads, d_new, rotary + parts),
        value_query_new=rows(query_heads, d_new, plain + parts * d_old),
        key_new=rows(key_values, d_new, rotary + places[:, None] % packed),
        key_old=rows(places // copies, d_old, plain),
        value_new=rows(key_values, d_new, plain + places[:, None] % packed * d_old),
        key_heads=-(-len(places) // packed),
        query_heads=query_heads if packed > 1 else None,
    )


def fill_attention(old: LlamaAttention, new: LlamaAttention, hidden: int, layout: HeadLayout, scale: float) -> None:
    """Write the weights of an attention into its grown twin, whose entries are all random so far.

    Args:
        old: of the small model.
        new: of the twin.
        hidden: width of the small model.
        layout: the places of its heads.
        scale: of the queries.
    """

    def weight(module: torch.nn.Linear, scale: float = 1.0) -> Tensor:
        return (module.weight.float() * scale).to(new.o_proj.weight)  # the large model's device and dtype

    if layout.query_heads is not None:
        new.q_proj.weight.view(-1, new.head_dim, new.q_proj.in_features)[layout.query_heads, :, :hidden] = 0.0
    new.q_proj.weight[layout.query_new, :hidden] = weight(old.q_proj, scale)
    new.k_proj.weight[: layout.key_heads * new.head_dim, :hidden] = (
        0.0  # the pairs in between: queries there meet zero keys
    )
    new.k_proj.weight[layout.key_new, :hidden] = weight(old.k_proj)[layout.key_old]
    new.v_proj.weight[layout.value_new, :hidden] = weight(old.v_proj)[layout.key_old]
    new.o_proj.weight.zero_()
    new.o_proj.weight[:hidden, layout.value_query_new] = weight(old.o_proj)


def fill_dense_mlp(small: LlamaMLP, large: LlamaMLP) -> None:
    """Write the weights of an MLP into its grown twin."""
    inner, hidden = small.up_proj.weight.shape
    large.gate_proj.weight[:inner, :hidden] = small.gate_proj.weight.to(large.gate_proj.weight)
    large.up_proj.weight[:inner, :hidden] = small.up_proj.weight.to(large.up_proj.weight)
    large.down_proj.weight.zero_()
    large.down_proj.weight[:hidden, :inner] = small.down_proj.weight.to(large.down_proj.weight)


def fill_norm(small: LlamaRMSNorm, large: LlamaRMSNorm) -> None:
    """Write the old weights times sqrt(h_old / h_new); the rest meets zeros and stays. [h_old] -> [h_new]"""
    hidden = small.weight.shape[0]
    scaled = small.weight.float() * math.sqrt(hidden / large.weight.shape[0])
    large.weight[:hidden] = scaled.to(large.weight)
