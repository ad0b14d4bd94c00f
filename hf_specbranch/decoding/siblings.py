"""Branches beside the main one. They share the text before the branch point and live in slots behind the line."""

from __future__ import annotations

import torch
from torch import Tensor

from .draft_model import DraftModel
from .line import Line, put_first


class Siblings:
    """`W` branches a row: a token at the branch point each, and up to `depth` tokens behind it.

    Args:
        line: the line they fork from.
        model: the draft model.
        point: the branch point's column in each row.
        tokens: [B, W] the tokens they start with.
        depth: how many tokens to draft behind these.
    """

    def __init__(self, line: Line, model: DraftModel, point: list[int], tokens: Tensor, depth: int) -> None:
        rows, count = tokens.shape
        device = line.device
        self.line, self.model, self.count, self.point = line, model, count, line.tensor(point)[:, None]  # [B, 1]
        # The main branch may fill `depth` slots from the branch point on; each sibling has `depth` after these.
        first = self.point + depth * torch.arange(1, count + 1, device=device)  # [B, W]
        self.slots = first[:, :, None] + torch.arange(depth, device=device)  # [B, W, depth]
        self.slots_used = max(point) + (count + 1) * depth
        self.tokens = torch.zeros((rows, count, depth + 1), dtype=torch.long, device=device)
        self.tokens[:, :, 0] = tokens
        self.confidence = torch.zeros((rows, count, depth), device=device)
        self.candidates = torch.zeros((rows, count, depth, line.branches), dtype=torch.long, device=device)
        self.scores = torch.empty((rows, count, depth, model.vocabulary), device=device)
        self.guides = [model.guide.fork() for _ in range(count)] if model.guide is not None else []
        for guide in self.guides:
            guide.rewind(point[0])

    def tips(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens to feed in this step, their columns and their slots: [B, W] each."""
        return self.tokens[:, :, step], (self.point + step).expand(-1, self.count), self.slots[:, :, step]

    def visible(self, step: int, shown: int) -> Tensor:
        """[B, W, shown]: the text before the branch point, and the sibling's own slots so far."""
        slots = self.model.slots[:shown]
        before = (slots < self.point) & self.model.seen[:, :shown]
        own = (slots >= self.slots[:, :, :1]) & (slots <= self.slots[:, :, step : step + 1])
        return before[:, None] | own

    def extend(self, step: int, logits: Tensor, generator: torch.Generator | None) -> None:
        """Choose each sibling's next token from logits [B, W, V] behind its tip."""
        q = self.model.distribution(logits, self._prefixes(step), self.guides)
        top = q.topk(self.line.branches, dim=-1)
        candidates = top.indices
        if generator is not None:
            drawn = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(*q.shape[:2], 1)
            candidates = put_first(q, drawn, self.line.branches)
        self.confidence[:, :, step] = top.values[:, :, 0]
        self.candidates[:, :, step] = candidates
        self.scores[:, :, step] = q
        self.tokens[:, :, step + 1] = candidates[:, :, 0]

    def _prefixes(self, step: int) -> list[list[Tensor]]:
        if not self.model.reads_prefixes:
            return []
        text = [self.line.ids[b, : int(self.point[b])] for b in self.line.rows]
        return [[torch.cat([text[b], own[: step + 1]])[None] for own in self.tokens[b]] for b in self.line.rows]

    def adopt(self, winners: list[int | None]) -> None:
        """Make the winning sibling of each row its line: its keys and values move to the line's columns."""
        line, depth = self.line, self.slots.shape[2]
        destination = self.point + torch.arange(depth, device=line.device)  # [B, depth]
        source = destination.clone()
        for b, winner in enumerate(winners):
            if winner is None:
                continue
            source[b] = self.slots[b, winner]
            point = int(self.point[b])
            line.ids[b, point : point + depth + 1] = self.tokens[b, winner]
            ring = torch.arange(point + 1, point + 1 + depth, device=line.device) % line.ring
            line.confidence[b, ring] = self.confidence[b, winner]
            line.candidates[b, ring] = self.candidates[b, winner]
            line.scores[b, ring] = self.scores[b, winner]
            line.start[b], line.length[b], line.known[b] = point + 1, depth, False
            if self.guides:
                self.model.guide = self.guides[winner]
        self.model.runner.move(source, destination)
