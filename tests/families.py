"""Tiny random models of many architectures."""

import torch
import transformers as tf

VOCABULARY = 64
_BASE = dict(vocab_size=VOCABULARY, eos_token_id=2, bos_token_id=1, pad_token_id=0)
_SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
_USUAL = dict(**_BASE, **_SIZES, num_key_value_heads=2, max_position_embeddings=256)
_PARTIAL = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
_MIXED = ["sliding_attention", "full_attention"]

FAMILIES = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_USUAL)),
    "llama-eager": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_USUAL, attn_implementation="eager")),
    "mistral-sliding": lambda: tf.MistralForCausalLM(tf.MistralConfig(**_USUAL, sliding_window=6, head_dim=8)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_USUAL)),
    "qwen2-sliding": lambda: tf.Qwen2ForCausalLM(
        tf.Qwen2Config(**_USUAL, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    ),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_USUAL, head_dim=8)),
    "gemma": lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**_USUAL, head_dim=8)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**_USUAL, head_dim=8, sliding_window=6)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(**_USUAL, head_dim=8, sliding_window=6, layer_types=_MIXED)
    ),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**_USUAL)),
    "olmo2": lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**_USUAL)),
    "glm4": lambda: tf.Glm4ForCausalLM(tf.Glm4Config(**_USUAL, head_dim=8, rope_parameters=_PARTIAL)),
    "starcoder2": lambda: tf.Starcoder2ForCausalLM(tf.Starcoder2Config(**_USUAL)),
    "smollm3": lambda: tf.SmolLM3ForCausalLM(tf.SmolLM3Config(**_USUAL, no_rope_layers=[1, 0])),
    "cohere2": lambda: tf.Cohere2ForCausalLM(
        tf.Cohere2Config(**_USUAL, head_dim=8, sliding_window=6, layer_types=_MIXED)
    ),
    "granite": lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**_USUAL, residual_multiplier=0.5)),
    "phi": lambda: tf.PhiForCausalLM(tf.PhiConfig(**_USUAL)),
    "gpt-neox-serial": lambda: tf.GPTNeoXForCausalLM(
        tf.GPTNeoXConfig(**_BASE, **_SIZES, max_position_embeddings=256, use_parallel_residual=False)
    ),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**_BASE, n_embd=32, n_layer=2, n_head=4, n_positions=256)),
    "gpt-neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**_BASE, **_SIZES, max_position_embeddings=256)),
    "opt": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(
            **_BASE,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            word_embed_proj_dim=32,
            max_position_embeddings=256,
        )  # fmt: skip
    ),
    "mixtral": lambda: tf.MixtralForCausalLM(
        tf.MixtralConfig(**_USUAL, num_local_experts=4, num_experts_per_tok=2, sliding_window=6)
    ),
    "qwen2-moe": lambda: tf.Qwen2MoeForCausalLM(
        tf.Qwen2MoeConfig(
            **_USUAL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32
        )
    ),
    "falcon": lambda: tf.FalconForCausalLM(
        tf.FalconConfig(
            **_BASE,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_kv_heads=2,
            alibi=False,
            new_decoder_architecture=True,
            max_position_embeddings=256,
        )  # fmt: skip
    ),
    "gpt-oss": lambda: tf.GptOssForCausalLM(
        tf.GptOssConfig(
            **_USUAL, head_dim=8, sliding_window=6, num_local_experts=4, num_experts_per_tok=2, layer_types=_MIXED
        )
    ),
}


def make(family, seed=0):
    return make_tiny(FAMILIES[family], seed)


def make_tiny(build, seed=0):
    """Build a model with weights large enough to matter."""
    torch.manual_seed(seed)
    model = build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model
