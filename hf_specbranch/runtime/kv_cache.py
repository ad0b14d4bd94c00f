"""The KV cache: a transformers cache whose entries are addressed by slot."""

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
    """Says which slots the next forward writes and how many it reads. All layers of a cache share one."""

    def __init__(self) -> None:
        self.slots: Tensor | None = None  # [B, Q]; None: append after what is there
        self.shown = 0  # attention reads the first `shown` slots
        self.capacity = BUCKET
        self._on_device: dict[torch.device, Tensor] = {}
        self._rows: dict[torch.device, Tensor] = {}

    def point_at(self, slots: Tensor | None, shown: int) -> None:
        """Set the slots that the next forward writes, [B, Q] or None to append, and the number that it reads."""
        self.slots, self.shown = slots, shown
        self._on_device.clear()
        self._rows.clear()

    def slots_on(self, device: torch.device) -> Tensor:
        """Return the slots, [B, Q], on a device: the layers of a split model are on several devices."""
        assert self.slots is not None
        if device not in self._on_device:
            self._on_device[device] = self.slots.to(device)
        return self._on_device[device]

    def rows_on(self, device: torch.device) -> Tensor:
        """Return row indices, [B, 1], which index together with the slots where several rows are written."""
        if device not in self._rows:
            self._rows[device] = torch.arange(self.slots_on(device).shape[0], device=device)[:, None]
        return self._rows[device]


class SlotLayer(CacheLayerMixin):
    """Stores keys and values of one layer, [B, heads, capacity, head_dim], in the slots that the address names."""

    is_sliding = False

    def __init__(self, address: Address) -> None:
        super().__init__()
        self.address = address
        self.appended = 0  # entries written by appending, which only prefill does

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._room_for(key_states, self.address.capacity)
        self.values = self._room_for(value_states, self.address.capacity)
        self.is_initialized = True

    @staticmethod
    def _room_for(states: Tensor, capacity: int) -> Tensor:
        rows, heads, _, head_dim = states.shape
        return states.new_zeros((rows, heads, capacity, head_dim))

    def grow(self, capacity: int) -> None:
        """Enlarge the memory to this many slots, and keep what is stored."""
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
        if slots.shape[0] == 1:  # one simple kernel each
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
    """Holds one `SlotLayer` per layer of the model, created when the first forward reaches it."""

    def __init__(self) -> None:
        self.address = Address()
        super().__init__(layer_class_to_replicate=partial(SlotLayer, self.address))

    def __bool__(self) -> bool:
        """Return whether anything was appended. Models that test it treat an empty cache as none, even with layers."""
        return any(layer.appended for layer in self.layers)

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots, and keep what is stored."""
        if slots > self.address.capacity:
            self.address.capacity = -(-slots // BUCKET) * BUCKET
            for layer in self.layers:
                layer.grow(self.address.capacity)

    def append(self) -> None:
        """Let the next forward be a prefill, which writes after what earlier prefills wrote."""
        self.address.point_at(None, 0)

    def forget(self) -> None:
        """Start again in the same memory. Old entries may stay, since no query attends to them."""
        for layer in self.layers:
            layer.appended = 0

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy entries from `source` slots to `destination` slots, both [B, N]. All are read before any is written."""
        for layer in self.layers:
            rows = torch.arange(source.shape[0], device=layer.keys.device)[:, None]
            origin, target = source.to(layer.keys.device), destination.to(layer.keys.device)
            layer.keys[rows, :, target] = layer.keys[rows, :, origin]
            layer.values[rows, :, target] = layer.values[rows, :, origin]

    def load(self, past: Cache) -> None:
        """Copy the entries of another cache, entry `i` into slot `i`.

        A sliding layer holds only its window. The slots before it stay empty, and the window hides them.
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
    """Return how many tokens a cache has seen."""
    return int(past.get_seq_length())


def why_not_loaded(past: Cache) -> str:
    """Return why `SlotCache` cannot replace this cache; empty if it can.

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
    """Yield the keys, the values and the index of their first token, layer by layer."""
    for layer in past.layers:
        length = int(layer.get_seq_length())
        if isinstance(layer, StaticLayer):
            yield layer.keys[:, :, :length], layer.values[:, :, :length], 0
        else:
            yield layer.keys, layer.values, length - layer.keys.shape[2]
