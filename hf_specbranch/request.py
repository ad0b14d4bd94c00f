"""What one `generate()` call asks for: its merged settings, and the checks it must pass before any work starts."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import CandidateGenerator, GenerationMode

from .attachment import Attachment
from .config import LOOKUP_TOKENS, SpecBranchConfig
from .decoding.candidates import settings_for_candidates
from .decoding.policies import POLICIES
from .model_state import every_parameter, ranks_of, why_adapters_need_plain
from .runtime.kv_cache import why_not_loaded
from .runtime.selection import check_model, check_pair
from .target_heads.base import TargetHead

DEFAULTS: dict[str, Any] = GenerationConfig._get_default_generation_params()
# Settings that make transformers take its candidates from elsewhere, or accept them by another rule.
CANDIDATE_SOURCES = (
    "assistant_early_exit",
    "use_mtp",
    "speculation_type",
    "assistant_ensemble_weight",
)


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


def call_config(
    given: Any, settings: MergedSettings, draft: PreTrainedModel | None, attached: Attachment | None = None
) -> SpecBranchConfig:
    """Return the speculation settings of a call: its own, the generation config's, those attached, or the defaults.

    Where they leave length and threshold open, those of transformers' assisted decoding count if the user has set
    them: in the call, in the target's generation config, or, where transformers reads them, in the draft's.
    """
    if given is None or given is True:
        given = settings.specbranch if settings.specbranch is not None else attached and attached.config
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
    tokens, size = settings.prompt_lookup_num_tokens, settings.set_by_user("max_matching_ngram_size")
    if tokens is None and attached is not None and attached.looks_up and config.prompt_lookup_num_tokens == "auto":
        tokens = LOOKUP_TOKENS
    if tokens is not None:
        config = replace(config, prompt_lookup_num_tokens=tokens)
    return config if size is None else replace(config, max_matching_ngram_size=size)


def lookup_on(device: torch.device, config: SpecBranchConfig, attached: Attachment) -> SpecBranchConfig:
    """Return the settings for a device: on a GPU, where it is not timed yet, lookup must be asked for."""
    if device.type == "cuda" and config.prompt_lookup_num_tokens == "auto" and attached.corpus is None:
        return replace(config, prompt_lookup_num_tokens=0)
    return config


def without_model(config: SpecBranchConfig) -> SpecBranchConfig:
    """Return the settings of the policy "auto" where there is no draft model: lookup alone."""
    lookup = config.prompt_lookup_num_tokens
    return replace(
        config, policy="autoregressive", prompt_lookup_num_tokens=LOOKUP_TOKENS if lookup == "auto" else lookup
    )


def settings_for_sources(
    config: SpecBranchConfig, draft: PreTrainedModel | None, candidates: CandidateGenerator | None
) -> SpecBranchConfig:
    """Return the settings of a call with these sources of drafts."""
    if candidates is not None:
        return settings_for_candidates(config, candidates)
    return without_model(config) if draft is None and config.policy == "auto" else config


def tokenizers_of(settings: MergedSettings, attached: Attachment, assistant: Any) -> tuple[Any, Any]:
    """Return the tokenizers of target and draft: those of the call, or those that the attached draft came with."""
    if assistant is None and settings.assistant_tokenizer is None:
        return attached.tokenizers
    return settings.tokenizer, settings.assistant_tokenizer


SUPPORTED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def why_plain(target: PreTrainedModel, draft: PreTrainedModel | None, settings: MergedSettings) -> str:
    """Return why this `generate()` call is left to transformers' own decoding; empty if it is not."""
    if _has_own_generate(target):
        return "its class has a generate() of its own"
    if target.get_input_embeddings().weight.is_meta:
        return "its embeddings are offloaded, which leaves open where it runs"
    if ranks_of(target) is not None:
        if isinstance(draft, TargetHead):
            return "a head that drafts shares layers with the target, and those of a tensor parallel one are sharded"
    elif any(type(weight).__name__ == "DTensor" for weight in every_parameter(target)):
        return "its weights are sharded over processes, by FSDP or by something else than a tp_plan alone"
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
    past = settings.past_key_values if settings.cache_params is None else settings.cache_params
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
