"""Makes the `Request` of a `generate()` call: what drafts, with which settings, and whether SpecBranch can serve it.

All of it is decided before any work starts. What cannot work is an error. What is left to transformers' own decoding
has a reason, which the functions `why_...` return; empty means that there is none.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import Cache, GenerationConfig, GenerationMixin, PreTrainedModel, StaticCache
from transformers.generation import CandidateGenerator, GenerationMode

from .attachment import Attachment
from .config import LOOKUP_TOKENS, SpecBranchConfig
from .decoding.call import Request
from .decoding.candidates import settings_for_candidates
from .decoding.policies import POLICIES
from .draft_settings import with_translation
from .model_state import draft_model, every_parameter, ranks_of, why_adapters_need_plain
from .runtime.past_cache import why_not_loaded
from .runtime.selection import check_model, check_pair
from .target_heads.base import TargetHead
from .target_heads.calls import drafted_by_transformers, what_drafts
from .vocabularies import usable_tokens

DEFAULTS: dict[str, Any] = GenerationConfig._get_default_generation_params()
# Settings that make transformers take its candidates from elsewhere, or accept them by another rule.
CANDIDATE_SOURCES = (
    "assistant_early_exit",
    "use_mtp",
    "speculation_type",
    "assistant_ensemble_weight",
)
SUPPORTED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
POSITIONAL = [name for name in inspect.signature(GenerationMixin.generate).parameters if name not in ("self", "kwargs")]


def by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of `generate()` by name; some may be passed by position."""
    return {**dict(zip(POSITIONAL, args)), **kwargs}


class MergedSettings:
    """Looks up settings in the order of transformers: the arguments, the config passed with them, the model's config,
    the defaults. An unknown name is None.

    Args:
        arguments: the call's, by name.
        model_config: `model.generation_config`.

    Example:
        >>> from hf_specbranch.request import MergedSettings
        >>> settings = MergedSettings({"generation_config": GenerationConfig(num_beams=4)}, GenerationConfig(top_k=7))
        >>> settings.num_beams, settings.top_k, settings.top_p, settings.mode.value
        (4, 7, 1.0, 'beam_search')
    """

    def __init__(self, arguments: dict[str, Any], model_config: GenerationConfig | None) -> None:
        self.arguments = arguments
        given = arguments.get("generation_config"), model_config
        self.configs = [config for config in given if config is not None]

    def __getattr__(self, name: str) -> Any:
        if name in self.arguments:
            return self.arguments[name]
        values = (getattr(config, name, None) for config in self.configs)
        return next((value for value in values if value is not None), DEFAULTS.get(name))

    @property
    def mode(self) -> GenerationMode:
        """The generation mode if there were no assistant and no lookup."""
        return GenerationConfig.get_generation_mode(_WithoutLookup(self), None)

    @property
    def candidate_source(self) -> str:
        """The name of the setting that selects transformers' own speculation; empty if there is none."""
        given = ((name, getattr(self, name)) for name in CANDIDATE_SOURCES)
        return next((name for name, value in given if value is not None and value is not False), "")

    def set_by_user(self, name: str, *more: GenerationConfig | None) -> Any:
        """Return a setting that the user has set, here or in `more` configs; None if it is unset.

        Unset values are None in a generation config. Pipelines of older transformers pass configs in which all values
        are filled in; there a value that equals the default counts as unset.
        """
        if self.arguments.get(name) is not None:
            return self.arguments[name]
        for config in (*self.configs, *more):
            value = getattr(config, name, None)
            if value is not None and not (value == DEFAULTS.get(name) and _is_filled_in(config)):
                return value
        return None


class _WithoutLookup:
    """The same settings without those that name a draft source of ours."""

    prompt_lookup_num_tokens = use_mtp = None

    def __init__(self, settings: MergedSettings) -> None:
        self.settings = settings

    def __getattr__(self, name: str) -> Any:
        return getattr(self.settings, name)


def _is_filled_in(config: GenerationConfig | None) -> bool:
    return all(getattr(config, name, None) is not None for name, value in DEFAULTS.items() if value is not None)


# ---- what drafts, and with which settings


