"""Which architectures there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
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
        """A tiny model with random weights.

        Raises:
            Exception: whatever its code raises, e.g. ImportError for a package that is not installed.
        """
        model_class = self.load()
        return tiny_model(model_class, tiny_config(model_class.config_class, **self.changes), seed)


def language_models() -> list[Family]:
    """Every architecture of `AutoModelForCausalLM`, and variants of some."""
    families = _mapped(MODEL_FOR_CAUSAL_LM_MAPPING)
    known = {family.name: family for family in families}
    return families + [replace(known[family], name=name, changes=changes) for name, family, changes in VARIANTS]


def vision_models() -> list[Family]:
    """Every further architecture of `AutoModelForImageTextToText`."""
    known = {family.model_class: family.name for family in language_models()}
    families = [family for family in _mapped(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING) if family.model_class not in known]
    taken = set(known.values())
    return [replace(each, name=f"{each.name} (images)") if each.name in taken else each for each in families]


def _mapped(mapping: Any) -> list[Family]:
    """One family per model class; of several model types with the same class, the text model or the shortest name."""
    names: dict[str, list[str]] = {}
    for model_type, class_name in mapping._model_mapping.items():
        names.setdefault(class_name, []).append(model_type)
    families = []
    for class_name, model_types in names.items():
        name = min(model_types, key=lambda each: (not each.endswith("_text"), len(each)))
        families.append(Family(name, class_name, partial(mapping._load_attr_from_module, name, class_name)))
    return families
