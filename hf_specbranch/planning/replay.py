"""Replay a recorded text round by round, as the decoding loop would generate it with other settings.

Greedy text is the target's, whatever is drafted. So the recording decides which draft tokens are accepted, and a replay
only counts: passes of the target, tokens in them, draft steps. No model runs and no costs are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, takewhile
from math import floor, prod
from operator import mul
from typing import NamedTuple

from ..config import SpecBranchConfig
from ..decoding.draft_state import branch_depth
from ..decoding.policies import POLICIES, Policy
from .agreement import ABSENT, Agreement

UNLIMITED = 1 << 30  # more than any text has tokens
LOOKED_UP = 7  # tokens that a lookup typically proposes, where it need not be as many as it may


class Round(NamedTuple):
    """The work of one round: a pass of the target, and the draft steps before and during it."""

    sent: int  # draft tokens and tree leaves in the pass; in a captured stage, the room for them
    committed: int  # tokens added to the text
    steps_before: int  # draft steps that the pass had to wait for
    overlapped_steps: int  # draft steps that could run while the target ran
    width: int  # branches in each of the overlapped steps


def effective_config(config: SpecBranchConfig, captured: bool = False, cheap: bool = True) -> SpecBranchConfig:
    """Return the settings with which a generation without hooks would run: numbers in place of "auto".

    Args:
        config: settings.
        captured: stages are captured as CUDA graphs.
        cheap: the draft is small compared with its target.

    Example:
        >>> from hf_specbranch import SpecBranchConfig
        >>> from hf_specbranch.planning.replay import effective_config
        >>> effective_config(SpecBranchConfig()).confidence_threshold
        0.4
        >>> effective_config(SpecBranchConfig(), captured=True).max_rejection_branches
        12
    """
    decided, policy = config.decided(captured, cheap), POLICIES[config.policy]
    rejection_branches = decided.max_rejection_branches if policy.forks else 0
    tree_leaves = decided.tree_leaves if policy.drafts_first else 0
    if (rejection_branches, tree_leaves) == (decided.max_rejection_branches, decided.tree_leaves):
        return decided
    return replace(decided, max_rejection_branches=rejection_branches, tree_leaves=tree_leaves)


def replay(
    agreement: Agreement, config: SpecBranchConfig | None = None, captured: bool = False, least_chance: float = 0.0
) -> list[Round]:
    """Return the rounds that the decoding loop would take on a recorded text, without the prefill.

    Args:
        agreement: the recording.
        config: the settings. Length heads and the user's hooks are not replayed.
        captured: count the work of captured stages, which run all their steps unless each is a stage of its own.
        least_chance: of a draft to be accepted, from which on it takes another step if it stops by cost.

    Example:
        >>> from hf_specbranch import SpecBranchConfig
        >>> from hf_specbranch.planning.simulate import Agreement, replay
        >>> agreement = Agreement(confidence=(0.9,) * 6, rank=(0, 0, 0, 1, 0, 0), candidates=2)
        >>> replay(agreement, SpecBranchConfig(policy="vanilla", max_draft_length=4))[0].committed
        3
    """
    config = effective_config(config or SpecBranchConfig(), captured)
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
        return list(_without_model(agreement, config, captured))
    return list(_Player(agreement, config, captured, least_chance))


def _without_model(agreement: Agreement, config: SpecBranchConfig, captured: bool) -> Iterator[Round]:
    """Yield the rounds of lookup alone, or of decoding without any draft."""
    at, end = 1, len(agreement.rank)
    while at < end:
        each = _lookup_round(agreement, at, config, captured) or Round(0, 1, 0, 0, 0)
        yield each
        at += each.committed


def _lookup_round(agreement: Agreement, at: int, config: SpecBranchConfig, captured: bool) -> Round | None:
    """Return the round in which tokens are looked up from this position on; None if none would be.

    As if it were known how many of them are right.
    """
    if not config.lookup_tokens or not agreement.lookups or agreement.lookups[at] == ABSENT:
        return None
    right, most = agreement.lookups[at], min(config.lookup_tokens, LOOKED_UP)
    if captured:
        most = next((each for each in config.captured_lookups if right <= each), config.lookup_tokens)
    sent = min(most, len(agreement.rank) - at - 1)
    return Round(sent, min(right, sent) + 1, 0, 0, 0)


class _Tables:
    """Facts about each position of a recording, computed once for all plans with the same epsilon and k_max."""

    def __init__(self, agreement: Agreement, epsilon: float, branches: int) -> None:
        self.rank, self.chances = agreement.rank, agreement.chances
        recorded = len(self.chances[0]) if self.chances else 0
        self.alternatives = range(1, min(branches + 1, recorded))  # ranks that are considered as likely rejections
        self.correct = _run_lengths((rank == 0 for rank in agreement.rank), at_end=0)
        self.confident = _run_lengths((largest >= epsilon for largest in agreement.confidence), at_end=UNLIMITED)
        self.width = [max(1, floor(branches * (1 - largest))) for largest in agreement.confidence]
        self._rejection_ranks: dict[tuple[int, int], int] = {}

    def rejection_rank(self, at: int, sent: int) -> int:
        """Return how many likely rejections the draft ranks above the one that happened; `UNLIMITED` if it is none.

        A likely rejection is a position among the `sent` draft tokens from `at` on, and an alternative token there. Its
        probability is that of all draft tokens before it times that of the alternative.
        """
        found = self._rejection_ranks.get((at, sent))
        if found is None:
            found = self._rejection_ranks[at, sent] = self._count_more_likely(at, sent)
        return found

    def _count_more_likely(self, at: int, sent: int) -> int:
        accepted = self.correct[at]
        rank = self.rank[at + accepted]
        if rank not in self.alternatives:
            return UNLIMITED
        actual = prod(chances[0] for chances in self.chances[at : at + accepted]) * self.chances[at + accepted][rank]
        prefix, more_likely = 1.0, 0  # prefix: the probability that all draft tokens before `place` are right
        for place in range(sent):
            if prefix < actual:  # so is everything after this place
                break
            chances = self.chances[at + place]
            for alternative in self.alternatives:
                probability = prefix * chances[alternative]
                if probability < actual:
                    break
                more_likely += probability > actual or (place, alternative) > (accepted, rank)
            prefix *= chances[0]
        return more_likely if actual else UNLIMITED


def _run_lengths(holds: Iterable[bool], at_end: int) -> list[int]:
    """Return for each position how many in a row hold from there on; a run that reaches the end gets `at_end` more."""
    runs = [at_end]
    for each in reversed(list(holds)):
        runs.append(runs[-1] + 1 if each else 0)
    return runs[::-1]


_tables = lru_cache(maxsize=16)(_Tables)


class _Player:
    """Replays one recording with one plan; the counterpart of `decoding.drafter` and `decoding.verifier`."""

    def __init__(self, agreement: Agreement, config: SpecBranchConfig, captured: bool, least_chance: float) -> None:
        self.agreement, self.rank, self.end = agreement, agreement.rank, len(agreement.rank)
        self.policy: Policy = POLICIES[config.policy]
        self.config = config if self.policy.drafts_first else replace(config, prompt_lookup_num_tokens=0)
        self.gamma, self.depth = config.draft_length, branch_depth(self.policy, config.draft_length)
        self.branches = config.max_branches
        tables = _tables(agreement, config.threshold(), self.branches)
        self.correct, self.confident, self.width = tables.correct, tables.confident, tables.width
        self.rejection_rank = tables.rejection_rank
        most = self.gamma * self.branches
        self.rejection_branches = min(int(config.max_rejection_branches), most)
        self.tree_leaves = min(int(config.tree_leaves), most)
        self.sends_uncertain = captured and not self.policy.drafts_ahead  # see `DraftRound`
        self.stepwise = captured and config.stops_early
        self.by_cost = captured and config.stops_by_cost and not self.policy.drafts_ahead
        self.least_chance = least_chance
        self.captured = [self._captured_rounds(steps) for steps in range(self.gamma + 1)] if captured else None

    def __iter__(self) -> Iterator[Round]:
        ahead, captured, end = self.policy.drafts_ahead, self.captured, self.end
        at, pending = 1, 0  # the prefill gives the first token; draft tokens that are pending after the text
        while at < end:
            looked_up = None if pending else _lookup_round(self.agreement, at, self.config, captured is not None)
            if looked_up:
                yield looked_up
                at += looked_up.committed
                continue
            room = end - at
            sent = self._num_sent(at, pending, room - 1)
            committed, survived = self._resolve(at, sent, ahead and room > sent + 1)
            if captured is not None:
                yield captured[self._captured_steps(pending, sent)][committed]
            else:
                yield self._eager(at, pending, room, sent, committed)
            at, pending = at + committed, survived

    def _num_sent(self, at: int, pending: int, limit: int) -> int:
        """Return how many draft tokens are sent: the pending draft, or a new one, up to where confidence is too low."""
        if not pending:
            confident = (self._confident(at) if self.by_cost else self.confident[at]) + self.sends_uncertain
            return min(confident, self.gamma, limit) if self.policy.drafts_first else 0
        return min(self.confident[at] if self.policy.forks else pending, pending, self.gamma, limit)

    def _confident(self, at: int) -> int:
        """Return after how many draft tokens another step is still worth its time; see `step_worth`."""
        reached = accumulate(self.agreement.confidence[at : at + self.gamma], mul)
        return sum(1 for _ in takewhile(lambda chance: chance > self.least_chance, reached))

    def _resolve(self, at: int, sent: int, ahead: bool) -> tuple[int, int]:
        """Return how many tokens the pass commits, and how many draft tokens are pending after them.

        Args:
            at: the position of the first draft token.
            sent: draft tokens in the pass.
            ahead: the draft continues while the target runs.
        """
        correct = self.correct[at]
        if correct >= sent:  # all are accepted; the branch that holds the bonus token survives
            width = self.width[at + sent] if self.policy.forks else 1
            return sent + 1, self.depth if ahead and 0 <= self.rank[at + sent] < width else 0
        if not (self.rejection_branches or self.tree_leaves):
            return correct + 1, 0
        rejection_rank, following = self.rejection_rank(at, sent), at + correct + 1
        survived = self.depth if ahead and rejection_rank < self.rejection_branches else 0
        if rejection_rank >= self.tree_leaves or following == self.end:
            return correct + 1, survived
        # An accepted leaf brings one token more, the leaf continuation. A branch survives if it holds that token too.
        return correct + 2, survived - 1 if survived and self.rank[following] == 0 else 0

    def _captured_rounds(self, steps: int) -> list[Round]:
        """Return the rounds of captured stages with so many steps before the pass, by committed tokens.

        The pass has room for the longest draft, and overlapped steps run over as many branches as allowed.
        """
        overlapped, width = (1 + self.depth, self._max_width) if self.policy.drafts_ahead else (0, 0)
        sent, most = self.gamma + self.tree_leaves, self.gamma + 1
        return [Round(sent, committed, steps, overlapped, width) for committed in range(most + 1)]

    def _captured_steps(self, pending: int, sent: int) -> int:
        """Return the draft steps before a pass: none if a draft is pending, all of them unless each is a stage."""
        if pending or not self.policy.drafts_first:
            return 0
        needed = sent if self.sends_uncertain else sent + 1
        return max(1, min(needed, self.gamma)) if self.stepwise else self.gamma

    def _eager(self, at: int, pending: int, room: int, sent: int, committed: int) -> Round:
        """Return a round of eager stages, which run the steps that are needed."""
        first = self.policy.drafts_first and not pending
        # A draft that stopped early has already computed the distribution after its last token.
        stopped_early = first and sent < min(self.gamma, room - 1)
        width, overlapped = 0, 0
        if self.policy.drafts_ahead and room > sent + 1:
            width = self.width[at + sent] if self.policy.forks else 1
            overlapped = self._overlapped_steps(sent, sent if first else pending, width, stopped_early)
        in_pass = sent + min(self.tree_leaves, sent * self.branches)
        before = sent + stopped_early if first else 0
        return Round(in_pass, committed, before, overlapped, self._max_width if self.rejection_branches else width)

    @property
    def _max_width(self) -> int:
        return self.branches + self.rejection_branches if self.policy.forks else 1

    def _overlapped_steps(self, sent: int, pending: int, width: int, stopped_early: bool) -> int:
        """Return the draft steps after the sent tokens: the main branch gets its full length, the others `depth`."""
        first = int(pending == sent and not stopped_early)
        missing = sent + 1 + self.depth - max(pending, sent + 1)
        return first + (self.depth if width > 1 or self.rejection_branches else missing)
