"""The state of drafting: the pending draft of each row, side branches, likely rejections, and the tensors of a round.

The text is a row of columns. Up to `start` it is committed; from there to `end` are drafted tokens. A drafted token is
chosen once and never chosen again. What belongs to a position is kept in rings addressed by column, so that committing
moves a number and nothing else. All of it is on the draft's device, in memory that stays where it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.eager import make_spans
from ..runtime.static_buffers import Buffers
from .acceptance import draw
from .draft_model import DraftModel
from .hooks import DraftState, Survivor
from .policies import Policy
from .resolve import NONE
from .scoring import Guide, Prefixes


def branch_depth(policy: Policy, gamma: int) -> int:
    """Return how many tokens to draft after the first token of a branch.

    PEARL drafts gamma tokens ahead, the one at the branch point among them; a branch is gamma tokens longer than that
    token.
    """
    return gamma if policy.forks else gamma - 1


class PendingDraft:
    """Drafted tokens after the text of a batch.

    Rows that do not take part in a step write to a scratch entry after the last.

    Args:
        buffers: where the memory comes from.
        text: [B, P] token ids.
        start: [B] the column after each row's last token that counts as committed.
        capacity: room for this many columns.
        reach: the longest a pending draft can get.
        vocabulary: size of the distributions.
        generator: draws tokens from the draft's distribution; None takes the likeliest.
    """

    def __init__(
        self,
        buffers: Buffers,
        text: Tensor,
        start: Tensor,
        capacity: int,
        reach: int,
        vocabulary: int,
        generator: torch.Generator | None,
    ) -> None:
        rows, length = text.shape
        self.device, self.count, self.capacity, self.ring, self.reach = buffers.device, rows, capacity, reach + 1, reach
        self.generator, self.static_shapes = generator, buffers.static_shapes
        self.rows = torch.arange(rows, out=buffers.tensor("rows", (rows,)))
        self.offsets = torch.arange(reach + 1, out=buffers.tensor("offsets", (reach + 1,)))
        self.ids = buffers.tensor("pending.ids", (rows, capacity + 1))
        self.ids[:, :length] = text
        self.start = buffers.tensor("pending.start", (rows,)).copy_(start)  # the first column that is not committed
        self.end = buffers.tensor("pending.end", (rows,)).copy_(start)  # the column after the last drafted token
        self.cached = buffers.tensor("pending.cached", (rows,))  # columns whose keys and values the draft has
        self.next = buffers.tensor("pending.next", (rows,))  # the token for column `end`, where `cached == end`
        self.confidence = buffers.tensor("pending.confidence", (rows, self.ring + 1), torch.float32)
        self.scores = buffers.tensor("pending.scores", (rows, self.ring + 1, vocabulary), torch.float32)

    @property
    def length(self) -> Tensor:
        """[B] drafted tokens."""
        return self.end - self.start

    def record(self, q: Tensor) -> None:
        """Store the draft's distribution [B, V] for column `end`, and choose the token that may stand there.

        The token is chosen before any hook decides whether to use it, and no hook sees it until it is drafted.
        """
        index = self.end % self.ring
        confidence, likeliest = q.max(-1)
        self.confidence[self.rows, index] = confidence
        self.scores[self.rows, index] = q
        self.next.copy_(likeliest if self.generator is None else draw(q, self.generator))
        self.cached.copy_(self.end)

    def extend(self, going: Tensor) -> None:
        """Append the chosen token, on the rows [B] that go on."""
        self.ids[self.rows, torch.where(going, self.end, self.capacity)] = self.next
        self.end += going

    def tokens(self, count: int) -> Tensor:
        """[B, count] the first tokens of each pending draft, and whatever follows."""
        return self.ids.gather(1, self._columns(count))

    def first_scores(self, count: int) -> Tensor:
        """[B, count, V] the draft's distributions at the first positions."""
        return self.scores_at(self._columns(count))

    def scores_at(self, columns: Tensor) -> Tensor:
        """[B, n, V] the draft's distributions in these columns [B, n]."""
        return self.scores[self.rows[:, None], columns % self.ring]

    def state(self, columns: Tensor) -> DraftState:
        """Return what is known about the token in these columns [B] before it is chosen."""
        index = columns % self.ring
        shown = columns if self.static_shapes else columns.clone()  # a hook on the host may keep what it is shown
        return DraftState(self.ids, shown, self.scores[self.rows, index], self.confidence[self.rows, index])

    def survivor(self, longest: int, features: Tensor | None, fresh: Tensor, with_scores: bool) -> Survivor:
        """Return the pending drafts as hooks see them.

        Args:
            longest: how many positions to show.
            features: the target's hidden states, if hooks want them.
            fresh: [B] rows whose pending draft comes straight from the propose stage.
            with_scores: show the draft's distributions too.
        """
        columns = self._columns(longest)
        return Survivor(
            tokens=self.ids.gather(1, columns),
            length=self.length,
            confidence=self.confidence.gather(1, columns % self.ring),
            committed=self.ids.gather(1, self.start[:, None] - 1)[:, 0],
            features=features,
            fresh=fresh.clone(),
            scores=self.scores_at(columns) if with_scores else None,
            column=self.start.clone(),
        )

    def _columns(self, count: int) -> Tensor:
        return (self.start[:, None] + self.offsets[:count]).clamp(max=self.capacity)  # [B, count]


