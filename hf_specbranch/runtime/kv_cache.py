"""The KV cache: a transformers cache whose entries are addressed by slot."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel, cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    LinearAttentionLayer,
    StaticLayer,
)

from .pieces import to_device
from .virtual_memory import VirtualTensor, grow, is_available

BUCKET = 256  # capacity grows in multiples of this many slots
# Where memory grows in place, it grows by 1,024 slots or 8 MiB for the keys of a layer, whichever is less (but by a
# BUCKET at least). Pages have 2 MiB: 1,024 slots of 8 heads of 128 in bfloat16 fill one, of 32 heads four. To map them
# takes the driver a fraction of a millisecond for each layer, so a step should serve many rounds; but 1,024 slots for
# 64 rows would be gigabytes that may never be used.
LONGEST_STEP, STEP_BYTES = 1024, 8 << 20
# Layers without keys and values of their own, or without attention; before transformers 5.23, of no class of their own.
EMPTY_LAYER: type = getattr(cache_utils, "DummyLayer", LinearAttentionLayer)


class Address:
    """Says which slots the next forward writes and how many it reads. All layers of a cache share one.

    Attributes:
        slots: [B, Q] the slots that are written; None: append after what is there.
        shown: attention reads the first `shown` slots.
        capacity: how many slots can be used. The tensors of a layer may have more, which must not be touched.
        limit: reserve addresses for this many slots, where possible; None: never.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.slots: Tensor | None = None
        self.shown = 0
        self.capacity = BUCKET
        self.limit = None if limit is None else _whole_steps(max(limit, BUCKET), BUCKET)
        self._on_device: dict[torch.device, Tensor] = {}
        self._index: dict[torch.device, tuple[Tensor | None, Tensor]] = {}

    @property
    def most(self) -> int:
        """How many slots the tensors of a layer have at most, while they stay where they are."""
        return max(self.capacity, self.limit or 0)

    def point_at(self, slots: Tensor | None, shown: int) -> None:
        """Set the slots that the next forward writes, [B, Q] or None to append, and the number that it reads."""
        self.slots, self.shown = slots, shown
        self._on_device.clear()
        self._index.clear()

    def slots_on(self, device: torch.device) -> Tensor:
        """Return the slots, [B, Q], on a device: the layers of a split model are on several devices."""
        assert self.slots is not None
        if device not in self._on_device:
            self._on_device[device] = self.slots if self.slots.device == device else to_device(self.slots, device)
        return self._on_device[device]

    def index_on(self, device: torch.device) -> tuple[Tensor | None, Tensor]:
        """Return row indices [B, 1] and slots [B, Q], which index together; of a single row None and slots [Q]."""
        found = self._index.get(device)
        if found is None:
            slots = self.slots_on(device)
            rows = None if slots.shape[0] == 1 else torch.arange(slots.shape[0], device=device)[:, None]
            found = self._index[device] = rows, slots[0] if rows is None else slots
        return found


