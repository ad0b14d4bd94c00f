"""The draft's side of a round: a line of drafted tokens, and branches where it forks.

A chain is the part of the line that is sent to the target; a cut decides how much is sent, and throws nothing
away. That is what keeps drawn drafts exact: a token once drawn stays the candidate until the target gets to it.

Everything is a stage on a desk. Where shapes are fixed, every step of a stage is taken, and rows that need it no more
write where nobody reads; elsewhere the stage asks the device, and leaves out what is not needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.static_buffers import Buffers
from ..stats import SpecBranchStats
from .acceptance import NONE
from .draft_model import DraftModel
from .hooks import HookList
from .likely_rejections import LikelyRejections
from .pending_draft import PendingDraft
from .policies import Policy
from .side_branches import SideBranches
from .state import Branches, DraftTokens, Feedback, TreeLeaves


class NoDrafter:
    """The draft's side of a method that drafts nothing.

    Args:
        nothing: an empty chain and no branches.
    """

    depth, most, same_every_round = 0, 1, True

    def __init__(self, nothing: tuple[DraftTokens, Branches]) -> None:
        self.nothing, self.device = nothing, nothing[0].length.device

    def prefill(self, length: int) -> None: ...

    def draft(self, feedback: Feedback, reached: int) -> DraftTokens:
        return self.nothing[0]

    def branch(self, reached: int) -> Branches:
        return self.nothing[1]

    def drafted(self) -> Tensor:
        return torch.zeros((self.nothing[0].length.shape[0], 6), dtype=torch.long, device=self.device)


class Drafter:
    """Drafts for a batch of rows.

    Args:
        desk: where the memory comes from and the stages run.
        model: the draft model.
        line: the line it extends, the prompt in place.
        policy: what to draft.
        gamma: the most tokens drafted in one go.
        branches: the most branches at a branch point.
        outcomes: the most branches at chain positions where the verdict may end.
        leaves: the most runners-up to send beside a chain.
        foresight: thinks of verdicts that end a chain early.
        hooks: the decisions where to stop, how wide to fork and how much to keep.
        limit: the longest a text may get.
        stats: where to count.
    """

    only_our_kernels = False  # see `Buffers.run`

    def __init__(
        self,
        buffers: Buffers,
        model: DraftModel,
        pending: PendingDraft,
        policy: Policy,
        gamma: int,
        branches: int,
        rejection_branches: int,
        leaves: int,
        likely_rejections: LikelyRejections,
        hooks: HookList,
        limit: int,
        stats: SpecBranchStats,
    ) -> None:
        self.buffers, self.model, self.pending, self.policy, self.hooks, self.stats = (
            buffers,
            model,
            pending,
            policy,
            hooks,
            stats,
        )
        self.device = pending.device
        self.gamma, self.depth, self.branches, self.rejection_branches = (
            gamma,
            policy.depth(gamma),
            branches,
            rejection_branches,
        )
        self.most = gamma + 2  # tokens that a round can add
        self.same_every_round = policy.drafts_first and not policy.drafts_ahead  # no verdict leaves a line, or a branch
        self.side_branches = SideBranches(buffers, pending, model, branches - 1 + rejection_branches, self.depth)
        rows = pending.count
        self.limit = buffers.tensor("limit", (1,)).fill_(limit)
        self.sent_tokens = buffers.tensor("chain.tokens", (rows, gamma))
        self.sent_length = buffers.tensor("chain.length", (rows,))
        self.point = buffers.tensor("point", (rows,))  # the branch point's column
        self.branch_tokens = buffers.tensor("branches.tokens", (rows, branches + rejection_branches))
        self.branch_at = buffers.tensor("branches.at", (rows, branches + rejection_branches)).fill_(NONE)
        self.following = buffers.tensor("branches.following", (rows, branches + rejection_branches)) if leaves else None
        self.width = buffers.tensor("branches.width", (rows,))  # branches at the branch point
        self.order = torch.arange(branches, out=buffers.tensor("branches.order", (branches,)))
        self.ahead = buffers.tensor("ahead", (rows,), torch.bool)  # rows that draft past the chain
        self.survived = buffers.tensor("survived", (rows,), torch.bool)  # the line outlived a verdict
        self.fresh = buffers.tensor("fresh", (rows,), torch.bool)  # the line comes straight from the draft stage
        self.count = buffers.tensor("count", (rows,))  # tokens drafted in this round
        self.leaves, self.likely_rejections = leaves, likely_rejections
        self.sent_scores = self.branch_scores = None
        if pending.generator is not None:
            self.sent_scores = buffers.tensor("chain.scores", (rows, gamma, model.vocabulary), torch.float32)
            self.branch_scores = buffers.tensor("branches.scores", (rows, model.vocabulary), torch.float32)

    def prefill(self, length: int) -> None:
        """Read the first columns of the text."""
        if length > 0:
            self.model.prefill(self.pending.ids[:, :length])
            self.pending.fed.copy_(self.pending.start)

    def draft(self, feedback: Feedback, reached: int) -> DraftTokens:
        """The chain for the next target pass: what is left of the line, or a newly drafted one.

        Args:
            feedback: what the last verdict meant.
            reached: the longest text of the batch.
        """
        shown = self._shown(reached)
        begins = self.policy.drafts_first and feedback.draft_ended
        if begins and self.buffers.static_shapes:
            self.stats.draft_forwards += self.gamma
            self.stats.draft_positions += self.gamma + 1
        key = ("draft", feedback.moved, begins, feedback.features is None, shown)
        self.buffers.run(key, lambda: self._draft(feedback, begins, shown), self.only_our_kernels)
        count = self.gamma if self.buffers.static_shapes else int(self.sent_length.max())
        scores = None if self.sent_scores is None else self.sent_scores[:, :count]
        leaves = None
        if self.leaves:
            leaves = TreeLeaves(
                self.likely_rejections.tokens[:, : self.leaves], self.likely_rejections.at[:, : self.leaves]
            )
        return DraftTokens(self.sent_tokens[:, :count], self.sent_length, scores, leaves, self.buffers.serial)

    def branch(self, reached: int) -> Branches:
        """Draft what may come after the chain, before the verdict on it is known."""
        if not self.policy.drafts_ahead:
            return Branches(self.branch_tokens[:, :1], self.branch_at[:, :1], None)
        if self.buffers.static_shapes:
            self.stats.draft_forwards += 1 + self.depth
            self.stats.draft_positions += 1 + self.depth * (1 + self.side_branches.most)
        shown = self._shown(reached)
        self.buffers.run(("branch", shown), lambda: self._branch(shown), self.only_our_kernels)
        return Branches(self.branch_tokens, self.branch_at, self.branch_scores, self.following)

    def drafted(self) -> Tensor:
        """[B, 6] what stands drafted while the target looks at the chain; see `VerifyResult`."""
        branches = self.width if self.policy.forks else torch.zeros_like(self.width)
        rejection_branches = (self.branch_at[:, self.branches :] != NONE).sum(1)
        leaves = (self.likely_rejections.at[:, : self.leaves] != NONE).sum(1)
        main = self.pending.length - self.sent_length
        return torch.stack([self.sent_length, main, branches, rejection_branches, leaves, self.count], dim=1)

    def _shown(self, reached: int) -> int:
        """How many slots a stage reads, where that must not be asked of the device."""
        if not self.buffers.static_shapes:
            return 0
        needed = reached + self.pending.reach + self.side_branches.slots_needed
        self.model.runner.reserve(self.pending.count, needed)
        return self.model.runner.bucket(needed)

    # ---- the draft stage

    def _draft(self, feedback: Feedback, begins: bool, shown: int) -> None:
        self._follow(feedback)
        pending = self.pending
        room = torch.where(feedback.finished, 0, self.limit - pending.start)  # [B] tokens each row may still gain
        empty = pending.end == pending.start
        self.count.zero_()
        if begins:
            self._draft_stage(empty & (room > 1), room, shown)
        self.fresh.copy_(empty & (pending.end > pending.start))
        kept = self._cut(feedback.features)
        self.sent_length.copy_(torch.minimum(kept, room - 1).clamp(min=0, max=self.gamma))
        self.ahead.copy_(self.policy.drafts_ahead & (room > self.sent_length + 1))
        self.survived.fill_(False)
        self.width.zero_()
        self.branch_at.fill_(NONE)
        self.point.copy_(pending.start + self.sent_length)
        self.sent_tokens.copy_(pending.tokens(self.gamma))
        if self.sent_scores is not None:
            self.sent_scores.copy_(pending.first_scores(self.gamma))
        if self.likely_rejections.count:
            self.likely_rejections.look(self.sent_length)

    def _draft_stage(self, going: Tensor, room: Tensor, shown: int) -> None:
        """Draft up to gamma tokens on the rows that have none, stopping where the hooks say so."""
        pending, unfed = self.pending, 2  # the target's own token, and one before it if the whole chain stood
        for step in range(self.gamma):
            going = going & (room - 1 > step)
            if self._nobody(going):
                break
            if self.buffers.static_shapes or self._anybody(going & (pending.fed < pending.end)):
                self._feed_line(unfed, shown)
                unfed = 1
            if self.hooks.stoppers:
                going = going & ~self.hooks.stop(pending.state(pending.end))
                if self._nobody(going):
                    break
            pending.extend(going)
            self.count += going

    def _feed_line(self, unfed: int, shown: int) -> None:
        """Feed what the draft has not read of each row's line."""
        pending, model = self.pending, self.model
        if not self.buffers.static_shapes:
            unfed, shown = max(1, int((pending.end - pending.fed).max())), int(pending.end.max())
        columns = (pending.end[:, None] - unfed + pending.offsets[:unfed]).clamp(min=0)  # [B, unfed]
        visible = model.text_up_to(columns, shown)
        logits = model.forward(pending.ids.gather(1, columns), columns, columns, visible)
        pending.note(model.next_distribution(pending.ids, pending.end, logits))

    def _cut(self, features: Tensor | None) -> Tensor:
        """[B] how much of each line to send, by the hooks.

        They are asked about survivors, and about lines fresh from the draft stage if one of them wants to be: on a
        poorly aligned pair most rolled back tokens come from there. What is not sent becomes the main branch.
        """
        hooks, pending = self.hooks, self.pending
        asked = self.survived | self.fresh if hooks.fresh_lines else self.survived
        if not self.policy.forks or self._nobody(asked):
            return pending.length
        longest = pending.reach if self.buffers.static_shapes else int(pending.length.max())
        kept = hooks.keep(pending.survivor(longest, features, self.fresh, with_scores=hooks.draft_scores))
        return torch.where(asked, kept, pending.length)

    # ---- the branch stage

    def _branch(self, shown: int) -> None:
        pending, ahead = self.pending, self.ahead
        if self._nobody(ahead):
            return
        at_end = ahead & (pending.end == self.point)
        if self.buffers.static_shapes or self._anybody(at_end & (pending.fed < pending.end)):
            self._feed_line(1, shown)
        pending.extend(at_end)
        self.count += at_end
        state = pending.state(self.point)
        width = self.hooks.fork(state).clamp(max=self.branches) if self.policy.forks else torch.ones_like(self.width)
        self.width.copy_(torch.where(ahead, width, 0))
        own = pending.ids.gather(1, self.point[:, None])
        self.branch_tokens[:, : self.branches] = own_token_first(state.scores, own, self.branches)
        is_open = self.order < self.width[:, None]
        self.branch_at[:, : self.branches] = torch.where(is_open, self.sent_length[:, None], NONE)
        if self.rejection_branches:
            at = self.likely_rejections.at[:, : self.rejection_branches]
            self.branch_tokens[:, self.branches :] = self.likely_rejections.tokens[:, : self.rejection_branches]
            self.branch_at[:, self.branches :] = torch.where(ahead[:, None], at, NONE)
        if self.branch_scores is not None:
            self.branch_scores.copy_(state.scores)
        self._grow(shown)

    def _grow(self, shown: int) -> None:
        """Draft the main branch and its siblings, `depth` tokens behind their first."""
        pending, side_branches = self.pending, self.side_branches
        others = self.side_branches.most
        if not self.buffers.static_shapes and not self.rejection_branches:
            others = int(self.width.max()) - 1
        at = self.branch_at[:, 1 : 1 + others]
        forks = torch.where(at == NONE, self.point[:, None], pending.start[:, None] + at)
        side_branches.open(self.point, forks, self.branch_tokens[:, 1 : 1 + others])
        self.count += (at != NONE).sum(1) * (1 + self.depth)
        goal = self.point + 1 + self.depth
        for step in range(self.depth):
            wants = self.ahead & (pending.end < goal)
            if self._nobody(wants) and not others:
                break
            self._grow_step(step, wants, shown)
        if self.following is not None:  # the main branch begins behind the chain, where there are no runners-up
            self.following[:, 1:] = side_branches.tokens[:, :, 1]

    def _grow_step(self, step: int, wants: Tensor, shown: int) -> None:
        """One forward over the tips of all branches; the main one takes part where it is not long enough."""
        pending, side_branches, model = self.pending, self.side_branches, self.model
        feeds_main = self.buffers.static_shapes or self._anybody(wants & (pending.fed < pending.end))
        if not self.buffers.static_shapes:
            shown = max(int(pending.end.max()), int(self.point.max()) + side_branches.slots_needed)
        inputs, visible = [], []
        if feeds_main:
            column = pending.end[:, None] - 1
            inputs.append((pending.ids.gather(1, column), column, column))
            visible.append(model.text_up_to(column, shown))
        if side_branches.count:
            inputs.append(side_branches.inputs(step))
            visible.append(side_branches.visible(step, shown))
        if inputs:
            tokens, columns, slots = (torch.cat(part, dim=1) for part in zip(*inputs))
            logits = model.forward(tokens, columns, slots, torch.cat(visible, dim=1))
        if feeds_main:
            pending.note(model.next_distribution(pending.ids, pending.end, logits[:, :1]))
        pending.extend(wants)
        self.count += wants
        if side_branches.count:
            side_branches.extend(step, logits[:, -side_branches.count :])

    # ---- after the verdict

    def _follow(self, feedback: Feedback) -> None:
        """Take note of a verdict: where the text goes on, and which drafted line lives on there."""
        pending, (committed, accepted, token, survivor, continuation, *_), finished = (
            self.pending,
            feedback.round_result,
            feedback.finished,
        )
        complete = committed == accepted + 1 + (continuation >= 0)  # a stop, or a slower row, may have cut it short
        missed = complete & (survivor == NONE)
        moved = complete & (survivor > 0)
        if feedback.moved:
            self.side_branches.adopt(torch.where(moved, survivor - 1, NONE))
        column = pending.start + accepted  # where the target's own token stands
        pending.ids[pending.rows, torch.where(missed, column, pending.capacity)] = token
        pending.ids[pending.rows, torch.where(missed & (continuation >= 0), column + 1, pending.capacity)] = (
            continuation
        )
        pending.start += committed
        end = torch.where(moved, column + 1 + self.depth, pending.end)
        pending.end.copy_(torch.where(missed | finished, pending.start, end))
        fed = torch.where(moved, pending.end - 1, pending.fed)
        pending.fed.copy_(torch.where(missed, torch.minimum(fed, column), fed))
        self.survived.copy_(complete & ~missed & ~finished)
        if self.model.guide is not None and bool(missed[0]):
            self.model.guide.rewind(int(column[0]))

    # ---- questions to the device, where they may be asked

    def _nobody(self, rows: Tensor) -> bool:
        return not self.buffers.static_shapes and not bool(rows.any())

    def _anybody(self, rows: Tensor) -> bool:
        return bool(rows.any())


def own_token_first(q: Tensor, token: Tensor, count: int) -> Tensor:
    """`count` tokens: the line's own, then the likeliest others. `q` is [..., V], `token` [..., 1]."""
    return q.scatter(-1, token, 2.0).topk(count, dim=-1).indices  # 2 is above every probability
