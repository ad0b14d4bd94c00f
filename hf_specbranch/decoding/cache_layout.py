"""The order in which a cache of transformers returns its keys, for the columns of attention outputs.

Attentions have one column per key. In plain `generate()` these are the keys that the cache returns: a sliding layer
returns its window, a static one its whole capacity. Our cache returns every slot from the first on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

KNOWN = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


def in_order_of(
    past: Cache, config: Any, passes: Sequence[tuple[Tensor, ...]], attention: Tensor
) -> tuple[tuple[Tensor, ...], ...]:
    """Return attentions with the columns that they have in plain `generate()`.

    Args:
        past: the cache that plain `generate()` would use, before anything is added to it.
        config: of the text model.
        passes: the attentions of each pass, the prompt's first, layer by layer: [B, heads, Q, S] over slots 0 to S.
        attention: [B, S] bool, False where the prompt is padded.
    """
    blind = attention.cumsum(1)[:, -passes[0][0].shape[2] :] == 0  # [B, Q] queries of the prompt that see nothing
    layers = [_layer_for(index, past, config) for index in range(len(passes[0]))]
    seen = int(past.get_seq_length())
    ordered: list[tuple[Tensor, ...]] = []
    for attentions in passes:
        slots = attentions[0].shape[-1]
        pairs = zip(attentions, _columns(layers, seen, slots))
        ordered.append(tuple(_reordered(each, columns, None if ordered else blind) for each, columns in pairs))
        seen = slots
    return tuple(ordered)


def _layer_for(index: int, past: Cache, config: Any) -> Any:
    """Return a copy of the cache layer that a layer of the model reads, in which each key is its slot's number."""
    types = getattr(config, "layer_types", None)
    if index >= len(past.layers) and past.layers and types is not None:  # it shares the keys of an earlier layer
        index = max((i for i in range(len(past.layers)) if types[i] == types[index]), default=index)
    layer: Any = past.layers[index] if index < len(past.layers) else None
    if type(layer) not in KNOWN:
        return DynamicLayer()
    if not layer.is_initialized:
        return copy.deepcopy(layer)
    twin, length = copy.copy(layer), int(layer.get_seq_length())
    room = layer.keys.shape[-2] if layer.keys.ndim > 1 else 0  # a dynamic layer begins as an empty vector
    if isinstance(layer, StaticLayer):
        names = torch.arange(1, room + 1) * (torch.arange(room) < length)
        twin.cumulative_length = layer.cumulative_length.cpu().clone()
    else:
        names = torch.arange(length - room, length) + 1
    twin.keys, twin.values, twin.device = _as_states(names), _as_states(names), torch.device("cpu")
    return twin


def _columns(layers: list[Any], seen: int, slots: int) -> Iterator[Tensor]:
    """Yield for each layer [S] the slot of each key, counted from 1, when slots `seen` to `slots` are added."""
    states = _as_states(torch.arange(seen, slots) + 1)
    for layer in layers:
        yield layer.update(states, states.clone())[0].flatten()


def _as_states(names: Tensor) -> Tensor:
    return names[None, None, :, None]


def _reordered(attention: Tensor, columns: Tensor, blind: Tensor | None) -> Tensor:
    columns = columns.to(attention.device)
    ordered = torch.nn.functional.pad(attention, (1, 0))[..., columns]
    if blind is None or len(columns) == attention.shape[-1]:
        return ordered
    # Where everything is masked, softmax spreads over all columns, however many there are.
    spread = attention[..., :1] * (attention.shape[-1] / len(columns))
    return torch.where(blind[:, None, :, None].to(attention.device), spread, ordered)