class SlotLayer(CacheLayerMixin):
    """Stores keys and values of one layer, [B, heads, slots, head_dim], in the slots that the address names.

    In memory they are [slots, B, heads, head_dim], so that more slots are more memory at the end. With a limit, on a
    GPU whose driver can do it, this memory never moves: the tensors span all slots up to the limit, and those up to
    the capacity have physical memory (`virtual_memory.py`).
    """

    is_sliding = False

    def __init__(self, address: Address) -> None:
        super().__init__()
        self.address = address
        self.appended = 0  # entries written by appending, which only prefill does
        self.virtual: list[VirtualTensor] = []  # of keys and values, if they never move

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._allocate(key_states, value_states, self.address.capacity)
        self.is_initialized = True

    def _allocate(self, key_states: Tensor, value_states: Tensor, capacity: int) -> None:
        """Take new memory for keys and values of this form."""
        limit, states = self.address.limit, (key_states, value_states)
        shapes = [(one.shape[0], one.shape[1], one.shape[3]) for one in states]
        virtual: list[VirtualTensor] = []
        if limit is not None and is_available(key_states.device):
            for one, shape in zip(states, shapes):
                virtual.append(VirtualTensor((limit, *shape), one.dtype, one.device, capacity))
            memory = [tensor.tensor for tensor in virtual]
        else:
            memory = [one.new_zeros((capacity, *shape)) for one, shape in zip(states, shapes)]
        self.virtual = virtual
        self.keys, self.values = (tensor.permute(1, 2, 0, 3) for tensor in memory)

    @property
    def slot_bytes(self) -> int:
        """The size of a slot, in the larger one of keys and values."""
        return max(states[:, :, :1].nbytes for states in (self.keys, self.values))

    @property
    def num_bytes(self) -> int:
        """The physical memory of keys and values."""
        if self.virtual:
            return sum(tensor.mapped_bytes for tensor in self.virtual)
        return int(self.keys.nbytes + self.values.nbytes)

    def move_to_larger_memory(self, capacity: int) -> None:
        """Take memory for this many slots, and copy what is stored."""
        kept = self.address.capacity
        old = self.keys, self.values
        self._allocate(*old, capacity)
        for new, before in zip((self.keys, self.values), old):
            new[:, :, :kept] = before[:, :, :kept]

    def release(self, slots: int) -> int:
        """Free memory so that at most this many slots keep theirs, none where it cannot grow in place; return how many.

        What was stored is lost.
        """
        self.appended = 0
        if self.virtual:
            return min(tensor.release(slots) for tensor in self.virtual)
        self.keys, self.values = (states[:, :, :0].clone() for states in (self.keys, self.values))
        return 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.address.slots is None:
            end = self.appended + key_states.shape[2]
            if end > self.address.capacity:
                raise IndexError(f"slots up to {end} are written, but {self.address.capacity} are reserved")
            self.keys[:, :, self.appended : end] = key_states
            self.values[:, :, self.appended : end] = value_states
            self.appended = end
            return self.keys[:, :, :end], self.values[:, :, :end]
        shown = min(self.address.shown, self.keys.shape[2])  # spans show all that may ever be mapped
        rows, slots = self.address.index_on(self.keys.device)
        if rows is None:  # one simple kernel each
            if key_states.dtype != self.keys.dtype or value_states.dtype != self.values.dtype:
                key_states, value_states = key_states.to(self.keys.dtype), value_states.to(self.values.dtype)
            self.keys.index_copy_(2, slots, key_states)
            self.values.index_copy_(2, slots, value_states)
        else:
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys.narrow(2, 0, shown), self.values.narrow(2, 0, shown)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.appended + query_length, 0

    def get_seq_length(self) -> int:
        return self.appended

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """Holds one `SlotLayer` per layer of the model, created when the first forward reaches it.

    Args:
        limit: reserve addresses for this many slots, so that the memory does not move until it needs more; see
            `SlotLayer`. Elsewhere the limit has no effect.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.address = Address(limit)
        self._has_moved = False  # since `reserve` last returned
        super().__init__(layer_class_to_replicate=partial(SlotLayer, self.address))

    def __bool__(self) -> bool:
        """Return whether anything was appended. Models that test it treat an empty cache as none, even with layers."""
        return any(layer.appended for _, layer in self.slot_layers())

    @property
    def num_bytes(self) -> int:
        """The physical memory that keys and values take."""
        return sum(layer.num_bytes for layer in self._initialized())

    def reserve(self, slots: int) -> bool:
        """Make room for `slots` slots, and keep what is stored.

        Returns:
            Whether memory that existed has moved, so that graphs which use it are invalid.
        """
        if slots > self.address.capacity:
            self._grow(slots)
        moved, self._has_moved = self._has_moved, False
        return moved

    def _grow(self, slots: int) -> None:
        address, layers = self.address, self._initialized()
        in_place = [layer for layer in layers if layer.virtual]
        step = BUCKET
        if in_place:
            fitting = STEP_BYTES // max(layer.slot_bytes for layer in in_place)
            step = max(BUCKET, min(LONGEST_STEP, fitting // BUCKET * BUCKET))
        capacity = _whole_steps(slots, step)
        if address.limit is not None and capacity > address.limit:
            if slots <= address.limit:
                capacity = address.limit
            else:
                address.limit = max(capacity, 2 * address.limit)
        grow([tensor for layer in in_place for tensor in layer.virtual if tensor.limit >= capacity], capacity)
        for layer in layers:
            if layer.keys.shape[2] < capacity:
                self._has_moved = True  # also if a later layer finds no memory
                layer.move_to_larger_memory(capacity)
        address.capacity = capacity

    def slot_layers(self) -> list[tuple[int, SlotLayer]]:
        """Return the layers that store keys and values, with their indices."""
        return [(index, layer) for index, layer in enumerate(self.layers) if isinstance(layer, SlotLayer)]

    def _initialized(self) -> list[SlotLayer]:
        return [layer for _, layer in self.slot_layers() if layer.is_initialized]

    def release(self, num_bytes: int | None = None) -> None:
        """Free at least this much memory, from the end; None: all. What is stored is lost, also in what is kept.

        Addresses that never move are kept, and the next `reserve` makes room again. Memory that cannot grow in place is
        freed altogether. Waits for the device; nothing may run with this cache meanwhile.
        """
        held, slots = self.num_bytes, 0
        if num_bytes is not None and held:
            slots = int(self.address.capacity * max(0.0, 1 - num_bytes / held))
        self.address.capacity = min((layer.release(slots) for layer in self._initialized()), default=0)

    def append(self) -> None:
        """Let the next forward be a prefill, which writes after what earlier prefills wrote."""
        self.address.point_at(None, 0)

    def point_at(self, slots: Tensor, shown: int) -> None:
        """Say which slots [B, Q] the next forward writes, and how many it reads."""
        self.address.point_at(slots, shown)

    def mark(self, slot: int) -> None:
        """Say that all slots before this one have been read, and no other; see `RecurrentCache`."""

    def keep_states(self, count: int) -> None:
        """Keep so many recurrent states per row, if there are any; see `RecurrentCache`."""

    def forget(self) -> None:
        """Start again in the same memory. Old entries may stay, since no query attends to them."""
        for _, layer in self.slot_layers():
            layer.appended = 0

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy entries from `source` slots to `destination` slots, both [B, N]. All are read before any is written."""
        for _, layer in self.slot_layers():
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
        for index, keys, values, first in _stored(past):
            if index == len(self.layers):
                self.layers.append(SlotLayer(self.address))
            layer = self.layers[index]
            if not layer.is_initialized:
                layer.lazy_initialization(keys, values)
            # `to` first: another GPU may have no access to our memory.
            layer.keys[:, :, first:length] = keys.to(layer.keys.device)
            layer.values[:, :, first:length] = values.to(layer.values.device)
            layer.appended = length

    def store(self, past: Cache, first: int, last: int, rows: int | None = None) -> None:
        """Append slots `first` to `last` (exclusive) of the first rows, by default of all, to another cache."""
        if last > first:
            for index, layer in self.slot_layers():
                keys, values = (each[:rows, :, first:last].clone() for each in (layer.keys, layer.values))
                past.update(keys, values, index)


def _whole_steps(slots: int, step: int) -> int:
    return -(-slots // step) * step


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name under which a model takes its cache."""
    return "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else "past_key_values"


def past_length(past: Cache) -> int:
    """Return how many tokens a cache has seen; 0 if it has recurrent layers alone, which do not count."""
    return int(past.get_seq_length()) if any(isinstance(layer, CacheLayerMixin) for layer in past.layers) else 0


def _stored(past: Cache) -> Iterator[tuple[int, Tensor, Tensor, int]]:
    """Yield the index of each layer with keys and values, these, and the index of their first token."""
    for index, layer in enumerate(past.layers):
        if not isinstance(layer, CacheLayerMixin):
            continue
        length = int(layer.get_seq_length())
        if isinstance(layer, StaticLayer):
            yield index, layer.keys[:, :, :length], layer.values[:, :, :length], 0
        else:
            yield index, layer.keys, layer.values, length - layer.keys.shape[2]
