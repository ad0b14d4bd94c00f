"""What a draft with another tokenizer means for the settings of a call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from .config import SpecBranchConfig
from .decoding.policies import POLICIES
from .runtime.eager import layer_kinds
from .runtime.recurrent_cache import is_recurrent
from .target_heads.base import TargetHead
from .vocabularies import Translation, translation_for


def with_translation(
    target: PreTrainedModel, draft: PreTrainedModel | None, config: SpecBranchConfig, tokenizers: tuple[Any, Any]
) -> tuple[SpecBranchConfig, Translation | None]:
    """Return how drafts are translated, if the draft has another tokenizer, and the settings of such a call.

    Nothing is planned then: recordings compare tokens of one vocabulary. Lookup joins in if it was asked for.
    """
    if draft is None or isinstance(draft, TargetHead) or None in tokenizers or not POLICIES[config.policy].drafts:
        return config, None
    translation = translation_for(target, draft, *tokenizers)
    if translation is None:
        return config, None
    if any(map(is_recurrent, layer_kinds(draft.config.get_text_config(decoder=True)))):
        name = draft.name_or_path or type(draft).__name__
        raise ValueError(f"the draft {name} has recurrent layers: choose one with the target's tokenizer")
    lookup = 0 if config.prompt_lookup_num_tokens == "auto" else config.prompt_lookup_num_tokens
    policy = "vanilla" if config.policy == "auto" else config.policy
    return replace(config, policy=policy, prompt_lookup_num_tokens=lookup), translation
