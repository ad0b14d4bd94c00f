"""The further outputs of `generate(return_dict_in_generate=True)`: scores, logits, states; one entry per token."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..runtime.base import Step
from ..runtime.kv_cache import EMPTY_LAYER
from .text import ScoresSoFar

Layers = tuple[Tensor, ...]


class Recorder:
    """Collects the outputs of target passes that belong to each committed token.

    Every entry covers the whole batch: rows that have ended continue with the target's outputs after padding, as in
    plain `generate()`.

    Args:
        config: says which outputs the caller wants.
        rows: rows of the batch.
        filled: slots that the prompt takes.
    """

    def __init__(self, config: GenerationConfig, rows: int, filled: int) -> None:
        wanted = bool(config.return_dict_in_generate)
        self.keeps_scores = wanted and bool(config.output_scores)
        self.keeps_logits = wanted and bool(config.output_logits)
        self.keeps_hidden = wanted and bool(config.output_hidden_states)
        self.keeps_attentions = wanted and bool(config.output_attentions)
        self.filled = filled
        self.scores: list[list[Tensor]] = [[] for _ in range(rows)]  # [row][token]: [V]
        self.logits: list[list[Tensor]] = [[] for _ in range(rows)]
        self.hidden: list[list[Layers]] = [[] for _ in range(rows)]  # [row][token][layer]: [..., 1, H]
        self.attentions: list[list[Layers]] = [[] for _ in range(rows)]  # ...: [heads, 1, L]
        self.prompt: Step | None = None

    def scores_so_far(self, scores: Tensor | None) -> ScoresSoFar | None:
        """Return the scores that stopping criteria see after `n` tokens of this round; None if row lengths differ.

        Args:
            scores: [B, Q, V] of this round.
        """
        if scores is None or not self.keeps_scores or len({len(row) for row in self.scores}) > 1:
            return None
        before = tuple(torch.stack(column) for column in zip(*self.scores))
        return lambda count: before + tuple(scores[:, j] for j in range(count))

    def add(self, step: Step, scores: Tensor | None, queries: Sequence[range]) -> None:
        """Record the outputs that belong to the next tokens of each row.

        Args:
            step: a pass of the target.
            scores: [B, Q, V] after the processors.
            queries: the queries of the pass that these are, row by row.
        """
        is_prompt = self.prompt is None
        self.prompt = self.prompt or step
        for b, row in enumerate(queries):
            for j in row:
                if self.keeps_scores and scores is not None:
                    self.scores[b].append(scores[b, j].clone())
                if self.keeps_logits:
                    self.logits[b].append(step.logits[b, j].to(copy=True, dtype=torch.float32))
                if self.keeps_hidden and not is_prompt and isinstance(step.hidden_states, tuple):
                    # Gemma-3n has four streams of hidden states, in a dimension before the rows.
                    self.hidden[b].append(tuple(layer[..., b, j : j + 1, :].clone() for layer in step.hidden_states))
                if self.keeps_attentions and not is_prompt and step.attentions is not None:
                    seen = self.filled + len(self.attentions[b]) + 1
                    self.attentions[b].append(tuple(layer[b, :, j : j + 1, :seen].clone() for layer in step.attentions))

    def outputs(self, past: Cache | None, config: Any, attention: Tensor) -> dict[str, Any]:
        """Return keyword arguments for `GenerateDecoderOnlyOutput`.

        Args:
            past: the cache that plain `generate()` would use, before anything is added to it.
            config: of the text model.
            attention: [B, filled] bool, False where the prompt is padded.
        """
        prompt = self.prompt or Step(torch.empty(0))
        attentions: Any = (prompt.attentions, *_layers(self.attentions, before=3))
        if past is not None and prompt.attentions is not None and prompt.attentions[0] is not None:
            attentions = in_order_of(past, config, attentions, attention)
        return {
            "scores": _tokens(self.scores) if self.keeps_scores else None,
            "logits": _tokens(self.logits) if self.keeps_logits else None,
            "hidden_states": (prompt.hidden_states, *_layers(self.hidden, before=2)) if self.keeps_hidden else None,
            "attentions": attentions if self.keeps_attentions else None,
        }


def _tokens(rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """Stack [row][token] tensors to one tensor [B, V] per token."""
    return tuple(torch.stack(column) for column in zip(*rows))


def _layers(rows: list[list[Layers]], before: int) -> tuple[Layers, ...]:
    """Stack [row][token][layer] tensors to [token][layer] tensors; rows come before the last `before` dimensions."""
    return tuple(tuple(torch.stack(layer, dim=-1 - before) for layer in zip(*column)) for column in zip(*rows))


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
    own = [i for i, layer in enumerate(past.layers) if type(layer) is not EMPTY_LAYER]
    if index not in own and own and types is not None:  # it shares the keys of an earlier layer
        index = max((i for i in own if types[i] == types[index]), default=index)
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