class SideBranches:
    """Up to `most` side branches per row: a first token in some column, and `depth` tokens after it.

    Args:
        buffers: where the memory comes from.
        pending: the pending draft that they branch off.
        model: the draft model.
        most: how many there can be.
        depth: how many tokens to draft after the first.
    """

    def __init__(self, buffers: Buffers, pending: PendingDraft, model: DraftModel, most: int, depth: int) -> None:
        rows = pending.count
        self.pending, self.model, self.most, self.depth = pending, model, most, depth
        self.count = most  # how many there are at the moment
        self.point = buffers.tensor("side.point", (rows, 1))  # the branch point's column: slots count from there
        self.forks = buffers.tensor("side.forks", (rows, most))  # the column of each one's first token
        self.tokens = buffers.tensor("side.tokens", (rows, most, depth + 1))
        self.confidence = buffers.tensor("side.confidence", (rows, most, depth), torch.float32)
        self.scores = buffers.tensor("side.scores", (rows, most, depth, model.vocabulary), torch.float32)
        # The main branch may fill `depth + 1` slots from the branch point on; each side branch has `depth` after these.
        first = depth + 1 + depth * torch.arange(most, device=pending.device)
        self.slot_offsets = buffers.tensor("side.slots", (most, depth))
        self.slot_offsets.copy_(first[:, None] + torch.arange(depth, device=pending.device))
        self.guides: list[Guide] = []

    @property
    def slots_needed(self) -> int:
        """Slots from the branch point on that the branches take, the main one included."""
        return 1 + self.depth * (1 + self.count)

    @property
    def slots(self) -> Tensor:
        """[B, W, depth]: where their keys and values are."""
        return self.point[:, :, None] + self.slot_offsets[: self.count]

    def open(self, point: Tensor, forks: Tensor, tokens: Tensor) -> None:
        """Begin with these tokens in columns `forks`, [B, W] each; the branch point is in column `point` [B]."""
        self.count = tokens.shape[1]
        self.point.copy_(point[:, None])
        self.forks[:, : self.count] = forks
        self.tokens[:, : self.count, 0] = tokens
        self.guides = [self.model.guide.fork() for _ in range(self.count)] if self.model.guide is not None else []
        for guide in self.guides:
            guide.rewind(int(point[0]))  # with a guide, all side branches start at the branch point

    def inputs(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens to feed in this step, their columns and their slots: [B, W] each."""
        return (
            self.tokens[:, : self.count, step],
            self.forks[:, : self.count] + step,
            self.slots[:, :, step],
        )

    def spans(self, step: int) -> Tensor:
        """[B, W, 4] what the branches see: the text before their first token, and their own slots so far."""
        own = self.slots
        return make_spans(self.model.first, self.forks[:, : self.count], own[:, :, 0], own[:, :, step] + 1)

    def extend(self, step: int, logits: Tensor) -> None:
        """Choose the next token of each branch from logits [B, W, V]."""
        q = self.model.distribution(logits, lambda: self.prefixes(step), self.guides)
        confidence, likeliest = q.max(-1)
        generator = self.pending.generator
        self.confidence[:, : self.count, step] = confidence
        self.scores[:, : self.count, step] = q
        self.tokens[:, : self.count, step + 1] = likeliest if generator is None else draw(q, generator)

    def prefixes(self, step: int) -> Prefixes:
        """Return the text before each branch's next token: the shared text, and its own tokens."""
        forks = self.forks[:, : self.count]
        ids = self.pending.ids[:, None].repeat(1, self.count, 1)  # [B, W, C]
        ids.scatter_(2, forks[:, :, None] + self.pending.offsets[: step + 1], self.tokens[:, : self.count, : step + 1])
        return Prefixes(ids, forks + step + 1)

    def adopt(self, winner: Tensor) -> None:
        """Make the surviving side branch of each row its pending draft: its keys and values move to their columns.

        Args:
            winner: [B] which side branch, or NONE.
        """
        pending, depth, wins, chosen = self.pending, self.depth, (winner >= 0)[:, None], winner.clamp(min=0)
        columns = self.forks[pending.rows, chosen][:, None] + pending.offsets[: depth + 1]  # [B, depth + 1]
        pending.ids.scatter_(1, torch.where(wins, columns, pending.capacity), self.tokens[pending.rows, chosen])
        ring = torch.where(wins, columns[:, 1:] % pending.ring, pending.ring)
        pending.confidence.scatter_(1, ring, self.confidence[pending.rows, chosen])
        pending.scores[pending.rows[:, None], ring] = self.scores[pending.rows, chosen]
        source = torch.where(wins, self.slots[pending.rows, chosen], columns[:, :depth])
        self.model.move(source, columns[:, :depth])
        if self.guides and bool(wins[0]):
            self.model.guide = self.guides[int(winner[0])]


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
        # The token at which a draft stops is sent too, unless the draft goes on from there while the target runs: its
        # step has run, and a pass in a captured stage is as wide as the longest draft in any case.
        self.sends_uncertain = self.static_shapes and not policy.drafts_ahead
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

    @property
    def goes_on(self) -> Tensor:
        """[B] bool: rows whose new draft takes another step."""
        return self.going & (self.pending.end < self.bound)

    @property
    def last_confidence(self) -> Tensor:
        """[B] the confidence of the last token of each pending draft."""
        return self.pending.confidence[self.pending.rows, (self.pending.end - 1) % self.pending.ring]


def own_token_first(q: Tensor, token: Tensor, count: int) -> Tensor:
    """Return `count` tokens: the pending draft's own, then the likeliest others. `q` is [..., V], `token` [..., 1]."""
    return q.scatter(-1, token, 2.0).topk(count, dim=-1).indices  # 2 is above every probability
