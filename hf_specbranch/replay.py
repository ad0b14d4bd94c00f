"""A recorded text played again, round by round, as the loop would generate it with other settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from heapq import nlargest
from math import floor
from typing import NamedTuple

from .agreement import Agreement
from .config import SpecBranchConfig
from .decoding.policies import POLICIES, Policy


class Round(NamedTuple):
    """One target pass."""

    sent: int  # drafted tokens in the pass; where stages are captured, room for them
    committed: int  # tokens it added
    steps_before: int  # draft steps it had to wait for
    steps_beside: int  # draft steps that could run at the same time
    width: int  # branches in these


def settled(config: SpecBranchConfig, captured: bool = False, cheap: bool = True) -> SpecBranchConfig:
    """The same settings with numbers where they say "auto", as a generation without hooks chooses them.

    Args:
        config: settings.
        captured: stages are captured as CUDA graphs.
        cheap: the draft is small beside its target.

    Example:
        >>> from hf_specbranch import SpecBranchConfig
        >>> from hf_specbranch.simulate import settled
        >>> settled(SpecBranchConfig()).confidence_threshold, settled(SpecBranchConfig(), captured=True).max_outcomes
        (0.4, 12)
    """
    decided, policy = config.decided(captured, cheap), POLICIES[config.policy]
    outcomes, leaves = decided.max_outcomes if policy.forks else 0, decided.runners_up if policy.drafts_first else 0
    return replace(decided, max_outcomes=outcomes, runners_up=leaves)


def replay(agreement: Agreement, config: SpecBranchConfig | None = None, captured: bool = False) -> list[Round]:
    """Go through a recorded text as the loop would; the pass that reads the prompt is not among the rounds.

    Args:
        agreement: the recording.
        config: settings to play it with; length heads and the user's hooks are not played.
        captured: count the work of captured stages, which take all their steps whether needed or not.

    Example:
        >>> from hf_specbranch import SpecBranchConfig
        >>> from hf_specbranch.simulate import Agreement, replay
        >>> agreement = Agreement(confidence=(0.9,) * 6, rank=(0, 0, 0, 1, 0, 0), candidates=2)
        >>> replay(agreement, SpecBranchConfig(policy="vanilla", max_draft_length=4))[0].committed
        3
    """
    config = settled(config or SpecBranchConfig(), captured)
    if POLICIES[config.policy].forks and config.max_branches > agreement.candidates:
        raise ValueError(
            f"max_branches={config.max_branches}, but {agreement.candidates} candidates were recorded at each "
            f"position: record with candidates={config.max_branches}"
        )
    if (config.max_outcomes or config.runners_up) and not agreement.chances:
        raise ValueError(
            f"max_outcomes={config.max_outcomes} and runners_up={config.runners_up}, but the recording has no chances: "
            f"record it anew, or replay with 0 of both"
        )
    return list(_Player(agreement, config, captured))


class _Player:
    """Plays one recording; the counterpart of `decoding.drafter` and `decoding.judge`."""

    def __init__(self, agreement: Agreement, config: SpecBranchConfig, captured: bool) -> None:
        self.sure, self.rank, self.end = agreement.confidence, agreement.rank, len(agreement.rank)
        self.chances, self.captured = agreement.chances, captured
        self.policy: Policy = POLICIES[config.policy]
        self.gamma, self.depth = config.draft_length, self.policy.depth(config.draft_length)
        self.epsilon, self.branches = config.threshold(), config.max_branches
        most = self.gamma * self.branches
        self.outcomes, self.leaves = min(int(config.max_outcomes), most), min(int(config.runners_up), most)
        self.at, self.line = 1, 0  # the prompt's pass gives the first token; tokens drafted behind the text
        self.looked = False  # whether the distribution behind the line is known already

    def __iter__(self) -> Iterator[Round]:
        while self.at < self.end:
            yield self._round()

    def _round(self) -> Round:
        room = self.end - self.at
        began = self.line == 0 and self.policy.drafts_first
        sent, before = self._chain(room)
        width, beside = 0, 0
        if self.policy.drafts_ahead and room > sent + 1:
            width = self._width(self.at + sent)
            beside = self._steps_beside(sent, width)
        accepted = 0
        while accepted < sent and self.rank[self.at + accepted] == 0:
            accepted += 1
        point, right = self.at + accepted, 0  # a runner-up that is right brings a further token
        if accepted == sent:
            left = self.depth if 0 <= self.rank[point] < width else 0
        else:
            foreseen, said = self._foreseen(sent), (accepted, self.rank[point])
            right = int(said in foreseen[: self.leaves] and point + 1 < self.end)
            left = self.depth if width and said in foreseen[: self.outcomes] else 0
            if left and right:  # it lives on if it has the further token too
                left = left - 1 if self.rank[point + 1] == 0 else 0
        self.at, self.line, self.looked = point + 1 + right, left, False
        if self.captured:
            return self._captured(accepted + 1 + right, began)
        passed = sent + min(self.leaves, sent * self.branches)
        return Round(passed, accepted + 1 + right, before, beside, width if not self.outcomes else self._widest)

    def _captured(self, committed: int, began: bool) -> Round:
        """Every step of a stage is taken, over as many branches as there may be."""
        if not self.policy.drafts:
            return Round(0, committed, 0, 0, 0)
        ahead = self.policy.drafts_ahead
        beside, width = (1 + self.depth, self._widest) if ahead else (0, 0)
        return Round(self.gamma + self.leaves, committed, self.gamma * began, beside, width)

    @property
    def _widest(self) -> int:
        return self.branches + self.outcomes if self.policy.forks else 1

    def _chain(self, room: int) -> tuple[int, int]:
        """How many tokens to send, and the draft steps it takes to have them."""
        limit = min(self.gamma, room - 1)
        if not self.policy.drafts:
            return 0, 0
        if self.line:
            return min(self._sure_of(self.line) if self.policy.forks else self.line, limit), 0
        if not self.policy.drafts_first:
            return 0, 0
        sent = self._sure_of(limit)
        self.line, self.looked = sent, sent < limit
        return sent, sent + self.looked

    def _sure_of(self, count: int) -> int:
        """How many of the next `count` tokens come before the first the draft is not sure of."""
        for index in range(count):
            position = self.at + index
            if position < self.end and self.sure[position] < self.epsilon:
                return index
        return count

    def _width(self, position: int) -> int:
        return max(1, floor(self.branches * (1 - self.sure[position]))) if self.policy.forks else 1

    def _foreseen(self, sent: int) -> list[tuple[int, int]]:
        """(place in the chain, candidate) of corrections, the likeliest by the draft first."""
        if not (self.outcomes or self.leaves):
            return []
        found, reached = [], 1.0
        for place in range(sent):
            own, *others = self.chances[self.at + place][: self.branches + 1]
            found += [(reached * chance, (place, rank)) for rank, chance in enumerate(others, 1)]
            reached *= own
        return [where for chance, where in nlargest(max(self.outcomes, self.leaves), found) if chance > 0]

    def _steps_beside(self, sent: int, width: int) -> int:
        """Draft steps behind the chain: the main branch is brought to its length, siblings take `depth` steps."""
        at_end = self.line == sent
        first = int(at_end and not self.looked)
        missing = sent + 1 + self.depth - max(self.line, sent + 1)
        return first + (self.depth if width > 1 or self.outcomes else missing)
