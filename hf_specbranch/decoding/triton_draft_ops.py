"""The operations of a drafting round in Triton: one kernel each, where torch takes a dozen.

Each does what `TorchDraftOps` does with static shapes; tests compare the two operation by operation.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels.rounds import (
    AfterRound,
    ForwardInputs,
    PendingBuffers,
    SentDraft,
    SideBranchBuffers,
    adopt,
    advance,
    count_drafted,
    empty_inputs,
    find_likely_rejections,
    fork,
    open_branches,
    pending_inputs,
    resolve_pending,
    send,
)
from ..kernels.spans import SPANS
from ..runtime.static_buffers import Buffers
from .draft_model import DraftModel
from .draft_state import DraftRound, branch_depth
from .hooks import ConfidenceStop, HookList, SpeculationHook, TopKBranches
from .policies import Policy
from .resolve import Drafted, RoundResult
from .scoring import Prefixes

OWN_RULES = (ConfidenceStop, TopKBranches)


def kernels_know(policy: Policy, gamma: int, hooks: HookList) -> bool:
    """Whether the kernels know the rules: where to stop and how wide to branch must be ours; other hooks may cut."""
    stops = all(type(hook) is ConfidenceStop for hook in hooks.stoppers) and len(hooks.stoppers) <= 1
    forks = all(type(hook) is TopKBranches for hook in hooks.hooks if type(hook).fork is not SpeculationHook.fork)
    return stops and forks and (branch_depth(policy, gamma) > 0 or not policy.drafts_ahead)


class TritonDraftOps:
    """See `DraftOps`.

    Args:
        round: the tensors of the round, with static shapes.
        model: the draft model.
        hooks: rules that the kernels know; see `kernels_know`.
        buffers: where further memory comes from.
        stepwise: each step of a new draft is a stage of its own, and finds its inputs where the last one has left them.
    """

    def __init__(
        self, round: DraftRound, model: DraftModel, hooks: HookList, buffers: Buffers, stepwise: bool = False
    ) -> None:
        self.round, self.model, self.device = round, model, round.pending.device
        pending, side = round.pending, round.side
        self.pending = PendingBuffers(
            pending.ids, pending.start, pending.end, pending.cached, pending.next, pending.confidence, pending.scores
        )
        self.side = SideBranchBuffers(
            side.point, side.forks, side.tokens, side.confidence, side.scores, side.slot_offsets
        )
        self.after = AfterRound(round.survived, round.room, round.empty, round.going, round.bound, round.count)
        self.sent = SentDraft(
            round.sent_tokens, round.sent_length, round.ahead, round.point, round.width, round.branch_at
        )
        self.drafted_counts = buffers.tensor("drafted", (pending.count, len(Drafted._fields)))
        self.epsilon = max((hook.epsilon for hook in hooks.hooks if isinstance(hook, ConfidenceStop)), default=0.0)
        widths = [hook.k_max for hook in hooks.hooks if isinstance(hook, TopKBranches)]
        self.k_max = widths[0] if round.policy.forks else 0
        others = [hook for hook in hooks.hooks if type(hook) not in OWN_RULES]
        self.cuts_by_confidence = not round.policy.forks or all(
            type(hook).keep is SpeculationHook.keep for hook in others
        )
        self.kept = kept_inputs(buffers, pending.count) if stepwise else None
        self.more_steps = buffers.tensor("step.more", (pending.count,)) if stepwise else None
        self.keeps_scores = (
            round.policy.forks
            or round.policy.drafts_ahead
            or round.rejections.count > 0
            or pending.generator is not None
            or hooks.draft_scores
        )
        # Greedy drafts may be chosen among the tokens of a shortlist; others are never likely.
        listed, greedy = model.shortlist, not model.processors and pending.generator is None
        model.expands = listed is None or not greedy or listed.vocabulary > self.pending.vocabulary
        self.token_ids = None if listed is None or model.expands else listed.ids
        self.inputs: ForwardInputs | None = None  # of the next step; `extend` writes them

    # ---- propose

    def adopt(self, result: RoundResult, moved: bool) -> None:
        runner, packed = self.model.runner, result.packed
        if moved:
            adopt(packed, self.pending, self.side, [(layer.keys, layer.values) for layer in runner.cache.layers])
        resolve_pending(
            packed,
            self.pending,
            self.side,
            runner.slot_positions,
            self.round.limit,
            self.round.depth,
            moved,
            self.after,
        )

    def draft_inputs(self, step: int) -> ForwardInputs | None:
        if step > 0:
            self.inputs = self.kept or self.inputs
            return self.inputs
        self.inputs = self._fill(self.kept or self._empty_inputs(1))
        return self._fill(self._empty_inputs(self.model.reread))

    def extend(self, logits: Tensor | None, flag: Tensor, bound: Tensor, further: int = 0, stops: bool = False) -> None:
        assert logits is not None
        epsilon = self.epsilon if stops else 0.0
        inclusive, tells = stops and self.round.sends_uncertain, self.more_steps if stops else None
        self._advance(
            logits[:, -1:], flag, bound, further=further, epsilon=epsilon, sticky=stops, inclusive=inclusive,
            goes_on=tells,
        )  # fmt: skip

    def send(self, kept: Tensor | None) -> None:
        round = self.round
        epsilon = self.epsilon if round.policy.forks else 0.0
        reach, ahead = round.pending.reach, round.policy.drafts_ahead
        send(self.pending, round.survived, round.room, kept, self.sent, reach, epsilon, ahead)

    def find_rejections(self) -> None:
        round, found = self.round, self.round.rejections
        alternatives = min(found.alternatives, self.pending.vocabulary - 1)
        others = torch.empty((self.pending.rows, round.gamma, alternatives), dtype=torch.long, device=self.device)
        chances = torch.empty((self.pending.rows, round.gamma, alternatives + 1), device=self.device)
        find_likely_rejections(self.pending, round.sent_length, chances, others, found.tokens, found.at)

    # ---- branch

    def point_inputs(self) -> ForwardInputs | None:
        self.inputs = self._fill(self._empty_inputs(1))
        return self.inputs

    def fork(self) -> None:
        round = self.round
        if round.branch_scores is not None:
            round.branch_scores.copy_(round.pending.scores_at(round.point[:, None])[:, 0])
        rejections = round.rejections.tokens, round.rejections.at
        fork(
            self.pending, round.point, round.sent_length, round.ahead, rejections, round.branch_tokens, round.branch_at,
            round.width, round.count, round.branches, round.depth, self.k_max,
        )  # fmt: skip

    def is_branching_done(self) -> bool:
        return False

    def branch_inputs(self, step: int) -> ForwardInputs | None:
        if step == 0:
            round, model = self.round, self.model
            self.inputs = self._empty_inputs(1 + round.side.most)
            open_branches(
                self.pending, self.side, round.point, round.branch_tokens, round.branch_at, model.positions,
                model.first, self.inputs,
            )  # fmt: skip
        return self.inputs

    def extend_branches(self, logits: Tensor | None, step: int) -> None:
        assert logits is not None
        side = self.side if self.round.side.most else None
        self._advance(logits, self.round.ahead, self.round.point, further=1 + self.round.depth, side=side, step=step)

    # ---- what is drafted

    def drafted(self) -> Tensor:
        round = self.round
        count_drafted(
            self.pending, round.sent_length, round.width, round.branch_at, round.rejections.at, round.count,
            round.branches, round.leaves, round.policy.forks, self.drafted_counts,
        )  # fmt: skip
        return self.drafted_counts

    def release(self) -> None:
        self.inputs = None

    # ----

    def _advance(self, logits: Tensor, flag: Tensor, bound: Tensor, **how: Any) -> None:
        """Take a step. Torch applies the processors; the kernel finds the likeliest tokens, or draws them."""
        pending, side = self.round.pending, how.get("side")
        if self.model.processors:
            scores = self.model.scores(logits[:, :1], lambda: Prefixes(pending.ids[:, None], pending.end[:, None]))
            if side is not None:
                others = self.model.scores(logits[:, 1:], partial(self.round.side.prefixes, how["step"]))
                scores = torch.cat([scores, others], dim=1)
            logits = scores
        noise = None
        if pending.generator is not None:
            size = min(logits.shape[2], self.pending.vocabulary)
            noise = torch.empty((*logits.shape[:2], size), device=self.device)
            noise.exponential_(generator=pending.generator)
        assert self.inputs is not None
        positions = self.model.positions
        advance(
            logits, self.pending, self.inputs, positions, flag, bound, self.round.count, noise=noise,
            token_ids=self.token_ids, keeps_scores=self.keeps_scores, **how,
        )  # fmt: skip

    def _fill(self, inputs: ForwardInputs) -> ForwardInputs:
        """Write the last tokens of each pending draft to the inputs of a forward."""
        pending_inputs(self.pending, self.model.positions, self.model.first, inputs)
        return inputs

    def _empty_inputs(self, queries: int) -> ForwardInputs:
        return empty_inputs(self.pending.rows, queries, self.device)


def kept_inputs(buffers: Buffers, rows: int) -> ForwardInputs:
    """Return memory for the inputs of one step that stays where it is."""
    tokens, slots, positions = (buffers.tensor(f"step.{name}", (rows, 1)) for name in ("tokens", "slots", "positions"))
    return ForwardInputs(tokens, slots, positions, buffers.tensor("step.spans", (rows, 1, 4), SPANS))
