"""PEFT adapters: which model a wrapper holds, what state its adapters are in, and which of them need plain decoding."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .module_walk import every_module


def transformers_model(model: Any) -> Any:
    """The transformers model inside a PEFT wrapper; anything else is returned as it is.

    Adapters such as LoRA replace modules in place, so the inner model computes with whatever adapter is active.
    """
    if isinstance(model, PreTrainedModel) or not isinstance(model, nn.Module):
        return model
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def draft_model(model: Any) -> Any:
    """The same for a draft; refuses prompt learning, which only the wrapper's own `generate()` applies."""
    inner = transformers_model(model)
    if inner is not model and getattr(model.active_peft_config, "is_prompt_learning", False):
        raise ValueError(
            f"the draft is a PEFT model with prompt learning ({model.active_peft_config.peft_type}): use an adapter "
            f"that changes layers, such as LoRA, or the base model"
        )
    return inner


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT has put adapters into this model, by a wrapper or by `model.add_adapter()`."""
    return bool(getattr(model, "peft_config", None))


def adapter_state(model: nn.Module) -> Hashable:
    """Which adapters are active, disabled and merged, layer by layer; None without adapters.

    What is remembered about a model is remembered for one such state.
    """
    if not has_adapters(model):
        return None
    state = []
    for module in every_module(model):
        if type(module).__module__.startswith("peft."):
            active = tuple(getattr(module, "active_adapters", ()))
            merged = tuple(getattr(module, "merged_adapters", ()))
            state.append((type(module).__name__, active, bool(getattr(module, "disable_adapters", False)), merged))
    return tuple(state)


def why_adapters_need_plain(model: PreTrainedModel) -> str:
    """Why the adapters in use work under transformers' own decoding only; empty if they do not.

    Prompt learning prepares the model's inputs itself. Adapters chosen per row (`adapter_names=`) or by position
    (aLoRA, X-LoRA) are handed to the layers by hooks that expect the passes of plain `generate()`.
    """
    prepare = model.__dict__.get("prepare_inputs_for_generation")
    if prepare is not None and getattr(prepare, "__func__", None) is not type(model).prepare_inputs_for_generation:
        return "prepare_inputs_for_generation is replaced on the model, as PEFT does for prompt learning"
    if has_adapters(model) and any(_is_steered_by_peft(module) for module in every_module(model)):
        return "the call chooses adapters per row or per position (adapter_names=, aLoRA or X-LoRA)"
    return ""


def _is_steered_by_peft(module: nn.Module) -> bool:
    hooks = (getattr(hook, "func", hook) for hook in module._forward_pre_hooks.values())
    return any(str(getattr(hook, "__module__", "")).startswith("peft.") for hook in hooks)
