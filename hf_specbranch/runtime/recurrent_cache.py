"""The cache of a model with recurrent layers: their states are kept by slot, so that they can be rolled back.

A recurrent state cannot forget a token. So the state after each of the last tokens is kept, together with the slot of
the token that comes next. A pass that begins at slot `s` starts from the states before slot `s`, for each row
independently. The slots of a pass therefore say all about rollback, as they do for keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    DynamicCache,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from ..kernels.kept_states import KeptStates
from .kv_cache import EMPTY_LAYER, Address, SlotCache, SlotLayer, past_length

WITHOUT_ATTENTION = ("mlp", "moe")  # kinds of layers that keep nothing


class StateHistory:
    """Says to which slots the kept states belong. All recurrent layers of a cache share one.

    The states before slot `s` are in entry `s % size`, in each row.

    Attributes:
        size: how many states are kept per row.
        slots: [B, size] the slot that comes after the state in each entry; -1 if there is none.
    """

    def __init__(self) -> None:
        self.size = 2
        self.slots = torch.empty((0, 0), dtype=torch.long)

    def restart(self, rows: int, slot: int, device: torch.device) -> None:
        """Forget all entries but one: in every row, the states before `slot`."""
        if self.slots.shape != (rows, self.size):
            self.slots = torch.empty((rows, self.size), dtype=torch.long, device=device)
        self.slots.fill_(-1)
        self.slots[:, slot % self.size] = slot

    def grow(self, size: int) -> tuple[Tensor, Tensor]:
        """Keep more states. Return the entries that were in use and where they are now, as rows of `[size * B, ...]`.

        The slots that are known lie within `size` of each other, so each has an entry of its own.
        """
        rows, before = self.slots.shape[0], self.slots
        row, column = (before >= 0).nonzero(as_tuple=True)  # waits for the device; no captured pass grows
        slots, old = before[row, column], column * rows + row
        self.size, self.slots = size, torch.full((rows, size), -1, device=before.device)
        self.slots[row, slots % size] = slots
        return old, slots % size * rows + row

    def entry(self, slots: Tensor) -> Tensor:
        """Return the entries [B] of the states before these slots, as rows of `[size * B, ...]`."""
        rows = slots.shape[0]
        return slots % self.size * rows + torch.arange(rows, device=slots.device)

    def holds(self, slots: Tensor) -> Tensor:
        """Return whether the states before these slots [B] are kept, a boolean scalar."""
        return (self.slots.gather(1, (slots % self.size)[:, None])[:, 0] == slots).all()

    def add(self, slots: Tensor) -> None:
        """Record that the states after tokens in these slots, [B, Q], are kept from now on."""
        self.slots.scatter_(1, (slots + 1) % self.size, slots + 1)


class RecurrentLayer(LinearAttentionLayer):
    """Stores the states of a recurrent layer, each [B, ...], and copies of them after each of the last tokens."""

    def __init__(self, history: StateHistory, address: Address, number_of_states: int = 1) -> None:
        super().__init__(number_of_states=number_of_states)
        self.history, self.address = history, address
        self.kept: dict[tuple[str, int], Tensor] = {}  # [size * B, ...] by state
        self.on_update: Callable[[int], None] | None = None  # called with the index of a state that is written

    def states(self) -> Iterator[tuple[tuple[str, int], Tensor]]:
        """Yield the name of each state and its tensor, which stays the same object."""
        for kind in ("conv", "recurrent"):
            initialized, tensors = getattr(self, f"is_{kind}_states_initialized"), getattr(self, f"{kind}_states")
            for index in range(self.number_of_states):
                if initialized[index]:
                    yield (kind, index), tensors[index]

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        if self.on_update is not None:
            self.on_update(state_idx)
        full: Tensor = super().update_conv_state(conv_states, state_idx, **kwargs)
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        if self.on_update is not None:
            self.on_update(state_idx)
        updated: Tensor = super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return updated

    def keep(self, entry: Tensor, index: int | None = None) -> None:
        """Copy the states to entries [B], by default all of them, or those with one index."""
        for name, state in self.states():
            if index is None or name[1] == index:
                shape = self.history.size * state.shape[0], *state.shape[1:]
                if name not in self.kept or self.kept[name].shape != shape:
                    self.kept[name] = state.new_zeros(shape)
                self.kept[name].index_copy_(0, entry.to(state.device), state)

    def restore(self, entry: Tensor, index: int | None = None) -> None:
        """Put the states of entries [B] in place, by default all of them, or those with one index."""
        for name, state in self.states():
            if index is None or name[1] == index:
                state.copy_(self.kept[name].index_select(0, entry.to(state.device)))

    def grow(self, old: Tensor, new: Tensor, rows: int) -> None:
        """Move entries to larger memory; see `StateHistory.grow`."""
        for name, kept in self.kept.items():
            grown = kept.new_zeros((self.history.size * rows, *kept.shape[1:]))
            self.kept[name] = grown.index_copy_(0, new.to(kept.device), kept.index_select(0, old.to(kept.device)))

    def states_of_pass(self) -> tuple[KeptStates, KeptStates] | None:
        """Return the kept windows and states of a layer with one of each, for the pass by slots; None in others."""
        if self.address.slots is None:
            return None
        kept = self.kept["conv", 0], self.kept["recurrent", 0]
        windows, states = (KeptStates(each, self.address.slots_on(each.device)) for each in kept)
        return windows, states


class RecurrentSlotLayer(RecurrentLayer, SlotLayer):
    """Stores the states, and the keys and values, of a layer that has both."""

    def __init__(self, history: StateHistory, address: Address, number_of_states: int = 1) -> None:
        SlotLayer.__init__(self, address)
        RecurrentLayer.__init__(self, history, address, number_of_states)

    def lazy_initialization(self, *args: Tensor, **kwargs: Any) -> None:
        kind: Any = SlotLayer if args else RecurrentLayer  # keys and values are passed by position, states by name
        kind.lazy_initialization(self, *args, **kwargs)


class RecurrentCache(SlotCache):
    """A `SlotCache` for a model with recurrent layers.

    Args:
        model: a model that has recurrent layers.
        limit: see `SlotCache`.
    """

    def __init__(self, model: PreTrainedModel, limit: int | None = None) -> None:
        super().__init__(limit)
        self.history = StateHistory()
        self.layer_class_to_replicate = None
        self.layers = [self._layer_like(layer) for layer in _cache_layers(model)]

    def _layer_like(self, layer: Any) -> Any:
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            return layer if isinstance(layer, EMPTY_LAYER) else SlotLayer(self.address)
        if isinstance(layer, DynamicLayer):
            return RecurrentSlotLayer(self.history, self.address, layer.number_of_states)
        return RecurrentLayer(self.history, self.address, layer.number_of_states)

    @property
    def num_bytes(self) -> int:
        """The physical memory that keys, values and states take."""
        layers = (layer for layer in self.layers if isinstance(layer, RecurrentLayer))
        return super().num_bytes + sum(kept.nbytes for layer in layers for kept in layer.kept.values())

    def recurrent_layers(self) -> Iterator[tuple[int, RecurrentLayer]]:
        """Yield the layers that have a state, with their indices. Some have none: MLPs count as layers, too."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, RecurrentLayer) and any(layer.states()):
                yield index, layer

    def keep_states(self, count: int) -> None:
        """Keep at least so many states per row from now on."""
        history = self.history
        if count <= history.size:
            return
        if not history.slots.numel():
            history.size = count
            return
        old, new = history.grow(count)
        for _, layer in self.recurrent_layers():
            layer.grow(old, new, history.slots.shape[0])
        self._has_moved = True

    def mark(self, slot: int) -> None:
        """Say that the states are those before this slot, in every row, and keep them."""
        history = self.history
        for _, layer in self.recurrent_layers():
            rows, device = next((state.shape[0], state.device) for _, state in layer.states())
            history.restart(rows, slot, device)
            layer.keep(history.entry(torch.full((rows,), slot, device=device)))

    def point_at(self, slots: Tensor, shown: int) -> None:
        """Say which slots the next forward writes. Its layers begin with the states before the first of them."""
        super().point_at(slots, shown)
        history, first = self.history, slots[:, 0]
        torch._assert_async(history.holds(first), "a pass begins at a slot for which no recurrent state is kept")
        self.keep_states(slots.shape[1] + 1)
        history.add(slots)

    def forget(self) -> None:
        super().forget()
        self.history.slots.fill_(-1)
        for layer in self.layers:
            if isinstance(layer, RecurrentLayer):
                layer.reset()

    def load(self, past: Cache) -> None:
        """Copy the entries of another cache, entry `i` into slot `i`, and its states."""
        super().load(past)
        for ours, theirs in zip(self.layers, past.layers):
            if isinstance(ours, RecurrentLayer):
                _copy_states(theirs, ours)
        self.mark(past_length(past))

    def store(self, past: Cache, first: int, last: int, rows: int | None = None) -> None:
        """Append slots `first` to `last` (exclusive) to another cache, and give it the states before slot `last`."""
        super().store(past, first, last, rows)
        slots = torch.full((self.history.slots.shape[0],), last, device=self.history.slots.device)
        torch._assert_async(self.history.holds(slots), "the recurrent states at the end of a text are not kept")
        for index, layer in self.recurrent_layers():
            layer.restore(self.history.entry(slots))
            _copy_states(layer, past.layers[index], rows)


