"""Every architecture of transformers as a tiny random model; the fields that set a size are known by their names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)

VOCABULARY, PAD, BOS, EOS = 64, 0, 1, 2
TEXT_TOKENS = range(3, 48)  # prompts consist of these; the ids above are left to image tokens and their like
HIDDEN, HEADS, HEAD_DIM, WINDOW, POSITIONS = 32, 4, 8, 8, 256
MOST_LAYERS = 4  # enough for one layer of each kind in nearly all architectures

# value -> the fields that take it, if a configuration has them
_SIZES: tuple[tuple[Any, str], ...] = (
    (VOCABULARY, "vocab_size vocab_size_per_layer_input pronunciation_vocab_size shape_vocab_size mel_vocab_size"),
    (VOCABULARY, "encoder_hash_byte_group_vocab"),
    (HIDDEN, "hidden_size n_embd d_model embed_dim embedding_size emb_dim word_embed_proj_dim attention_hidden_size"),
    (HIDDEN, "input_embedding_size output_embedding_size pronunciation_embed_dim shape_embed_dim text_hidden_size"),
    (HIDDEN, "hidden_size_global lru_width conv_dim out_hidden_size projection_dim text_embed_dim rel_extent"),
    (HIDDEN, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size ext_pw_out_channel"),
    (HIDDEN, "moe_shared_expert_intermediate_size shared_intermediate_size nemo_conv_channels router_hidden_size"),
    (HIDDEN, "depthwise_separable_out_channel output_proj_dims proj_dim projector_hidden_size resampler_hidden_size"),
    (2 * HIDDEN, "intermediate_size ffn_dim n_inner dim_ff dff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim"),
    (2 * HIDDEN, "feed_forward_size d_inner dense_intermediate_size mlp_dim mamba_d_ssm"),
    (HEADS, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"),
    (HEADS, "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads mamba_n_heads"),
    (HEADS, "mamba_num_heads n_mamba_heads attention_heads conf_num_attention_heads"),
    (HEADS // 2, "num_key_value_heads num_kv_heads num_global_key_value_heads swa_num_key_value_heads index_n_heads"),
    (HEADS // 2, "linear_num_key_heads linear_num_value_heads"),
    (HEAD_DIM, "head_dim dim_head d_kv attention_head_dim swa_head_dim kv_channels"),
    (HEAD_DIM, "qk_rope_head_dim qk_nope_head_dim v_head_dim index_head_dim rotary_dim attention_head_size"),
    (HEAD_DIM, "linear_key_head_dim linear_value_head_dim hidden_size_per_layer_input state_size mamba_d_state"),
    (HEAD_DIM, "ssm_state_size d_rel laurel_rank local_attn_chunk_length lsh_attn_chunk_length"),
    (2 * HEAD_DIM, "global_head_dim q_lora_rank kv_lora_rank o_lora_rank mamba_d_head mamba_head_dim mamba_headdim"),
    (WINDOW, "sliding_window sliding_window_size attention_window_size attention_chunk_size window_size"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts index_topk"),
    (2, "num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k top_k_experts top_k"),
    (2, "n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers num_encoder_layers depth"),
    (2, "num_hidden_layers num_blocks conf_num_hidden_layers"),
    (1, "n_group topk_group num_expert_groups first_k_dense_replace num_dense_layers moe_layer_start_index"),
    (1, "n_shared_experts num_shared_experts moe_num_shared_experts max_window_layers"),
    (POSITIONS, "max_position_embeddings n_positions n_ctx max_seq_len"),
    (0, "num_mtp_layers num_nextn_predict_layers num_kv_shared_layers"),
    (0.0, "dropout attention_dropout hidden_dropout_prob attention_probs_dropout_prob resid_pdrop embd_pdrop"),
    (16, "image_size position_embedding_size"),
    (4, "patch_size mm_tokens_per_image"),
    (2, "temporal_patch_size spatial_merge_size scale_factor pooling_kernel_size pixel_shuffle_factor"),
    (True, "use_cache is_decoder use_sliding_window"),
    (False, "tie_word_embeddings"),  # a tied output layer repeats its input: texts of one token would prove little
    (PAD, "pad_token_id"),
    (BOS, "bos_token_id"),
    (EOS, "eos_token_id"),
)
SIZES = {name: value for value, names in _SIZES for name in names.split()}
# Set although the default is None, which means no window, or as many key heads as query heads.
_EVEN_IF_NONE = "sliding_window num_key_value_heads head_dim n_routed_experts num_experts_per_tok n_shared_experts"
EVEN_IF_NONE = {*_EVEN_IF_NONE.split(), "pad_token_id", "bos_token_id", "eos_token_id"}

_MIXED = ["sliding_attention", "full_attention"]
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_SHARED_LAYERS = {"num_hidden_layers": 4, "layer_types": 2 * _MIXED, "num_kv_shared_layers": 2}
_SHARED_ATTENTION = {
    "attention_hidden_size": 2 * HIDDEN,
    "attention_head_dim": 2 * HEAD_DIM,
    "num_key_value_heads": HEADS,
}
_IMAGE_CODES = {"base_channels": HIDDEN, "channel_multiplier": [1, 1], "num_res_blocks": 1, "attn_resolutions": [1]}
# What does not follow from the names, by model type.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"n_group": 2},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"num_hidden_layers": 2},
    "cohere_compass_text": {"layer_types": _MIXED, "rope_parameters": dict.fromkeys(_MIXED, _MROPE)},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4},
    },
    "chameleon": {"vocabulary_map": {"<image>": VOCABULARY - 1}},
    "chameleon_vqgan": _IMAGE_CODES,
    "emu3": {"vocabulary_map": {"<image>": VOCABULARY - 1}},
    "emu3_vqgan": _IMAGE_CODES,
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [HIDDEN, HIDDEN]},
    "gemma3n_text": {**_SHARED_LAYERS, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "intermediate_size": 64},
    "gemma4_text": _SHARED_LAYERS,
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 2},
    "janus_vqgan": _IMAGE_CODES,
    "laguna": {"layer_types": _MIXED},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 16, "n_groups": 2},
    "mellum": {"layer_types": _MIXED},
    "mistral4": {"head_dim": 2 * HEAD_DIM},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "mllama_vision_model": {
        "intermediate_layers_indices": [0, 1],
        "num_global_layers": 1,
        "vision_output_dim": 3 * HIDDEN,
    },
    "muse_spark_audio": {"hidden_sizes": [8, 16, 16, HIDDEN]},
    "nemotron_h": {"n_groups": 2},
    "paddleocr_vl_text": {"rope_parameters": _MROPE},
    "qwen2_5_omni_thinker": {"vision_start_token_id": VOCABULARY - 9},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": VOCABULARY - 9},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_shape": (16, 16), "axial_pos_embds_dim": (16, 16), "attn_layers": ("local", "lsh")},
    "xmod": {"default_language": "en_XX"},
    "zamba": _SHARED_ATTENTION,
    "zamba2": _SHARED_ATTENTION,
    "zaya": {"num_experts_per_tok": 1},
}

_LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16, "factor": 4.0}
_LONGROPE |= {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = _YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Settings that change how attention is computed: (name, model type, settings).
VARIANTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama, eager attention", "llama", {"attn_implementation": "eager"}),
    ("llama, longrope", "llama", {"rope_parameters": _LONGROPE}),
    ("llama, dynamic rope", "llama", {"rope_parameters": _DYNAMIC, "max_position_embeddings": 20}),
    ("llama, yarn", "llama", {"rope_parameters": _YARN}),
    ("llama, llama3 rope", "llama", {"rope_parameters": _LLAMA3}),
    ("phi3, longrope", "phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 16}),
    ("falcon, alibi", "falcon", {"alibi": True, "new_decoder_architecture": False}),
    ("falcon, new decoder", "falcon", {"new_decoder_architecture": True}),
    ("gemma2, eager attention", "gemma2", {"attn_implementation": "eager"}),
    ("mixtral, router logits", "mixtral", {"output_router_logits": True}),
    ("qwen2, no window", "qwen2", {"use_sliding_window": False}),
    ("mistral, no window", "mistral", {"sliding_window": None}),
    ("gpt_neo, long window", "gpt_neo", {"window_size": 2 * WINDOW}),
)


def tiny_config(config_class: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    """Return a small configuration of the given class."""
    return config_class(**{**tiny_settings(config_class), **changes})


def tiny_settings(config_class: type[PretrainedConfig]) -> dict[str, Any]:
    """Return the arguments that make a configuration small."""
    default = config_class()
    known = default.to_dict()
    settings = {
        name: value
        for name, value in SIZES.items()
        if name in known and (known[name] is not None or name in EVEN_IF_NONE)
    }
    if "kv_lora_rank" in known and "num_key_value_heads" in known:
        settings["num_key_value_heads"] = HEADS  # latent attention has a key for each head
    settings.update(_layers(default, known, settings))
    several_axes = "mrope_section" in getattr(config_class, "ignore_keys_at_rope_validation", ())
    settings.update(
        {name: _rope(value, several_axes) for name, value in known.items() if name.startswith("rope_") and value}
    )
    special = [name for name, value in known.items() if _is_special_token(name, value)]
    settings.update({name: VOCABULARY - 1 - index for index, name in enumerate(sorted(special))})
    for name, part_class in _parts(config_class, default, known).items():
        settings[name] = {**tiny_settings(part_class), "model_type": part_class.model_type}
    return {**settings, **OVERRIDES.get(config_class.model_type, {})}


def _parts(
    config_class: type[PretrainedConfig], default: PretrainedConfig, known: dict[str, Any]
) -> dict[str, type[PretrainedConfig]]:
    """Return the classes of nested configurations; a vision tower is added even where it is optional."""
    parts = {name: getattr(default, name, None) for name, value in known.items() if isinstance(value, dict)}
    classes = {name: type(part) for name, part in parts.items() if isinstance(part, PretrainedConfig)}
    optional: Any = getattr(config_class, "sub_configs", {}).get("vision_config")
    if known.get("vision_config", "none such") is None and getattr(optional, "model_type", None):
        classes["vision_config"] = optional
    return classes


def _layers(default: PretrainedConfig, known: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the number of layers and all lists with an entry per layer, so that every kind of layer occurs."""
    name = default.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    number = known.get(name)
    lists = {
        key: value for key, value in known.items() if isinstance(value, (list, tuple)) and len(value) == number != 0
    }
    if "use_sliding_window" in known:
        lists.pop("layer_types", None)  # follows from the window
    if not lists:
        return {}
    kinds = list(zip(*lists.values()))
    chosen = [index for index, kind in enumerate(kinds) if kinds.index(kind) == index][:MOST_LAYERS]
    chosen = chosen if len(chosen) > 1 else 2 * chosen
    return {
        name: len(chosen),
        **{key: SIZES.get(key) or [value[index] for index in chosen] for key, value in lists.items()},
    }


