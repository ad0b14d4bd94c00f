"""Follows every drafted token from where it is put down to where a verdict decides about it."""

from __future__ import annotations

from ..decoding.acceptance import NONE
from ..decoding.state import RowResult, VerifyResult
from .recording import ACCEPTED, LOST, ROLLED_BACK, CommittedToken, DraftedToken


class TokenLog:
    """The drafted tokens of one row by identity, where `decoding.ledger` counts them."""

    def __init__(self) -> None:
        self.drafted: list[DraftedToken] = []
        self.committed: list[CommittedToken] = []
        self.pending: list[int] = []  # drafted tokens that stand behind the text, by index
        self.side_branches: dict[int, list[int]] = {}  # branch -> its tokens
        self.round = 0

    def put_down(self, tokens: list[int], confidences: list[float | None], lane: str, branch: int = 0) -> list[int]:
        """Tokens drafted in this round; returns their indices."""
        first = len(self.drafted)
        self.drafted += [
            DraftedToken(token, self.round, lane, branch, confidence) for token, confidence in zip(tokens, confidences)
        ]
        return list(range(first, len(self.drafted)))

    def extend(self, tokens: list[int], confidences: list[float | None], lane: str) -> list[int]:
        """What stands on the line now, all of it; returns what is new."""
        known = len(self.pending)
        new = self.put_down(tokens[known:], confidences[known:], lane)
        self.pending += new
        return new

    def settle(self, verify_result: VerifyResult, row_result: RowResult) -> None:
        """Decide about everything this verdict decides about; the rules are those of `decoding.ledger`."""
        pending, draft_tokens, main = (
            self.pending,
            self.pending[: verify_result.draft_tokens],
            self.pending[verify_result.draft_tokens :],
        )
        losers = [index for tokens in self.side_branches.values() for index in tokens]
        cut = row_result.finished and row_result.committed <= len(draft_tokens)
        if row_result.complete and row_result.survivor == NONE:
            stands, falls, left = draft_tokens[: row_result.accepted], draft_tokens[row_result.accepted :], list[int]()
        elif row_result.complete and row_result.survivor > 0:
            first, *left = self.side_branches[row_result.survivor]
            stands, falls = [*draft_tokens[: row_result.accepted], first], draft_tokens[row_result.accepted :]
            losers = [index for index in losers if index not in (first, *left)]
        elif cut:
            stands, falls, left = draft_tokens[: row_result.committed], draft_tokens[row_result.committed :], []
        else:  # what is behind the text lives on, the main branch with it
            stands, falls, left, main = pending[: row_result.committed], [], pending[row_result.committed :], []
        self._end(stands, ACCEPTED)
        self._end(falls, ROLLED_BACK)
        self._end(main, LOST if verify_result.branches else ROLLED_BACK)
        self._end(losers, LOST)
        if row_result.finished:
            self._end(left, ROLLED_BACK)
            left = []
        self.pending, self.side_branches = left, {}
        sources = [*stands, None]
        for token, source in zip(verify_result.offered[: row_result.committed], sources):
            self.committed.append(CommittedToken(token, self.round, source))
        self.round += 1

    def _end(self, indices: list[int], fate: str) -> None:
        for index in indices:
            self.drafted[index].fate, self.drafted[index].settled = fate, self.round
