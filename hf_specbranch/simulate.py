"""Predict how fast each policy would be on another machine, from one recording of how well a draft agrees.

Greedy decoding is a replay: the text is the target's whatever is drafted, so for every position it is enough to know
how sure the draft was and where the target's token stood among the draft's candidates. `replay` goes through such a
recording round by round as the loop would, `predict` puts a price on the rounds:

    a pass of the target over q tokens    t(q) = target_pass + (q - 1) * target_token
    a step of the draft over w branches   d(w) = draft_step + (w - 1) * draft_branch
    drafting before a pass                S = steps * d(1)
    drafting beside a pass                B = steps * d(w)
    a round                               S + t(q) + B - hidden * min(t(q), B)

`hidden` is the part of what could run at the same time that does: 0 without overlap, 1 with a device for each model.
What a draft says after a wrong token is not recorded; it never matters to the verdict, and for the number of steps the
recorded confidence stands in. Reading the prompt is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from math import floor
from typing import NamedTuple

from .agreement import ABSENT, Agreement, load_agreements, read_agreement, record_agreement, save_agreements
from .config import SpecBranchConfig
from .decoding.assembly import CAPTURED_LENGTH, OUTCOMES
from .decoding.policies import POLICIES, Policy

__all__ = [
    "ABSENT", "Agreement", "Prediction", "Round", "StepCosts", "load_agreements", "predict", "read_agreement",
    "record_agreement", "replay", "save_agreements", "settled",
]  # fmt: skip


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
    large = captured and not cheap
    gamma = CAPTURED_LENGTH if large and config.max_draft_length == "auto" else config.draft_length
    outcomes = config.max_outcomes
    if isinstance(outcomes, str):
        outcomes = 0 if not captured else CAPTURED_LENGTH if large else OUTCOMES
    if not POLICIES[config.policy].forks:
        outcomes = 0
    epsilon = config.threshold(alone=captured)
    return replace(config, max_draft_length=gamma, confidence_threshold=epsilon, max_outcomes=outcomes)


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
    if config.max_outcomes and not agreement.chances:
        raise ValueError(
            f"max_outcomes={config.max_outcomes}, but the recording has no chances: record it anew, or replay with "
            f"max_outcomes=0"
        )
    return list(_Player(agreement, config, captured))


class _Player:
    """Plays one recording; the counterpart of `decoding.drafter`."""

    def __init__(self, agreement: Agreement, config: SpecBranchConfig, captured: bool) -> None:
        self.sure, self.rank, self.end = agreement.confidence, agreement.rank, len(agreement.rank)
        self.chances, self.captured = agreement.chances, captured
        self.policy: Policy = POLICIES[config.policy]
        self.gamma, self.depth = config.draft_length, self.policy.depth(config.draft_length)
        self.epsilon, self.branches = config.threshold(), config.max_branches
        self.outcomes = min(int(config.max_outcomes), self.gamma * self.branches)
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
        point = self.at + accepted
        if accepted == sent:
            survives = 0 <= self.rank[point] < width
        else:
            survives = width > 0 and (accepted, self.rank[point]) in self._foreseen(sent)
        self.at, self.line, self.looked = point + 1, self.depth if survives else 0, False
        if self.captured:
            return self._captured(accepted + 1, began)
        return Round(sent, accepted + 1, before, beside, width if not self.outcomes else self._widest)

    def _captured(self, committed: int, began: bool) -> Round:
        """Every step of a stage is taken, over as many branches as there may be."""
        if not self.policy.drafts:
            return Round(0, committed, 0, 0, 0)
        ahead = self.policy.drafts_ahead
        beside, width = (1 + self.depth, self._widest) if ahead else (0, 0)
        return Round(self.gamma, committed, self.gamma * began, beside, width)

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

    def _foreseen(self, sent: int) -> set[tuple[int, int]]:
        """(place in the chain, candidate) of the branches for corrections: where these are likeliest by the draft."""
        if not self.outcomes:
            return set()
        found, reached = [], 1.0
        for place in range(sent):
            own, *others = self.chances[self.at + place][: self.branches + 1]
            found += [(reached * chance, (place, rank)) for rank, chance in enumerate(others, 1)]
            reached *= own
        return {where for chance, where in nlargest(self.outcomes, found) if chance > 0}

    def _steps_beside(self, sent: int, width: int) -> int:
        """Draft steps behind the chain: the main branch is brought to its length, siblings take `depth` steps."""
        at_end = self.line == sent
        first = int(at_end and not self.looked)
        missing = sent + 1 + self.depth - max(self.line, sent + 1)
        return first + (self.depth if width > 1 or self.outcomes else missing)


_PRICES = ("target_pass", "target_token", "draft_step", "draft_branch")


@dataclass(frozen=True)
class StepCosts:
    """What a step takes, in seconds, the loop's own work included.

    Args:
        target_pass: the target over one token.
        target_token: each further token in the same pass.
        draft_step: the draft over one branch.
        draft_branch: each further branch in the same step.
        hidden: the part of drafting beside a pass that costs no time of its own: 0 none, 1 all.

    Example:
        >>> from hf_specbranch.simulate import StepCosts
        >>> costs = StepCosts(target_pass=0.008, target_token=0.0001, draft_step=0.0003, draft_branch=0.0)
        >>> round(costs.speed_ratio)
        27
    """

    target_pass: float
    target_token: float = 0.0
    draft_step: float = 0.0
    draft_branch: float = 0.0
    hidden: float = 0.0

    def __post_init__(self) -> None:
        if self.target_pass <= 0 or min(self.target_token, self.draft_step, self.draft_branch) < 0:
            raise ValueError(f"{self}: expected a target pass that takes time, and nothing below 0")
        if not 0 <= self.hidden <= 1:
            raise ValueError(f"hidden={self.hidden}: expected a number from 0 to 1")

    @property
    def speed_ratio(self) -> float:
        """c: draft steps that fit into one target pass."""
        return self.target_pass / self.draft_step if self.draft_step else float("inf")

    def at_ratio(self, ratio: float) -> StepCosts:
        """The same target with a draft so fast that `ratio` of its steps take as long as one pass."""
        if ratio <= 0 or self.draft_step <= 0:
            raise ValueError(f"ratio={ratio} with draft_step={self.draft_step}: both must be above 0")
        scale = self.target_pass / ratio / self.draft_step
        return replace(self, draft_step=self.draft_step * scale, draft_branch=self.draft_branch * scale)

    def on_gpus(self, count: int) -> StepCosts:
        """The same models on `count` GPUs of this kind: from two on the draft has its own, so all that can run
        beside the target does; from three on branches are spread over those the target leaves free.
        """
        if count < 2:
            return self
        return replace(self, hidden=1.0, draft_branch=self.draft_branch / (count - 1))

    def to_dict(self) -> dict[str, float]:
        """Milliseconds a step, draft steps a pass, and the hidden part, ready for JSON."""
        prices = {f"{name}_ms": 1e3 * getattr(self, name) for name in _PRICES}
        return {**prices, "speed_ratio": self.speed_ratio, "hidden": self.hidden}

    def seconds(self, rounds: Sequence[Round], overlap: bool = True) -> float:
        """What these rounds take together."""
        hidden = self.hidden if overlap else 0.0
        total = 0.0
        for each in rounds:
            verify, ahead = self.parts(each)
            total += each.steps_before * self.draft_step + verify + ahead - hidden * min(verify, ahead)
        return total

    def parts(self, each: Round) -> tuple[float, float]:
        """The pass, and the drafting that may run beside it."""
        verify = self.target_pass + each.sent * self.target_token
        return verify, each.steps_beside * (self.draft_step + max(0, each.width - 1) * self.draft_branch)


class Prediction(NamedTuple):
    """What to expect of one choice of settings."""

    tokens_per_second: float
    speedup: float  # over autoregressive decoding at the same costs
    tokens_per_pass: float
    draft_steps_per_pass: float


def predict(
    agreements: Sequence[Agreement], config: SpecBranchConfig, costs: StepCosts, captured: bool = False
) -> Prediction:
    """How fast these texts would be generated with these settings at these costs, the prompts' reading left out.

    Args:
        agreements: recordings.
        config: settings.
        costs: what a step takes.
        captured: stages are captured, as on CUDA; see `replay`.

    Example:
        >>> from hf_specbranch import SpecBranchConfig
        >>> from hf_specbranch.simulate import Agreement, StepCosts, predict
        >>> agreement = Agreement(confidence=(0.9,) * 21, rank=(0,) * 21, candidates=4)
        >>> costs = StepCosts(target_pass=0.01, draft_step=0.001)
        >>> round(predict([agreement], SpecBranchConfig(policy="vanilla", max_draft_length=4), costs).speedup, 2)
        3.57
    """
    rounds = [each for agreement in agreements for each in replay(agreement, config, captured)]
    tokens, seconds = sum(each.committed for each in rounds), costs.seconds(rounds, config.overlap)
    if not rounds:
        raise ValueError("nothing to predict from: record at least two new tokens")
    speed = tokens / seconds
    steps = sum(each.steps_before + each.steps_beside for each in rounds)
    return Prediction(speed, speed * costs.target_pass, tokens / len(rounds), steps / len(rounds))
