"""The tensors of a drafting round, shared by the drafter and by both implementations of its operations."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.static_buffers import Buffers
from .likely_rejections import LikelyRejections
from .pending_draft import PendingDraft
from .policies import Policy
from .resolve import NONE
from .side_branches import SideBranches


class DraftRound:
    """State of a drafting round, row by row, in memory that stays where it is.

    Args:
        buffers: where the memory comes from.
        pending: the pending draft, the prompt in place.
        side: the side branches.
        rejections: the likely rejections, for tree leaves and rejection branches.
        policy: what to draft.
        gamma: the most tokens drafted in one go.
        branches: the most branches at the branch point (k_max).
        rejection_branches: the most branches at earlier positions.
        leaves: the most tree leaves to send with a draft.
        limit: the longest a text may get.
        vocabulary: size of the distributions.
    """

    def __init__(
        self,
        buffers: Buffers,
        pending: PendingDraft,
        side: SideBranches,
        rejections: LikelyRejections,
        policy: Policy,
        gamma: int,
        branches: int,
        rejection_branches: int,
        leaves: int,
        limit: int,
        vocabulary: int,
    ) -> None:
        self.pending, self.side, self.rejections, self.policy = pending, side, rejections, policy
        self.gamma, self.depth = gamma, side.depth
        self.branches, self.rejection_branches, self.leaves = branches, rejection_branches, leaves
        self.static_shapes = buffers.static_shapes
        rows = pending.count
        self.limit = buffers.tensor("limit", (1,)).fill_(limit)

        # The draft tokens that are sent to the target.
        self.sent_tokens = buffers.tensor("sent.tokens", (rows, gamma))
        self.sent_length = buffers.tensor("sent.length", (rows,))
        self.sent_scores: Tensor | None = None

        # The branches: the main one first, then those at the branch point, then those at earlier positions.
        self.point = buffers.tensor("point", (rows,))  # the branch point's column
        self.width = buffers.tensor("branches.width", (rows,))  # branches at the branch point
        self.branch_tokens = buffers.tensor("branches.tokens", (rows, branches + rejection_branches))
        self.branch_at = buffers.tensor("branches.at", (rows, branches + rejection_branches)).fill_(NONE)
        self.order = torch.arange(branches, out=buffers.tensor("branches.order", (branches,)))
        self.following: Tensor | None = None  # the second token of each branch, if there are tree leaves
        if leaves:
            self.following = buffers.tensor("branches.following", (rows, branches + rejection_branches))
        self.branch_scores: Tensor | None = None  # the draft's distribution at the branch point

        # What is known of each row once the last round is resolved.
        self.survived = buffers.tensor("survived", (rows,), torch.bool)  # a drafted branch outlived the round
        self.room = buffers.tensor("room", (rows,))  # tokens the row may still gain
        self.empty = buffers.tensor("empty", (rows,), torch.bool)  # nothing is pending
        self.going = buffers.tensor("going", (rows,), torch.bool)  # nothing is pending, and there is room for a draft
        self.bound = buffers.tensor("bound", (rows,))  # the column where a new draft must end
        self.fresh = buffers.tensor("fresh", (rows,), torch.bool)  # the pending draft was proposed in this round
        self.ahead = buffers.tensor("ahead", (rows,), torch.bool)  # the row drafts past what is sent
        self.count = buffers.tensor("count", (rows,))  # tokens drafted in this round

        if pending.generator is not None:  # drafts are drawn: the test needs their distributions
            self.sent_scores = buffers.tensor("sent.scores", (rows, gamma, vocabulary), torch.float32)
            self.branch_scores = buffers.tensor("branches.scores", (rows, vocabulary), torch.float32)
