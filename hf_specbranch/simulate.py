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
from dataclasses import asdict, dataclass, replace
from math import floor
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from .config import SpecBranchConfig
from .decoding.policies import POLICIES, Policy

ABSENT = -1  # the target's token is not among the recorded candidates


@dataclass(frozen=True)
class Agreement:
    """One greedy text, and what the draft made of each of its tokens.

    Args:
        confidence: the draft's largest probability at each new token.
        rank: where the target's token stood among the draft's candidates: 0 first, `ABSENT` none of them.
        candidates: how many were looked at; branches beyond that cannot be replayed.

    Example:
        >>> from hf_specbranch.simulate import Agreement
        >>> Agreement(confidence=(0.9, 0.5, 0.8, 0.2), rank=(0, 0, 1, -1), candidates=4).rate
        0.5
    """

    confidence: tuple[float, ...]
    rank: tuple[int, ...]
    candidates: int

    def __post_init__(self) -> None:
        if len(self.confidence) != len(self.rank) or not self.rank:
            raise ValueError(
                f"{len(self.confidence)} confidences and {len(self.rank)} ranks: expected as many of one as of the "
                f"other, at least one"
            )

    @property
    def rate(self) -> float:
        """How often the draft's first candidate was the target's token."""
        return self.within(1)

    def within(self, count: int) -> float:
        """How often the target's token was among the draft's first `count` candidates."""
        return sum(0 <= rank < count for rank in self.rank) / len(self.rank)

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Agreement:
        """The inverse of `to_dict`."""
        return cls(tuple(fields["confidence"]), tuple(fields["rank"]), fields["candidates"])


@torch.no_grad()
def record_agreement(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    max_new_tokens: int = 64,
    candidates: int = 8,
) -> Agreement:
    """Generate greedily with the target alone, then let the draft read that text once.

    Args:
        target: the large model.
        draft: the small one, with the same tokenizer.
        inputs: one tokenized prompt.
        max_new_tokens: how much text to look at.
        candidates: how many of the draft's likeliest tokens to keep at each position.

    Example:
        >>> from hf_specbranch import load_demo_pair
        >>> from hf_specbranch.simulate import record_agreement
        >>> target, draft, tokenizer = load_demo_pair()
        >>> agreement = record_agreement(target, draft, tokenizer("def add(a, b):", return_tensors="pt"), 16)
        >>> len(agreement.rank)
        16
    """
    plain: dict[str, Any] = {"specbranch": False} if hasattr(target, "specbranch_stats") else {}
    text = target.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, **plain)  # [1, L]
    before = inputs["input_ids"].shape[1]
    read = text.to(draft.device)
    logits = draft(input_ids=read, use_cache=False).logits[0, before - 1 : -1]  # [N, V]
    top = logits.float().softmax(-1).topk(min(candidates, logits.shape[-1]), dim=-1)
    same = top.indices == read[0, before:, None]  # [N, K]
    rank = torch.where(same.any(1), same.long().argmax(1), ABSENT)
    return Agreement(tuple(top.values[:, 0].tolist()), tuple(rank.tolist()), top.indices.shape[1])


class Round(NamedTuple):
    """One target pass."""

    sent: int  # drafted tokens the target checked
    committed: int  # tokens it added
    steps_before: int  # draft steps it had to wait for
    steps_beside: int  # draft steps that could run at the same time
    width: int  # branches in these


def replay(agreement: Agreement, config: SpecBranchConfig | None = None) -> list[Round]:
    """Go through a recorded text as the loop would; the pass that reads the prompt is not among the rounds.

    Args:
        agreement: the recording.
        config: settings to play it with; length heads and the user's hooks are not played.

    Example:
        >>> from hf_specbranch import SpecBranchConfig
        >>> from hf_specbranch.simulate import Agreement, replay
        >>> agreement = Agreement(confidence=(0.9,) * 6, rank=(0, 0, 0, 1, 0, 0), candidates=2)
        >>> replay(agreement, SpecBranchConfig(policy="vanilla", max_draft_length=4))[0].committed
        3
    """
    config = config or SpecBranchConfig()
    if POLICIES[config.policy].forks and config.max_branches > agreement.candidates:
        raise ValueError(
            f"max_branches={config.max_branches}, but {agreement.candidates} candidates were recorded at each "
            f"position: record with candidates={config.max_branches}"
        )
    return list(_Player(agreement, config))


