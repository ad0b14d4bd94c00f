"""The verdicts that are likely to end a chain early, by what the draft says."""

from __future__ import annotations

import torch

from ..runtime.static_buffers import Buffers
from .acceptance import NONE
from .pending_draft import PendingDraft


class LikelyRejections:
    """Pairs of a chain position and a token: the tokens before the position are accepted, its own is not, and the
    target says another that the draft thought of. The likeliest come first.

    Args:
        desk: where the memory comes from.
        line: the line whose beginning is the chain.
        gamma: the longest chain.
        alternatives: how many tokens to think of at each position.
        count: how many pairs to keep.
    """

    def __init__(self, buffers: Buffers, pending: PendingDraft, gamma: int, alternatives: int, count: int) -> None:
        self.pending, self.gamma, self.alternatives, self.count = pending, gamma, alternatives, count
        self.tokens = buffers.tensor("foresight.tokens", (pending.count, count))
        self.at = buffers.tensor("foresight.at", (pending.count, count)).fill_(NONE)  # NONE: there are no more

    def look(self, sent_length: torch.Tensor) -> None:
        """Think about chains of these lengths [B].

        The probability of the pair `(i, y)` is taken to be `q_0(x_0) ... q_(i-1)(x_(i-1)) * q_i(y)`.
        """
        pending, gamma = self.pending, self.gamma
        tokens, q = pending.tokens(gamma)[:, :, None], pending.first_scores(gamma)  # [B, N, 1], [B, N, V]
        stands = q.gather(2, tokens)[:, :, 0]  # [B, N]
        reached = torch.cat([torch.ones_like(stands[:, :1]), stands[:, :-1]], dim=1).cumprod(1)
        others = q.scatter(2, tokens, 0.0).topk(min(self.alternatives, q.shape[2] - 1), dim=2)  # [B, N, K]
        places = pending.offsets[:gamma, None].expand(-1, others.values.shape[2])  # [N, K]
        in_chain = places < sent_length[:, None, None]
        chance = torch.where(in_chain, reached[:, :, None] * others.values, 0.0).flatten(1)
        best = chance.topk(self.count, dim=1)
        self.tokens.copy_(others.indices.flatten(1).gather(1, best.indices))
        self.at.copy_(torch.where(best.values > 0, places.flatten()[best.indices], NONE))
