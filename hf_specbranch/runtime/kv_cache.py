"""A transformers cache whose entries are addressed by slot."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

BUCKET = 256  # capacity grows in multiples of this many slots


class Address:
    """Where the next forward writes and what it reads; one object shared by all layers of a cache."""

    def __init__(self) -> None:
        self.slots: Tensor | None = None  # [B, Q]; None appends behind what is there
        self.shown = 0  # slots the attention reads: the first `shown`
        self.capacity = BUCKET
        self._on_device: dict[torch.device, Tensor] = {}
        self._rows: dict[torch.device, Tensor] = {}

    def point_at(self, slots: Tensor | None, shown: int) -> None:
        self.slots, self.shown = slots, shown
        self._on_device.clear()
        self._rows.clear()

    def slots_on(self, device: torch.device) -> Tensor:
        """The slots, [B, Q]; layers of a split model live on several devices."""
        assert self.slots is not None
        if device not in self._on_device:
            self._on_device[device] = self.slots.to(device)
        return self._on_device[device]

    def rows_on(self, device: torch.device) -> Tensor:
        """[B, 1], beside the slots where several rows are written."""
        if device not in self._rows:
            self._rows[device] = torch.arange(self.slots_on(device).shape[0], device=device)[:, None]
        return self._rows[device]


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [B, heads, capacity, head_dim], written wherever the address says."""

    is_sliding = False

    def __init__(self, address: Address) -> None:
        super().__init__()
        self.address = address
        self.appended = 0  # entries written by appending, that is, by prefill

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._room_for(key_states, self.address.capacity)
        self.values = self._room_for(value_states, self.address.capacity)
        self.is_initialized = True

    @staticmethod
    def _room_for(states: Tensor, capacity: int) -> Tensor:
        rows, heads, _, head_dim = states.shape
        return states.new_zeros((rows, heads, capacity, head_dim))

    def grow(self, capacity: int) -> None:
        if self.is_initialized and self.keys.shape[2] < capacity:
            for name in ("keys", "values"):
                old = getattr(self, name)
                new = self._room_for(old, capacity)
                new[:, :, : old.shape[2]] = old
                setattr(self, name, new)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.address.slots is None:
            end = self.appended + key_states.shape[2]
            self.keys[:, :, self.appended : end] = key_states
            self.values[:, :, self.appended : end] = value_states
            self.appended = end
            return self.keys[:, :, :end], self.values[:, :, :end]
        shown = self.address.shown
        slots = self.address.slots_on(self.keys.device)
        if slots.shape[0] == 1:  # one plain kernel each
            self.keys.index_copy_(2, slots[0], key_states.to(self.keys.dtype))
            self.values.index_copy_(2, slots[0], value_states.to(self.values.dtype))
        else:
            rows = self.address.rows_on(self.keys.device)
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys[:, :, :shown], self.values[:, :, :shown]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.appended + query_length, 0

    def get_seq_length(self) -> int:
        return self.appended

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """One `SlotLayer` per layer of the model, created as the first forward reaches it."""

    def __init__(self) -> None:
        self.address = Address()
        super().__init__(layer_class_to_replicate=partial(SlotLayer, self.address))

    def __bool__(self) -> bool:
        """Whether anything was appended: models that ask take an empty cache for none, even if it has layers."""
        return any(layer.appended for layer in self.layers)

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots, keeping what is stored."""
        if slots > self.address.capacity:
            self.address.capacity = -(-slots // BUCKET) * BUCKET
            for layer in self.layers:
                layer.grow(self.address.capacity)

    def append(self) -> None:
        """The next forward is a prefill: it writes behind what earlier prefills wrote."""
        self.address.point_at(None, 0)

    def forget(self) -> None:
        """Start anew in the same memory: what nobody sees does not exist."""
        for layer in self.layers:
            layer.appended = 0

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy entries between slots, [B, N] to [B, N]; reading happens before writing."""
        for layer in self.layers:
            rows = torch.arange(source.shape[0], device=layer.keys.device)[:, None]
            origin, target = source.to(layer.keys.device), destination.to(layer.keys.device)
            layer.keys[rows, :, target] = layer.keys[rows, :, origin]
            layer.values[rows, :, target] = layer.values[rows, :, origin]

    def load(self, past: Cache) -> None:
        """Take over what another cache holds, entry `i` into slot `i`.

        A sliding layer remembers only its window; the slots before it stay empty, and the window hides them.
        """
        length = past_length(past)
        self.reserve(length)
        for index, (keys, values, first) in enumerate(_stored(past)):
            if index == len(self.layers):
                self.layers.append(SlotLayer(self.address))
                self.layers[index].lazy_initialization(keys, values)
            layer = self.layers[index]
            layer.keys[:, :, first:length] = keys
            layer.values[:, :, first:length] = values
            layer.appended = length

    def store(self, past: Cache, first: int, last: int) -> None:
        """Append slots `first` to `last` (exclusive) to another cache."""
        if last > first:
            for index, layer in enumerate(self.layers):
                past.update(layer.keys[:, :, first:last].clone(), layer.values[:, :, first:last].clone(), index)


def past_length(past: Cache) -> int:
    """How many tokens a cache has seen."""
    return int(past.get_seq_length())


def why_not_loaded(past: Cache) -> str:
    """Why `SlotCache` cannot stand in for this cache; empty if it can.

    A cache that changes what it stores (a quantized one) gives other logits than a `SlotCache`, even while it is empty.
    """
    kinds = {type(layer) for layer in past.layers}
    if isinstance(later := getattr(past, "layer_class_to_replicate", None), type):
        kinds.add(later)
    known = {DynamicLayer, DynamicSlidingWindowLayer, StaticLayer}
    if past_length(past) == 0:
        known.add(StaticSlidingWindowLayer)  # `store` writes it through its own update; `load` does not read it
    if past_length(past) > 0 and getattr(past, "offloading", False):
        return "past_key_values is offloaded, layer by layer, to the CPU"
    if type(past).update is not Cache.update:
        return f"past_key_values is a {type(past).__name__}, which stores keys and values in its own way"
    if unknown := sorted(kind.__name__ for kind in kinds - known):
        return f"past_key_values has layers of type {', '.join(unknown)}, which cannot be read by slot"
    return ""


def _stored(past: Cache) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Keys, values and the first token they belong to, layer by layer."""
    for layer in past.layers:
        length = int(layer.get_seq_length())
        if isinstance(layer, StaticLayer):
            yield layer.keys[:, :, :length], layer.values[:, :, :length], 0
        else:
            yield layer.keys, layer.values, length - layer.keys.shape[2]
