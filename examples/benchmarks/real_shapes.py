"""Configurations of public models at their real sizes, and models of these shapes with random weights.

The numbers are those of the public configs, so nothing is downloaded.

    model = build("Llama-3.1-8B", device="cuda", dtype=torch.bfloat16)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

# name: (class of the config, its numbers)
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.1-8B": (
        "LlamaConfig",
        dict(
            vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=131072, tie_word_embeddings=False,
            rope_parameters=dict(
                rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
        ),
    ),
    "Llama-3.2-1B": (
        "LlamaConfig",
        dict(
            vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
            num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-5, max_position_embeddings=131072,
            tie_word_embeddings=True,
            rope_parameters=dict(
                rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
        ),
    ),
    "Qwen2.5-7B": (
        "Qwen2Config",
        dict(
            vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
            num_key_value_heads=4, rms_norm_eps=1e-6, max_position_embeddings=131072, tie_word_embeddings=False,
            rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
        ),
    ),
    "Qwen2.5-0.5B": (
        "Qwen2Config",
        dict(
            vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
            num_key_value_heads=2, rms_norm_eps=1e-6, max_position_embeddings=32768, tie_word_embeddings=True,
            rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
        ),
    ),
    "Qwen3-8B": (
        "Qwen3Config",
        dict(
            vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6, max_position_embeddings=40960,
            tie_word_embeddings=False, rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
        ),
    ),
    "Qwen3-30B-A3B": (
        "Qwen3MoeConfig",
        dict(
            vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
            num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
            num_experts_per_tok=8, norm_topk_prob=True, rms_norm_eps=1e-6, max_position_embeddings=40960,
            tie_word_embeddings=False, rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
        ),
    ),
    "Mistral-7B": (
        "MistralConfig",
        dict(
            vocab_size=32768, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=32768, sliding_window=None,
            tie_word_embeddings=False, rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
        ),
    ),
    "Gemma-2-9B": (
        "Gemma2Config",
        dict(
            vocab_size=256000, hidden_size=3584, intermediate_size=14336, num_hidden_layers=42, num_attention_heads=16,
            num_key_value_heads=8, head_dim=256, query_pre_attn_scalar=256, sliding_window=4096,
            attn_logit_softcapping=50.0, final_logit_softcapping=30.0, max_position_embeddings=8192,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        ),
    ),
    "Gemma-3-4B": (
        "Gemma3TextConfig",
        dict(
            vocab_size=262208, hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, num_attention_heads=8,
            num_key_value_heads=4, head_dim=256, query_pre_attn_scalar=256, sliding_window=1024,
            max_position_embeddings=131072,
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", rope_theta=1000000.0, factor=8.0),
                sliding_attention=dict(rope_type="default", rope_theta=10000.0),
            ),
        ),
    ),
    "Phi-3-mini": (
        "Phi3Config",
        dict(
            vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=32, rms_norm_eps=1e-5, max_position_embeddings=4096,
            original_max_position_embeddings=4096, sliding_window=2047, tie_word_embeddings=False,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=1.0),
        ),
    ),
    "OLMo-2-7B": (
        "Olmo2Config",
        dict(
            vocab_size=100352, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=32, rms_norm_eps=1e-6, max_position_embeddings=4096, tie_word_embeddings=False,
            rope_parameters=dict(rope_type="default", rope_theta=500000.0),
        ),
    ),
    "GLM-4-9B": (
        "GlmConfig",
        dict(
            vocab_size=151552, hidden_size=4096, intermediate_size=13696, num_hidden_layers=40, num_attention_heads=32,
            num_key_value_heads=2, head_dim=128, attention_bias=True, rms_norm_eps=1.5625e-7,
            max_position_embeddings=131072, tie_word_embeddings=False,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
        ),
    ),
    "Granite-8B": (
        "GraniteConfig",
        dict(
            vocab_size=49155, hidden_size=4096, intermediate_size=12800, num_hidden_layers=40, num_attention_heads=32,
            num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=131072, tie_word_embeddings=True,
            embedding_multiplier=12.0, attention_multiplier=0.0078125, residual_multiplier=0.22, logits_scaling=16.0,
            rope_parameters=dict(rope_type="default", rope_theta=10000000.0),
        ),
    ),
    "Pythia-6.9B": (
        "GPTNeoXConfig",
        dict(
            vocab_size=50432, hidden_size=4096, intermediate_size=16384, num_hidden_layers=32, num_attention_heads=32,
            max_position_embeddings=2048, use_parallel_residual=True, tie_word_embeddings=False,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25),
        ),
    ),
    "StarCoder2-7B": (
        "Starcoder2Config",
        dict(
            vocab_size=49152, hidden_size=4608, intermediate_size=18432, num_hidden_layers=32, num_attention_heads=36,
            num_key_value_heads=4, max_position_embeddings=16384, sliding_window=4096, use_bias=True,
            embedding_dropout=0.1, residual_dropout=0.1, attention_dropout=0.1,
            rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
        ),
    ),
    "SmolLM3-3B": (
        "SmolLM3Config",
        dict(
            vocab_size=128256, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
            num_key_value_heads=4, no_rope_layer_interval=4, rms_norm_eps=1e-6, max_position_embeddings=65536,
            tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=5000000.0),
        ),
    ),
    "Cohere2-7B": (
        "Cohere2Config",
        dict(
            vocab_size=256000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, sliding_window=4096, logit_scale=0.25, layer_norm_eps=1e-5,
            max_position_embeddings=132096, rope_parameters=dict(rope_type="default", rope_theta=50000.0),
        ),
    ),
    "gpt-oss-20b": (
        "GptOssConfig",
        dict(
            vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=24, num_attention_heads=64,
            num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4, sliding_window=128,
            max_position_embeddings=131072, tie_word_embeddings=False,
            rope_parameters=dict(
                rope_type="yarn", rope_theta=150000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                original_max_position_embeddings=4096,
            ),
        ),
    ),
}  # fmt: skip

_NO_SPECIAL_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # texts do not end

# Sizes that `tiny` replaces. Grouped-query attention stays grouped.
_TINY = dict(
    vocab_size=256, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=4, head_dim=16,
    num_experts=8, num_local_experts=8, num_experts_per_tok=2, sliding_window=24, query_pre_attn_scalar=16,
)  # fmt: skip


def config_of(name: str, layers: int | None = None, tiny: bool = False) -> PreTrainedConfig:
    """Return the configuration of a model.

    Args:
        name: one of `CONFIGS`.
        layers: number of layers; default: the model's own.
        tiny: shrink every size, keep the architecture.
    """
    kind, numbers = _SHAPES[name]
    if tiny:
        grouped = numbers.get("num_key_value_heads", 0) < numbers["num_attention_heads"]
        small = {key: value for key, value in _TINY.items() if numbers.get(key) is not None}
        small |= dict(num_attention_heads=4, num_key_value_heads=2 if grouped else 4)
        numbers = {**numbers, **{key: value for key, value in small.items() if key in numbers}}
    if layers is not None:
        numbers = {**numbers, "num_hidden_layers": layers}
    config: PreTrainedConfig = getattr(transformers, kind)(**_NO_SPECIAL_TOKENS, **numbers)
    return config


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {name: partial(config_of, name) for name in _SHAPES}


@torch.no_grad()
def build(
    name: str,
    device: str | torch.device = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    layers: int | None = None,
    tiny: bool = False,
) -> PreTrainedModel:
    """Return a model of this shape with random weights, created on the device.

    Weights have the standard deviation that the config names. Norms, biases and attention sinks get noise too: an
    error in them would not show at ones and zeros.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(name, layers, tiny), dtype=dtype).eval()
    for path, parameter in model.named_parameters():
        if parameter.dim() == 1 or path.endswith("bias"):
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model