def make_request(
    model: PreTrainedModel,
    attachment: Attachment,
    settings: MergedSettings,
    assistant: Any,
    specbranch: Any,
    **others: Any,
) -> Request:
    """Decide what drafts for a call, and with which settings.

    The first of these drafts:

    - lookup alone, if the call sets `prompt_lookup_num_tokens` and "lookup" is not attached; as in transformers, it
      takes the place of a draft model;
    - the `CandidateGenerator` that is the `assistant_model`, or attached if there is no `assistant_model`;
    - the target's own layers for multi-token prediction, if the call sets `use_mtp`;
    - the model that is the `assistant_model`, or a head of the target made from it;
    - the model or head that is attached;
    - no model: lookup where it pays, or the target alone.

    Whether lookup also drafts beside a model is a setting (`SpecBranchConfig.prompt_lookup_num_tokens`).

    Args:
        model: the target.
        attachment: what `specbranch(model, ...)` was given.
        settings: of the call.
        assistant: the `assistant_model` of the call.
        specbranch: the argument of that name.
        others: further fields of the request.
    """
    given = assistant if assistant is not None else attachment.candidates
    candidates = given if isinstance(given, CandidateGenerator) else None
    draft = None if candidates is not None else attachment.draft if given is None else draft_model(given)
    if (source := settings.candidate_source) or assistant is not None:
        draft = what_drafts(model, draft, source)
    config = call_config(specbranch, settings, draft, attachment)
    if settings.prompt_lookup_num_tokens is not None and not attachment.looks_up:
        draft = candidates = None
        config = replace(config, policy="auto")
    has_settings = specbranch is not None or settings.specbranch is not None
    return Request(
        config=config,
        draft=draft,
        candidates=candidates,
        corpus=attachment.corpus,
        asked=draft is not None or candidates is not None or attachment.asks or has_settings,
        fills_cache=settings.arguments.get("past_key_values") is not None,
        **others,
    )


def call_config(
    given: Any,
    settings: MergedSettings,
    draft: PreTrainedModel | None,
    attachment: Attachment,
) -> SpecBranchConfig:
    """Return the speculation settings of a call: its own, the generation config's, those attached, or the defaults.

    Where they leave length and threshold open, those of transformers' assisted decoding count if the user has set
    them: in the call, in the target's generation config, or, where transformers reads them, in the draft's.
    """
    if given is None or given is True:
        given = settings.specbranch if settings.specbranch is not None else attachment.config
        given = {} if given is None else given
    if isinstance(given, SpecBranchConfig):
        config = given
    elif isinstance(given, dict):
        config = SpecBranchConfig.from_dict(given)
    elif isinstance(given, (str, Path)):
        config = SpecBranchConfig.from_json_file(given)
    else:
        raise TypeError(f"specbranch={given!r}: expected a SpecBranchConfig, a dict, a JSON file's path or a bool")
    drafts_own = getattr(draft, "generation_config", None)
    if config.max_draft_length == "auto" and (length := settings.set_by_user("num_assistant_tokens", drafts_own)):
        config = replace(config, max_draft_length=length)
    if config.confidence_threshold == "auto":
        threshold = settings.set_by_user("assistant_confidence_threshold", drafts_own)
        config = replace(config, confidence_threshold="auto" if threshold is None else threshold)
    if settings.prompt_lookup_num_tokens is not None:
        config = replace(config, prompt_lookup_num_tokens=settings.prompt_lookup_num_tokens)
    elif config.prompt_lookup_num_tokens == "auto" and attachment.looks_up:
        config = replace(config, prompt_lookup_num_tokens=LOOKUP_TOKENS)
    if (size := settings.set_by_user("max_matching_ngram_size")) is not None:
        config = replace(config, max_matching_ngram_size=size)
    return config


def settings_for_sources(
    config: SpecBranchConfig, draft: PreTrainedModel | None, candidates: CandidateGenerator | None
) -> SpecBranchConfig:
    """Return the settings of a call with these draft sources: under "auto", lookup drafts where no model does."""
    if candidates is not None:
        return settings_for_candidates(config, candidates)
    if draft is not None or config.policy != "auto":
        return config
    lookup = LOOKUP_TOKENS if config.prompt_lookup_num_tokens == "auto" else config.prompt_lookup_num_tokens
    return replace(config, policy="autoregressive", prompt_lookup_num_tokens=lookup)


# ---- what is refused, and what is left to transformers


def why_candidates_are_theirs(settings: MergedSettings, assistant: Any) -> str:
    """Return what makes transformers' own candidate generators draft; empty if a source of ours does."""
    source = settings.candidate_source
    return drafted_by_transformers(source, assistant) if source or assistant is not None else ""


def tokenizers_of(settings: MergedSettings, attachment: Attachment, has_assistant: bool) -> tuple[Any, Any]:
    """Return the tokenizers of target and draft: those of the call, or those that the attached draft came with."""
    if not has_assistant and settings.assistant_tokenizer is None:
        return attachment.tokenizers
    return settings.tokenizer, settings.assistant_tokenizer