class _Player:
    """Plays one recording; the counterpart of `decoding.drafter`."""

    def __init__(self, agreement: Agreement, config: SpecBranchConfig) -> None:
        self.sure, self.rank, self.end = agreement.confidence, agreement.rank, len(agreement.rank)
        self.policy: Policy = POLICIES[config.policy]
        self.gamma, self.depth = config.draft_length, self.policy.depth(config.draft_length)
        self.epsilon, self.branches = config.threshold(), config.max_branches
        self.at, self.line = 1, 0  # the prompt's pass gives the first token; tokens drafted behind the text
        self.looked = False  # whether the distribution behind the line is known already

    def __iter__(self) -> Iterator[Round]:
        while self.at < self.end:
            yield self._round()

    def _round(self) -> Round:
        room = self.end - self.at
        sent, before = self._chain(room)
        width, beside = 0, 0
        if self.policy.drafts_ahead and room > sent + 1:
            width = self._width(self.at + sent)
            beside = self._steps_beside(sent, width)
        accepted = 0
        while accepted < sent and self.rank[self.at + accepted] == 0:
            accepted += 1
        point = self.at + accepted
        survives = width > 0 and accepted == sent and 0 <= self.rank[point] < width
        self.at, self.line, self.looked = point + 1, self.depth if survives else 0, False
        return Round(sent, accepted + 1, before, beside, width)

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

    def _steps_beside(self, sent: int, width: int) -> int:
        """Draft steps behind the chain: the main branch is brought to its length, siblings take `depth` steps."""
        at_end = self.line == sent
        first = int(at_end and not self.looked)
        missing = sent + 1 + self.depth - max(self.line, sent + 1)
        return first + (self.depth if width > 1 else missing)


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

    def seconds(self, rounds: Sequence[Round]) -> float:
        """What these rounds take together."""
        return sum(self._round(*each) for each in rounds)

    def _round(self, sent: int, committed: int, before: int, beside: int, width: int) -> float:
        verify = self.target_pass + sent * self.target_token
        ahead = beside * (self.draft_step + max(0, width - 1) * self.draft_branch)
        return before * self.draft_step + verify + ahead - self.hidden * min(verify, ahead)


class Prediction(NamedTuple):
    """What to expect of one choice of settings."""

    tokens_per_second: float
    speedup: float  # over autoregressive decoding at the same costs
    tokens_per_pass: float
    draft_steps_per_pass: float


def predict(agreements: Sequence[Agreement], config: SpecBranchConfig, costs: StepCosts) -> Prediction:
    """How fast these texts would be generated with these settings at these costs, the prompts' reading left out.

    Example:
        >>> from hf_specbranch import SpecBranchConfig
        >>> from hf_specbranch.simulate import Agreement, StepCosts, predict
        >>> agreement = Agreement(confidence=(0.9,) * 21, rank=(0,) * 21, candidates=4)
        >>> costs = StepCosts(target_pass=0.01, draft_step=0.001)
        >>> round(predict([agreement], SpecBranchConfig(policy="vanilla", max_draft_length=4), costs).speedup, 2)
        3.57
    """
    effective = costs if config.overlap else replace(costs, hidden=0.0)
    rounds = [each for agreement in agreements for each in replay(agreement, config)]
    tokens, seconds = sum(each.committed for each in rounds), effective.seconds(rounds)
    if not rounds:
        raise ValueError("nothing to predict from: record at least two new tokens")
    speed = tokens / seconds
    steps = sum(each.steps_before + each.steps_beside for each in rounds)
    return Prediction(speed, speed * costs.target_pass, tokens / len(rounds), steps / len(rounds))
