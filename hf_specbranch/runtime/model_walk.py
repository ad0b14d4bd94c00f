"""Walks over the modules of a model, and finds PEFT adapters among them.

Every generation walks over its models several times. `nn.Module.modules()` is slower than the functions here, because
it builds a name for each module.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


def every_module(model: nn.Module) -> list[nn.Module]:
    """Return a module and all modules inside it, each once, in the order of `model.modules()`.

    Example:
        >>> from torch import nn
        >>> inner = nn.ReLU()
        >>> [type(module).__name__ for module in every_module(nn.Sequential(inner, nn.Sequential(inner)))]
        ['Sequential', 'ReLU', 'Sequential']
    """
    found: dict[nn.Module, None] = {}
    ahead: list[nn.Module | None] = [model]
    while ahead:
        module = ahead.pop()
        if module is not None and module not in found:
            found[module] = None
            if module._modules:
                ahead.extend(reversed(module._modules.values()))
    return list(found)


def every_parameter(model: nn.Module) -> list[nn.Parameter]:
    """Return all parameters of a model. Tied parameters appear more than once.

    Example:
        >>> from torch import nn
        >>> [tuple(parameter.shape) for parameter in every_parameter(nn.Linear(3, 2))]
        [(2, 3), (2,)]
    """
    held = (module._parameters.values() for module in every_module(model) if module._parameters)
    return [parameter for parameters in held for parameter in parameters if parameter is not None]


def every_buffer(model: nn.Module) -> list[Tensor]:
    """Return all buffers of a model. Shared buffers appear more than once.

    Example:
        >>> from torch import nn
        >>> len(every_buffer(nn.BatchNorm1d(2)))
        3
    """
    held = (module._buffers.values() for module in every_module(model) if module._buffers)
    return [buffer for buffers in held for buffer in buffers if buffer is not None]


# ---- PEFT adapters


def transformers_model(model: Any) -> Any:
    """Return the transformers model inside a PEFT wrapper, or anything else unchanged.

    Adapters such as LoRA replace modules in place, so the inner model computes with whichever adapter is active.
    """
    if isinstance(model, PreTrainedModel) or not isinstance(model, nn.Module):
        return model
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def draft_model(model: Any) -> Any:
    """Return the transformers model inside a draft, and refuse prompt learning.

    Only the PEFT wrapper's own `generate()` applies prompt learning, and a draft is never called through it.
    """
    inner = transformers_model(model)
    if inner is not model and getattr(model.active_peft_config, "is_prompt_learning", False):
        raise ValueError(
            f"the draft is a PEFT model with prompt learning ({model.active_peft_config.peft_type}): use an adapter "
            f"that changes layers, such as LoRA, or the base model"
        )
    return inner


def has_adapters(model: nn.Module) -> bool:
    """Return whether PEFT has put adapters into this model, by a wrapper or by `model.add_adapter()`."""
    return bool(getattr(model, "peft_config", None))


def adapter_state(model: nn.Module) -> Hashable:
    """Return which adapters are active, disabled and merged, layer by layer; None without adapters.

    What is remembered about a model holds for one such state.
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
    """Return why the active adapters work only with transformers' own decoding; empty if they work with ours too.

    Prompt learning prepares the model's inputs itself. Adapters chosen per row (`adapter_names=`) or by position
    (aLoRA, X-LoRA) reach the layers through hooks that expect the passes of plain `generate()`.
    """
    prepare = model.__dict__.get("prepare_inputs_for_generation")
    if prepare is not None and getattr(prepare, "__func__", None) is not type(model).prepare_inputs_for_generation:
        return "prepare_inputs_for_generation is replaced on the model, as PEFT does for prompt learning"
    if has_adapters(model) and any(_has_peft_hooks(module) for module in every_module(model)):
        return "the call chooses adapters per row or per position (adapter_names=, aLoRA or X-LoRA)"
    return ""


def _has_peft_hooks(module: nn.Module) -> bool:
    hooks = (getattr(hook, "func", hook) for hook in module._forward_pre_hooks.values())
    return any(str(getattr(hook, "__module__", "")).startswith("peft.") for hook in hooks)
