"""The rejections that the draft model itself considers likely."""

from __future__ import annotations

import torch

from ..runtime.static_buffers import Buffers
from .pending_draft import PendingDraft
from .resolve import NONE


class LikelyRejections:
    """Pairs of a draft position and a token: the target accepts the tokens before the position, rejects the one there,
    and says this token instead. The likeliest pairs come first.

    Args:
        buffers: where the memory comes from.
        pending: the pending draft, whose beginning is sent.
        gamma: the most draft tokens.
        alternatives: how many tokens to consider at each position.
        count: how many pairs to keep.
    """

    def __init__(self, buffers: Buffers, pending: PendingDraft, gamma: int, alternatives: int, count: int) -> None:
        self.pending, self.gamma, self.alternatives, self.count = pending, gamma, alternatives, count
        self.tokens = buffers.tensor("rejections.tokens", (pending.count, count))
        self.at = buffers.tensor("rejections.at", (pending.count, count)).fill_(NONE)  # NONE: there are no more

    def find(self, sent_length: torch.Tensor) -> None:
        """Find the pairs for drafts of these lengths [B].

        The probability of the pair `(i, y)` is taken to be `q_0(x_0) ... q_(i-1)(x_(i-1)) * q_i(y)`.
        """
        pending, gamma = self.pending, self.gamma
        tokens, q = pending.tokens(gamma)[:, :, None], pending.first_scores(gamma)  # [B, N, 1], [B, N, V]
        own = q.gather(2, tokens)[:, :, 0]  # [B, N]
        reached = torch.cat([torch.ones_like(own[:, :1]), own[:, :-1]], dim=1).cumprod(1)
        others = q.scatter(2, tokens, 0.0).topk(min(self.alternatives, q.shape[2] - 1), dim=2)  # [B, N, K]
        positions = pending.offsets[:gamma, None].expand(-1, others.values.shape[2])  # [N, K]
        is_sent = positions < sent_length[:, None, None]
        chance = torch.where(is_sent, reached[:, :, None] * others.values, 0.0).flatten(1)
        best = chance.topk(self.count, dim=1)
        self.tokens.copy_(others.indices.flatten(1).gather(1, best.indices))
        self.at.copy_(torch.where(best.values > 0, positions.flatten()[best.indices], NONE))
