"""What a step of each model takes here, fitted to short real generations.

Timing a forward by itself would leave out the loop around it, and miss what the runtime does (captured graphs run
several times as fast as ordinary forwards). So every policy generates the same few texts, and the four prices of
`simulate.StepCosts` and the hidden part of drafting are those that explain the measured times best; ways with overlap
and without are among them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..config import SpecBranchConfig
from ..decoding.assembly import is_cheap
from ..stats import SpecBranchStats
from .agreement import Agreement
from .costs import StepCosts
from .replay import Round, replay, settled
from .simulate import predict

Inputs = dict[str, Tensor]
PLAIN = "plain generate()", "its first token"
HIDDEN_STEPS, TURNS = 20, 4


@dataclass(frozen=True)
class Measurement:
    """Costs, and what they were fitted to.

    Args:
        costs: seconds a step.
        plain: tokens per second of plain `generate()`.
        measured: tokens per second of each way that was run, by name.
        predicted: what the costs predict for the same ways.
        settings: the settings of each way.
        captured: stages ran as CUDA graphs.
    """

    costs: StepCosts
    plain: float
    measured: dict[str, float]
    predicted: dict[str, float]
    settings: dict[str, SpecBranchConfig]
    captured: bool = False

    @property
    def error(self) -> float:
        """Median relative error of the predictions."""
        return median(abs(self.predicted[name] / speed - 1) for name, speed in self.measured.items())


class TimedRounds(NamedTuple):
    """Rounds of one generation, and the time behind its first token."""

    rounds: list[Round]
    seconds: float
    overlap: bool = False


def ways_to_measure(gamma: int, branches: int, runtime: str = "auto") -> dict[str, SpecBranchConfig]:
    """What is run: ways that differ in how much they draft, send and fork, so that each price shows."""

    def way(policy: str, **more: Any) -> SpecBranchConfig:
        fields = {"max_draft_length": gamma, "max_branches": branches, "overlap": False, "runtime": runtime, **more}
        return SpecBranchConfig(policy=policy, **fields)

    return {
        "autoregressive": way("autoregressive"),
        "vanilla, fixed length": way("vanilla", confidence_threshold=0.0),
        "vanilla": way("vanilla"),
        "pearl, no overlap": way("pearl"),
        "specbranch, one branch, no overlap": way("specbranch", max_branches=1),
        "specbranch, no overlap": way("specbranch"),
        "pearl": way("pearl", overlap=True),
        "specbranch": way("specbranch", overlap=True),
    }


def measure_costs(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Inputs],
    agreements: Sequence[Agreement],
    gamma: int = 8,
    branches: int = 4,
    runtime: str = "auto",
    repeats: int = 2,
    tick: Callable[[], None] = lambda: None,
) -> Measurement:
    """Generate each recorded text again in every way and fit the costs.

    Args:
        model: the target, with SpecBranch attached.
        draft: the draft.
        prompts: tokenized prompts.
        agreements: the recording of each.
        gamma: the longest draft to try.
        branches: the most branches to try.
        runtime: as in `SpecBranchConfig`.
        repeats: the fastest of so many runs counts.
        tick: called after every generation.
    """
    ways = ways_to_measure(gamma, branches, runtime)
    times: dict[str, list[float]] = {name: [] for name in ways}
    plain_seconds, captured = 0.0, False
    for inputs, agreement in zip(prompts, agreements):
        new_tokens = len(agreement.rank)
        best = dict.fromkeys((*ways, *PLAIN), float("inf"))
        for turn in range(repeats + 1):  # in turns, so that a busy moment of the machine hits all ways; one warm-up
            for name in best:
                seconds = (
                    decode_seconds(model, draft, inputs, ways[name], new_tokens)
                    if name in ways
                    else plain_run_seconds(model, inputs, new_tokens if name == PLAIN[0] else 1)
                )
                captured = was_captured(model.specbranch_stats) if name in ways else captured
                best[name] = min(best[name], seconds) if turn else best[name]
                tick()
        plain_seconds += best[PLAIN[0]] - best[PLAIN[1]]
        for name in ways:
            times[name].append(best[name])
    ways = {name: settled(way, captured, is_cheap(model, draft)) for name, way in ways.items()}
    costs = fit_costs(
        TimedRounds(replay(agreement, way, captured), seconds, way.overlap)
        for name, way in ways.items()
        for agreement, seconds in zip(agreements, times[name])
    )
    tokens = sum(len(agreement.rank) - 1 for agreement in agreements)
    measured = {name: tokens / sum(seconds) for name, seconds in times.items()}
    predicted = {name: predict(agreements, way, costs, captured).tokens_per_second for name, way in ways.items()}
    return Measurement(costs, tokens / plain_seconds, measured, predicted, ways, captured)


def was_captured(stats: SpecBranchStats) -> bool:
    """Whether a generation's stages were replayed whole."""
    return stats.runtime not in ("", "eager") and not stats.slowed_by


