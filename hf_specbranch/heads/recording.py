"""Watching a generation: what each line looked like, and how much of it became text."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..decoding.hooks import NO_OPINION, SpeculationHook, Survivor
from .inputs import HeadInputs, head_inputs

# How often the lines of a round are held back, left to confidence, or sent whole: later rounds then start from
# states that any head's verdicts may lead to. What is sent decides no label, since lines are never redrafted; one
# verdict for the whole batch makes the rounds that hold back cheap.
HELD_BACK, LEFT_TO_CONFIDENCE, SENT_WHOLE = 0.5, 0.35, 0.15
STORED = torch.bfloat16  # hidden states and embeddings; their range matters more than their last digits


class LineRecorder(SpeculationHook):
    """A hook that notes every line it is asked about.

    Args:
        target: whose embeddings and layers to read.
        layers: indices into its `hidden_states`.
        gamma: positions to look at.
        drafted_tokens: how many of the first tokens to embed.
        seed: of its random verdicts.
    """

    fresh_lines = True
    draft_scores = True

    def __init__(
        self, target: PreTrainedModel, layers: tuple[int, ...], gamma: int, drafted_tokens: int, seed: int
    ) -> None:
        self.feature_layers = layers
        self.embeddings = target.get_input_embeddings()
        self.gamma, self.drafted_tokens = gamma, drafted_tokens
        self.generator = torch.Generator().manual_seed(seed)
        self.noted: list[dict[str, Tensor]] = []

    def keep(self, survivor: Survivor) -> Tensor | None:
        if survivor.features is None or survivor.column is None:  # the round after the prompt
            return None
        inputs = head_inputs(survivor, self.embeddings, self.gamma, self.drafted_tokens)
        rows = (survivor.length > 0).nonzero()[:, 0].cpu()
        line = {
            "row": rows,
            "column": survivor.column.cpu()[rows],
            "length": survivor.length.cpu()[rows].clamp(max=self.gamma),
            "tokens": _padded(survivor.tokens.cpu(), self.gamma)[rows],
        }
        self.noted.append({**line, **_stored(inputs, rows)})
        return self._explore(survivor)

    def _explore(self, survivor: Survivor) -> Tensor:
        weights = torch.tensor([HELD_BACK, LEFT_TO_CONFIDENCE, SENT_WHOLE])
        verdict = int(torch.multinomial(weights, 1, generator=self.generator))
        if verdict == 2:
            return survivor.length
        return torch.full_like(survivor.length, 0 if verdict == 0 else NO_OPINION)

    def samples(self, sequences: Tensor, ends: list[int]) -> dict[str, Tensor]:
        """All noted lines with the number of their tokens that became text.

        A line's token is accepted exactly if the text has it: greedy drafts by comparison, and a drawn token that
        falls is replaced by one from the residual, which gives it no probability.

        Args:
            sequences: [B, T] the texts in the end.
            ends: where each of them ends.

        Returns:
            Tensors with one entry a line; lines whose fate the end of the text hides are left out.
        """
        if not self.noted:
            return {}
        table = {name: torch.cat([part[name] for part in self.noted]) for name in self.noted[0]}
        text = torch.nn.functional.pad(sequences.cpu(), (0, self.gamma), value=-1)
        columns = table["column"][:, None] + torch.arange(self.gamma)  # [N, G]
        written = torch.tensor(ends)[table["row"]][:, None]
        there = text[table["row"][:, None], columns.clamp(max=text.shape[1] - 1)]
        inside = torch.arange(self.gamma) < table["length"][:, None]
        agrees = (there == table["tokens"]) & (columns < written) & inside
        accepted = agrees.long().cumprod(1).sum(1)
        known = (accepted == table["length"]) | (table["column"] + accepted < written[:, 0])
        table["accepted"] = accepted
        return {name: values[known] for name, values in table.items() if name not in ("column", "tokens")}


def _stored(inputs: HeadInputs, rows: Tensor) -> dict[str, Tensor]:
    large = ("hidden", "committed", "drafted")
    return {
        name: values.cpu()[rows].to(STORED if name in large else torch.float32)
        for name, values in inputs._asdict().items()
    }


def _padded(tokens: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tokens, (0, max(0, width - tokens.shape[1])))[:, :width]
