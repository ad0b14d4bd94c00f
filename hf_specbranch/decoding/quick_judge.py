"""Greedy verdicts in two kernels; what `Judge` says where no processor has a say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.rounds import greedy_verdict
from .judge import Judge
from .records import Branches, Chain


class QuickJudge(Judge):
    """A judge that takes the target's likeliest tokens as they are, and tells the text what that means."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.limit = self.desk.tensor("judge.limit", (1,)).fill_(self.text.stopper.max_length)
        self.text.told_on_device = True

    def _decide(self, logits: Tensor, chain: Chain, branches: Branches, drafted: Tensor, report: Tensor) -> Tensor:
        where = torch.empty_like(chain.length)
        leaves = None if chain.leaves is None else (chain.leaves.tokens, chain.leaves.at)
        greedy_verdict(
            logits.argmax(-1), (chain.tokens, chain.length), (branches.tokens, branches.at), branches.following,
            leaves, drafted, self.text.ids, self.text.told, self.limit, report, where,
        )  # fmt: skip
        return where
