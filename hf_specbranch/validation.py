"""Refuses bad input before any work starts, and finds out which calls are left to transformers' own decoding."""

from __future__ import annotations

from typing import Any

from transformers import Cache, PreTrainedModel, StaticCache
from transformers.generation import GenerationMixin, GenerationMode

from .config import SpecBranchConfig
from .decoding.policies import POLICIES
from .request import MergedSettings
from .runtime.kv_cache import why_not_loaded
from .runtime.model_walk import every_parameter, why_adapters_need_plain
from .runtime.positions import LengthDependentRotary

# Two vocabularies of one tokenizer may differ by padding: Qwen2.5 has 151,936 entries, or 152,064.
LARGEST_PADDING = 0.01
SUPPORTED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def check_model(model: PreTrainedModel, role: str) -> None:
    """Refuse a model that cannot be a target or a draft (`role`)."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"the {role} must be a transformers PreTrainedModel, not {name}")
    if model.config.is_encoder_decoder:
        raise ValueError(f"the {role} {name} is an encoder-decoder model: SpecBranch needs decoder-only models")
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"the {role} {name} keeps a recurrent state, which cannot be rolled back: choose an attention-only model"
        )
    if any(parameter.is_meta for parameter in every_parameter(model)):
        raise ValueError(f"the {role} {name} has weights on the meta device: load them before generating")


def check_pair(target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any, draft_tokenizer: Any) -> None:
    """Refuse a draft with another vocabulary."""
    ours, theirs = (model.config.get_text_config(decoder=True) for model in (target, draft))
    remedy = "choose a draft that shares the target's tokenizer"
    names = f"target {_name(target)}: {ours.vocab_size} entries, draft {_name(draft)}: {theirs.vocab_size}"
    if tokenizer is not None and draft_tokenizer is not None:
        if tokenizer.get_vocab() != draft_tokenizer.get_vocab():
            raise ValueError(
                f"the tokenizers differ ({_name(tokenizer)} and {_name(draft_tokenizer)}; {names}): {remedy}"
            )
        return
    if ours.vocab_size == theirs.vocab_size:
        return
    padding = abs(ours.vocab_size - theirs.vocab_size) / max(ours.vocab_size, theirs.vocab_size)
    if padding > LARGEST_PADDING or ours.model_type != theirs.model_type:
        raise ValueError(
            f"vocabulary sizes differ ({names}): {remedy}; if it does share it, pass tokenizer= and "
            f"assistant_tokenizer= so that this can be checked"
        )


def why_plain(target: PreTrainedModel, draft: PreTrainedModel | None, settings: MergedSettings) -> str:
    """Return why this `generate()` call is left to transformers' own decoding; empty if it is not."""
    if _has_own_generate(target):
        return "its class has a generate() of its own"
    if (mode := settings.mode) not in SUPPORTED_MODES:
        return f"SpecBranch speeds up greedy decoding and sampling, not {mode.value.replace('_', ' ')}"
    if settings.use_cache is False:
        return "SpecBranch needs the cache, and use_cache=False turns it off"
    if settings.synced_gpus:
        return "SpecBranch does not run under ZeRO-3 or FSDP (synced_gpus=True)"
    if settings.cache_implementation in ("paged", "quantized"):
        return (
            f"SpecBranch cannot keep its keys and values under cache_implementation={settings.cache_implementation!r}"
        )
    past = settings.past_key_values
    if isinstance(past, Cache) and (reason := why_not_loaded(past)):
        return reason
    for model, role in ((target, "target"), (draft, "draft")):
        if model is not None and model.training and model.is_gradient_checkpointing:
            return f"the {role} is in training mode with gradient checkpointing, which turns its cache off"
    return why_adapters_need_plain(target)


def _has_own_generate(model: PreTrainedModel) -> bool:
    """Whether the model's class has a `generate()` besides ours and transformers': it may call another model's."""
    classes = list(type(model).__mro__)
    ours = max(index for index, each in enumerate(classes) if each.__module__.startswith(__package__ or "-"))
    return next(each for each in classes[ours + 1 :] if "generate" in vars(each)) is not GenerationMixin


def why_refused(settings: MergedSettings) -> str:
    """Return the remedy for a call that neither SpecBranch nor transformers' assisted decoding takes; else empty."""
    if settings.mode not in SUPPORTED_MODES:
        return ""  # transformers ignores the assistant there
    if settings.use_cache is False:
        return "leave out use_cache=False, or leave out assistant_model="
    if isinstance(settings.past_key_values, StaticCache):
        return "pass a DynamicCache, or the whole text without past_key_values"
    return ""


def check_request(
    target: PreTrainedModel, draft: PreTrainedModel | None, config: SpecBranchConfig, tokenizer: Any, assistant: Any
) -> None:
    """Refuse a `generate()` call whose models or settings cannot work.

    Args:
        target: the model that generates.
        draft: its draft, if there is one.
        config: the settings of the call.
        tokenizer: the target's tokenizer, if it was passed.
        assistant: the draft's tokenizer, if it was passed.
    """
    check_model(target, "target")
    if not POLICIES[config.policy].drafts:
        return
    if draft is None:
        raise ValueError(
            f"policy={config.policy!r} needs a draft model: pass assistant_model=, or attach one with "
            f"specbranch(model, draft=...)"
        )
    check_model(draft, "draft")
    check_pair(target, draft, tokenizer, assistant)


def check_inputs(target: PreTrainedModel, input_ids: Any, model_kwargs: dict[str, Any]) -> None:
    """Refuse prompts that are empty or longer than the context."""
    rows, length = input_ids.shape
    embedded = model_kwargs.get("inputs_embeds")
    if rows == 0 or (length == 0 and embedded is None):
        raise ValueError(
            f"the prompt is empty (input_ids of shape {tuple(input_ids.shape)}): give at least one token per row"
        )
    limit = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    mask = model_kwargs.get("attention_mask")
    real = int(mask.sum(1).max()) if mask is not None else length
    if limit is not None and 0 < limit < real and not LengthDependentRotary(target):
        raise ValueError(
            f"the prompt has {real} tokens and {type(target).__name__} a context of {limit}: shorten the prompt"
        )


def _name(thing: Any) -> str:
    return getattr(thing, "name_or_path", "") or type(thing).__name__
