"""What one `generate()` call asks for: its merged settings, and the request that reaches the decoding loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import GenerationMode

from .config import SpecBranchConfig
from .decoding.hooks import SpeculationHook
from .runtime.model_walk import every_parameter

DEFAULTS: dict[str, Any] = GenerationConfig._get_default_generation_params()
# Settings that make transformers take its candidates from elsewhere, or accept them by another rule.
CANDIDATE_SOURCES = (
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "use_mtp",
    "speculation_type",
    "assistant_ensemble_weight",
)


POSITIONAL = [name for name in inspect.signature(GenerationMixin.generate).parameters if name not in ("self", "kwargs")]


@dataclass
class Attachment:
    """What was given to `specbranch(model, ...)`. A plain object, so that the draft is no submodule of the target."""

    draft: PreTrainedModel | None = None
    head: Any = None
    warned: set[str] = field(default_factory=set)  # the reasons for falling back that were logged
    temporary_calls: int = 0  # running calls of `attached_for_call`, where the user has not attached the model


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
        """The generation mode if there were no assistant."""
        return GenerationConfig.get_generation_mode(self, None)

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


def _is_filled_in(config: GenerationConfig | None) -> bool:
    return all(getattr(config, name, None) is not None for name, value in DEFAULTS.items() if value is not None)


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
    observer: Callable[[Any], Any] | None  # `decoding.loop.Parts` in, the same out


def call_config(given: Any, settings: MergedSettings, draft: PreTrainedModel | None) -> SpecBranchConfig:
    """Return the speculation settings of a call: its own, else the generation config's, else the defaults.

    Where they leave length and threshold open, those of transformers' assisted decoding count if the user has set
    them: in the call, in the target's generation config, or, where transformers reads them, in the draft's.
    """
    if given is None or given is True:
        candidates = (getattr(config, "specbranch", None) for config in settings.configs)
        given = next((candidate for candidate in candidates if candidate is not None), {})
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
    return config


@contextmanager
def seeded_from(generator: torch.Generator | None, model: PreTrainedModel) -> Iterator[None]:
    """Seed torch's global generators with a number drawn from `generator`, and restore them afterwards.

    These are the CPU's and those of the model's CUDA devices.
    """
    if generator is None:
        yield
        return
    devices = {weight.device for weight in every_parameter(model) if weight.device.type == "cuda"}
    shared = [torch.default_generator, *(torch.cuda.default_generators[device.index] for device in devices)]
    before = [each.get_state() for each in shared]
    seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device))
    try:
        for each in shared:
            each.manual_seed(seed)
        yield
    finally:
        for each, state in zip(shared, before):
            each.set_state(state)
