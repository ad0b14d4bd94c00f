"""What one `generate()` call asks for: its merged settings, and the checks it must pass before any work starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import CandidateGenerator, GenerationMode

from .attachment import Attachment
from .config import LOOKUP_TOKENS, SpecBranchConfig
from .corpus import LookupCorpus
from .decoding.candidates import settings_for_candidates
from .decoding.hooks import SpeculationHook
from .decoding.policies import POLICIES
from .model_state import every_parameter, is_compiled, is_offloaded, ranks_of, why_adapters_need_plain
from .progress import Progress
from .runtime.eager import layer_kinds
from .runtime.kv_cache import why_not_loaded
from .runtime.positions import LengthDependentRotary
from .runtime.recurrent_cache import is_recurrent
from .target_heads.base import TargetHead
from .vocabularies import Translation

DEFAULTS: dict[str, Any] = GenerationConfig._get_default_generation_params()
# Settings that make transformers take its candidates from elsewhere, or accept them by another rule.
CANDIDATE_SOURCES = (
    "assistant_early_exit",
    "use_mtp",
    "speculation_type",
    "assistant_ensemble_weight",
)


POSITIONAL = [name for name in inspect.signature(GenerationMixin.generate).parameters if name not in ("self", "kwargs")]


class FallBack(Exception):
    """This call is left to transformers' own decoding; the message says why. Raised before the first token."""


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


warming_up: ContextVar[Progress | None] = ContextVar("warming_up", default=None)


@dataclass
class Request:
    """What one `generate()` call asks of SpecBranch.

    It is passed on as the call's `assistant_model`, so that it reaches the decoding of this call and no other: a
    processor or streamer may call `generate()` of this or any other model meanwhile.
    """

    config: SpecBranchConfig
    draft: PreTrainedModel | None
    hooks: Sequence[SpeculationHook]
    generator: torch.Generator | None
    fills_cache: bool  # past_key_values was passed in
    corpus: LookupCorpus | None
    candidates: CandidateGenerator | None  # drafts in place of a model
    observer: Callable[[Any], Any] | None  # `decoding.loop.Parts` in, the same out
    asked: bool = True  # a draft or settings were given; otherwise what cannot be served is left alone without a word
    translation: Translation | None = None  # to the draft's tokenizer, if it is another one
    # Capture all stages instead of generating, and report progress here.
    warm_up: Progress | None = field(default_factory=lambda: warming_up.get())

    def draft_of_call(self, target: PreTrainedModel, samples: bool) -> PreTrainedModel | None:
        """Return the model that drafts: the draft, or a cheaper copy of it. On a CPU only if the settings say so."""
        config, draft = self.config, self.draft
        has_copies = not isinstance(draft, TargetHead) and self.translation is None
        if draft is None or not has_copies or not POLICIES[config.policy].drafts:
            return draft
        off = (None,) if draft.device.type == "cuda" else (None, "auto")
        if all(setting in off for setting in config.draft_form):
            return draft
        from .planning.draft_choice import draft_of_call

        return draft_of_call(config, target, draft, samples, user=self)


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


# Two vocabularies of one tokenizer may differ by padding: Qwen2.5 has 151,936 entries, or 152,064.
LARGEST_PADDING = 0.01
SUPPORTED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def check_model(model: PreTrainedModel, role: str) -> None:
    """Refuse a model that cannot be a target or a draft (`role`)."""
    name = type(model).__name__
    if is_compiled(model):
        raise ValueError(
            f"the {role} is under torch.compile, which would compile it again for each shape: pass the model as it was "
            f"loaded, on a GPU its stages are captured as CUDA graphs"
        )
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"the {role} must be a transformers PreTrainedModel, not {name}")
    if model.config.is_encoder_decoder:
        raise ValueError(f"the {role} {name} is an encoder-decoder model: SpecBranch needs decoder-only models")
    if getattr(model, "_is_stateful", False) and not _keeps_states_in_cache(model):
        raise ValueError(
            f"the {role} {name} keeps a recurrent state outside of its cache, where it cannot be rolled back: choose "
            f"another model"
        )
    if role == "draft" and getattr(model, "_tp_size", None) is not None:
        raise ValueError(f"the draft {name} is tensor parallel: load it without tp_plan, since rank 0 runs it alone")
    is_placed = role == "target" or not model.get_input_embeddings().weight.is_meta
    if any(parameter.is_meta for parameter in every_parameter(model)) and not (is_placed and is_offloaded(model)):
        raise ValueError(f"the {role} {name} has weights on the meta device: load them before generating")


def _keeps_states_in_cache(model: PreTrainedModel) -> bool:
    return any(map(is_recurrent, layer_kinds(model.config.get_text_config(decoder=True))))


def check_pair(target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any, draft_tokenizer: Any) -> None:
    """Refuse a draft with another vocabulary, unless both tokenizers are known (`vocabularies.translation_for`)."""
    ours, theirs = (model.config.get_text_config(decoder=True) for model in (target, draft))
    names = f"target {_name(target)}: {ours.vocab_size} entries, draft {_name(draft)}: {theirs.vocab_size}"
    if ours.vocab_size == theirs.vocab_size or (tokenizer is not None and draft_tokenizer is not None):
        return
    padding = abs(ours.vocab_size - theirs.vocab_size) / max(ours.vocab_size, theirs.vocab_size)
    if padding > LARGEST_PADDING or ours.model_type != theirs.model_type:
        raise ValueError(
            f"vocabulary sizes differ ({names}): pass the target's tokenizer= and the draft's assistant_tokenizer=, or "
            f"choose a draft that shares the target's tokenizer"
        )


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
