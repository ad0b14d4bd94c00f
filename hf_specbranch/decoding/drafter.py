"""The draft model as a draft source: it proposes draft tokens, and branches while the target verifies them.

Draft tokens that are sent are the beginning of the pending draft. A cut decides how much is sent, and throws nothing
away. That keeps drawn drafts exact: a token once drawn stays the candidate until the target reaches it.

The two stages, `propose` and `branch`, run on buffers, so that each can be captured as one CUDA graph. Between forwards
stand small operations (`DraftOps`). `TorchDraftOps` works everywhere; it is the reference of `TritonDraftOps`. With
static shapes every step runs (but see `stepwise_drafter`), and finished rows write to scratch entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.rounds import ForwardInputs
from ..runtime.eager import Remembered, make_spans
from ..runtime.static_buffers import Buffers
from ..stats import SpecBranchStats
from .draft_model import DraftModel
from .draft_source import DraftOps
from .draft_state import DraftRound, own_token_first
from .hooks import HookList
from .resolve import (
    NONE,
    BranchStarts,
    DraftTokens,
    Feedback,
    RoundResult,
    TreeLeaves,
    resolve_rows,
    side_branch_to_adopt,
)


class Drafter:
    """Drafts for a batch of rows.

    Args:
        buffers: where the stages run.
        model: the draft model.
        round: the tensors of a round.
        ops: the operations between forwards, in torch or in Triton.
        hooks: where to stop, how wide to branch and how much to send.
        stats: where to count.
    """

    def __init__(
        self,
        buffers: Buffers,
        model: DraftModel,
        round: DraftRound,
        ops: DraftOps,
        hooks: HookList,
        stats: SpecBranchStats,
    ) -> None:
        self.buffers, self.model, self.round, self.ops, self.hooks = buffers, model, round, ops, hooks
        self.device, self.policy, self.gamma, self.depth = round.pending.device, round.policy, round.gamma, round.depth
        self.name, self.stats = model.name, stats
        self.usual_steps: float = self.gamma  # of a new draft
        # Drafts are proposed before every pass, and no verify result leaves a pending draft or a branch.
        self.same_every_round, self.keeps_drafts = self.policy.drafts_first and not self.policy.drafts_ahead, True
        self.reads_early, self.begin_next = model.known_tokens is not None, None
        self.only_our_kernels = ops.cuts_by_confidence  # see `Buffers.run`

    def prefill(self, length: int) -> None:
        """Read the first columns of the text."""
        if length > 0:
            pending = self.round.pending
            self.model.prefill(pending.ids[:, : self.model.prefix_length(length, pending.start)])
            pending.cached.copy_(pending.start)
        elif self.model.runner.is_recurrent:
            self.model.begin_without_text()

    def propose(self, feedback: Feedback, reached: int) -> DraftTokens:
        """Adopt what survived the last round, and return what to verify: the pending draft, or a new one."""
        round, shown = self.round, self._slots_shown(reached)
        is_new = self.policy.drafts_first and feedback.draft_ended
        self._run_propose(feedback, is_new, shown)
        count = self.gamma if round.static_shapes else int(round.sent_length.max())
        scores = None if round.sent_scores is None else round.sent_scores[:, :count]
        leaves = None
        if round.leaves:
            leaves = TreeLeaves(round.rejections.tokens[:, : round.leaves], round.rejections.at[:, : round.leaves])
        return DraftTokens(round.sent_tokens[:, :count], round.sent_length, scores, leaves, self.buffers.serial)

    def branch(self, reached: int) -> BranchStarts:
        """Draft what may come after the draft tokens, before the verify result is known."""
        round = self.round
        if not self.policy.drafts_ahead:
            return BranchStarts(round.branch_tokens[:, :1], round.branch_at[:, :1], None)
        if round.static_shapes:
            self.stats.draft_forwards += 1 + self.depth
            self.stats.draft_positions += 1 + self.depth * (1 + round.side.most)
        shown = self._slots_shown(reached)
        self.buffers.run(("branch", shown), lambda: self._branch(shown), self.only_our_kernels)
        return BranchStarts(round.branch_tokens, round.branch_at, round.branch_scores, round.following)

    def drafted(self) -> Tensor:
        """[B, 6] what is drafted while the target verifies; the fields of `Drafted`."""
        return self.ops.drafted()

    def remember(self, tokens: list[int]) -> None:
        if (runner := self.model.runner).remembered.tokens:  # there is one row, without padding
            # A round adds at most gamma + 2 tokens, and reads all but two of those before.
            read = len(tokens) - (self.gamma + 2) - 2
            if not self.round.static_shapes:  # the device may be asked
                read = int(torch.minimum(self.round.pending.cached, self.round.pending.start)[0])
            runner.remembered = Remembered(tokens[: max(0, read)])

    def _slots_shown(self, reached: int) -> int:
        """See `EagerRunner.bucket`."""
        if not self.round.static_shapes:
            return 0
        needed = reached + self.round.pending.reach + self.round.side.slots_needed
        self.model.runner.reserve(self.round.pending.count, needed)
        return self.model.runner.bucket(needed)

    # ---- the stages

    def _run_propose(self, feedback: Feedback, is_new: bool, shown: int) -> None:
        if is_new and self.round.static_shapes:
            self._count_steps(1 if self.model.in_blocks else self.gamma)
        key = ("propose", feedback.moved, is_new, feedback.features is None, shown, self.model.reread)
        self.buffers.run(key, lambda: self._propose(feedback, is_new, shown), self.only_our_kernels)

    def _count_steps(self, forwards: int) -> None:
        """Count the forwards of a new draft; the first of them reads two tokens."""
        self.stats.draft_forwards += forwards
        self.stats.draft_positions += 1 + (self.gamma if self.model.in_blocks else forwards)

    def _propose(self, feedback: Feedback, is_new: bool, shown: int) -> None:
        self.ops.adopt(feedback.result, feedback.moved)
        for step in range(self.gamma if is_new else 0):
            if self._no_row(self.round.goes_on):
                break
            self._draft_step(step, shown)
        self._send(feedback.features)

    def _draft_step(self, step: int, shown: int) -> None:
        """Draft one token more on the rows that have no draft, unless a hook stops them (confidence below epsilon)."""
        logits = self._forward(self.ops.draft_inputs(step), shown)
        self.ops.extend(logits, self.round.going, self.round.bound, stops=True)

    def _send(self, features: Tensor | None) -> None:
        round, ops = self.round, self.ops
        ops.send(None if ops.cuts_by_confidence else self._kept(features))
        if round.sent_scores is not None:
            round.sent_scores.copy_(round.pending.first_scores(self.gamma))
        if round.rejections.count:
            ops.find_rejections()
        ops.release()

    def _kept(self, features: Tensor | None) -> Tensor:
        """[B] how much of each pending draft to send, by the hooks; the length head (H-RAD) is one of them.

        They are asked about surviving drafts, and about new ones if a hook wants to be: on a poorly aligned pair most
        rolled back tokens come from there. What is not sent becomes the main branch.
        """
        round, hooks, pending = self.round, self.hooks, self.round.pending
        round.fresh.copy_(round.empty & (pending.end > pending.start))
        concerned = round.survived | round.fresh if hooks.fresh_drafts else round.survived
        if not self.policy.forks or self._no_row(concerned):
            return pending.length
        longest = pending.reach if round.static_shapes else int(pending.length.max())
        kept = hooks.keep(pending.survivor(longest, features, round.fresh, with_scores=hooks.draft_scores))
        return kept.where(concerned, pending.length)

    def _branch(self, shown: int) -> None:
        round, ops = self.round, self.ops
        if self._no_row(round.ahead):
            return
        ops.extend(self._forward(ops.point_inputs(), shown), round.ahead, round.point, further=1)
        ops.fork()  # up to k_max branches, the less confident the draft is the more
        for step in range(self.depth):
            if ops.is_branching_done():
                break
            ops.extend_branches(self._forward(ops.branch_inputs(step), shown), step)
        if round.following is not None:  # the main branch starts after all draft tokens, where there are no leaves
            round.following[:, 1:] = round.side.tokens[:, :, 1]
        ops.release()

    def _forward(self, inputs: ForwardInputs | None, shown: int) -> Tensor | None:
        return None if inputs is None else self.model.forward(inputs, shown)

    def _no_row(self, rows: Tensor) -> bool:
        """Whether no row takes part; with static shapes every row does."""
        return not self.round.static_shapes and not bool(rows.any())


class TorchDraftOps:
    """See `DraftOps`. The arguments are those of `Drafter`."""

    cuts_by_confidence, more_steps = False, None

    def __init__(self, round: DraftRound, model: DraftModel, hooks: HookList) -> None:
        self.round, self.model, self.hooks = round, model, hooks
        self.feeds_main = True  # the last branch inputs begin with the main branch

    # ---- propose

    def adopt(self, result: RoundResult, moved: bool) -> None:
        round, pending = self.round, self.round.pending
        rows = resolve_rows(result.committed, result.accepted, result.survivor, result.continuation, result.finished)
        if moved:
            round.side.adopt(side_branch_to_adopt(rows, result.survivor))
        # Write what the target has committed after the accepted tokens; other rows write to the scratch entry.
        column = pending.start + result.accepted  # of the target's own token
        has_more = rows.rejected & (result.continuation >= 0)
        pending.ids[pending.rows, torch.where(rows.rejected, column, pending.capacity)] = result.token
        pending.ids[pending.rows, torch.where(has_more, column + 1, pending.capacity)] = result.continuation
        # The pending draft starts after the text, and ends after the branch that survived or where it was.
        pending.start += result.committed
        end = torch.where(rows.moved, column + 1 + round.depth, pending.end)
        pending.end.copy_(torch.where(rows.rejected | result.finished, pending.start, end))
        # The draft has read all of a branch but its last token, and nothing after a rejected token.
        cached = torch.where(rows.moved, pending.end - 1, pending.cached)
        cached = torch.where(rows.rejected, torch.minimum(cached, column), cached)
        if self.model.states is not None:  # a head reads the last round again, now with the target's states
            cached = torch.minimum(cached, column - result.accepted)
        pending.cached.copy_(cached)
        round.survived.copy_(rows.survived)
        round.room.copy_(torch.where(result.finished, 0, round.limit - pending.start))
        round.empty.copy_(pending.end == pending.start)
        round.going.copy_(round.empty & (round.room > 1))
        round.bound.copy_(pending.start + round.room - 1)
        round.count.zero_()
        if self.model.guide is not None and bool(rows.rejected[0]):
            self.model.guide.rewind(int(column[0]))

    def draft_inputs(self, step: int) -> ForwardInputs | None:
        return self._pending_inputs(self.model.reread if step == 0 else 1, self.round.going)

    def _pending_inputs(self, queries: int, wanted: Tensor) -> ForwardInputs | None:
        """Return the last tokens of each pending draft, if a wanted row has some that the draft has not read."""
        pending, model = self.round.pending, self.model
        if not self.round.static_shapes:
            if not bool((wanted & (pending.cached < pending.end)).any()):
                return None
            queries = max(1, int((pending.end - pending.cached).max()))
        columns = torch.clamp(pending.end[:, None] + torch.arange(-queries, 0, device=model.device), min=model.earliest)
        tokens, positions = pending.ids.gather(1, columns), model.positions.gather(1, columns)
        return ForwardInputs(tokens, columns, positions, make_spans(model.first, columns + 1))

    def extend(self, logits: Tensor | None, flag: Tensor, bound: Tensor, further: int = 0, stops: bool = False) -> None:
        pending = self.round.pending
        if logits is not None:
            pending.record(self.model.next_distribution(pending.ids, pending.end, logits))
        extends = goes_on = flag & (pending.end < bound + further)
        if stops:
            if self.hooks.stoppers:
                goes_on = extends & ~self.hooks.stop(pending.state(pending.end))
            flag.copy_(goes_on)
            extends = extends if self.round.sends_uncertain else goes_on
        pending.extend(extends)
        self.round.count += extends

    def send(self, kept: Tensor | None) -> None:
        assert kept is not None
        round, pending = self.round, self.round.pending
        round.sent_length.copy_(torch.minimum(kept, round.room - 1).clamp(min=0, max=round.gamma))
        round.ahead.copy_(round.policy.drafts_ahead & (round.room > round.sent_length + 1))
        round.survived.fill_(False)
        round.width.zero_()
        round.branch_at.fill_(NONE)
        round.point.copy_(pending.start + round.sent_length)
        round.sent_tokens.copy_(pending.tokens(round.gamma))

    def find_rejections(self) -> None:
        self.round.rejections.find(self.round.sent_length)

    # ---- branch

    def point_inputs(self) -> ForwardInputs | None:
        round = self.round
        return self._pending_inputs(1, round.ahead & (round.pending.end == round.point))

    def fork(self) -> None:
        round, pending = self.round, self.round.pending
        state, widest = pending.state(round.point), round.branches
        width = self.hooks.fork(state).clamp(max=widest) if round.policy.forks else torch.ones_like(round.width)
        round.width.copy_(torch.where(round.ahead, width, 0))
        own = pending.ids.gather(1, round.point[:, None])
        round.branch_tokens[:, :widest] = own_token_first(state.scores, own, widest)
        is_open = round.order < round.width[:, None]
        round.branch_at[:, :widest] = torch.where(is_open, round.sent_length[:, None], NONE)
        if round.rejection_branches:
            at = round.rejections.at[:, : round.rejection_branches]
            round.branch_tokens[:, widest:] = round.rejections.tokens[:, : round.rejection_branches]
            round.branch_at[:, widest:] = torch.where(round.ahead[:, None], at, NONE)
        if round.branch_scores is not None:
            round.branch_scores.copy_(state.scores)
        self._open_side_branches()

    def _open_side_branches(self) -> None:
        round, count = self.round, self.round.side.most
        if not round.static_shapes and not round.rejection_branches:
            count = int(round.width.max()) - 1
        at = round.branch_at[:, 1 : 1 + count]
        forks = torch.where(at == NONE, round.point[:, None], round.pending.start[:, None] + at)
        round.side.open(round.point, forks, round.branch_tokens[:, 1 : 1 + count])
        round.count += (at != NONE).sum(1) * (1 + round.depth)

    @property
    def _is_main_short(self) -> Tensor:
        """[B] rows whose main branch is not long enough yet."""
        return self.round.ahead & (self.round.pending.end < self.round.point + 1 + self.round.depth)

    def is_branching_done(self) -> bool:
        return not self.round.static_shapes and not self.round.side.count and not bool(self._is_main_short.any())

    def branch_inputs(self, step: int) -> ForwardInputs | None:
        round, pending, model = self.round, self.round.pending, self.model
        self.feeds_main = round.static_shapes or bool((self._is_main_short & (pending.cached < pending.end)).any())
        parts = []
        if self.feeds_main:
            column = pending.end[:, None] - 1
            parts.append((pending.ids.gather(1, column), column, column, make_spans(model.first, column + 1)))
        if round.side.count:
            parts.append((*round.side.inputs(step), round.side.spans(step)))
        if not parts:
            return None
        tokens, columns, slots, spans = (torch.cat(each, dim=1) for each in zip(*parts))
        return ForwardInputs(tokens, slots, model.positions.gather(1, columns), spans)

    def extend_branches(self, logits: Tensor | None, step: int) -> None:
        round, pending, is_short = self.round, self.round.pending, self._is_main_short
        if self.feeds_main:
            assert logits is not None
            pending.record(self.model.next_distribution(pending.ids, pending.end, logits[:, :1]))
        pending.extend(is_short)
        round.count += is_short
        if round.side.count:
            assert logits is not None
            round.side.extend(step, logits[:, -round.side.count :])

    # ---- what is drafted

    def drafted(self) -> Tensor:
        round = self.round
        branches = round.width if round.policy.forks else torch.zeros_like(round.width)
        rejection_branches = (round.branch_at[:, round.branches :] != NONE).sum(1)
        leaves = (round.rejections.at[:, : round.leaves] != NONE).sum(1)
        ahead = round.pending.length - round.sent_length
        return torch.stack([round.sent_length, ahead, branches, rejection_branches, leaves, round.count], dim=1)

    def release(self) -> None: ...
