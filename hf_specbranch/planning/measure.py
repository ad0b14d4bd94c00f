"""Measure the step costs of a pair with short generations.

Timing single forwards would leave out the loop around them and what the runtime does; captured graphs run several times
as fast as eager forwards. So every policy generates the same few texts, with and without overlap, and the costs are
fitted to the measured times: the four step costs and the hidden fraction that explain them best.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..config import SpecBranchConfig
from ..decoding.assembly import is_cheap
from ..progress import Progress
from ..stats import SpecBranchStats
from .agreement import Agreement
from .costs import StepCosts
from .replay import Round, effective_config, replay
from .simulate import predict

Inputs = dict[str, Tensor]
PLAIN = "plain generate()", "the first token of plain generate()"
HIDDEN_STEPS = 20  # the hidden fraction is searched in steps of 1/20
ITERATIONS = 4  # of the fit at a given hidden fraction


@dataclass(frozen=True)
class Measurement:
    """Step costs, and the runs they were fitted to.

    Args:
        costs: the fitted step costs.
        plain: tokens per second of plain `generate()`.
        measured: tokens per second of each run, by name.
        predicted: what the costs predict for the same runs.
        settings: the settings of each run.
        captured: stages were captured as CUDA graphs.
    """

    costs: StepCosts
    plain: float
    measured: dict[str, float]
    predicted: dict[str, float]
    settings: dict[str, SpecBranchConfig]
    captured: bool = False

    @property
    def error(self) -> float:
        """The median relative error of the predictions."""
        return median(abs(self.predicted[name] / speed - 1) for name, speed in self.measured.items())


class TimedRounds(NamedTuple):
    """The rounds of one generation, and the seconds they took after its first token."""

    rounds: list[Round]
    seconds: float
    overlap: bool = False


def measured_settings(max_draft_length: int, max_branches: int, runtime: str = "auto") -> dict[str, SpecBranchConfig]:
    """Return the settings to run, by name: they differ in draft lengths and branches, so that each cost shows."""

    def make(policy: str, **more: Any) -> SpecBranchConfig:
        fields = {
            "max_draft_length": max_draft_length,
            "max_branches": max_branches,
            "overlap": False,
            "runtime": runtime,
            **more,
        }
        return SpecBranchConfig(policy=policy, **fields)

    return {
        "autoregressive": make("autoregressive"),
        "vanilla, fixed length": make("vanilla", confidence_threshold=0.0),
        "vanilla": make("vanilla"),
        "pearl, no overlap": make("pearl"),
        "specbranch, one branch, no overlap": make("specbranch", max_branches=1),
        "specbranch, no overlap": make("specbranch"),
        "pearl": make("pearl", overlap=True),
        "specbranch": make("specbranch", overlap=True),
    }


def measure_costs(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Inputs],
    agreements: Sequence[Agreement],
    max_draft_length: int = 8,
    max_branches: int = 4,
    runtime: str = "auto",
    repeats: int = 2,
    progress: Progress | None = None,
) -> Measurement:
    """Generate each recorded text again with all `measured_settings`, and fit the step costs to the times.

    Args:
        model: the target, with SpecBranch attached.
        draft: the draft.
        prompts: tokenized prompts.
        agreements: a recording per prompt.
        max_draft_length: gamma of the settings.
        max_branches: k_max of the settings.
        runtime: as in `SpecBranchConfig`.
        repeats: how often each is timed; the fastest run counts.
        progress: receives what is timed; advances after every generation.
    """
    progress = progress or Progress()
    settings = measured_settings(max_draft_length, max_branches, runtime)
    times: dict[str, list[float]] = {name: [] for name in settings}
    plain_seconds, captured = 0.0, False
    for number, (inputs, agreement) in enumerate(zip(prompts, agreements), start=1):
        new_tokens = len(agreement.rank)
        best = dict.fromkeys((*settings, *PLAIN), float("inf"))
        for turn in range(repeats + 1):  # the first is a warm-up; in turns, so that a busy moment hits all alike
            for name in best:
                progress.doing(f"timing {name} on text {number} of {len(prompts)}")
                seconds = (
                    decode_seconds(model, draft, inputs, settings[name], new_tokens)
                    if name in settings
                    else plain_run_seconds(model, inputs, new_tokens if name == PLAIN[0] else 1)
                )
                captured = was_captured(model.specbranch_stats) if name in settings else captured
                best[name] = min(best[name], seconds) if turn else best[name]
                progress.advance()
        plain_seconds += best[PLAIN[0]] - best[PLAIN[1]]
        for name in settings:
            times[name].append(best[name])
    cheap = is_cheap(model, draft)
    settings = {name: effective_config(config, captured, cheap) for name, config in settings.items()}
    costs = fit_costs(
        TimedRounds(replay(agreement, config, captured), seconds, config.overlap)
        for name, config in settings.items()
        for agreement, seconds in zip(agreements, times[name])
    )
    tokens = sum(len(agreement.rank) - 1 for agreement in agreements)
    measured = {name: tokens / sum(seconds) for name, seconds in times.items()}
    predicted = {name: predict(agreements, each, costs, captured).tokens_per_second for name, each in settings.items()}
    return Measurement(costs, tokens / plain_seconds, measured, predicted, settings, captured)


def was_captured(stats: SpecBranchStats) -> bool:
    """Return whether the stages of a generation ran as captured CUDA graphs."""
    return stats.runtime not in ("", "eager") and not stats.slowed_by


def generations(prompts: int, repeats: int = 2) -> int:
    """Return how often `measure_costs` advances its progress."""
    return prompts * (repeats + 1) * (len(measured_settings(1, 1)) + len(PLAIN))


def decode_seconds(
    model: Any, draft: PreTrainedModel, inputs: Inputs, settings: SpecBranchConfig, new_tokens: int
) -> float:
    """Generate one greedy text and return its seconds after the first token."""
    model.generate(**inputs, assistant_model=draft, specbranch=settings, max_new_tokens=new_tokens, do_sample=False)
    return float(model.specbranch_stats.total_seconds - model.specbranch_stats.time_to_first_token)


def plain_run_seconds(model: Any, inputs: Inputs, new_tokens: int) -> float:
    """Generate one greedy text with plain `generate()` and return its seconds."""
    began = time.perf_counter()
    model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, specbranch=False)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - began


def fit_costs(runs: Iterable[TimedRounds]) -> StepCosts:
    """Fit step costs, none below 0, and the hidden fraction to these times: least squares on relative errors.

    The time of a round is linear in the costs once two things are given: the hidden fraction, and whether the pass or
    the overlapped drafting takes longer. The first is searched on a grid. The second follows from the costs, so the
    linear fit is iterated.

    Example:
        >>> from hf_specbranch.planning import Round
        >>> from hf_specbranch.planning.measure import TimedRounds, fit_costs
        >>> alone, two = [Round(0, 1, 0, 0, 0)] * 3, [Round(2, 3, 2, 0, 0)]
        >>> round(fit_costs([TimedRounds(alone, 0.03), TimedRounds(two, 0.014)]).target_pass, 3)
        0.01
    """
    counted = [_RoundCounts(Counter(each._replace(committed=0) for each in run.rounds), *run[1:]) for run in runs]
    overlaps = any(run.overlap and any(each.overlapped_steps for each in run.rounds) for run in counted)
    steps = HIDDEN_STEPS if overlaps else 0
    fits = [_fit(counted, step / max(1, steps)) for step in range(steps + 1)]
    return min(fits, key=lambda fit: fit[0])[1]


class _RoundCounts(NamedTuple):
    """A run as counts of its different rounds, which are few."""

    rounds: Counter[Round]
    seconds: float
    overlap: bool

    def predicted_seconds(self, costs: StepCosts) -> float:
        return sum(count * costs.seconds([each], self.overlap) for each, count in self.rounds.items())


def _fit(runs: Sequence[_RoundCounts], hidden: float) -> tuple[float, StepCosts]:
    """Return the sum of squared relative errors and the costs fitted at this hidden fraction."""
    seconds = torch.tensor([[run.seconds] for run in runs], dtype=torch.float64)
    ones = torch.ones_like(seconds)
    costs = StepCosts(target_pass=1.0, hidden=hidden)  # to begin with, passes take longer than overlapped drafting
    for _ in range(ITERATIONS):
        counts = torch.tensor([_step_counts(run, costs) for run in runs], dtype=torch.float64) / seconds  # [N, 4]
        kept = [0, 1, 2, 3]
        while True:
            solution = torch.linalg.lstsq(counts[:, kept], ones, driver="gelsd").solution[:, 0]
            if bool((solution >= 0).all()):
                break
            kept.remove(kept[int(solution.argmin())])
        fitted = dict(zip(kept, solution.tolist()))
        fitted[0] = max(fitted.get(0, 0.0), 1e-9)
        costs = StepCosts(fitted[0], fitted.get(1, 0.0), fitted.get(2, 0.0), fitted.get(3, 0.0), hidden)
    error = sum((run.predicted_seconds(costs) / run.seconds - 1) ** 2 for run in runs)
    return error, costs


def _step_counts(run: _RoundCounts, costs: StepCosts) -> tuple[float, float, float, float]:
    """Return how often a run pays each cost: passes, tokens in them, draft steps, branches in these.

    The shorter of a pass and its overlapped drafting counts only by the fraction that is not hidden.
    """
    passes = tokens = steps = branches = 0.0
    hidden = costs.hidden if run.overlap else 0.0
    for each, count in run.rounds.items():
        verify, drafting = costs.parts(each)
        visible_passes = count * (1 - hidden * (verify < drafting))
        visible_steps = count * (1 - hidden * (verify >= drafting)) * each.overlapped_steps
        passes += visible_passes
        tokens += visible_passes * each.sent
        steps += count * each.steps_before + visible_steps
        branches += visible_steps * max(0, each.width - 1)
    return passes, tokens, steps, branches
