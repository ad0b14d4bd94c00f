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

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from ..config import SpecBranchConfig
from .agreement import ABSENT, Agreement, load_agreements, read_agreement, record_agreement, save_agreements
from .replay import Round, replay, settled

__all__ = [
    "ABSENT", "Agreement", "Prediction", "Round", "StepCosts", "load_agreements", "predict", "read_agreement",
    "record_agreement", "replay", "save_agreements", "settled",
]  # fmt: skip


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
        passes: (further tokens, seconds) of passes that were timed, if any, by their width: between them times are
            interpolated, and behind the last a token takes `target_token`.
        waiting: what a round with drafting beside its pass takes beyond all that, since the host must hear its verdict
            before it can say how the next one begins.

    Example:
        >>> from hf_specbranch.planning.simulate import StepCosts
        >>> costs = StepCosts(target_pass=0.008, target_token=0.0001, draft_step=0.0003, draft_branch=0.0)
        >>> round(costs.speed_ratio)
        27
    """

    target_pass: float
    target_token: float = 0.0
    draft_step: float = 0.0
    draft_branch: float = 0.0
    hidden: float = 0.0
    passes: tuple[tuple[float, float], ...] = ()
    waiting: float = 0.0

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

    def seconds(self, rounds: Iterable[Round] | Mapping[Round, int], overlap: bool = True) -> float:
        """What these rounds take together; of many that are alike one may be given, and how often it came."""
        return sum(count * self._round(each, overlap) for each, count in Counter(rounds).items())

    def _round(self, each: Round, overlap: bool) -> float:
        verify, ahead = self.parts(each)
        saved = self.hidden * min(verify, ahead) if overlap else 0.0
        return each.steps_before * self.draft_step + verify + ahead - saved + self.waiting * (each.steps_beside > 0)

    def pass_over(self, sent: int) -> float:
        """Seconds of a pass over one token and so many further ones."""
        if not self.passes:
            return self.target_pass + sent * self.target_token
        if sent <= self.passes[0][0]:
            return self.passes[0][1]
        for (low, fast), (high, slow) in pairwise(self.passes):
            if sent <= high:
                return fast + (sent - low) / (high - low) * (slow - fast)
        widest, seconds = self.passes[-1]
        return seconds + (sent - widest) * self.target_token

    def parts(self, each: Round) -> tuple[float, float]:
        """The pass, and the drafting that may run beside it."""
        verify = self.pass_over(each.sent)
        return verify, each.steps_beside * (self.draft_step + max(0, each.width - 1) * self.draft_branch)


@lru_cache(maxsize=2048)  # texts that are remembered times plans
def _counted(agreement: Agreement, config: SpecBranchConfig, captured: bool) -> tuple[int, Counter[Round]]:
    """Tokens of a replay, and how often each kind of round came, whatever it committed.

    A replay knows no costs, so a text that is thought over again need not be played again.
    """
    tokens, kinds = 0, Counter[Round]()
    for (sent, committed, before, beside, width), count in Counter(replay(agreement, config, captured)).items():
        tokens += count * committed
        kinds[Round(sent, 0, before, beside, width)] += count
    return tokens, kinds


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
        >>> from hf_specbranch.planning.simulate import Agreement, StepCosts, predict
        >>> agreement = Agreement(confidence=(0.9,) * 21, rank=(0,) * 21, candidates=4)
        >>> costs = StepCosts(target_pass=0.01, draft_step=0.001)
        >>> round(predict([agreement], SpecBranchConfig(policy="vanilla", max_draft_length=4), costs).speedup, 2)
        3.57
    """
    tokens, kinds = 0, Counter[Round]()
    for agreement in agreements:
        gained, rounds = _counted(agreement, config, captured)
        tokens += gained
        kinds.update(rounds)
    if not kinds:
        raise ValueError("nothing to predict from: record at least two new tokens")
    speed, passes = tokens / costs.seconds(kinds, config.overlap), kinds.total()
    steps = sum(count * (each.steps_before + each.steps_beside) for each, count in kinds.items())
    return Prediction(speed, speed * costs.target_pass, tokens / passes, steps / passes)
