"""What `generate(return_dict_in_generate=True)` hands out beside the tokens, one entry a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ..runners.base import Step
from .records import Outcome
from .text import ScoresSoFar

Layers = tuple[Tensor, ...]


class Recorder:
    """Cuts the outputs of target passes into the pieces that belong to each committed token.

    Rows that end early are filled up with zeros, so that every entry covers the whole batch.
    """

    def __init__(self, config: GenerationConfig, rows: int, filled: int) -> None:
        wanted = bool(config.return_dict_in_generate)
        self.keeps_scores = wanted and bool(config.output_scores)
        self.keeps_logits = wanted and bool(config.output_logits)
        self.keeps_hidden = wanted and bool(config.output_hidden_states)
        self.keeps_attentions = wanted and bool(config.output_attentions)
        self.filled = filled  # slots the prompt takes
        self.scores: list[list[Tensor]] = [[] for _ in range(rows)]  # [row][token]: [V]
        self.logits: list[list[Tensor]] = [[] for _ in range(rows)]
        self.hidden: list[list[Layers]] = [[] for _ in range(rows)]  # [row][token][layer]: [1, H]
        self.attentions: list[list[Layers]] = [[] for _ in range(rows)]  # ...: [heads, 1, L]
        self.prompt: Step | None = None

    def scores_so_far(self, scores: Tensor | None) -> ScoresSoFar | None:
        """What stopping criteria see after `n` tokens of this round, as long as all rows are equally long."""
        if scores is None or not self.keeps_scores or len({len(row) for row in self.scores}) > 1:
            return None
        before = tuple(torch.stack(column) for column in zip(*self.scores))
        return lambda count: before + tuple(scores[:, j] for j in range(count))

    @property
    def keeps_nothing(self) -> bool:
        return not (self.keeps_scores or self.keeps_logits or self.keeps_hidden or self.keeps_attentions)

    def add(self, step: Step, scores: Tensor | None, outcomes: Sequence[Outcome]) -> None:
        """Keep what belongs to the tokens just committed."""
        if self.keeps_nothing:
            return
        is_prompt = self.prompt is None
        self.prompt = self.prompt or step
        for b, outcome in enumerate(outcomes):
            for j in range(outcome.committed):
                if self.keeps_scores and scores is not None:
                    self.scores[b].append(scores[b, j].clone())
                if self.keeps_logits:
                    self.logits[b].append(step.logits[b, j].to(copy=True, dtype=torch.float32))
                if self.keeps_hidden and not is_prompt and isinstance(step.hidden_states, tuple):
                    self.hidden[b].append(tuple(layer[b, j : j + 1].clone() for layer in step.hidden_states))
                if self.keeps_attentions and not is_prompt and step.attentions is not None:
                    seen = self.filled + len(self.attentions[b]) + 1
                    self.attentions[b].append(tuple(layer[b, :, j : j + 1, :seen].clone() for layer in step.attentions))

    def outputs(self) -> dict[str, Any]:
        """Keyword arguments for `GenerateDecoderOnlyOutput`."""
        prompt = self.prompt or Step(torch.empty(0))
        return {
            "scores": _tokens(self.scores) if self.keeps_scores else None,
            "logits": _tokens(self.logits) if self.keeps_logits else None,
            "hidden_states": (prompt.hidden_states, *_layers(self.hidden)) if self.keeps_hidden else None,
            "attentions": (prompt.attentions, *_layers(self.attentions)) if self.keeps_attentions else None,
        }


def _tokens(rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """[row][token] pieces to one [B, ...] tensor a token."""
    longest = max(rows, key=len)
    return tuple(
        torch.stack([row[t] if t < len(row) else torch.zeros_like(longest[t]) for row in rows])
        for t in range(len(longest))
    )


def _layers(rows: list[list[Layers]]) -> tuple[Layers, ...]:
    """[row][token][layer] pieces to [token][layer] tensors [B, ...]."""
    longest = max(rows, key=len)
    by_layer = [
        _tokens([[token[layer] for token in row] for row in rows]) for layer in range(len(longest[0]) if longest else 0)
    ]
    return tuple(zip(*by_layer))
