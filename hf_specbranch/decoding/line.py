"""The drafted line of each row, and what the draft knew at each of its positions.

Text is a row of columns. Up to `start` it is committed; from there follow `length` drafted tokens, each chosen
once and never chosen anew. What belongs to a drafted position is kept in rings addressed by column, so that
committing moves a number and nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .hooks import DraftState, Survivor
from .records import Chain

Index = int | Tensor  # [n], or a number where there is one row


class Line:
    """Drafted tokens behind the text of a batch.

    Args:
        prompt: [B, P] token ids.
        capacity: room for this many columns.
        reach: the longest a line can get.
        branches: how many candidate tokens to keep at each position.
        vocabulary: size of the distributions.
    """

    def __init__(self, prompt: Tensor, capacity: int, reach: int, branches: int, vocabulary: int) -> None:
        rows, length = prompt.shape
        self.device, self.rows, self.branches = prompt.device, range(rows), branches
        self.ids = torch.zeros((rows, capacity), dtype=torch.long, device=self.device)
        self.ids[:, :length] = prompt
        self.start = [length] * rows  # first column that is not committed
        self.length = [0] * rows  # drafted tokens from there
        self.known = [False] * rows  # whether the distribution behind the line's end is on record
        self.ring = reach + 1
        self.confidence = torch.zeros((rows, self.ring), device=self.device)
        self.candidates = torch.zeros((rows, self.ring, branches), dtype=torch.long, device=self.device)
        self.scores = torch.zeros((rows, self.ring, vocabulary), device=self.device)

    @property
    def end(self) -> list[int]:
        """The column behind the last drafted token."""
        return [start + length for start, length in zip(self.start, self.length)]

    def tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)

    def note(self, q: Tensor, columns: list[int], going: list[bool]) -> None:
        """Put the draft's distribution [B, V] for these columns on record, on the rows that go on."""
        top = q.topk(self.branches, dim=-1)
        rows, index = self._entries(columns, going)
        self.confidence[rows, index] = top.values[rows, 0]
        self.candidates[rows, index] = top.indices[rows]
        self.scores[rows, index] = q[rows]

    def extend(self, going: list[bool], generator: torch.Generator | None) -> int:
        """Choose a token behind the line's end on the rows that go on; how many rows these are."""
        if not any(going):
            return 0
        rows, index = self._entries(self.end, going)
        if generator is not None:
            q = self.scores[rows, index]  # [n, V]
            drawn = torch.multinomial(q, 1, generator=generator)
            self.candidates[rows, index] = put_first(q, drawn, self.branches)
        self.ids[rows, self._going(self.end, going)] = self.candidates[rows, index, 0]
        self.length = [length + goes for length, goes in zip(self.length, going)]
        self.known = [known and not goes for known, goes in zip(self.known, going)]
        return sum(going)

    def chain(self, lengths: list[int], with_scores: bool) -> Chain:
        """The first `lengths` tokens of each line."""
        columns = self._columns(max(lengths))
        scores = gather_rows(self.scores, columns % self.ring) if with_scores else None
        return Chain(self.ids.gather(1, columns), self.tensor(lengths), scores)

    def state(self, columns: list[int]) -> DraftState:
        """What is known about the token in these columns before it is chosen."""
        everyone = [True for _ in self.rows]
        rows, index = self._entries(columns, everyone)
        scores, confidence = self.scores[rows, index], self.confidence[rows, index]
        shape = (len(self.rows), -1)
        return DraftState(self.ids, self.tensor(columns), scores.view(shape), confidence.view(-1))

    def branch_tokens(self, columns: list[int]) -> Tensor:
        """[B, K] candidates at these columns, the line's own token first."""
        return self._at(self.candidates, columns)

    def survivor(self, features: Tensor | None, fresh: list[bool], with_scores: bool) -> Survivor:
        """The lines as hooks see them.

        Args:
            features: the target's hidden states, if hooks want them.
            fresh: rows whose line comes straight from the draft stage.
            with_scores: show the draft's distributions too.
        """
        columns = self._columns(max(self.length))
        start = self.tensor(self.start)
        return Survivor(
            tokens=self.ids.gather(1, columns),
            length=self.tensor(self.length),
            confidence=self.confidence.gather(1, columns % self.ring),
            committed=self.ids.gather(1, start[:, None] - 1)[:, 0],
            features=features,
            fresh=torch.tensor(fresh, device=self.device),
            scores=gather_rows(self.scores, columns % self.ring) if with_scores else None,
            column=start,
        )

    def _columns(self, count: int) -> Tensor:
        return self.tensor(self.start)[:, None] + torch.arange(count, device=self.device)  # [B, count]

    def _entries(self, columns: list[int], going: list[bool]) -> tuple[Index, Index]:
        """The rows that go on, and where in the rings their columns are; plain numbers if there is one row."""
        return self._going(list(self.rows), going), self._going([column % self.ring for column in columns], going)

    def _going(self, values: list[int], going: list[bool]) -> Index:
        if len(values) == 1:
            return values[0]
        return self.tensor([value for value, goes in zip(values, going) if goes])

    def _at(self, table: Tensor, columns: list[int]) -> Tensor:
        """[B, X] entries of `table` [B, ring, X] that belong to these columns."""
        return gather_rows(table, self.tensor([column % self.ring for column in columns])[:, None])[:, 0]


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """Entries of `table` [B, R, X] at `index` [B, n]: [B, n, X]."""
    return table.gather(1, index[:, :, None].expand(-1, -1, table.shape[2]))


def put_first(q: Tensor, token: Tensor, count: int) -> Tensor:
    """`count` tokens: the one that was drawn, then the likeliest others. `q` is [..., V], `token` [..., 1]."""
    return q.scatter(-1, token, 2.0).topk(count, dim=-1).indices  # 2 is above every probability
