"""A recorded text played again, round by round, as the loop would generate it with other settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import floor, prod
from typing import NamedTuple

from ..config import SpecBranchConfig
from ..decoding.policies import POLICIES, Policy
from .agreement import Agreement

FOR_EVER = 1 << 30  # more than any text has tokens


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
        >>> from hf_specbranch.planning.simulate import settled
        >>> settled(SpecBranchConfig()).confidence_threshold, settled(SpecBranchConfig(), captured=True).tree_leaves
        (0.4, 6)
    """
    decided, policy = config.decided(captured, cheap), POLICIES[config.policy]
    outcomes, leaves = (
        decided.max_rejection_branches if policy.forks else 0,
        decided.tree_leaves if policy.drafts_first else 0,
    )
    if (outcomes, leaves) == (decided.max_rejection_branches, decided.tree_leaves):
        return decided
    return replace(decided, max_rejection_branches=outcomes, tree_leaves=leaves)


def replay(agreement: Agreement, config: SpecBranchConfig | None = None, captured: bool = False) -> list[Round]:
    """Go through a recorded text as the loop would; the pass that reads the prompt is not among the rounds.

    Args:
        agreement: the recording.
        config: settings to play it with; length heads and the user's hooks are not played.
        captured: count the work of captured stages, which take all their steps whether needed or not.

    Example:
        >>> from hf_specbranch import SpecBranchConfig
        >>> from hf_specbranch.planning.simulate import Agreement, replay
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
    if (config.max_rejection_branches or config.tree_leaves) and not agreement.chances:
        raise ValueError(
            f"max_rejection_branches={config.max_rejection_branches} and tree_leaves={config.tree_leaves}, but the "
            f"recording has no probabilities: record it again, or replay with both at 0"
        )
    if not POLICIES[config.policy].drafts:
        return [Round(0, 1, 0, 0, 0)] * (len(agreement.rank) - 1)
    return list(_Player(agreement, config, captured))


class _Tables:
    """What a recording says at each position, worked out once for all settings that share these two."""

    def __init__(self, agreement: Agreement, epsilon: float, branches: int) -> None:
        self.rank, self.chances = agreement.rank, agreement.chances
        recorded = len(self.chances[0]) if self.chances else 0
        self.others = range(1, min(branches + 1, recorded))  # candidates that a correction is foreseen among
        self.right = _runs((rank == 0 for rank in agreement.rank), behind=0)
        self.certain = _runs((sure >= epsilon for sure in agreement.confidence), behind=FOR_EVER)
        self.width = [max(1, floor(branches * (1 - sure))) for sure in agreement.confidence]
        self._standings: dict[tuple[int, int], int] = {}

    def standing(self, at: int, sent: int) -> int:
        """Of the corrections that the draft foresees for the chain of `sent` tokens from `at` on, likeliest first, the
        place of the one that came; behind all others if it is none of them.
        """
        found = self._standings.get((at, sent))
        if found is None:
            found = self._standings[at, sent] = self._count_likelier(at, sent)
        return found

    def _count_likelier(self, at: int, sent: int) -> int:
        accepted = self.right[at]
        rank = self.rank[at + accepted]
        if rank not in self.others:
            return FOR_EVER
        came = prod(chances[0] for chances in self.chances[at : at + accepted]) * self.chances[at + accepted][rank]
        reached, likelier = 1.0, 0  # the chance that the chain is right up to a place
        for place in range(sent):
            if reached < came:  # and so is all behind it
                break
            chances = self.chances[at + place]
            for other in self.others:
                chance = reached * chances[other]
                if chance < came:
                    break
                likelier += chance > came or (place, other) > (accepted, rank)
            reached *= chances[0]
        return likelier if came else FOR_EVER


def _runs(holds: Iterable[bool], behind: int) -> list[int]:
    """At each position, for how many from there on something holds; at the end it goes on for `behind` more."""
    runs = [behind]
    for each in reversed(list(holds)):
        runs.append(runs[-1] + 1 if each else 0)
    return runs[::-1]


_tables = lru_cache(maxsize=16)(_Tables)


class _Player:
    """Plays one recording; the counterpart of `decoding.drafter` and `decoding.judge`."""

    def __init__(self, agreement: Agreement, config: SpecBranchConfig, captured: bool) -> None:
        self.rank, self.end = agreement.rank, len(agreement.rank)
        self.policy: Policy = POLICIES[config.policy]
        self.gamma, self.depth = config.draft_length, self.policy.depth(config.draft_length)
        self.branches = config.max_branches
        tables = _tables(agreement, config.threshold(), self.branches)
        self.right, self.certain, self.width = tables.right, tables.certain, tables.width
        self.standing = tables.standing
        most = self.gamma * self.branches
        self.outcomes, self.leaves = min(int(config.max_rejection_branches), most), min(int(config.tree_leaves), most)
        self.captured = [self._captured(lined) for lined in (False, True)] if captured else None

    def __iter__(self) -> Iterator[Round]:
        ahead, captured, end = self.policy.drafts_ahead, self.captured, self.end
        at, line = 1, 0  # the prompt's pass gives the first token; tokens drafted behind the text
        while at < end:
            room = end - at
            sent = self._chain(at, line, room - 1)
            committed, left = self._verdict(at, sent, ahead and room > sent + 1)
            yield captured[line > 0][committed] if captured else self._eager(at, line, room, sent, committed)
            at, line = at + committed, left

    def _chain(self, at: int, line: int, limit: int) -> int:
        """How many tokens to send: what stands drafted, or what is drafted first, up to where the draft is not sure."""
        if not line:
            return min(self.certain[at], self.gamma, limit) if self.policy.drafts_first else 0
        return min(self.certain[at] if self.policy.forks else line, line, self.gamma, limit)

    def _verdict(self, at: int, sent: int, ahead: bool) -> tuple[int, int]:
        """Tokens that the pass commits, and those that stand drafted behind them."""
        right = self.right[at]
        if right >= sent:  # all of it is right; a branch lives on if it has the token behind
            width = self.width[at + sent] if self.policy.forks else 1
            return sent + 1, self.depth if ahead and 0 <= self.rank[at + sent] < width else 0
        if not (self.outcomes or self.leaves):
            return right + 1, 0
        standing, behind = self.standing(at, sent), at + right + 1
        left = self.depth if ahead and standing < self.outcomes else 0
        if standing >= self.leaves or behind == self.end:
            return right + 1, left
        # A runner-up that is right brings a further token; a branch lives on if it has that too.
        return right + 2, left - 1 if left and self.rank[behind] == 0 else 0

    def _captured(self, lined: bool) -> list[Round]:
        """Rounds by the tokens they commit: every step of a stage is taken, over as many branches as there may be.

        Args:
            lined: tokens stand drafted when the round begins.
        """
        before = 0 if lined or not self.policy.drafts_first else self.gamma
        beside, width = (1 + self.depth, self._widest) if self.policy.drafts_ahead else (0, 0)
        sent, most = self.gamma + self.leaves, self.gamma + 1
        return [Round(sent, committed, before, beside, width) for committed in range(most + 1)]

    def _eager(self, at: int, line: int, room: int, sent: int, committed: int) -> Round:
        """Steps are taken as they are needed."""
        first = self.policy.drafts_first and not line
        looked = first and sent < min(self.gamma, room - 1)  # the distribution behind the chain is known already
        width, beside = 0, 0
        if self.policy.drafts_ahead and room > sent + 1:
            width = self.width[at + sent] if self.policy.forks else 1
            beside = self._steps_beside(sent, sent if first else line, width, looked)
        passed = sent + min(self.leaves, sent * self.branches)
        return Round(passed, committed, sent + looked if first else 0, beside, self._widest if self.outcomes else width)

    @property
    def _widest(self) -> int:
        return self.branches + self.outcomes if self.policy.forks else 1

    def _steps_beside(self, sent: int, line: int, width: int, looked: bool) -> int:
        """Draft steps behind the chain: the main branch is brought to its length, siblings take `depth` steps."""
        first = int(line == sent and not looked)
        missing = sent + 1 + self.depth - max(line, sent + 1)
        return first + (self.depth if width > 1 or self.outcomes else missing)
