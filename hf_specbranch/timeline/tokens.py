"""Follows every drafted token from where it is drafted to the round that decides about it."""

from __future__ import annotations

from ..decoding.resolve import Resolution, RowResult, VerifyResult
from .recording import ACCEPTED, ROLLED_BACK, WASTED, CommittedToken, DraftedToken


class TokenLog:
    """The drafted tokens of one row by identity, where `decoding.accounting` counts them."""

    def __init__(self) -> None:
        self.drafted: list[DraftedToken] = []
        self.committed: list[CommittedToken] = []
        self.pending: list[int] = []  # drafted tokens after the text, by index
        self.side: dict[int, list[int]] = {}  # branch -> its tokens
        self.round = 0

    def add(self, tokens: list[int], confidences: list[float | None], lane: str, branch: int = 0) -> list[int]:
        """Add tokens drafted in this round; return their indices."""
        first = len(self.drafted)
        self.drafted += [
            DraftedToken(token, self.round, lane, branch, confidence) for token, confidence in zip(tokens, confidences)
        ]
        return list(range(first, len(self.drafted)))

    def extend(self, tokens: list[int], confidences: list[float | None], lane: str) -> list[int]:
        """Take the whole pending draft as it is now; return what is new."""
        known = len(self.pending)
        new = self.add(tokens[known:], confidences[known:], lane)
        self.pending += new
        return new

    def resolve(self, result: VerifyResult, row: RowResult, resolution: Resolution) -> None:
        """Decide about the tokens that this round decides about, as `resolution` counts them."""
        sent, drafted = result.drafted.sent, result.drafted
        branch = self.side.pop(resolution.survivor, []) if resolution.from_branch else []
        accepted = self.pending[: resolution.from_draft] + branch[: resolution.from_branch]
        rest, left = self.pending[resolution.from_draft :], branch[resolution.from_branch :]
        if not branch and (resolution.pending or resolution.from_draft > sent):
            rest, left = [], rest  # the pending draft goes on
        lost_ahead = rest[max(0, sent - resolution.from_draft) :]
        lost_sent = rest[: len(rest) - len(lost_ahead)]
        self._end(accepted, ACCEPTED)
        self._end(lost_sent, ROLLED_BACK)
        self._end(lost_ahead, WASTED if drafted.branches else ROLLED_BACK)
        self._end([index for tokens in self.side.values() for index in tokens], WASTED)
        self.pending, self.side = left, {}
        if row.finished:
            self.roll_back()
        sources: list[int | None] = [*accepted, *[None] * (row.committed - len(accepted))]
        for token, source in zip(result.offered[: row.committed], sources, strict=True):
            self.committed.append(CommittedToken(token, self.round, source))
        self.round += 1

    def roll_back(self) -> None:
        """Roll back what is pending: the text ends, or another plan takes over."""
        self._end(self.pending, ROLLED_BACK)
        self.pending = []

    def _end(self, indices: list[int], fate: str) -> None:
        for index in indices:
            self.drafted[index].fate, self.drafted[index].settled = fate, self.round
