"""Greedy verdicts in two kernels; what `Judge` says where no processor has a say."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.rounds import greedy_verdict
from .judge import Judge
from .records import Branches, Chain


class QuickJudge(Judge):
    """A judge that takes the target's likeliest tokens as they are."""

    def _decide(self, logits: Tensor, chain: Chain, branches: Branches, drafted: Tensor, report: Tensor) -> Tensor:
        where = torch.empty_like(chain.length)
        leaves = None if chain.leaves is None else (chain.leaves.tokens, chain.leaves.at)
        greedy_verdict(
            logits.argmax(-1), (chain.tokens, chain.length), (branches.tokens, branches.at), branches.following,
            leaves, drafted, self.text.ids, self.text.length, report, where,
        )  # fmt: skip
        return where
