"""The modules of a model that keep a recurrent state, and the forward that runs them token by token.

Given several tokens, such a module computes only the state after the last one. To roll back, the states in between are
needed. So in a pass by slots it reads one token after the other, as it does in plain `generate()`, and its states are
kept after each. All other modules read all tokens of the pass at once.
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

from ..layers.check import evaluating
from ..model_state import state_of
from .kv_cache import cache_argument
from .recurrent_cache import RecurrentCache, RecurrentLayer

States = list[tuple[int, int]]  # the layer of the cache, and the index of the state in it


class StateOwners:
    """The modules that keep states in a cache, found in a pass.

    Attributes:
        states: which states each module keeps.
    """

    def __init__(self) -> None:
        self.states: dict[nn.Module, States] = {}
        self._lock, self._passes = Lock(), 0
        self._own: dict[nn.Module, Any] = {}  # forwards that the modules had of their own, besides their class's

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Let these modules read token by token in passes by slots. Other passes, in other threads, are as always."""
        with self._lock:
            if not self._passes:
                for module, states in self.states.items():
                    self._own[module] = module.__dict__.get("forward")
                    module.__dict__["forward"] = SteppedForward(module.forward, states)
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


class SteppedForward:
    """Takes the place of a module's forward: in a pass by slots it reads token by token, and keeps each state.

    Args:
        own: the module's forward.
        states: the states that it keeps.
    """

    def __init__(self, own: Callable[..., Any], states: States) -> None:
        self.own, self.states = own, states
        self.names = list(inspect.signature(own).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        caches = (each for each in (*args, *kwargs.values()) if isinstance(each, RecurrentCache))
        cache = next(caches, None)
        if cache is None or cache.address.slots is None:
            return self.own(*args, **kwargs)
        outputs, count = [], cache.address.slots.shape[1]
        for token in range(count):
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
            state.state_owners = owners
    found: StateOwners = state.state_owners
    return found


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
