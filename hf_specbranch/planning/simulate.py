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
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..config import SpecBranchConfig
from .agreement import ABSENT, Agreement, load_agreements, read_agreement, record_agreement, save_agreements
from .costs import StepCosts
from .replay import Round, replay, settled

__all__ = [
    "ABSENT", "Agreement", "Prediction", "Round", "StepCosts", "load_agreements", "predict", "read_agreement",
    "record_agreement", "replay", "save_agreements", "settled",
]  # fmt: skip


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