def _rope(value: Any, several_axes: bool) -> Any:
    """Return rotary settings; the sections of several axes (time, height, width) sum to the number of rotated pairs."""
    if not isinstance(value, dict):
        return value
    changed = {name: _rope(each, several_axes) for name, each in value.items()}
    if several_axes and "rope_type" in changed:
        pairs = int(HEAD_DIM * changed.get("partial_rotary_factor", 1.0)) // 2
        changed["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    return changed


def _is_special_token(name: str, value: Any) -> bool:
    return name.endswith(("_token_id", "_token_index")) and name not in SIZES and isinstance(value, int)


def tiny_model(model_class: type[PreTrainedModel], config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return a float32 model with random weights, large enough that greedy texts vary; it never ends a text."""
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # recurrent states that last for several tokens
                parameter.normal_(-1, 0.25)
            elif parameter.ndim >= 2:
                parameter.normal_(0, 0.25)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    generation = model.generation_config
    generation.pad_token_id, generation.bos_token_id, generation.eos_token_id = PAD, BOS, None
    return model


def noisy_copy(model: PreTrainedModel, noise: float = 0.04, seed: int = 1) -> PreTrainedModel:
    """Return a draft that agrees with the model often, but not always."""
    twin = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(noise * parameter.std(correction=0) * torch.randn_like(parameter))
    return twin


@dataclass(frozen=True)
class Family:
    """An architecture of transformers; its code is imported when it is built."""

    name: str
    model_class: str
    load: Callable[[], type[PreTrainedModel]]
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        """The name without its variant."""
        return self.name.split(",")[0].split(" ")[0]

    def build(self, seed: int = 0) -> PreTrainedModel:
        """Build a tiny model with random weights.

        Raises:
            Exception: whatever its code raises, e.g. ImportError for a package that is not installed.
        """
        model_class = self.load()
        return tiny_model(model_class, tiny_config(model_class.config_class, **self.changes), seed)


def language_models() -> list[Family]:
    """Return every architecture of `AutoModelForCausalLM`, and variants of some."""
    families = _mapped(MODEL_FOR_CAUSAL_LM_MAPPING)
    known = {family.name: family for family in families}
    return families + [replace(known[family], name=name, changes=changes) for name, family, changes in VARIANTS]


def vision_models() -> list[Family]:
    """Return every further architecture of `AutoModelForImageTextToText`."""
    known = {family.model_class: family.name for family in language_models()}
    families = [family for family in _mapped(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING) if family.model_class not in known]
    taken = set(known.values())
    return [replace(each, name=f"{each.name} (images)") if each.name in taken else each for each in families]


def _mapped(mapping: Any) -> list[Family]:
    """Return one family per model class, named by the text model or the shortest of its model types."""
    names: dict[str, list[str]] = {}
    for model_type, class_name in mapping._model_mapping.items():
        names.setdefault(class_name, []).append(model_type)
    families = []
    for class_name, model_types in names.items():
        name = min(model_types, key=lambda each: (not each.endswith("_text"), len(each)))
        families.append(Family(name, class_name, partial(mapping._load_attr_from_module, name, class_name)))
    return families
