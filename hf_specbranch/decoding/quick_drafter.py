"""The draft's side of a round with its bookkeeping in few kernels; it does what `Drafter` does."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels.parallel_build import room
from ..kernels.rounds import (
    Afterwards,
    LineMemory,
    Sent,
    SiblingMemory,
    Tips,
    adopt,
    advance,
    follow,
    foresee,
    fork,
    open_branches,
    read_on,
    send,
    tally,
)
from .drafter import Drafter
from .hooks import ConfidenceStop, HookList, SpeculationHook, TopKBranches
from .pending_draft import Line
from .policies import Policy
from .scoring import Prefixes
from .side_branches import Siblings
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
        rows, desk = self.line.count, self.desk
        self.line_memory, self.sibling_memory = memory_of(self.line), siblings_memory(self.siblings)
        self.after = Afterwards(
            self.survived,
            room=desk.tensor("room", (rows,)),
            empty=desk.tensor("empty", (rows,), torch.bool),
            going=desk.tensor("going", (rows,), torch.bool),
            bound=desk.tensor("bound", (rows,)),
            drafted=self.count,
        )
        self.sent = Sent(self.chain_tokens, self.chain_length, self.ahead, self.point, self.width, self.branch_at)
        self.stood = desk.tensor("drafted", (rows, 6))
        self.epsilon = max((hook.epsilon for hook in self.hooks.hooks if isinstance(hook, ConfidenceStop)), default=0.0)
        widths = [hook.k_max for hook in self.hooks.hooks if isinstance(hook, TopKBranches)]
        self.widest = widths[0] if self.policy.forks else 0
        ours = (ConfidenceStop, TopKBranches)
        self.asks = self.policy.forks and any(
            type(hook).keep is not SpeculationHook.keep for hook in self.hooks.hooks if type(hook) not in ours
        )
        self.in_kernels = not self.asks

    def drafted(self) -> Tensor:
        tally(
            self.line_memory, self.chain_length, self.width, self.branch_at, self.foresight.at, self.count,
            self.branches, self.leaves, self.policy.forks, self.stood,
        )  # fmt: skip
        return self.stood

    def _draft(self, feedback: Feedback, begins: bool, shown: int) -> None:
        line, siblings, told, runner = self.line_memory, self.sibling_memory, feedback.told, self.model.runner
        if feedback.moved:
            adopt(told, line, siblings, [(layer.keys, layer.values) for layer in runner.cache.layers])
        follow(told, line, siblings, runner.slot_positions, self.limit, self.depth, feedback.moved, self.after)
        if begins:
            self._draft_quickly(shown)
        kept = None
        if self.asks:
            self.fresh.copy_(self.after.empty & (self.line.end > self.line.start))
            kept = self._cut(feedback.features)
        epsilon = self.epsilon if self.policy.forks else 0.0
        send(line, self.survived, self.after.room, kept, self.sent, self.line.reach, epsilon, self.policy.drafts_ahead)
        if self.chain_scores is not None:
            self.chain_scores.copy_(self.line.first_scores(self.gamma))
        if self.foresight.count:
            self._foresee()

    def _draft_quickly(self, shown: int) -> None:
        """Draft up to gamma tokens on the rows that have none."""
        tips = self._line_tips(1, shown)
        logits = self._forward(self._line_tips(2, shown))  # the target's own token, and perhaps one before it
        going, bound = self.after.going, self.after.bound
        for step in range(self.gamma):
            if step > 0:
                logits = self._forward(tips)
            self._advance(logits[:, -1:], tips, going, bound, epsilon=self.epsilon, sticky=True)

    def _advance(self, logits: Tensor, tips: Tips, flag: Tensor, bound: Tensor, **how: Any) -> None:
        """Take a step. What processors do is torch's; the kernel finds the likeliest tokens, or draws them."""
        line, siblings = self.line, how.get("siblings")
        if self.model.processors:
            said = self.model.scores(logits[:, :1], lambda: Prefixes(line.ids[:, None], line.end[:, None]))
            if siblings is not None:
                behind = self.model.scores(logits[:, 1:], partial(self.siblings.prefixes, how["step"]))
                said = torch.cat([said, behind], dim=1)
            logits = said
        noise = None
        if line.generator is not None:
            size = min(logits.shape[2], self.line_memory.vocabulary)
            noise = torch.empty((*logits.shape[:2], size), device=self.device).exponential_(generator=line.generator)
        advance(logits, self.line_memory, tips, self.model.positions, flag, bound, self.count, noise=noise, **how)

    def _foresee(self) -> None:
        foresight, rows = self.foresight, self.line.count
        alternatives = min(foresight.alternatives, self.line_memory.vocabulary - 1)
        others = torch.empty((rows, self.gamma, alternatives), dtype=torch.long, device=self.device)
        chances = torch.empty((rows, self.gamma, alternatives + 1), device=self.device)
        foresee(self.line_memory, self.chain_length, chances, others, foresight.tokens, foresight.at)

    def _branch(self, shown: int) -> None:
        line, siblings, model, others = self.line_memory, self.sibling_memory, self.model, self.siblings.most
        tips = self._line_tips(1, shown)
        self._advance(self._forward(tips), tips, self.ahead, self.point, further=1)
        if self.branch_scores is not None:
            self.branch_scores.copy_(self.line.scores_at(self.point[:, None])[:, 0])
        foreseen = self.foresight.tokens, self.foresight.at
        fork(
            line, self.point, self.chain_length, self.ahead, foreseen, self.branch_tokens, self.branch_at, self.width,
            self.count, self.branches, self.depth, self.widest,
        )  # fmt: skip
        tips = self._tips(1 + others, shown)
        open_branches(line, siblings, self.point, self.branch_tokens, self.branch_at, model.positions, model.seen, tips)
        for step in range(self.depth):
            self._advance(
                self._forward(tips), tips, self.ahead, self.point, further=1 + self.depth,
                siblings=siblings if others else None, step=step,
            )  # fmt: skip
        if self.following is not None:  # the main branch begins behind the chain, where there are no runners-up
            self.following[:, 1:] = self.siblings.tokens[:, :, 1]

    def _forward(self, tips: Tips) -> Tensor:
        tokens = self.model.own_tokens(tips.tokens)
        return self.model.runner.forward_as_it_is(tokens, tips.positions, tips.slots, tips.visible).logits

    def _line_tips(self, queries: int, shown: int) -> Tips:
        tips = self._tips(queries, shown)
        read_on(self.line_memory, self.model.positions, self.model.seen, tips)
        return tips

    def _tips(self, queries: int, shown: int) -> Tips:
        return empty_tips(self.line.count, queries, min(shown, self.model.slots.shape[0]), self.device)


def empty_tips(rows: int, queries: int, shown: int, device: torch.device) -> Tips:
    """Room for the inputs of a forward."""
    tokens, slots, positions = (room((rows, queries), torch.long, device) for _ in range(3))
    visible = torch.empty((rows, queries, shown), dtype=torch.bool, device=device)
    return Tips(tokens, slots, positions, visible)


def memory_of(line: Line) -> LineMemory:
    """What the kernels see of a line."""
    return LineMemory(line.ids, line.start, line.end, line.fed, line.next, line.confidence, line.scores)


def siblings_memory(siblings: Siblings) -> SiblingMemory:
    """What the kernels see of siblings."""
    return SiblingMemory(
        siblings.point, siblings.forks, siblings.tokens, siblings.confidence, siblings.scores, siblings.slot_offsets
    )
