"""Follows every drafted token from where it is put down to where a verdict decides about it."""

from __future__ import annotations

from ..decoding.acceptance import NONE
from ..decoding.state import Outcome, Report
from .recording import ACCEPTED, LOST, ROLLED_BACK, CommittedToken, DraftedToken


class DraftedLine:
    """The drafted tokens of one row by identity, where `decoding.ledger` counts them."""

    def __init__(self) -> None:
        self.drafted: list[DraftedToken] = []
        self.committed: list[CommittedToken] = []
        self.line: list[int] = []  # drafted tokens that stand behind the text, by index
        self.siblings: dict[int, list[int]] = {}  # branch -> its tokens
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
        known = len(self.line)
        new = self.put_down(tokens[known:], confidences[known:], lane)
        self.line += new
        return new

    def settle(self, report: Report, outcome: Outcome) -> None:
        """Decide about everything this verdict decides about; the rules are those of `decoding.ledger`."""
        line, chain, main = self.line, self.line[: report.chain], self.line[report.chain :]
        losers = [index for tokens in self.siblings.values() for index in tokens]
        cut = outcome.finished and outcome.committed <= len(chain)
        if outcome.complete and outcome.survivor == NONE:
            stands, falls, left = chain[: outcome.accepted], chain[outcome.accepted :], list[int]()
        elif outcome.complete and outcome.survivor > 0:
            first, *left = self.siblings[outcome.survivor]
            stands, falls = [*chain[: outcome.accepted], first], chain[outcome.accepted :]
            losers = [index for index in losers if index not in (first, *left)]
        elif cut:
            stands, falls, left = chain[: outcome.committed], chain[outcome.committed :], []
        else:  # what is behind the text lives on, the main branch with it
            stands, falls, left, main = line[: outcome.committed], [], line[outcome.committed :], []
        self._end(stands, ACCEPTED)
        self._end(falls, ROLLED_BACK)
        self._end(main, LOST if report.branches else ROLLED_BACK)
        self._end(losers, LOST)
        if outcome.finished:
            self._end(left, ROLLED_BACK)
            left = []
        self.line, self.siblings = left, {}
        sources = [*stands, None]
        for token, source in zip(report.offered[: outcome.committed], sources):
            self.committed.append(CommittedToken(token, self.round, source))
        self.round += 1

    def _end(self, indices: list[int], fate: str) -> None:
        for index in indices:
            self.drafted[index].fate, self.drafted[index].settled = fate, self.round
