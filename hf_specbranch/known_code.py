"""Whether a model runs the code of torch and transformers alone, as these were installed.

Users replace some of that code: the forward of a class, a function that a modeling file calls, an attention of some
name. The names of classes and of the attention do not tell. A function tells by the module that it was defined in, and
so does what it wraps.
"""

from __future__ import annotations

import sys
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .model_state import every_module

CLASSES = ("torch.", "transformers.", "hf_specbranch.layers.")  # where those of modules are defined
# And functions, by the first name. Files of transformers name some of the others, which compute nothing.
FUNCTIONS = {"torch", "transformers", "hf_specbranch", "accelerate", "safetensors", *sys.stdlib_module_names}


def runs_known_code(model: PreTrainedModel, attention: str) -> bool:
    """Return whether all code that a pass of a model runs is part of torch, transformers or this package.

    Args:
        model: the model.
        attention: the name of its attention.

    Example:
        >>> from hf_specbranch import load_demo_pair
        >>> target, _, _ = load_demo_pair()
        >>> runs_known_code(target, "sdpa")
        True
    """
    modules = every_module(model)
    classes = set(map(class_of, modules))
    if not all(kind.__module__.startswith(CLASSES) and kind.__module__ in sys.modules for kind in classes):
        return False
    if any("forward" in module.__dict__ for module in modules):
        return False
    hooks = [hook for each in modules for hook in (*each._forward_hooks.values(), *each._forward_pre_hooks.values())]
    named = [functions.get(attention) for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)]
    called = [*hooks, *(each for each in named if each is not None), *(kind.forward for kind in classes)]
    files = {sys.modules[kind.__module__] for kind in classes} | {torch.nn.functional}
    # Besides functions, classes and files hold anything at all.
    held = [each for holder in (*classes, *files) for each in list(vars(holder).values()) if _is_function(each)]
    return all(_is_known(each) for each in (*called, *held))


def class_of(module: nn.Module) -> type[Any]:
    """Return the class of a module; SpecBranch attached to a model does not count."""
    kind: type[Any] = getattr(type(module), "_specbranch_original", type(module))
    return kind


def _is_function(code: Any) -> bool:
    return isinstance(code, (FunctionType, MethodType, staticmethod, classmethod))


def _is_known(code: Any) -> bool:
    """Return whether a function, and every function that it wraps, is defined in one of the packages `FUNCTIONS`."""
    function = code if isinstance(code, FunctionType) else getattr(code, "__func__", None)
    if not isinstance(function, FunctionType):
        return False
    wrapped = getattr(function, "__wrapped__", None)
    known = str(function.__globals__.get("__name__")).split(".")[0] in FUNCTIONS
    return known and (wrapped is None or _is_known(wrapped))
