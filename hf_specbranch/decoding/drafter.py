"""The draft's side of a round: a line of drafted tokens, and branches where it forks.

A chain is the part of the line that is sent to the target; a cut decides how much is sent, and throws nothing
away. That is what keeps drawn drafts exact: a token once drawn stays the candidate until the target gets to it.

Everything is a stage on a desk. Where shapes are fixed, every step of a stage is taken, and rows that need it no more
write where nobody reads; elsewhere the stage asks the device, and leaves out what is not needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.static_buffers import Desk
from ..stats import SpecBranchStats
from .acceptance import NONE
from .draft_model import DraftModel
from .hooks import HookList
from .likely_rejections import Foresight
from .pending_draft import Line
from .policies import Policy
from .side_branches import Siblings
from .state import Branches, Chain, Feedback, Leaves


class NoDrafter:
    """The draft's side of a method that drafts nothing.

    Args:
        nothing: an empty chain and no branches.
    """

    depth, most, always_alike = 0, 1, True

    def __init__(self, nothing: tuple[Chain, Branches]) -> None:
        self.nothing, self.device = nothing, nothing[0].length.device

    def prefill(self, length: int) -> None: ...

    def draft(self, feedback: Feedback, reached: int) -> Chain:
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

    in_kernels = False  # see `Desk.run`

    def __init__(
        self,
        desk: Desk,
        model: DraftModel,
        line: Line,
        policy: Policy,
        gamma: int,
        branches: int,
        outcomes: int,
        leaves: int,
        foresight: Foresight,
        hooks: HookList,
        limit: int,
        stats: SpecBranchStats,
    ) -> None:
        self.desk, self.model, self.line, self.policy, self.hooks, self.stats = desk, model, line, policy, hooks, stats
        self.device = line.device
        self.gamma, self.depth, self.branches, self.outcomes = gamma, policy.depth(gamma), branches, outcomes
        self.most = gamma + 2  # tokens that a round can add
        self.always_alike = policy.drafts_first and not policy.drafts_ahead  # no verdict leaves a line, or a branch
        self.siblings = Siblings(desk, line, model, branches - 1 + outcomes, self.depth)
        rows = line.count
        self.limit = desk.tensor("limit", (1,)).fill_(limit)
        self.chain_tokens = desk.tensor("chain.tokens", (rows, gamma))
        self.chain_length = desk.tensor("chain.length", (rows,))
        self.point = desk.tensor("point", (rows,))  # the branch point's column
        self.branch_tokens = desk.tensor("branches.tokens", (rows, branches + outcomes))
        self.branch_at = desk.tensor("branches.at", (rows, branches + outcomes)).fill_(NONE)
        self.following = desk.tensor("branches.following", (rows, branches + outcomes)) if leaves else None
        self.width = desk.tensor("branches.width", (rows,))  # branches at the branch point
        self.order = torch.arange(branches, out=desk.tensor("branches.order", (branches,)))
        self.ahead = desk.tensor("ahead", (rows,), torch.bool)  # rows that draft past the chain
        self.survived = desk.tensor("survived", (rows,), torch.bool)  # the line outlived a verdict
        self.fresh = desk.tensor("fresh", (rows,), torch.bool)  # the line comes straight from the draft stage
        self.count = desk.tensor("count", (rows,))  # tokens drafted in this round
        self.leaves, self.foresight = leaves, foresight
        self.chain_scores = self.branch_scores = None
        if line.generator is not None:
            self.chain_scores = desk.tensor("chain.scores", (rows, gamma, model.vocabulary), torch.float32)
            self.branch_scores = desk.tensor("branches.scores", (rows, model.vocabulary), torch.float32)

    def prefill(self, length: int) -> None:
        """Read the first columns of the text."""
        if length > 0:
            self.model.prefill(self.line.ids[:, :length])
            self.line.fed.copy_(self.line.start)

    def draft(self, feedback: Feedback, reached: int) -> Chain:
        """The chain for the next target pass: what is left of the line, or a newly drafted one.

        Args:
            feedback: what the last verdict meant.
            reached: the longest text of the batch.
        """
        shown = self._shown(reached)
        begins = self.policy.drafts_first and feedback.line_ended
        if begins and self.desk.fixed:
            self.stats.draft_forwards += self.gamma
            self.stats.draft_positions += self.gamma + 1
        key = ("draft", feedback.moved, begins, feedback.features is None, shown)
        self.desk.run(key, lambda: self._draft(feedback, begins, shown), self.in_kernels)
        count = self.gamma if self.desk.fixed else int(self.chain_length.max())
        scores = None if self.chain_scores is None else self.chain_scores[:, :count]
        leaves = None
        if self.leaves:
            leaves = Leaves(self.foresight.tokens[:, : self.leaves], self.foresight.at[:, : self.leaves])
        return Chain(self.chain_tokens[:, :count], self.chain_length, scores, leaves, self.desk.serial)

    def branch(self, reached: int) -> Branches:
        """Draft what may come after the chain, before the verdict on it is known."""
        if not self.policy.drafts_ahead:
            return Branches(self.branch_tokens[:, :1], self.branch_at[:, :1], None)
        if self.desk.fixed:
            self.stats.draft_forwards += 1 + self.depth
            self.stats.draft_positions += 1 + self.depth * (1 + self.siblings.most)
        shown = self._shown(reached)
        self.desk.run(("branch", shown), lambda: self._branch(shown), self.in_kernels)
        return Branches(self.branch_tokens, self.branch_at, self.branch_scores, self.following)

    def drafted(self) -> Tensor:
        """[B, 6] what stands drafted while the target looks at the chain; see `Report`."""
        branches = self.width if self.policy.forks else torch.zeros_like(self.width)
        outcomes = (self.branch_at[:, self.branches :] != NONE).sum(1)
        leaves = (self.foresight.at[:, : self.leaves] != NONE).sum(1)
        main = self.line.length - self.chain_length
        return torch.stack([self.chain_length, main, branches, outcomes, leaves, self.count], dim=1)

    def _shown(self, reached: int) -> int:
        """How many slots a stage reads, where that must not be asked of the device."""
        if not self.desk.fixed:
            return 0
        needed = reached + self.line.reach + self.siblings.slots_needed
        self.model.runner.reserve(self.line.count, needed)
        return self.model.runner.bucket(needed)

    # ---- the draft stage

    def _draft(self, feedback: Feedback, begins: bool, shown: int) -> None:
        self._follow(feedback)
        line = self.line
        room = torch.where(feedback.finished, 0, self.limit - line.start)  # [B] tokens each row may still gain
        empty = line.end == line.start
        self.count.zero_()
        if begins:
            self._draft_stage(empty & (room > 1), room, shown)
        self.fresh.copy_(empty & (line.end > line.start))
        kept = self._cut(feedback.features)
        self.chain_length.copy_(torch.minimum(kept, room - 1).clamp(min=0, max=self.gamma))
        self.ahead.copy_(self.policy.drafts_ahead & (room > self.chain_length + 1))
        self.survived.fill_(False)
        self.width.zero_()
        self.branch_at.fill_(NONE)
        self.point.copy_(line.start + self.chain_length)
        self.chain_tokens.copy_(line.tokens(self.gamma))
        if self.chain_scores is not None:
            self.chain_scores.copy_(line.first_scores(self.gamma))
        if self.foresight.count:
            self.foresight.look(self.chain_length)

    def _draft_stage(self, going: Tensor, room: Tensor, shown: int) -> None:
        """Draft up to gamma tokens on the rows that have none, stopping where the hooks say so."""
        line, unfed = self.line, 2  # the target's own token, and one before it if the whole chain stood
        for step in range(self.gamma):
            going = going & (room - 1 > step)
            if self._nobody(going):
                break
            if self.desk.fixed or self._anybody(going & (line.fed < line.end)):
                self._feed_line(unfed, shown)
                unfed = 1
            if self.hooks.stoppers:
                going = going & ~self.hooks.stop(line.state(line.end))
                if self._nobody(going):
                    break
            line.extend(going)
            self.count += going

    def _feed_line(self, unfed: int, shown: int) -> None:
        """Feed what the draft has not read of each row's line."""
        line, model = self.line, self.model
        if not self.desk.fixed:
            unfed, shown = max(1, int((line.end - line.fed).max())), int(line.end.max())
        columns = (line.end[:, None] - unfed + line.offsets[:unfed]).clamp(min=0)  # [B, unfed]
        visible = model.text_up_to(columns, shown)
        logits = model.forward(line.ids.gather(1, columns), columns, columns, visible)
        line.note(model.distribution_behind(line.ids, line.end, logits))

    def _cut(self, features: Tensor | None) -> Tensor:
        """[B] how much of each line to send, by the hooks.

        They are asked about survivors, and about lines fresh from the draft stage if one of them wants to be: on a
        poorly aligned pair most rolled back tokens come from there. What is not sent becomes the main branch.
        """
        hooks, line = self.hooks, self.line
        asked = self.survived | self.fresh if hooks.fresh_lines else self.survived
        if not self.policy.forks or self._nobody(asked):
            return line.length
        longest = line.reach if self.desk.fixed else int(line.length.max())
        kept = hooks.keep(line.survivor(longest, features, self.fresh, with_scores=hooks.draft_scores))
        return torch.where(asked, kept, line.length)

    # ---- the branch stage

    def _branch(self, shown: int) -> None:
        line, ahead = self.line, self.ahead
        if self._nobody(ahead):
            return
        at_end = ahead & (line.end == self.point)
        if self.desk.fixed or self._anybody(at_end & (line.fed < line.end)):
            self._feed_line(1, shown)
        line.extend(at_end)
        self.count += at_end
        state = line.state(self.point)
        width = self.hooks.fork(state).clamp(max=self.branches) if self.policy.forks else torch.ones_like(self.width)
        self.width.copy_(torch.where(ahead, width, 0))
        own = line.ids.gather(1, self.point[:, None])
        self.branch_tokens[:, : self.branches] = put_first(state.scores, own, self.branches)
        is_open = self.order < self.width[:, None]
        self.branch_at[:, : self.branches] = torch.where(is_open, self.chain_length[:, None], NONE)
        if self.outcomes:
            at = self.foresight.at[:, : self.outcomes]
            self.branch_tokens[:, self.branches :] = self.foresight.tokens[:, : self.outcomes]
            self.branch_at[:, self.branches :] = torch.where(ahead[:, None], at, NONE)
        if self.branch_scores is not None:
            self.branch_scores.copy_(state.scores)
        self._grow(shown)

    def _grow(self, shown: int) -> None:
        """Draft the main branch and its siblings, `depth` tokens behind their first."""
        line, siblings = self.line, self.siblings
        others = self.siblings.most
        if not self.desk.fixed and not self.outcomes:
            others = int(self.width.max()) - 1
        at = self.branch_at[:, 1 : 1 + others]
        forks = torch.where(at == NONE, self.point[:, None], line.start[:, None] + at)
        siblings.open(self.point, forks, self.branch_tokens[:, 1 : 1 + others])
        self.count += (at != NONE).sum(1) * (1 + self.depth)
        goal = self.point + 1 + self.depth
        for step in range(self.depth):
            wants = self.ahead & (line.end < goal)
            if self._nobody(wants) and not others:
                break
            self._grow_step(step, wants, shown)
        if self.following is not None:  # the main branch begins behind the chain, where there are no runners-up
            self.following[:, 1:] = siblings.tokens[:, :, 1]

    def _grow_step(self, step: int, wants: Tensor, shown: int) -> None:
        """One forward over the tips of all branches; the main one takes part where it is not long enough."""
        line, siblings, model = self.line, self.siblings, self.model
        feeds_main = self.desk.fixed or self._anybody(wants & (line.fed < line.end))
        if not self.desk.fixed:
            shown = max(int(line.end.max()), int(self.point.max()) + siblings.slots_needed)
        tips, visible = [], []
        if feeds_main:
            column = line.end[:, None] - 1
            tips.append((line.ids.gather(1, column), column, column))
            visible.append(model.text_up_to(column, shown))
        if siblings.count:
            tips.append(siblings.tips(step))
            visible.append(siblings.visible(step, shown))
        if tips:
            tokens, columns, slots = (torch.cat(part, dim=1) for part in zip(*tips))
            logits = model.forward(tokens, columns, slots, torch.cat(visible, dim=1))
        if feeds_main:
            line.note(model.distribution_behind(line.ids, line.end, logits[:, :1]))
        line.extend(wants)
        self.count += wants
        if siblings.count:
            siblings.extend(step, logits[:, -siblings.count :])

    # ---- after the verdict

    def _follow(self, feedback: Feedback) -> None:
        """Take note of a verdict: where the text goes on, and which drafted line lives on there."""
        line, (committed, accepted, token, survivor, bonus, *_), finished = self.line, feedback.told, feedback.finished
        complete = committed == accepted + 1 + (bonus >= 0)  # a stop, or a slower row, may have cut it short
        missed = complete & (survivor == NONE)
        moved = complete & (survivor > 0)
        if feedback.moved:
            self.siblings.adopt(torch.where(moved, survivor - 1, NONE))
        column = line.start + accepted  # where the target's own token stands
        line.ids[line.rows, torch.where(missed, column, line.capacity)] = token
        line.ids[line.rows, torch.where(missed & (bonus >= 0), column + 1, line.capacity)] = bonus
        line.start += committed
        end = torch.where(moved, column + 1 + self.depth, line.end)
        line.end.copy_(torch.where(missed | finished, line.start, end))
        fed = torch.where(moved, line.end - 1, line.fed)
        line.fed.copy_(torch.where(missed, torch.minimum(fed, column), fed))
        self.survived.copy_(complete & ~missed & ~finished)
        if self.model.guide is not None and bool(missed[0]):
            self.model.guide.rewind(int(column[0]))

    # ---- questions to the device, where they may be asked

    def _nobody(self, rows: Tensor) -> bool:
        return not self.desk.fixed and not bool(rows.any())

    def _anybody(self, rows: Tensor) -> bool:
        return bool(rows.any())


def put_first(q: Tensor, token: Tensor, count: int) -> Tensor:
    """`count` tokens: the line's own, then the likeliest others. `q` is [..., V], `token` [..., 1]."""
    return q.scatter(-1, token, 2.0).topk(count, dim=-1).indices  # 2 is above every probability