def complete_request(
    model: PreTrainedModel, request: Request, settings: MergedSettings, tokenizers: tuple[Any, Any]
) -> str:
    """Refuse what cannot work, and fit the settings to what drafts.

    Returns:
        Why the call is left to transformers; empty if SpecBranch serves it.
    """
    request.config = settings_for_sources(request.config, request.draft, request.candidates)
    source = request.draft if request.candidates is None else request.candidates
    check_request(model, source, request.config, *tokenizers)
    if request.corpus is not None:  # checked when it was attached, but embeddings may have been resized
        request.corpus.check_tokens(usable_tokens(model))
    if None not in tokenizers:
        request.config, request.translation = with_translation(model, request.draft, request.config, tokenizers)
    return why_plain(model, request.draft, settings)


def check_request(
    target: PreTrainedModel, draft: Any, config: SpecBranchConfig, tokenizer: Any, assistant: Any
) -> None:
    """Refuse a `generate()` call whose models or settings cannot work.

    Args:
        target: the model that generates.
        draft: its draft model or candidate generator, if there is one.
        config: the settings of the call.
        tokenizer: the target's tokenizer, if it was passed.
        assistant: the draft's tokenizer, if it was passed.
    """
    check_model(target, "target")
    if not POLICIES[config.policy].drafts or isinstance(draft, CandidateGenerator):
        return
    if draft is None:
        raise ValueError(
            f"policy={config.policy!r} needs a draft model: pass assistant_model=, or attach one with "
            f"specbranch(model, draft=...)"
        )
    check_model(draft, "draft")
    check_pair(target, draft, tokenizer, assistant)


def why_plain(target: PreTrainedModel, draft: PreTrainedModel | None, settings: MergedSettings) -> str:
    """Return why this `generate()` call is left to transformers' own decoding; empty if it is not."""
    if _has_own_generate(target):
        return "its class has a generate() of its own"
    if target.get_input_embeddings().weight.is_meta:
        return "its embeddings are offloaded, which leaves open where it runs"
    if ranks_of(target) is not None:
        if isinstance(draft, TargetHead):
            return "a head that drafts shares layers with the target, and those of a tensor parallel one are sharded"
    elif any(kind.__name__ == "DTensor" for kind in set(map(type, every_parameter(target)))):
        return "its weights are sharded over processes, by FSDP or by something else than a tp_plan alone"
    if (mode := settings.mode) not in SUPPORTED_MODES:
        return f"SpecBranch speeds up greedy decoding and sampling, not {mode.value.replace('_', ' ')}"
    if settings.use_cache is False:
        return "SpecBranch needs the cache, and use_cache=False turns it off"
    if settings.cache_implementation in ("paged", "quantized"):
        return (
            f"SpecBranch cannot keep its keys and values under cache_implementation={settings.cache_implementation!r}"
        )
    past = settings.past_key_values if settings.cache_params is None else settings.cache_params
    if isinstance(past, Cache) and (reason := why_not_loaded(past)):
        return reason
    for model, role in ((target, "target"), (draft, "draft")):
        if model is not None and model.training and _checkpoints(model):
            return f"the {role} is in training mode with gradient checkpointing, which turns its cache off"
    return why_adapters_need_plain(target)


def _checkpoints(model: PreTrainedModel) -> bool:
    """Whether gradient checkpointing is on; transformers 5.23 has renamed the property."""
    checkpoints = getattr(model, "is_activation_checkpointing", None)
    return bool(model.is_gradient_checkpointing if checkpoints is None else checkpoints)


def _has_own_generate(model: PreTrainedModel) -> bool:
    """Whether the model's class has a `generate()` besides ours and transformers': it may call another model's."""
    classes = list(type(model).__mro__)
    ours = max(index for index, each in enumerate(classes) if each.__module__.startswith(__package__ or "-"))
    return next(each for each in classes[ours + 1 :] if "generate" in vars(each)) is not GenerationMixin


def remedy_if_nothing_serves(settings: MergedSettings) -> str:
    """Return the remedy for a call that neither SpecBranch nor transformers' assisted decoding takes; else empty."""
    if settings.mode not in SUPPORTED_MODES:
        return ""  # transformers ignores the assistant there
    if settings.use_cache is False:
        return "leave out use_cache=False, or leave out assistant_model="
    if isinstance(settings.past_key_values, StaticCache):
        return "pass a DynamicCache, or the whole text without past_key_values"
    return ""