def _copy_states(source: Any, destination: Any, rows: int | None = None) -> None:
    """Give a layer the states of another, those of the first rows or of all."""
    for index in range(source.number_of_states):
        if source.is_conv_states_initialized[index]:
            state = source.conv_states[index][:rows]
            if not destination.is_conv_states_initialized[index]:
                destination.lazy_initialization(
                    conv_states=state, state_idx=index, conv_kernel_size=source.conv_kernel_size[index]
                )
            destination.conv_states[index].copy_(state)
        if source.is_recurrent_states_initialized[index]:
            state = source.recurrent_states[index][:rows]
            if not destination.is_recurrent_states_initialized[index]:
                destination.lazy_initialization(recurrent_states=state, state_idx=index)
            destination.recurrent_states[index].copy_(state)
        destination.has_previous_state[index] = source.has_previous_state[index]


def _cache_layers(model: PreTrainedModel) -> list[Any]:
    """Return the layers of the cache that transformers makes for a model."""
    return list(DynamicCache(config=model.config.get_text_config(decoder=True)).layers)


def is_recurrent(kind: str) -> bool:
    """Return whether layers of this kind keep a recurrent state in their cache, or nothing at all.

    Example:
        >>> [is_recurrent(kind) for kind in ("linear_attention", "hybrid", "mlp", "full_attention")]
        [True, True, True, False]
    """
    kept_in = EMPTY_LAYER if kind in WITHOUT_ATTENTION else DYNAMIC_LAYER_TYPE_MAPPING.get(kind, DynamicLayer)
    return issubclass(kept_in, (LinearAttentionLayer, EMPTY_LAYER))


def masked_kinds(kinds: list[str]) -> tuple[list[str], dict[str, None]]:
    """Return the kinds of attention masks that layers of these kinds need, and the names of masks that stay empty.

    Example:
        >>> masked_kinds(["full_attention", "sliding_attention"])
        (['full_attention', 'sliding_attention'], {})
        >>> masked_kinds(["conv", "hybrid"])
        (['full_attention'], {'conv': None, 'hybrid': None, 'linear_attention': None})
    """
    both = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}  # attention and a recurrent state
    attention = sorted({both.get(kind, kind) for kind in kinds if kind in both or not is_recurrent(kind)})
    recurrent = [kind for kind in kinds if is_recurrent(kind)]
    return attention, dict.fromkeys(sorted({*recurrent, "conv", "linear_attention"}) if recurrent else [])
