"""Which architectures there are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedModel

from .tiny import WINDOW, tiny_config, tiny_model

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


@dataclass(frozen=True)
class Family:
    """An architecture that can be built."""

    name: str
    model_class: type[PreTrainedModel]
    changes: dict[str, Any] = field(default_factory=dict)

    def build(self, seed: int = 0) -> PreTrainedModel:
        """A tiny model with random weights.

        Raises:
            Exception: whatever its code raises, e.g. ImportError for a package that is not installed.
        """
        return tiny_model(self.model_class, tiny_config(self.model_class.config_class, **self.changes), seed)


def language_models() -> list[Family]:
    """Every architecture behind `AutoModelForCausalLM`, and variants of some."""
    families = _mapped(MODEL_FOR_CAUSAL_LM_MAPPING)
    classes = {family.name: family.model_class for family in families}
    return families + [Family(name, classes[family], changes) for name, family, changes in VARIANTS]


def vision_models() -> list[Family]:
    """Every further architecture behind `AutoModelForImageTextToText`."""
    known = {family.model_class for family in language_models()}
    return [family for family in _mapped(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING) if family.model_class not in known]


def _mapped(mapping: Any) -> list[Family]:
    """One family per model class; model types that share a class are named once."""
    names: dict[type[PreTrainedModel], str] = {}
    for model_type, class_name in mapping._model_mapping.items():
        names.setdefault(mapping._load_attr_from_module(model_type, class_name), model_type)
    return [Family(name, model_class) for model_class, name in names.items()]
