"""The draft model as the drafter uses it: columns in, distributions over the target's vocabulary out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..runners.eager import EagerRunner
from ..stats import SpecBranchStats
from .scoring import Guide, Processor, can_guide, needs_prefixes, score_positions, stateless


class DraftModel:
    """Runs the draft on columns of the text and applies the user's processors to what it says.

    Args:
        runner: the model and its cache.
        attention: [B, P] bool, False where the prompt is padded.
        vocabulary: size of the target's vocabulary, which drafted tokens must fit.
        processors: the user's logits processors.
        capacity: the most columns the text can reach.
        stats: where to count forwards.
    """

    def __init__(
        self,
        runner: EagerRunner,
        attention: Tensor,
        vocabulary: int,
        processors: Sequence[Processor],
        capacity: int,
        stats: SpecBranchStats,
    ) -> None:
        self.runner, self.device, self.stats = runner, runner.device, stats
        rows, length = attention.shape
        self.seen = torch.ones((rows, capacity), dtype=torch.bool, device=self.device)
        self.seen[:, :length] = attention
        self.slots = torch.arange(capacity, device=self.device)
        # Positions past the draft's context are held at its end: drafts there are poor, but must not fail.
        last = None if runner.position_limit is None else runner.position_limit - 1
        padding = (~attention).sum(1, keepdim=True).to(self.device)
        self.positions = (self.slots - padding).clamp(min=0, max=last)  # [B, capacity], by column
        self.vocabulary, self.own_vocabulary = vocabulary, runner.vocabulary
        self.processors = stateless(processors)
        # A guide follows one line, from a prompt it has read; rows of a batch would each need their own state.
        guided = rows == 1 and length > 0 and any(can_guide(processor) for processor in processors)
        self.guide = Guide.beside(processors, length) if guided else None

    @property
    def reads_prefixes(self) -> bool:
        """Whether `distribution` must be given the text before each position."""
        return self.guide is not None or needs_prefixes(self.processors)

    def prefill(self, tokens: Tensor) -> Tensor:
        """Read the prompt [B, P]; logits [B, 1, V] behind it."""
        self.stats.draft_forwards += 1
        attention = self.seen[:, : tokens.shape[1]]
        mask = None if bool(attention.all()) else attention.long()
        return self.runner.prefill(self._own(tokens), self.positions[:, : tokens.shape[1]], mask)[:, None]

    def read_line(self, ids: Tensor, end: list[int], count: int) -> Tensor:
        """Feed the last `count` columns of each row's line; their logits [B, count, V]."""
        if min(end) == max(end):
            first, last = end[0] - count, end[0]
            columns = self.slots[None, first:last].expand(len(end), -1)
            visible = self.seen[:, None, :last]
            if count > 1:
                visible = visible & (self.slots[:last] <= columns[:, :, None])
            return self._run(ids[:, first:last], self.positions[:, first:last], columns, visible, first)
        columns = torch.tensor(end, device=self.device)[:, None] + torch.arange(-count, 0, device=self.device)
        columns = columns.clamp(min=0)
        return self.forward(ids.gather(1, columns), columns, columns, self.text_up_to(columns, max(end)))

    def forward(self, tokens: Tensor, columns: Tensor, slots: Tensor, visible: Tensor) -> Tensor:
        """Logits [B, Q, V] for tokens that stand in these columns and are kept in these slots."""
        return self._run(tokens, self.positions.gather(1, columns), slots, visible, None)

    def _run(self, tokens: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, first: int | None) -> Tensor:
        self.stats.draft_forwards += 1
        self.runner.reserve(tokens.shape[0], visible.shape[2])
        return self.runner.forward(self._own(tokens), positions, slots, visible, first).logits

    def text_up_to(self, columns: Tensor, shown: int) -> Tensor:
        """[B, Q, shown]: what a token in column `c` of the line sees, all columns to its own."""
        return (self.slots[:shown] <= columns[:, :, None]) & self.seen[:, None, :shown]

    def distribution(self, logits: Tensor, prefixes: list[list[Tensor]], guides: list[Guide]) -> Tensor:
        """Probabilities [B, n, V] over the target's vocabulary, after the processors.

        Args:
            logits: [B, n, V'] from the model.
            prefixes: `[b][j]` the text before position `j` of row `b`, if `reads_prefixes`.
            guides: for a single row, one a position; otherwise none.
        """
        logits = fit_vocabulary(logits.to(self.device, torch.float32), self.vocabulary)
        if guides:
            scored = [guide.score(prefixes[0][j], logits[:, j]) for j, guide in enumerate(guides)]
            logits = torch.stack(scored, dim=1)
        else:
            logits = score_positions(self.processors, prefixes, logits)
        return logits.softmax(-1)

    def distribution_behind(self, ids: Tensor, end: list[int], logits: Tensor) -> Tensor:
        """[B, V] behind each row's last column, given logits [B, Q, V] for its last `Q` columns."""
        if self.guide is None:
            prefixes = [[ids[b : b + 1, :column]] for b, column in enumerate(end)] if self.reads_prefixes else []
            return self.distribution(logits[:, -1:], prefixes, [])[:, 0]
        for j in range(logits.shape[1]):
            length = end[0] - logits.shape[1] + 1 + j
            if length == self.guide.seen:  # earlier prefixes it knows already
                q = self.distribution(logits[:, j : j + 1], [[ids[:, :length]]], [self.guide])
        return q[:, 0]

    def _own(self, tokens: Tensor) -> Tensor:
        """Tokens the draft has no embedding for become its last one; that costs acceptance, nothing else."""
        return tokens if self.own_vocabulary >= self.vocabulary else tokens.clamp(max=self.own_vocabulary - 1)


def fit_vocabulary(logits: Tensor, size: int) -> Tensor:
    """Cut or pad [..., V] to the target's vocabulary; a padded token has probability 0."""
    missing = size - logits.shape[-1]
    if missing <= 0:
        return logits[..., :size]
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
