"""The public shapes of well-known models: the figures of their configs, and nothing else of them.

A model of such a shape with random weights costs what the real one costs, and nothing is downloaded.

    config = config_of("llama3.1-8b")
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names of the shapes do not need it
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class ModelShape:
    """The figures of one model.

    Args:
        source: the repository whose config has these figures.
        model_type: the architecture, as `AutoConfig` names it.
        figures: arguments of its config. What is left out has the default of the architecture.
    """

    source: str
    model_type: str
    figures: dict[str, Any]


def _rope(theta: float, rope_type: str = "default", **figures: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": theta, **figures}


def _llama3_rope(factor: float) -> dict[str, Any]:
    figures = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    return _rope(500000.0, "llama3", factor=factor, **figures)


SHAPES: dict[str, ModelShape] = {
    "llama3.1-8b": ModelShape("meta-llama/Llama-3.1-8B", "llama", dict(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=131072, tie_word_embeddings=False,
        rope_parameters=_llama3_rope(8.0),
    )),
    "llama3.2-1b": ModelShape("meta-llama/Llama-3.2-1B", "llama", dict(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-5, max_position_embeddings=131072,
        tie_word_embeddings=True, rope_parameters=_llama3_rope(32.0),
    )),
    "qwen2.5-0.5b": ModelShape("Qwen/Qwen2.5-0.5B", "qwen2", dict(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, rms_norm_eps=1e-6, max_position_embeddings=32768, tie_word_embeddings=True,
        rope_parameters=_rope(1000000.0),
    )),
    "qwen2.5-1.5b": ModelShape("Qwen/Qwen2.5-1.5B", "qwen2", dict(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, rms_norm_eps=1e-6, max_position_embeddings=131072, tie_word_embeddings=True,
        rope_parameters=_rope(1000000.0),
    )),
    "qwen2.5-7b": ModelShape("Qwen/Qwen2.5-7B", "qwen2", dict(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, rms_norm_eps=1e-6, max_position_embeddings=131072, tie_word_embeddings=False,
        rope_parameters=_rope(1000000.0),
    )),
    "qwen3-0.6b": ModelShape("Qwen/Qwen3-0.6B", "qwen3", dict(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6, max_position_embeddings=40960,
        tie_word_embeddings=True, rope_parameters=_rope(1000000.0),
    )),
    "qwen3-1.7b": ModelShape("Qwen/Qwen3-1.7B", "qwen3", dict(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6, max_position_embeddings=40960,
        tie_word_embeddings=True, rope_parameters=_rope(1000000.0),
    )),
    "qwen3-4b": ModelShape("Qwen/Qwen3-4B", "qwen3", dict(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6, max_position_embeddings=40960,
        tie_word_embeddings=True, rope_parameters=_rope(1000000.0),
    )),
    "qwen3-8b": ModelShape("Qwen/Qwen3-8B", "qwen3", dict(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6, max_position_embeddings=40960,
        tie_word_embeddings=False, rope_parameters=_rope(1000000.0),
    )),
    "qwen3-32b": ModelShape("Qwen/Qwen3-32B", "qwen3", dict(
        vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64,
        num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6, max_position_embeddings=40960,
        tie_word_embeddings=False, rope_parameters=_rope(1000000.0),
    )),
    "mistral-7b": ModelShape("mistralai/Mistral-7B-v0.3", "mistral", dict(
        vocab_size=32768, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=32768, sliding_window=None,
        tie_word_embeddings=False, rope_parameters=_rope(1000000.0),
    )),
    "gemma2-9b": ModelShape("google/gemma-2-9b", "gemma2", dict(
        vocab_size=256000, hidden_size=3584, intermediate_size=14336, num_hidden_layers=42, num_attention_heads=16,
        num_key_value_heads=8, head_dim=256, query_pre_attn_scalar=256, sliding_window=4096,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, max_position_embeddings=8192,
        tie_word_embeddings=True, rope_parameters=_rope(10000.0),
    )),
    "gemma3-4b": ModelShape("google/gemma-3-4b-pt", "gemma3_text", dict(
        vocab_size=262208, hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, query_pre_attn_scalar=256, sliding_window=1024,
        max_position_embeddings=131072, tie_word_embeddings=True, rope_parameters=dict(
            full_attention=_rope(1000000.0, "linear", factor=8.0), sliding_attention=_rope(10000.0),
        ),
    )),
    "phi3-mini": ModelShape("microsoft/Phi-3-mini-4k-instruct", "phi3", dict(
        vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, rms_norm_eps=1e-5, max_position_embeddings=4096, sliding_window=2047,
        original_max_position_embeddings=4096, tie_word_embeddings=False,
        rope_parameters=_rope(10000.0, partial_rotary_factor=1.0),
    )),
    "starcoder2-7b": ModelShape("bigcode/starcoder2-7b", "starcoder2", dict(
        vocab_size=49152, hidden_size=4608, intermediate_size=18432, num_hidden_layers=32, num_attention_heads=36,
        num_key_value_heads=4, max_position_embeddings=16384, sliding_window=4096, use_bias=True,
        embedding_dropout=0.1, residual_dropout=0.1, attention_dropout=0.1, tie_word_embeddings=True,
        rope_parameters=_rope(1000000.0),
    )),
    "smollm3-3b": ModelShape("HuggingFaceTB/SmolLM3-3B", "smollm3", dict(
        vocab_size=128256, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
        num_key_value_heads=4, no_rope_layer_interval=4, rms_norm_eps=1e-6, max_position_embeddings=65536,
        tie_word_embeddings=True, rope_parameters=_rope(5000000.0),
    )),
    "olmo2-7b": ModelShape("allenai/OLMo-2-1124-7B", "olmo2", dict(
        vocab_size=100352, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, rms_norm_eps=1e-6, max_position_embeddings=4096, tie_word_embeddings=False,
        rope_parameters=_rope(500000.0),
    )),
    "pythia-6.9b": ModelShape("EleutherAI/pythia-6.9b", "gpt_neox", dict(
        vocab_size=50432, hidden_size=4096, intermediate_size=16384, num_hidden_layers=32, num_attention_heads=32,
        max_position_embeddings=2048, use_parallel_residual=True, tie_word_embeddings=False,
        rope_parameters=_rope(10000.0, partial_rotary_factor=0.25),
    )),
    "command-r7b": ModelShape("CohereLabs/c4ai-command-r7b-12-2024", "cohere2", dict(
        vocab_size=256000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, sliding_window=4096, logit_scale=0.25, layer_norm_eps=1e-5,
        max_position_embeddings=132096, tie_word_embeddings=True, rope_parameters=_rope(50000.0),
    )),
    "glm4-9b": ModelShape("zai-org/glm-4-9b-hf", "glm", dict(
        vocab_size=151552, hidden_size=4096, intermediate_size=13696, num_hidden_layers=40, num_attention_heads=32,
        num_key_value_heads=2, head_dim=128, attention_bias=True, rms_norm_eps=1.5625e-7,
        max_position_embeddings=131072, tie_word_embeddings=False,
        rope_parameters=_rope(10000.0, partial_rotary_factor=0.5),
    )),
    "glm4-9b-0414": ModelShape("zai-org/GLM-4-9B-0414", "glm4", dict(
        vocab_size=151552, hidden_size=4096, intermediate_size=13696, num_hidden_layers=40, num_attention_heads=32,
        num_key_value_heads=2, head_dim=128, attention_bias=True, rms_norm_eps=1e-5, max_position_embeddings=32768,
        tie_word_embeddings=False, rope_parameters=_rope(10000.0, partial_rotary_factor=0.5),
    )),
    "granite3.1-8b": ModelShape("ibm-granite/granite-3.1-8b-base", "granite", dict(
        vocab_size=49155, hidden_size=4096, intermediate_size=12800, num_hidden_layers=40, num_attention_heads=32,
        num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=131072, tie_word_embeddings=True,
        embedding_multiplier=12.0, attention_multiplier=0.0078125, residual_multiplier=0.22, logits_scaling=16.0,
        rope_parameters=_rope(10000000.0),
    )),
    # ---- with recurrent layers
    "qwen3.5-9b": ModelShape("Qwen/Qwen3.5-9B", "qwen3_5_text", dict(
        vocab_size=248320, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32, num_attention_heads=16,
        num_key_value_heads=4, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4, rms_norm_eps=1e-6,
        max_position_embeddings=262144, tie_word_embeddings=False,
        rope_parameters=_rope(
            10000000.0, partial_rotary_factor=0.25, mrope_section=[11, 11, 10], mrope_interleaved=True
        ),
    )),
    # ---- mixtures of experts
    "gpt-oss-20b": ModelShape("openai/gpt-oss-20b", "gpt_oss", dict(
        vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=24, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4, sliding_window=128,
        max_position_embeddings=131072, tie_word_embeddings=False, rope_parameters=_rope(
            150000.0, "yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
            original_max_position_embeddings=4096,
        ),
    )),
    "qwen3-30b-a3b": ModelShape("Qwen/Qwen3-30B-A3B", "qwen3_moe", dict(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, rms_norm_eps=1e-6, max_position_embeddings=40960, tie_word_embeddings=False,
        rope_parameters=_rope(1000000.0),
    )),
    "qwen1.5-moe-a2.7b": ModelShape("Qwen/Qwen1.5-MoE-A2.7B", "qwen2_moe", dict(
        vocab_size=151936, hidden_size=2048, intermediate_size=5632, moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=16,
        num_experts=60, num_experts_per_tok=4, norm_topk_prob=False, rms_norm_eps=1e-6, max_position_embeddings=8192,
        tie_word_embeddings=False, rope_parameters=_rope(1000000.0),
    )),
    "mixtral-8x7b": ModelShape("mistralai/Mixtral-8x7B-v0.1", "mixtral", dict(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, rms_norm_eps=1e-5, sliding_window=None,
        max_position_embeddings=32768, tie_word_embeddings=False, rope_parameters=_rope(1000000.0),
    )),
    "olmoe-1b-7b": ModelShape("allenai/OLMoE-1B-7B-0924", "olmoe", dict(
        vocab_size=50304, hidden_size=2048, intermediate_size=1024, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=16, num_experts=64, num_experts_per_tok=8, norm_topk_prob=False, rms_norm_eps=1e-5,
        max_position_embeddings=4096, tie_word_embeddings=False, rope_parameters=_rope(10000.0),
    )),
    "granite3.1-3b-a800m": ModelShape("ibm-granite/granite-3.1-3b-a800m-base", "granitemoe", dict(
        vocab_size=49155, hidden_size=1536, intermediate_size=512, num_hidden_layers=32, num_attention_heads=24,
        num_key_value_heads=8, num_local_experts=40, num_experts_per_tok=8, rms_norm_eps=1e-6,
        max_position_embeddings=131072, tie_word_embeddings=True, embedding_multiplier=12.0,
        attention_multiplier=0.015625, residual_multiplier=0.22, logits_scaling=6.0, rope_parameters=_rope(10000000.0),
    )),
    "moonlight-16b-a3b": ModelShape("moonshotai/Moonlight-16B-A3B", "deepseek_v3", dict(
        vocab_size=163840, hidden_size=2048, intermediate_size=11264, moe_intermediate_size=1408, num_hidden_layers=27,
        num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, n_group=1,
        topk_group=1, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.446, rms_norm_eps=1e-5,
        max_position_embeddings=8192, tie_word_embeddings=False, rope_parameters=_rope(50000.0),
    )),
}  # fmt: skip

_NO_SPECIAL_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # texts do not end

# Sizes of a tiny model, by the names of figures. Grouped-query attention stays grouped.
_TINY = dict(
    vocab_size=256, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=4, head_dim=16,
    num_attention_heads=4, shared_expert_intermediate_size=32, num_experts=8, num_local_experts=8, n_routed_experts=8,
    num_experts_per_tok=2, sliding_window=24, query_pre_attn_scalar=16, kv_lora_rank=16, qk_nope_head_dim=16,
    qk_rope_head_dim=16, v_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
    linear_value_head_dim=16,
)  # fmt: skip


def config_of(name: str, layers: int | None = None, tiny: bool = False) -> PreTrainedConfig:
    """Return the configuration of a named shape.

    Args:
        name: one of `SHAPES`.
        layers: number of layers; default: the model's own.
        tiny: shrink every size, keep the architecture.

    Example:
        >>> config_of("qwen3-8b").hidden_size
        4096
    """
    from transformers import AutoConfig

    shape = SHAPES[name]
    figures = shrunk(shape.figures) if tiny else shape.figures
    if layers is not None:
        figures = {**figures, "num_hidden_layers": layers}
    config: PreTrainedConfig = AutoConfig.for_model(shape.model_type, **_NO_SPECIAL_TOKENS, **figures)
    return config


def shrunk(figures: dict[str, Any]) -> dict[str, Any]:
    """Return figures of the same architecture with tiny sizes.

    Args:
        figures: arguments of a config; lists with an entry per layer are cut.
    """
    small = {key: value for key, value in _TINY.items() if figures.get(key) is not None}
    if (kv_heads := figures.get("num_key_value_heads")) is not None:
        small["num_key_value_heads"] = 2 if kv_heads < figures["num_attention_heads"] else 4
    layers = figures.get("num_hidden_layers")
    cut = {
        key: value[: _TINY["num_hidden_layers"]]
        for key, value in figures.items()
        if isinstance(value, list) and len(value) == layers
    }
    return {**figures, **small, **cut}
