"""Calls for which nothing was asked of SpecBranch: which of them are plain `generate()`."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from .model_state import adapter_state, state_of
from .request import SUPPORTED_MODES, MergedSettings
from .runtime.idle_runners import free_all
from .runtime.selection import check_model, masks_for, why_not_captured


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
        except torch.OutOfMemoryError:  # a later call may have enough
            free_all(target.device)
            return "there is no memory to check it"
        except (TypeError, ValueError) as refused:
            known[key] = str(refused)
    return known[key]
