"""What one `generate()` call asks for: its settings in transformers' order, and the request that it makes of us."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode

from .config import SpecBranchConfig
from .decoding.hooks import SpeculationHook
from .decoding.loop import Parts
from .runtime.module_walk import every_parameter

DEFAULTS: dict[str, Any] = GenerationConfig._get_default_generation_params()
# What makes transformers take its candidates from elsewhere, or accept them by another rule.
CANDIDATE_SOURCES = (
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "use_mtp",
    "speculation_type",
    "assistant_ensemble_weight",
)


class MergedSettings:
    """Looks settings up in the order of transformers: the arguments, the config passed with them, the model's config,
    the defaults. An unknown name is None.

    Args:
        arguments: of the call, by name.
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
        """The generation mode without an assistant."""
        return GenerationConfig.get_generation_mode(self, None)

    @property
    def candidate_source(self) -> str:
        """The argument that asks for transformers' own speculation, if there is one."""
        given = ((name, getattr(self, name)) for name in CANDIDATE_SOURCES)
        return next((name for name, value in given if value is not None and value is not False), "")

    def set_by_user(self, name: str, *more: GenerationConfig | None) -> Any:
        """A setting that somebody has chosen, here or in `more` configs; None if it is unset.

        Unset values are None in a generation config. Pipelines of older transformers pass configs in which all of them
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
    """What one `generate()` call asks of us.

    It travels as the call's `assistant_model`, so that it reaches the decoding of this call and no other: a processor
    or streamer may call `generate()` of this or any other model meanwhile.
    """

    config: SpecBranchConfig
    draft: PreTrainedModel | None
    hooks: Sequence[SpeculationHook]
    generator: torch.Generator | None
    fills_cache: bool  # past_key_values was passed in
    observer: Callable[[Parts], Parts] | None


def call_config(given: Any, settings: MergedSettings, draft: PreTrainedModel | None) -> SpecBranchConfig:
    """The speculation settings of a call: its own, else the generation config's, else the defaults.

    Where they leave length and threshold open, those of transformers' assisted decoding count, if somebody has set
    them: with the call, in the target's generation config, or, as transformers reads them, in the draft's.
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
    theirs = getattr(draft, "generation_config", None)
    if config.max_draft_length == "auto" and (length := settings.set_by_user("num_assistant_tokens", theirs)):
        config = replace(config, max_draft_length=length)
    if config.confidence_threshold == "auto":
        threshold = settings.set_by_user("assistant_confidence_threshold", theirs)
        config = replace(config, confidence_threshold="auto" if threshold is None else threshold)
    return config


@contextmanager
def seeded_from(generator: torch.Generator | None, model: PreTrainedModel) -> Iterator[None]:
    """Seed torch's global generators by a number drawn from this one, and restore them afterwards.

    They are the CPU's and those of the CUDA devices on which the model lies.
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
