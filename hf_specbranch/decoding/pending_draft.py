"""The pending draft of each row: drafted tokens after the text, and what the draft model knew at each of them.

The text is a row of columns. Up to `start` it is committed; from there to `end` are drafted tokens. A drafted token is
chosen once and never chosen again. What belongs to a position is kept in rings addressed by column, so that committing
moves a number and nothing else. All of it is on the draft's device, in memory that stays where it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.static_buffers import Buffers
from .acceptance import draw
from .hooks import DraftState, Survivor


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
