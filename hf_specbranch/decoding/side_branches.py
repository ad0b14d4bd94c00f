"""Side branches: they share the text before their first token and live in slots after the pending draft."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.static_buffers import Buffers
from .acceptance import draw
from .draft_model import DraftModel
from .pending_draft import PendingDraft
from .scoring import Guide, Prefixes


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

    def visible(self, step: int, shown: int) -> Tensor:
        """[B, W, shown]: the text before the first token, and the branch's own slots so far."""
        slots, own_slots = self.model.slots[:shown], self.slots
        before = (slots < self.forks[:, : self.count, None]) & self.model.seen[:, None, :shown]
        own = (slots >= own_slots[:, :, :1]) & (slots <= own_slots[:, :, step : step + 1])
        return before | own

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
        self.model.runner.move(source, columns[:, :depth])
        if self.guides and bool(wins[0]):
            self.model.guide = self.guides[int(winner[0])]
