"""Twins with the shapes of real models, vocabulary included: `llama3.1-8b`, `qwen2.5-0.5b`, `qwen3-30b-a3b` and others.

They are made by the rules of `grow`, and by these:

- Vocabulary: the small model's tokens come first. One new dimension of the residual stream holds a constant, so small
  that norms do not see it. Their weights are zero there, except that of the last norm, which makes it large. In the
  output layer only rows of other tokens read it, which gives them logits far below all others.
- Biases of q, k and v are zero.
- Norms of queries and keys (Qwen3) divide by a constant, since their epsilon is large; their weights undo that.
- Experts: the router has the same row for k experts in a row, so the k with the highest logits are one such group. Each
  group computes the small model's MLP: each of its experts has a part of the units, and k times their outputs, since
  each has the weight 1/k. Different tokens choose different groups.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

from .grow import (
    CONTEXT,
    NAMED_SHAPES,
    Shape,
    check_growth,
    fill_attention,
    fill_dense_mlp,
    fill_norm,
    grow,
    head_layout,
    packed_heads,
    resolve_shape,
)
from .shapes import SHAPES, config_of

if TYPE_CHECKING:  # the names of shapes need neither
    import torch
    from torch import Tensor
    from transformers import LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
TWINS = tuple(name for name, shape in SHAPES.items() if shape.model_type in MODEL_TYPES)
# Of norms of queries and keys, whose mean squares are below 100; a power of four, so that its root is exact.
EPSILON = 2.0**30
# The constant of the residual stream, relative to the smallest embedding: its square is below the rounding of float32.
CONSTANT = 2.0**-13
NORM_WEIGHT = 2.0**10  # of the last norm for the constant
LOGIT = -64.0  # of tokens that the small model does not have, at most; usually far below


def make_twin(
    model: LlamaForCausalLM,
    shape: Shape | str,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PreTrainedModel:
    """Enlarge a Llama model to a shape of `grow`, or to the shape and architecture of a real model.

    Args:
        model: a small `LlamaForCausalLM`.
        shape: as for `grow`, or one of `TWINS`.
        dtype: of the weights; default: the model's own.
        device: of the weights; default: the model's own.

    Returns:
        A new model that gives the small model's logits for its tokens, and logits far below them for all others.

    Example:
        >>> from hf_specbranch import load_demo_pair
        >>> small = load_demo_pair()[1]
        >>> make_twin(small, "68m").config.vocab_size
        4096
    """
    if isinstance(shape, Shape) or shape in NAMED_SHAPES:
        return grow(model, shape, dtype, device)
    import torch
    from transformers import AutoModelForCausalLM

    check_twin(model, shape)
    sizes = sizes_of(shape)
    config = twin_config(model, shape)
    with torch.device(device if device is not None else model.device), torch.no_grad():
        twin: Any = AutoModelForCausalLM.from_config(config, dtype=dtype or model.dtype).eval()
        layout = head_layout(model.config, sizes)
        query_scale = math.sqrt(sizes.head_dim / model.config.head_dim)
        new_layers = sizes.num_hidden_layers - model.config.num_hidden_layers
        for layer in twin.model.layers:
            _neutralise_attention(layer.self_attn)
        for layer in twin.model.layers[:new_layers]:
            layer.self_attn.o_proj.weight.zero_()
            _outputs_of(layer.mlp).zero_()
        for small, large in zip(model.model.layers, twin.model.layers[new_layers:], strict=True):
            fill_attention(small.self_attn, large.self_attn, model.config.hidden_size, layout, query_scale)
            if hasattr(large.mlp, "experts"):
                fill_experts(small.mlp, large.mlp, config)
            else:
                fill_dense_mlp(small.mlp, large.mlp)
            fill_norm(small.input_layernorm, large.input_layernorm)
            fill_norm(small.post_attention_layernorm, large.post_attention_layernorm)
        fill_norm(model.model.norm, twin.model.norm)
        fill_vocabulary(model, twin)
        if (packed := packed_heads(model.config, sizes)) > 1:
            frequencies = model.model.rotary_emb.inv_freq  # [d_old / 2]; each is needed for every packed head
            twin.model.rotary_emb.inv_freq.copy_(frequencies.repeat_interleave(sizes.head_dim // model.config.head_dim))
            assert packed * model.config.head_dim <= sizes.head_dim
    twin.generation_config = copy.deepcopy(model.generation_config)
    found: PreTrainedModel = twin
    return found


def check_twin(model: LlamaForCausalLM, shape: Shape | str) -> None:
    """Raise before any work if a model has no twin of this shape."""
    if isinstance(shape, str) and shape not in NAMED_SHAPES:
        check_name(shape)
        check_growth(model, sizes_of(shape))
        vocabulary, hidden = SHAPES[shape].figures["vocab_size"], SHAPES[shape].figures["hidden_size"]
        if vocabulary < model.config.vocab_size or hidden <= model.config.hidden_size:
            raise ValueError(
                f"{shape} has {vocabulary} tokens and width {hidden}: expected at least {model.config.vocab_size} "
                f"tokens and more than width {model.config.hidden_size}, those of the model"
            )
        return
    check_growth(model, resolve_shape(shape))


def check_name(shape: str) -> None:
    """Refuse the name of a shape that is neither one of `grow` nor one of `TWINS`."""
    if shape not in NAMED_SHAPES and shape not in TWINS:
        raise ValueError(f"unknown shape {shape!r}: use one of {', '.join((*NAMED_SHAPES, *TWINS))}")


def sizes_of(name: str) -> Shape:
    """Return the sizes of a real model. The MLP of a mixture is as wide as the experts of one token together."""
    config: Any = config_of(name)
    inner = config.intermediate_size
    if SHAPES[name].model_type == "qwen3_moe":
        inner = config.num_experts_per_tok * config.moe_intermediate_size
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Shape(
        config.hidden_size, config.num_hidden_layers, heads, config.num_key_value_heads, inner, head_dim=head_dim
    )


def twin_config(model: LlamaForCausalLM, name: str) -> PreTrainedConfig:
    """Return the config of a twin: the real one, with rotary frequencies, epsilon and special tokens of the model."""
    old, config = model.config, config_of(name)
    config.rope_parameters = copy.deepcopy(old.rope_parameters)
    config.rms_norm_eps = old.rms_norm_eps * old.hidden_size / config.hidden_size
    config.max_position_embeddings = max(old.max_position_embeddings, CONTEXT)
    # A tied twin needs a tied model. An untied one reads as many bytes per step.
    config.tie_word_embeddings = bool(config.tie_word_embeddings and old.tie_word_embeddings)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, token, getattr(old, token))
    return config


def _neutralise_attention(attention: Any) -> None:
    """Let biases add nothing, and norms of queries and keys do nothing."""
    for name in ("q_proj", "k_proj", "v_proj"):
        if (bias := getattr(attention, name).bias) is not None:
            bias.zero_()
    for name in ("q_norm", "k_norm"):
        if (norm := getattr(attention, name, None)) is not None:
            norm.variance_epsilon = EPSILON
            norm.weight.fill_(math.sqrt(EPSILON))


def _outputs_of(mlp: Any) -> Tensor:
    """Return the weights of an MLP or of all experts that write to the residual stream."""
    found: Tensor = mlp.experts.down_proj if hasattr(mlp, "experts") else mlp.down_proj.weight
    return found


def fill_experts(small: Any, large: Any, config: Any) -> None:
    """Write an MLP into each group of experts, and let the router choose a group."""
    chosen, hidden = config.num_experts_per_tok, small.up_proj.in_features
    groups = config.num_experts // chosen
    experts, router = large.experts, large.gate.weight  # [E, 2 I, h] and [E, h, I]; [E, h]
    width = experts.down_proj.shape[2]
    router.copy_(router[:groups].repeat_interleave(chosen, 0)[: router.shape[0]])
    router[groups * chosen :] = 0.0
    experts.down_proj.zero_()
    parts = [part.to(experts.down_proj) for part in (small.gate_proj.weight, small.up_proj.weight)]
    down = small.down_proj.weight.to(experts.down_proj) * chosen
    units = -(-parts[0].shape[0] // chosen)
    for expert in range(groups * chosen):
        first = expert % chosen * units
        count = max(0, min(units, parts[0].shape[0] - first))
        for part, weight in enumerate(parts):
            experts.gate_up_proj[expert, part * width : part * width + count, :hidden] = weight[first : first + count]
        experts.down_proj[expert, :hidden, :count] = down[:, first : first + count]


def fill_vocabulary(model: LlamaForCausalLM, twin: Any) -> None:
    """Write embeddings and output layer; tokens that the model does not have get logits far below all others."""
    tokens, hidden = model.model.embed_tokens.weight.shape
    embeddings, output = twin.model.embed_tokens.weight, twin.lm_head.weight  # the same if tied
    if output is not embeddings:
        embeddings.zero_()
        output[:tokens, :hidden] = model.lm_head.weight.to(output)
        output[:tokens, hidden] = 0.0
    embeddings[:tokens] = 0.0
    embeddings[:tokens, :hidden] = model.model.embed_tokens.weight.to(embeddings)
    if embeddings.shape[0] == tokens:
        return
    constant = CONSTANT * float(model.model.embed_tokens.weight.float().norm(dim=1).clamp(min=1e-6).min())
    for layer in twin.model.layers:
        layer.input_layernorm.weight[hidden] = layer.post_attention_layernorm.weight[hidden] = 0.0
    twin.model.norm.weight[hidden] = NORM_WEIGHT
    normed = constant * math.sqrt(twin.config.hidden_size) / largest_state(model) * NORM_WEIGHT
    embeddings[:tokens, hidden] = constant
    output[tokens:, hidden] = LOGIT / normed


def largest_state(model: LlamaForCausalLM) -> float:
    """Return the largest length of a hidden state before the last norm, over a text of some tokens."""
    import torch

    found: list[float] = []
    hook = model.model.norm.register_forward_pre_hook(
        lambda _, args: found.append(float(args[0].float().norm(dim=-1).max()))
    )
    try:
        tokens = torch.arange(0, model.config.vocab_size, max(1, model.config.vocab_size // 256), device=model.device)
        model(input_ids=tokens[None], use_cache=False)
    finally:
        hook.remove()
    return found[0]
