"""The modules of a model that keep a recurrent state, and how they read the tokens of a pass.

Given several tokens, such a module computes only the state after the last one. To roll back, the states in between are
needed. Where a module is recognised (`layers/delta_net.py`), kernels keep them. Any other one reads one token after the
other in a pass by slots, as it does in plain `generate()`, and its states are kept after each. All other modules read
all tokens of the pass at once.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..layers.base import Replacement, ThreadForward, untouched
from ..layers.check import agreeing, evaluating
from ..layers.delta_net import DeltaNetForward, recognise_delta_net
from ..layers.recognise import record_calls
from ..model_state import state_of
from .kv_cache import cache_argument
from .recurrent_cache import RecurrentCache, RecurrentLayer

States = list[tuple[int, int]]  # the layer of the cache, and the index of the state in it


class StateOwners:
    """The modules that keep states in a cache, found in a pass.

    Attributes:
        states: which states each module keeps.
        replacements: forwards of modules that read all tokens of a pass at once, and keep each state.
    """

    def __init__(self) -> None:
        self.states: dict[nn.Module, States] = {}
        self.replacements: dict[nn.Module, DeltaNetForward] = {}
        self._lock, self._passes = Lock(), 0
        self._own: dict[nn.Module, Any] = {}  # forwards that the modules had of their own, besides their class's

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Let these modules keep each state in passes by slots. Other passes, in other threads, are as always."""
        with self._lock:
            if not self._passes:
                for module, states in self.states.items():
                    own = module.__dict__.get("forward")
                    if isinstance(own, ThreadForward) and isinstance(own.ours, DeltaNetForward):
                        continue  # it runs through our kernels, which keep each state
                    self._own[module] = own
                    module.__dict__["forward"] = SteppedForward(module.forward, states, self._replacement(module))
            self._passes += 1
        try:
            yield
        finally:
            with self._lock:
                self._passes -= 1
                if not self._passes:
                    for module, own in self._own.items():
                        del module.__dict__["forward"]
                        if own is not None:
                            module.__dict__["forward"] = own
                    self._own.clear()

    def _replacement(self, module: nn.Module) -> Replacement | None:
        """Return the replacement of a module, if it may be used now: hooks may have been added since it was checked."""
        ours = self.replacements.get(module)
        usable = ours is not None and "forward" not in module.__dict__ and all(map(untouched, ours.bypassed))
        return ours if usable else None


class SteppedForward:
    """Takes the place of a module's forward: in a pass by slots it keeps each state.

    Args:
        own: the module's forward.
        states: the states that it keeps.
        ours: reads all tokens of a pass at once; None: the module reads one token after the other.
    """

    def __init__(self, own: Callable[..., Any], states: States, ours: Replacement | None = None) -> None:
        self.own, self.states, self.ours = own, states, ours
        self.names = list(inspect.signature(own).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        caches = (each for each in (*args, *kwargs.values()) if isinstance(each, RecurrentCache))
        cache = next(caches, None)
        if cache is None or cache.address.slots is None:
            return self.own(*args, **kwargs)
        if self.ours is not None:
            return self.ours(*args, **kwargs)
        outputs, count = [], cache.address.slots.shape[1]
        for token in range(count):
            # Also after the first token: rows with fewer tokens to read than others begin with the same one repeatedly.
            entry = cache.history.entry(cache.address.slots[:, token])
            for layer, index in self.states:
                cache.layers[layer].restore(entry, index)
            values = [_at(token, count, name, value) for name, value in zip(self.names, args)]
            named = {name: _at(token, count, name, value) for name, value in kwargs.items()}
            outputs.append(self.own(*values, **named))
            entry = cache.history.entry(cache.address.slots[:, token] + 1)
            for layer, index in self.states:
                cache.layers[layer].keep(entry, index)
        return _joined(outputs)


def _at(token: int, count: int, name: str, value: Any) -> Any:
    """Return what of an argument concerns one of `count` tokens. All of these are text, so masks of padding go."""
    if name.endswith("mask"):
        return None
    if isinstance(value, (tuple, list)):
        return type(value)(_at(token, count, name, each) for each in value)
    if not isinstance(value, Tensor):
        return value
    if value.ndim == 1 or name == "position_ids":  # [Q], [B, Q] or [axes, B, Q]
        return value[..., token : token + 1] if value.shape[-1] == count else value
    return value[:, token : token + 1] if value.shape[1] == count else value  # [B, Q, ...]


def _joined(outputs: list[Any]) -> Any:
    """Join the outputs for single tokens, [B, 1, ...] each. Of several outputs, the first is the one for the token."""
    if isinstance(outputs[0], tuple):
        return (torch.cat([each[0] for each in outputs], dim=1), *outputs[-1][1:])
    return torch.cat(outputs, dim=1)


def owners_of(model: PreTrainedModel) -> StateOwners:
    """Return the modules of a model that keep states, found in a pass over two tokens and remembered."""
    state = state_of(model)
    with state.kernel_lock:
        if state.state_owners is None:
            owners, cache = StateOwners(), RecurrentCache(model)
            for number, layer in enumerate(cache.layers):
                if isinstance(layer, RecurrentLayer):
                    layer.on_update = partial(_note, owners, number)
            cache.append()
            tokens = torch.ones((1, 2), dtype=torch.long, device=model.get_input_embeddings().weight.device)
            with torch.no_grad(), evaluating(model):
                model(input_ids=tokens, use_cache=True, **{cache_argument(model): cache})
            owners.replacements = _checked_replacements(model, owners)
            state.state_owners = owners
    found: StateOwners = state.state_owners
    return found


def _checked_replacements(model: PreTrainedModel, owners: StateOwners) -> dict[nn.Module, DeltaNetForward]:
    """Return replacements for the modules that are recognised and compute the same, found out in a pass."""
    found = {module: ours for module in owners.states if (ours := recognise_delta_net(module)) is not None}
    usable = {
        module: ours for module, ours in found.items() if untouched(module) and all(map(untouched, ours.bypassed))
    }
    return agreeing(usable, record_calls(model, usable.__contains__)) if usable else {}


def _note(owners: StateOwners, layer: int, index: int) -> None:
    """Note the module that is running: the innermost one whose method called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            states = owners.states.setdefault(module, [])
            if (layer, index) not in states:
                states.append((layer, index))
            return
        frame = frame.f_back
