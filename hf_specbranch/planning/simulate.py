"""Predict how fast a policy would be, here or on another machine, from recordings of agreement and step costs.

`replay` turns a recorded text into rounds, `StepCosts` gives the time of each round, and `predict` adds them up. The
draft's predictions after a wrong token are not recorded. The verify result never depends on them; where the number of
draft steps does, the recorded confidence is used instead. The prefill is left out.

The names that a simulation needs can all be imported from here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..config import SpecBranchConfig
from .agreement import ABSENT, Agreement, load_agreements, read_agreement, record_agreement, save_agreements
from .costs import StepCosts
from .replay import Round, effective_config, replay

__all__ = [
    "ABSENT", "Agreement", "Prediction", "Round", "StepCosts", "effective_config", "load_agreements", "predict",
    "read_agreement", "record_agreement", "replay", "save_agreements",
]  # fmt: skip

SPEEDS = 2  # at which a draft that stops by cost is replayed: a typical one, and the one that comes of it
CHANCES = 0.05  # in steps of which a replay stops such a draft, so that it serves other costs too


class Prediction(NamedTuple):
    """The expected speed of one choice of settings."""

    tokens_per_second: float
    speedup: float  # over autoregressive decoding at the same costs
    tokens_per_pass: float
    draft_steps_per_pass: float


def predict(
    agreements: Sequence[Agreement], config: SpecBranchConfig, costs: StepCosts, captured: bool = False
) -> Prediction:
    """Predict how fast these texts would be generated with these settings at these costs, without the prefill.

    Args:
        agreements: recordings.
        config: settings.
        costs: step costs.
        captured: stages are captured as CUDA graphs; see `replay`.

    Example:
        >>> from hf_specbranch import SpecBranchConfig
        >>> from hf_specbranch.planning.simulate import Agreement, StepCosts, predict
        >>> agreement = Agreement(confidence=(0.9,) * 21, rank=(0,) * 21, candidates=4)
        >>> costs = StepCosts(target_pass=0.01, draft_step=0.001)
        >>> round(predict([agreement], SpecBranchConfig(policy="vanilla", max_draft_length=4), costs).speedup, 2)
        3.57
    """
    tokens, rounds = 0, Counter[Round]()
    for agreement in agreements:
        committed, counts = _count_at(costs, agreement, config, captured)
        tokens += committed
        rounds.update(counts)
    if not rounds:
        raise ValueError("nothing to predict from: record at least two new tokens")
    speed, passes = tokens / costs.seconds(rounds, config.overlap), rounds.total()
    steps = sum(count * (each.steps_before + each.overlapped_steps) for each, count in rounds.items())
    return Prediction(speed, speed * costs.target_pass, tokens / passes, steps / passes)


def _count_at(
    costs: StepCosts, agreement: Agreement, config: SpecBranchConfig, captured: bool
) -> tuple[int, Counter[Round]]:
    """Return what `_count_rounds` does; where a draft stops by cost, that depends on the speed of the text."""
    if not (captured and config.stops_by_cost):
        return _count_rounds(agreement, config, captured)
    tokens, rounds, seconds = 2, Counter[Round](), costs.target_pass  # to begin with
    for _ in range(SPEEDS):
        least_chance = round(tokens / seconds * costs.draft_step / CHANCES) * CHANCES
        tokens, rounds = _count_rounds(agreement, config, captured, least_chance)
        seconds = costs.seconds(rounds) or costs.target_pass
    return tokens, rounds


@lru_cache(maxsize=2048)  # recent texts times plans
def _count_rounds(
    agreement: Agreement, config: SpecBranchConfig, captured: bool, least_chance: float = 0.0
) -> tuple[int, Counter[Round]]:
    """Return the tokens of a replay, and how often each different round occurs, with `committed` set to 0.

    A replay does not depend on costs otherwise, so re-evaluating a text at new costs need not replay it again.
    """
    tokens, counts = 0, Counter[Round]()
    rounds = replay(agreement, config, captured, least_chance)
    for (sent, committed, before, overlapped, width), count in Counter(rounds).items():
        tokens += count * committed
        counts[Round(sent, 0, before, overlapped, width)] += count
    return tokens, counts
