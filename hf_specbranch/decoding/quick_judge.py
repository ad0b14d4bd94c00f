"""Verdicts in few kernels; they are what `Verifier` says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.parallel_build import room
from ..kernels.rounds import Drawn, drawn_choices, verify_draft
from .scoring import Prefixes
from .state import Branches, DraftTokens
from .verifier import Verifier


class QuickJudge(Verifier):
    """A judge that also tells the text what its verdict means."""

    only_our_kernels = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.limit = self.buffers.tensor("judge.limit", (1,)).fill_(self.text.stopper.max_length)
        self.text.resolved_on_device = True

    def _decide(
        self, logits: Tensor, draft_tokens: DraftTokens, branches: Branches, drafted: Tensor, verify_result: Tensor
    ) -> Tensor:
        where = room(draft_tokens.length.shape, torch.long, logits.device)
        leaves = None if draft_tokens.leaves is None else (draft_tokens.leaves.tokens, draft_tokens.leaves.at)
        verify_draft(
            self._choices(logits, draft_tokens, branches), (draft_tokens.tokens, draft_tokens.length),
            (branches.tokens, branches.at),
            branches.following, leaves, drafted, self.text.ids, self.text.round_result, self.limit, verify_result,
            where,
        )  # fmt: skip
        return where

    def _choices(self, logits: Tensor, draft_tokens: DraftTokens, branches: Branches) -> Tensor:
        """[B, N + 1 + W]: the target's token at each chain position, at the branch point, behind each runner-up."""
        scores = self.score(logits.float(), lambda: self._prefixes(draft_tokens)) if self.processors else logits
        if not self.draws:
            return scores.argmax(-1)
        shape = (*scores.shape[:2], scores.shape[2] + 1)
        noise = torch.empty(shape, device=scores.device).exponential_(generator=self.generator)
        if draft_tokens.scores is None:
            return drawn_choices(scores, noise, None)
        return drawn_choices(
            scores, noise, Drawn(draft_tokens.tokens, draft_tokens.length, draft_tokens.scores, *branches[:3])
        )

    def _prefixes(self, draft_tokens: DraftTokens) -> Prefixes:
        """The text before each of these."""
        before = self.text.prefixes(draft_tokens)
        if draft_tokens.leaves is None:
            return before
        behind = self.text.leaf_prefixes(draft_tokens)
        return Prefixes(*(torch.cat(both, dim=1) for both in zip(before, behind)))
