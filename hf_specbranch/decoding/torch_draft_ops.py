"""The operations of a drafting round in torch. They work everywhere, and are the reference of the Triton ones.

With static shapes every operation does all of its work, and finished rows write to scratch entries. Without, it asks
the device what is needed, and leaves out the rest.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..kernels.rounds import ForwardInputs
from .draft_model import DraftModel
from .draft_round import DraftRound
from .hooks import HookList
from .resolve import NONE, resolve_rows, side_branch_to_adopt
from .state import RoundResult


class DraftOps(Protocol):
    """The operations between the forwards of the draft model, in the order of a round.

    Attributes:
        cuts_by_confidence: `send` finds out by itself how much to send; no other hook has a say.
    """

    cuts_by_confidence: bool

    def adopt(self, result: RoundResult, moved: bool) -> None:
        """Resolve the last round: what survived becomes the pending draft. `moved`: in some row a side branch does."""
        ...

    def draft_inputs(self, step: int, shown: int) -> ForwardInputs | None:
        """Return the inputs of step `step` of a new draft; None if every distribution needed is known."""
        ...

    def extend(self, logits: Tensor | None, flag: Tensor, bound: Tensor, further: int = 0, stops: bool = False) -> None:
        """Record the distribution after the pending draft, and append a token where a row goes on.

        Args:
            logits: [B, Q, V'] of the draft's last forward, or None.
            flag: [B] bool: rows that may go on.
            bound: [B] the column where they stop, but for `further`.
            further: added to the bound.
            stops: hooks may stop a row (below epsilon, for one), which takes it out of `flag` for good.
        """
        ...

    def send(self, kept: Tensor | None) -> None:
        """Send the first tokens of each pending draft: `kept` [B] of them, within the room there is."""
        ...

    def find_rejections(self) -> None:
        """Find the likeliest rejections of the draft that is sent."""
        ...

    def point_inputs(self, shown: int) -> ForwardInputs | None:
        """Return the inputs for the distribution at the branch point; None if it is known."""
        ...

    def fork(self) -> None:
        """Choose the first tokens of the branches: up to k_max at the branch point, and the likely rejections."""
        ...

    def branch_inputs(self, step: int, shown: int) -> ForwardInputs | None:
        """Return the inputs of step `step` of all branches; None if there is nothing to feed."""
        ...

    def extend_branches(self, logits: Tensor | None, step: int) -> None:
        """Append a token to every branch."""
        ...

    def is_branching_done(self) -> bool:
        """Whether no branch needs another step."""
        ...

    def drafted(self) -> Tensor:
        """[B, 6] what is drafted; the fields of `Drafted`."""
        ...

    def release(self) -> None:
        """Let go of tensors that a stage has made."""
        ...


class TorchDraftOps:
    """See `DraftOps`.

    Args:
        round: the tensors of the round.
        model: the draft model.
        hooks: where to stop, how wide to branch and how much to send.
    """

    cuts_by_confidence = False

    def __init__(self, round: DraftRound, model: DraftModel, hooks: HookList) -> None:
        self.round, self.model, self.hooks = round, model, hooks
        self.feeds_main = True  # the last branch inputs begin with the main branch

    # ---- propose

    def adopt(self, result: RoundResult, moved: bool) -> None:
        round, pending = self.round, self.round.pending
        rows = resolve_rows(result.committed, result.accepted, result.survivor, result.continuation, result.finished)
        if moved:
            round.side.adopt(side_branch_to_adopt(rows, result.survivor))
        column = pending.start + result.accepted  # of the target's own token
        has_more = rows.rejected & (result.continuation >= 0)
        pending.ids[pending.rows, torch.where(rows.rejected, column, pending.capacity)] = result.token
        pending.ids[pending.rows, torch.where(has_more, column + 1, pending.capacity)] = result.continuation
        pending.start += result.committed
        end = torch.where(rows.moved, column + 1 + round.depth, pending.end)
        pending.end.copy_(torch.where(rows.rejected | result.finished, pending.start, end))
        cached = torch.where(rows.moved, pending.end - 1, pending.cached)
        pending.cached.copy_(torch.where(rows.rejected, torch.minimum(cached, column), cached))
        round.survived.copy_(rows.survived)
        round.room.copy_(torch.where(result.finished, 0, round.limit - pending.start))
        round.empty.copy_(pending.end == pending.start)
        round.going.copy_(round.empty & (round.room > 1))
        round.bound.copy_(pending.start + round.room - 1)
        round.count.zero_()
        if self.model.guide is not None and bool(rows.rejected[0]):
            self.model.guide.rewind(int(column[0]))

    def draft_inputs(self, step: int, shown: int) -> ForwardInputs | None:
        # At first the target's own token, and the one before it if the whole draft was accepted.
        return self._pending_inputs(2 if step == 0 else 1, shown, self.round.going)

    def _pending_inputs(self, queries: int, shown: int, wanted: Tensor) -> ForwardInputs | None:
        """Return the last tokens of each pending draft, if a wanted row has some that the draft has not read."""
        pending, model = self.round.pending, self.model
        if not self.round.static_shapes:
            if not bool((wanted & (pending.cached < pending.end)).any()):
                return None
            queries, shown = max(1, int((pending.end - pending.cached).max())), int(pending.end.max())
        columns = (pending.end[:, None] - queries + pending.offsets[:queries]).clamp(min=0)  # [B, Q]
        return ForwardInputs(
            pending.ids.gather(1, columns),
            columns,
            model.positions.gather(1, columns),
            model.text_up_to(columns, shown),
        )

    def extend(self, logits: Tensor | None, flag: Tensor, bound: Tensor, further: int = 0, stops: bool = False) -> None:
        pending = self.round.pending
        if logits is not None:
            pending.record(self.model.next_distribution(pending.ids, pending.end, logits))
        going = flag & (pending.end < bound + further)
        if stops:
            if self.hooks.stoppers:
                going = going & ~self.hooks.stop(pending.state(pending.end))
            flag.copy_(going)
        pending.extend(going)
        self.round.count += going

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

    def point_inputs(self, shown: int) -> ForwardInputs | None:
        round = self.round
        return self._pending_inputs(1, shown, round.ahead & (round.pending.end == round.point))

    def fork(self) -> None:
        round, pending = self.round, self.round.pending
        state, widest = pending.state(round.point), round.branches
        forks = round.policy.forks
        width = self.hooks.fork(state).clamp(max=widest) if forks else torch.ones_like(round.width)
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
        round = self.round
        others = round.side.most
        if not round.static_shapes and not round.rejection_branches:
            others = int(round.width.max()) - 1
        at = round.branch_at[:, 1 : 1 + others]
        forks = torch.where(at == NONE, round.point[:, None], round.pending.start[:, None] + at)
        round.side.open(round.point, forks, round.branch_tokens[:, 1 : 1 + others])
        round.count += (at != NONE).sum(1) * (1 + round.depth)

    @property
    def _wants(self) -> Tensor:
        """[B] rows whose main branch is not long enough yet."""
        round = self.round
        return round.ahead & (round.pending.end < round.point + 1 + round.depth)

    def is_branching_done(self) -> bool:
        return not self.round.static_shapes and not self.round.side.count and not bool(self._wants.any())

    def branch_inputs(self, step: int, shown: int) -> ForwardInputs | None:
        round, pending, model = self.round, self.round.pending, self.model
        static = round.static_shapes
        self.feeds_main = static or bool((self._wants & (pending.cached < pending.end)).any())
        if not static:
            shown = max(int(pending.end.max()), int(round.point.max()) + round.side.slots_needed)
        parts = []
        if self.feeds_main:
            column = pending.end[:, None] - 1
            parts.append((pending.ids.gather(1, column), column, column, model.text_up_to(column, shown)))
        if round.side.count:
            parts.append((*round.side.inputs(step), round.side.visible(step, shown)))
        if not parts:
            return None
        tokens, columns, slots, visible = (torch.cat(each, dim=1) for each in zip(*parts))
        return ForwardInputs(tokens, slots, model.positions.gather(1, columns), visible)

    def extend_branches(self, logits: Tensor | None, step: int) -> None:
        round, pending = self.round, self.round.pending
        wants = self._wants
        if self.feeds_main:
            assert logits is not None
            pending.record(self.model.next_distribution(pending.ids, pending.end, logits[:, :1]))
        pending.extend(wants)
        round.count += wants
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


def own_token_first(q: Tensor, token: Tensor, count: int) -> Tensor:
    """Return `count` tokens: the pending draft's own, then the likeliest others. `q` is [..., V], `token` [..., 1]."""
    return q.scatter(-1, token, 2.0).topk(count, dim=-1).indices  # 2 is above every probability
