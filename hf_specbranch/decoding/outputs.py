"""The further outputs of `generate(return_dict_in_generate=True)`: scores, logits, states; one entry per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache

from ..runtime.base import Step
from .cache_layout import in_order_of
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

    @property
    def keeps_nothing(self) -> bool:
        return not (self.keeps_scores or self.keeps_logits or self.keeps_hidden or self.keeps_attentions)

    def add(self, step: Step, scores: Tensor | None, queries: Sequence[range]) -> None:
        """Record the outputs that belong to the next tokens of each row.

        Args:
            step: a pass of the target.
            scores: [B, Q, V] after the processors.
            queries: the queries of the pass that these are, row by row.
        """
        if self.keeps_nothing:
            return
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