def generations(prompts: int, repeats: int = 2) -> int:
    """How often `measure_costs` will tick."""
    return prompts * (repeats + 1) * (len(ways_to_measure(1, 1)) + len(PLAIN))


def decode_seconds(
    model: Any, draft: PreTrainedModel, inputs: Inputs, settings: SpecBranchConfig, new_tokens: int
) -> float:
    """One greedy generation, without the time its first token took."""
    model.generate(**inputs, assistant_model=draft, specbranch=settings, max_new_tokens=new_tokens, do_sample=False)
    return float(model.specbranch_stats.total_seconds - model.specbranch_stats.time_to_first_token)


def plain_run_seconds(model: Any, inputs: Inputs, new_tokens: int) -> float:
    """One plain greedy generation, whole."""
    began = time.perf_counter()
    model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, specbranch=False)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - began


def fit_costs(runs: Iterable[TimedRounds]) -> StepCosts:
    """The prices, none below 0, and the hidden part that explain these times best: least squares on relative errors.

    For a given hidden part, and knowing of each round whether the pass or the drafting beside it is longer, its time is
    a sum of prices. The first is tried in steps; the second follows from the prices, so it takes a few turns.

    Example:
        >>> from hf_specbranch.planning.simulate import Round
        >>> from hf_specbranch.planning.measure import TimedRounds, fit_costs
        >>> alone, two = [Round(0, 1, 0, 0, 0)] * 3, [Round(2, 3, 2, 0, 0)]
        >>> round(fit_costs([TimedRounds(alone, 0.03), TimedRounds(two, 0.014)]).target_pass, 3)
        0.01
    """
    counted = [_Counted(Counter(each._replace(committed=0) for each in run.rounds), *run[1:]) for run in runs]
    steps = HIDDEN_STEPS if any(run.overlap and any(each.steps_beside for each in run.rounds) for run in counted) else 0
    tried = [_fit(counted, part / max(1, steps)) for part in range(steps + 1)]
    return min(tried, key=lambda found: found[0])[1]


class _Counted(NamedTuple):
    """A run by its different rounds, which are few."""

    rounds: Counter[Round]
    seconds: float
    overlap: bool

    def at(self, costs: StepCosts) -> float:
        return sum(count * costs.seconds([each], self.overlap) for each, count in self.rounds.items())


def _fit(runs: Sequence[_Counted], hidden: float) -> tuple[float, StepCosts]:
    """Prices at this hidden part, and what is left unexplained."""
    seconds = torch.tensor([[run.seconds] for run in runs], dtype=torch.float64)
    ones = torch.ones_like(seconds)
    costs = StepCosts(target_pass=1.0, hidden=hidden)  # at first every pass is longer than what runs beside it
    for _ in range(TURNS):
        counts = torch.tensor([_counts(run, costs) for run in runs], dtype=torch.float64) / seconds  # [N, 4]
        kept = [0, 1, 2, 3]
        while True:
            prices = torch.linalg.lstsq(counts[:, kept], ones, driver="gelsd").solution[:, 0]
            if bool((prices >= 0).all()):
                break
            kept.remove(kept[int(prices.argmin())])
        found = dict(zip(kept, prices.tolist()))
        found[0] = max(found.get(0, 0.0), 1e-9)
        costs = StepCosts(found[0], found.get(1, 0.0), found.get(2, 0.0), found.get(3, 0.0), hidden)
    left = sum((run.at(costs) / run.seconds - 1) ** 2 for run in runs)
    return left, costs


def _counts(run: _Counted, costs: StepCosts) -> tuple[float, float, float, float]:
    """How often each price is paid: a pass, a token in it, a draft step, a branch in that."""
    passes = tokens = steps = branches = 0.0
    hidden = costs.hidden if run.overlap else 0.0
    for each, count in run.rounds.items():
        verify, ahead = costs.parts(each)
        in_pass = count * (1 - hidden * (verify < ahead))  # the shorter of the two is hidden
        beside = count * (1 - hidden * (verify >= ahead)) * each.steps_beside
        passes += in_pass
        tokens += in_pass * each.sent
        steps += count * each.steps_before + beside
        branches += beside * max(0, each.width - 1)
    return passes, tokens, steps, branches
