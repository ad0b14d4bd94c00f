"""Verdicts in few kernels; they are what `Judge` says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.parallel_build import room
from ..kernels.rounds import Drawn, drawn_choices, verdict
from .scoring import Prefixes
from .state import Branches, Chain
from .verifier import Judge


class QuickJudge(Judge):
    """A judge that also tells the text what its verdict means."""

    in_kernels = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.limit = self.desk.tensor("judge.limit", (1,)).fill_(self.text.stopper.max_length)
        self.text.told_on_device = True

    def _decide(self, logits: Tensor, chain: Chain, branches: Branches, drafted: Tensor, report: Tensor) -> Tensor:
        where = room(chain.length.shape, torch.long, logits.device)
        leaves = None if chain.leaves is None else (chain.leaves.tokens, chain.leaves.at)
        verdict(
            self._choices(logits, chain, branches), (chain.tokens, chain.length), (branches.tokens, branches.at),
            branches.following, leaves, drafted, self.text.ids, self.text.told, self.limit, report, where,
        )  # fmt: skip
        return where

    def _choices(self, logits: Tensor, chain: Chain, branches: Branches) -> Tensor:
        """[B, N + 1 + W]: the target's token at each chain position, at the branch point, behind each runner-up."""
        scores = self.score(logits.float(), lambda: self._prefixes(chain)) if self.processors else logits
        if not self.draws:
            return scores.argmax(-1)
        shape = (*scores.shape[:2], scores.shape[2] + 1)
        noise = torch.empty(shape, device=scores.device).exponential_(generator=self.generator)
        if chain.scores is None:
            return drawn_choices(scores, noise, None)
        return drawn_choices(scores, noise, Drawn(chain.tokens, chain.length, chain.scores, *branches[:3]))

    def _prefixes(self, chain: Chain) -> Prefixes:
        """The text before each of these."""
        before = self.text.prefixes(chain)
        if chain.leaves is None:
            return before
        behind = self.text.leaf_prefixes(chain)
        return Prefixes(*(torch.cat(both, dim=1) for both in zip(before, behind)))
