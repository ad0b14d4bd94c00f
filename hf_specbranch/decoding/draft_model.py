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
        self.first_position = -(~attention).sum(1, keepdim=True).to(self.device)  # [B, 1]
        self.last_position = None if runner.position_limit is None else runner.position_limit - 1
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
        positions = self._positions(self.slots[None, : tokens.shape[1]])
        return self.runner.prefill(self._own(tokens), positions, mask)[:, None]

    def forward(self, tokens: Tensor, columns: Tensor, slots: Tensor, visible: Tensor) -> Tensor:
        """Logits [B, Q, V] for tokens that stand in these columns and are kept in these slots."""
        self.stats.draft_forwards += 1
        self.runner.reserve(tokens.shape[0], visible.shape[2])
        return self.runner.forward(self._own(tokens), self._positions(columns), slots, visible).logits

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

    def _positions(self, columns: Tensor) -> Tensor:
        """Positions past the draft's context are held at its end: drafts there are poor, but must not fail."""
        return (columns + self.first_position).clamp(min=0, max=self.last_position)

    def _own(self, tokens: Tensor) -> Tensor:
        """Tokens the draft has no embedding for become its last one; that costs acceptance, nothing else."""
        return tokens if self.own_vocabulary >= self.vocabulary else tokens.clamp(max=self.own_vocabulary - 1)


def fit_vocabulary(logits: Tensor, size: int) -> Tensor:
    """Cut or pad [..., V] to the target's vocabulary; a padded token has probability 0."""
    missing = size - logits.shape[-1]
    if missing <= 0:
        return logits[..., :size]
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
