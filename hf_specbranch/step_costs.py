"""What a step of each model takes here, fitted to short real generations.

Timing a forward by itself would leave out the loop around it, and miss what the runtime does (captured graphs run
several times as fast as ordinary forwards). So every policy generates the same few texts, and the four prices of
`simulate.StepCosts` are those that explain the measured times best; how much of the drafting is hidden comes from
the same generations with overlap on and off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .config import SpecBranchConfig
from .simulate import Agreement, Round, StepCosts, predict, replay

Inputs = dict[str, Tensor]
PLAIN = "plain generate()", "its first token"


@dataclass(frozen=True)
class Measurement:
    """Costs, and what they were fitted to.

    Args:
        costs: seconds a step.
        plain: tokens per second of plain `generate()`.
        measured: tokens per second of each way that was run, by name.
        predicted: what the costs predict for the same ways.
        settings: the settings of each way.
    """

    costs: StepCosts
    plain: float
    measured: dict[str, float]
    predicted: dict[str, float]
    settings: dict[str, SpecBranchConfig]

    @property
    def error(self) -> float:
        """Median relative error of the predictions."""
        return median(abs(self.predicted[name] / speed - 1) for name, speed in self.measured.items())


class _Run(NamedTuple):
    rounds: list[Round]
    seconds: float


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
    runs: dict[str, list[_Run]] = {name: [] for name in ways}
    plain_seconds = 0.0
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
                best[name] = min(best[name], seconds) if turn else best[name]
                tick()
        plain_seconds += best[PLAIN[0]] - best[PLAIN[1]]
        for name, way in ways.items():
            runs[name].append(_Run(replay(agreement, way), best[name]))
    apart = [run for name, way in ways.items() if not way.overlap for run in runs[name]]
    costs = _fit(apart)
    pairs = [(runs["pearl, no overlap"], runs["pearl"]), (runs["specbranch, no overlap"], runs["specbranch"])]
    costs = replace(costs, hidden=_hidden(costs, pairs))
    tokens = sum(len(agreement.rank) - 1 for agreement in agreements)
    measured = {name: tokens / sum(run.seconds for run in found) for name, found in runs.items()}
    predicted = {name: predict(agreements, way, costs).tokens_per_second for name, way in ways.items()}
    return Measurement(costs, tokens / plain_seconds, measured, predicted, ways)


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


def _fit(runs: Sequence[_Run]) -> StepCosts:
    """Least squares on relative errors, with no price below 0."""
    rows = [
        (
            len(run.rounds),
            sum(each.sent for each in run.rounds),
            sum(each.steps_before + each.steps_beside for each in run.rounds),
            sum(each.steps_beside * max(0, each.width - 1) for each in run.rounds),
        )
        for run in runs
    ]
    counts = torch.tensor(rows, dtype=torch.float64) / torch.tensor([[run.seconds] for run in runs])  # [N, 4]
    ones = torch.ones((len(runs), 1), dtype=torch.float64)
    kept = [0, 1, 2, 3]
    while True:
        prices = torch.linalg.lstsq(counts[:, kept], ones, driver="gelsd").solution[:, 0]
        if bool((prices >= 0).all()):
            break
        kept.remove(kept[int(prices.argmin())])
    found = dict(zip(kept, prices.tolist()))
    return StepCosts(*(found.get(index, 0.0) for index in range(4)))


def _hidden(costs: StepCosts, pairs: Sequence[tuple[list[_Run], list[_Run]]]) -> float:
    """The part of what could overlap that did: (time without - time with) / sum of min(pass, drafting)."""
    saved = could = 0.0
    for apart, beside in pairs:
        saved += sum(run.seconds for run in apart) - sum(run.seconds for run in beside)
        rounds = [each for run in apart for each in run.rounds]
        could += costs.seconds(rounds) - replace(costs, hidden=1.0).seconds(rounds)
    return min(1.0, max(0.0, saved / could)) if could else 0.0
