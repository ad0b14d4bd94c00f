"""Calls that are left to transformers' own decoding: which ones, and how they are seeded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel, StaticCache

from .model_state import adapter_state, every_parameter, state_of
from .request import SUPPORTED_MODES, FallBack, MergedSettings, check_inputs, check_model
from .runtime.selection import masks_for, why_not_captured


def why_left_alone(target: PreTrainedModel, settings: MergedSettings) -> str:
    """Return why a call without any setting or draft of ours is left to transformers; empty if it is not.

    Decoding without a draft is to be faster than plain `generate()` and nothing else: where it would not be, or where a
    check of a target refuses it, plain `generate()` runs.
    """
    if target.device.type not in ("cpu", "cuda") or target.training:
        return "it would not be faster, or the model is being trained"
    if str(settings.cache_implementation).startswith("offloaded"):
        return "the cache is to be kept elsewhere"
    if target.device.type == "cuda" and (reason := why_not_captured(target)):
        return reason
    if settings.mode not in SUPPORTED_MODES:
        return "it is no greedy decoding or sampling"
    attention = target.config.get_text_config(decoder=True)._attn_implementation
    known, key = state_of(target).refusals, (adapter_state(target), target.dtype, attention)
    if key not in known:
        try:
            check_model(target, "target")
            masks_for(target, "target")
            known[key] = ""
        except (TypeError, ValueError) as refused:
            known[key] = str(refused)
    return known[key]


def leave_refused_inputs(target: PreTrainedModel, input_ids: Any, model_kwargs: dict[str, Any]) -> None:
    """Leave inputs that `check_inputs` refuses to transformers."""
    try:
        check_inputs(target, input_ids, model_kwargs)
    except ValueError as refused:
        raise FallBack(str(refused)) from refused


def why_refused(settings: MergedSettings) -> str:
    """Return the remedy for a call that neither SpecBranch nor transformers' assisted decoding takes; else empty."""
    if settings.mode not in SUPPORTED_MODES:
        return ""  # transformers ignores the assistant there
    if settings.use_cache is False:
        return "leave out use_cache=False, or leave out assistant_model="
    if isinstance(settings.past_key_values, StaticCache):
        return "pass a DynamicCache, or the whole text without past_key_values"
    return ""


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
