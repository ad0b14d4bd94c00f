"""What is remembered about a model between calls: one object per model, which goes when the model goes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn


@dataclass
class ModelState:
    """Everything that earlier calls found out about one model.

    The parts of the package that fill a field own its type; this module imports none of them.

    Attributes:
        mask_forms: whether the model takes its masks by layer type, by state of its adapters (`runtime.mask_probe`).
        padding_is_plain: whether padded batches are read as plain `generate()` reads them (`padding_check`).
        sync_reason: why a forward cannot be captured, empty if it can (`runtime.cuda_graph`).
        kernel_check: the model's fingerprint when its kernels were checked, and whether they agreed.
        kernel_recipe: which modules our kernels replace, and how (`kernels.fuse`).
        idle_runners: runners with their graphs and caches, waiting for the next call (`runtime.cuda_graph`).
        warned_eager: the reason that was logged for running eagerly (`runtime.selection`).
        num_parameters: counted once, since that takes a millisecond.
        pairs: what the planner knows of this target with each draft, by state of their adapters (`planning.online`).
    """

    mask_forms: dict[Hashable, bool] = field(default_factory=dict)
    padding_is_plain: bool | None = None
    sync_reason: str | None = None
    kernel_check: tuple[int, bool] | None = None
    kernel_recipe: Any = None
    idle_runners: dict[Hashable, Any] = field(default_factory=dict)
    warned_eager: str = ""
    num_parameters: int | None = None
    pairs: WeakKeyDictionary[nn.Module, dict[Hashable, Any]] = field(default_factory=WeakKeyDictionary)


_STATES: WeakKeyDictionary[nn.Module, ModelState] = WeakKeyDictionary()


def state_of(model: nn.Module) -> ModelState:
    """What is remembered about this model.

    Example:
        >>> from hf_specbranch import load_demo_pair
        >>> target, _, _ = load_demo_pair()
        >>> state_of(target) is state_of(target)
        True
    """
    return _STATES.setdefault(model, ModelState())


def num_parameters(model: nn.Module) -> int:
    """How many parameters a model has."""
    state = state_of(model)
    if state.num_parameters is None:
        state.num_parameters = sum(weight.numel() for weight in model.parameters())
    return state.num_parameters
