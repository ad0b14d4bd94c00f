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

from .kv_cache import Address, SlotCache, SlotLayer, past_length


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
        self.wanted = 0  # entries that were asked for; they are made when a pass begins

    def restart(self, rows: int, slot: int, device: torch.device) -> None:
        """Forget all entries but one: in every row, the states before `slot`."""
        self.slots = torch.full((rows, self.size), -1, device=device)
        self.slots[:, slot % self.size] = slot

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

    def __init__(self, history: StateHistory, number_of_states: int = 1) -> None:
        super().__init__(number_of_states=number_of_states)
        self.history = history
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
                if name not in self.kept:
                    self.kept[name] = state.new_zeros((self.history.size * state.shape[0], *state.shape[1:]))
                self.kept[name].index_copy_(0, entry.to(state.device), state)

    def restore(self, entry: Tensor) -> None:
        """Put the states of entries [B] in place."""
        for name, state in self.states():
            state.copy_(self.kept[name].index_select(0, entry.to(state.device)))

    def forget(self) -> None:
        """Start again without states."""
        self.reset()
        self.kept.clear()


class RecurrentSlotLayer(RecurrentLayer, SlotLayer):
    """Stores the states, and the keys and values, of a layer that has both."""

    def __init__(self, history: StateHistory, address: Address, number_of_states: int = 1) -> None:
        SlotLayer.__init__(self, address)
        RecurrentLayer.__init__(self, history, number_of_states)

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
            return SlotLayer(self.address)
        if isinstance(layer, DynamicLayer):
            return RecurrentSlotLayer(self.history, self.address, layer.number_of_states)
        return RecurrentLayer(self.history, layer.number_of_states)

    def recurrent_layers(self) -> Iterator[tuple[int, RecurrentLayer]]:
        """Yield the layers that have a state, with their indices. Some have none: MLPs count as layers, too."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, RecurrentLayer) and any(layer.states()):
                yield index, layer

    def keep_states(self, count: int) -> None:
        """Keep at least so many states per row from the next pass on."""
        self.history.wanted = max(self.history.wanted, count)

    def mark(self, slot: int) -> None:
        """Say that the states are those before this slot, in every row, and keep them."""
        history = self.history
        for _, layer in self.recurrent_layers():
            layer.kept.clear()
            rows, device = next((state.shape[0], state.device) for _, state in layer.states())
            history.restart(rows, slot, device)
            layer.keep(history.entry(torch.full((rows,), slot, device=device)))

    def point_at(self, slots: Tensor, shown: int) -> None:
        """Say which slots the next forward writes, and put the states before the first of them in place."""
        super().point_at(slots, shown)
        history, first = self.history, slots[:, 0]
        torch._assert_async(history.holds(first), "a pass begins at a slot for which no recurrent state is kept")
        for _, layer in self.recurrent_layers():
            layer.restore(history.entry(first))
        needed = max(slots.shape[1] + 1, history.wanted)
        if needed > history.size:
            history.size = needed
            for _, layer in self.recurrent_layers():
                layer.kept.clear()
                layer.keep(history.entry(first))
            history.slots = torch.full((slots.shape[0], needed), -1, device=slots.device)
            history.slots.scatter_(1, (first % needed)[:, None], first[:, None])
        history.add(slots)

    def forget(self) -> None:
        super().forget()
        for layer in self.layers:
            if isinstance(layer, RecurrentLayer):
                layer.forget()

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
        >>> is_recurrent("linear_attention"), is_recurrent("hybrid"), is_recurrent("full_attention")
        (True, True, False)
    """
    return issubclass(DYNAMIC_LAYER_TYPE_MAPPING.get(kind, DynamicLayer), LinearAttentionLayer)


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
