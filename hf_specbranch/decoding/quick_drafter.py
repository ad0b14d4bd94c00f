"""The draft's side of a round with its bookkeeping in few kernels; it does what `Drafter` does."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels.parallel_build import room
from ..kernels.rounds import (
    AfterRound,
    ForwardInputs,
    PendingBuffers,
    SentDraft,
    SideBranchBuffers,
    adopt,
    advance,
    count_drafted,
    find_likely_rejections,
    fork,
    open_branches,
    pending_inputs,
    resolve_pending,
    send,
)
from .drafter import Drafter
from .hooks import ConfidenceStop, HookList, SpeculationHook, TopKBranches
from .pending_draft import PendingDraft
from .policies import Policy
from .scoring import Prefixes
from .side_branches import SideBranches
from .state import Feedback


def is_plain(policy: Policy, gamma: int, hooks: HookList) -> bool:
    """Whether the kernels know these decisions: where to stop and how wide to fork are ours; others may cut lines."""
    stops = all(type(hook) is ConfidenceStop for hook in hooks.stoppers) and len(hooks.stoppers) <= 1
    forks = all(type(hook) is TopKBranches for hook in hooks.hooks if type(hook).fork is not SpeculationHook.fork)
    return stops and forks and (policy.depth(gamma) > 0 or not policy.drafts_ahead)


class QuickDrafter(Drafter):
    """A drafter whose stages are captured, and whose hooks are plain."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        rows, buffers = self.pending.count, self.buffers
        self.pending_buffers, self.side_branch_buffers = (
            pending_buffers_of(self.pending),
            side_branch_buffers_of(self.side_branches),
        )
        self.after = AfterRound(
            self.survived,
            room=buffers.tensor("room", (rows,)),
            empty=buffers.tensor("empty", (rows,), torch.bool),
            going=buffers.tensor("going", (rows,), torch.bool),
            bound=buffers.tensor("bound", (rows,)),
            drafted=self.count,
        )
        self.sent = SentDraft(self.sent_tokens, self.sent_length, self.ahead, self.point, self.width, self.branch_at)
        self.stood = buffers.tensor("drafted", (rows, 6))
        self.epsilon = max((hook.epsilon for hook in self.hooks.hooks if isinstance(hook, ConfidenceStop)), default=0.0)
        widths = [hook.k_max for hook in self.hooks.hooks if isinstance(hook, TopKBranches)]
        self.widest = widths[0] if self.policy.forks else 0
        ours = (ConfidenceStop, TopKBranches)
        self.asks = self.policy.forks and any(
            type(hook).keep is not SpeculationHook.keep for hook in self.hooks.hooks if type(hook) not in ours
        )
        self.only_our_kernels = not self.asks

    def drafted(self) -> Tensor:
        count_drafted(
            self.pending_buffers, self.sent_length, self.width, self.branch_at, self.likely_rejections.at, self.count,
            self.branches, self.leaves, self.policy.forks, self.stood,
        )  # fmt: skip
        return self.stood

    def _draft(self, feedback: Feedback, begins: bool, shown: int) -> None:
        pending, side_branches, round_result, runner = (
            self.pending_buffers,
            self.side_branch_buffers,
            feedback.round_result,
            self.model.runner,
        )
        if feedback.moved:
            adopt(round_result, pending, side_branches, [(layer.keys, layer.values) for layer in runner.cache.layers])
        resolve_pending(
            round_result,
            pending,
            side_branches,
            runner.slot_positions,
            self.limit,
            self.depth,
            feedback.moved,
            self.after,
        )
        if begins:
            self._draft_new(shown)
        kept = None
        if self.asks:
            self.fresh.copy_(self.after.empty & (self.pending.end > self.pending.start))
            kept = self._cut(feedback.features)
        epsilon = self.epsilon if self.policy.forks else 0.0
        send(
            pending,
            self.survived,
            self.after.room,
            kept,
            self.sent,
            self.pending.reach,
            epsilon,
            self.policy.drafts_ahead,
        )
        if self.sent_scores is not None:
            self.sent_scores.copy_(self.pending.first_scores(self.gamma))
        if self.likely_rejections.count:
            self._find_likely_rejections()

    def _draft_new(self, shown: int) -> None:
        """Draft up to gamma tokens on the rows that have none."""
        inputs = self._pending_inputs(1, shown)
        logits = self._forward(self._pending_inputs(2, shown))  # the target's own token, and perhaps one before it
        going, bound = self.after.going, self.after.bound
        for step in range(self.gamma):
            if step > 0:
                logits = self._forward(inputs)
            self._advance(logits[:, -1:], inputs, going, bound, epsilon=self.epsilon, sticky=True)

    def _advance(self, logits: Tensor, inputs: ForwardInputs, flag: Tensor, bound: Tensor, **how: Any) -> None:
        """Take a step. What processors do is torch's; the kernel finds the likeliest tokens, or draws them."""
        pending, side_branches = self.pending, how.get("siblings")
        if self.model.processors:
            said = self.model.scores(logits[:, :1], lambda: Prefixes(pending.ids[:, None], pending.end[:, None]))
            if side_branches is not None:
                behind = self.model.scores(logits[:, 1:], partial(self.side_branches.prefixes, how["step"]))
                said = torch.cat([said, behind], dim=1)
            logits = said
        noise = None
        if pending.generator is not None:
            size = min(logits.shape[2], self.pending_buffers.vocabulary)
            noise = torch.empty((*logits.shape[:2], size), device=self.device).exponential_(generator=pending.generator)
        advance(logits, self.pending_buffers, inputs, self.model.positions, flag, bound, self.count, noise=noise, **how)

    def _find_likely_rejections(self) -> None:
        likely_rejections, rows = self.likely_rejections, self.pending.count
        alternatives = min(likely_rejections.alternatives, self.pending_buffers.vocabulary - 1)
        others = torch.empty((rows, self.gamma, alternatives), dtype=torch.long, device=self.device)
        chances = torch.empty((rows, self.gamma, alternatives + 1), device=self.device)
        find_likely_rejections(
            self.pending_buffers, self.sent_length, chances, others, likely_rejections.tokens, likely_rejections.at
        )

    def _branch(self, shown: int) -> None:
        pending, side_branches, model, others = (
            self.pending_buffers,
            self.side_branch_buffers,
            self.model,
            self.side_branches.most,
        )
        inputs = self._pending_inputs(1, shown)
        self._advance(self._forward(inputs), inputs, self.ahead, self.point, further=1)
        if self.branch_scores is not None:
            self.branch_scores.copy_(self.pending.scores_at(self.point[:, None])[:, 0])
        rejections = self.likely_rejections.tokens, self.likely_rejections.at
        fork(
            pending, self.point, self.sent_length, self.ahead, rejections, self.branch_tokens, self.branch_at,
            self.width, self.count, self.branches, self.depth, self.widest,
        )  # fmt: skip
        inputs = self._inputs(1 + others, shown)
        open_branches(
            pending, side_branches, self.point, self.branch_tokens, self.branch_at, model.positions, model.seen, inputs
        )
        for step in range(self.depth):
            self._advance(
                self._forward(inputs), inputs, self.ahead, self.point, further=1 + self.depth,
                side_branches=side_branches if others else None, step=step,
            )  # fmt: skip
        if self.following is not None:  # the main branch begins behind the chain, where there are no runners-up
            self.following[:, 1:] = self.side_branches.tokens[:, :, 1]

    def _forward(self, inputs: ForwardInputs) -> Tensor:
        tokens = self.model.own_tokens(inputs.tokens)
        return self.model.runner.forward_uncaptured(tokens, inputs.positions, inputs.slots, inputs.visible).logits

    def _pending_inputs(self, queries: int, shown: int) -> ForwardInputs:
        inputs = self._inputs(queries, shown)
        pending_inputs(self.pending_buffers, self.model.positions, self.model.seen, inputs)
        return inputs

    def _inputs(self, queries: int, shown: int) -> ForwardInputs:
        return empty_inputs(self.pending.count, queries, min(shown, self.model.slots.shape[0]), self.device)


def empty_inputs(rows: int, queries: int, shown: int, device: torch.device) -> ForwardInputs:
    """Room for the inputs of a forward."""
    tokens, slots, positions = (room((rows, queries), torch.long, device) for _ in range(3))
    visible = torch.empty((rows, queries, shown), dtype=torch.bool, device=device)
    return ForwardInputs(tokens, slots, positions, visible)


def pending_buffers_of(pending: PendingDraft) -> PendingBuffers:
    """What the kernels see of a line."""
    return PendingBuffers(
        pending.ids, pending.start, pending.end, pending.fed, pending.next, pending.confidence, pending.scores
    )


def side_branch_buffers_of(side_branches: SideBranches) -> SideBranchBuffers:
    """What the kernels see of siblings."""
    return SideBranchBuffers(
        side_branches.point,
        side_branches.forks,
        side_branches.tokens,
        side_branches.confidence,
        side_branches.scores,
        side_branches.slot_offsets,
    )
