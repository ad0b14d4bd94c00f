"""Search fixed settings for a pair on this machine: rank them all by replay, then measure the best few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import NamedTuple

from transformers import PreTrainedModel

from ..config import SpecBranchConfig
from ..decoding.assembly import is_cheap
from ..progress import Progress
from ..runtime.selection import check_model, check_pair
from .agreement import Agreement, record_agreement
from .chooser import MIN_HIDDEN
from .costs import StepCosts
from .measure import Inputs, Measurement, decode_seconds, generations, measure_costs, plain_run_seconds
from .replay import effective_config
from .simulate import Prediction, predict

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
THRESHOLDS = (0.0, 0.2, 0.4, 0.6, 0.8)
BRANCHES = (1, 2, 4, 8)
POLICIES = ("vanilla", "pearl", "specbranch")


class Ranked(NamedTuple):
    """Settings and their predicted speed."""

    config: SpecBranchConfig
    prediction: Prediction


def rank(
    agreements: Sequence[Agreement],
    costs: StepCosts,
    policies: Sequence[str] = POLICIES,
    runtime: str = "auto",
    captured: bool = False,
    cheap: bool = True,
) -> list[Ranked]:
    """Return all settings on the grid, the fastest predicted first; among equals, the one with fewer draft steps.

    Args:
        agreements: recordings.
        costs: step costs.
        policies: the policies to search.
        runtime: as in `SpecBranchConfig`.
        captured: stages are captured as CUDA graphs.
        cheap: the draft is small compared with its target.

    Example:
        >>> from hf_specbranch.planning import Agreement, StepCosts
        >>> from hf_specbranch.planning.tune import rank
        >>> always_right = Agreement(confidence=(0.9,) * 65, rank=(0,) * 65, candidates=8)
        >>> best = rank([always_right], StepCosts(target_pass=0.01, draft_step=0.0001))[0]
        >>> best.config.max_draft_length
        16
    """
    overlap = costs.hidden >= MIN_HIDDEN
    ranked = []
    for policy in policies:
        thresholds = THRESHOLDS if policy != "pearl" else THRESHOLDS[:1]  # it ignores the threshold
        branches = BRANCHES if policy == "specbranch" else BRANCHES[:1]
        for length, threshold, count in product(LENGTHS, thresholds, branches):
            config = SpecBranchConfig(
                policy=policy,
                max_draft_length=length,
                confidence_threshold=threshold,
                max_branches=count,
                overlap=overlap,
                runtime=runtime,
            )
            prediction = predict(agreements, effective_config(config, captured, cheap), costs, captured)
            ranked.append(Ranked(config, prediction))
    return sorted(ranked, key=lambda each: (-each.prediction.tokens_per_second, each.prediction.draft_steps_per_pass))


@dataclass(frozen=True)
class Trial:
    """Settings that were measured; speeds in tokens per second after the first token."""

    config: SpecBranchConfig
    predicted: float
    measured: float


@dataclass(frozen=True)
class Tuning:
    """The result of a search.

    Args:
        trials: the settings that were measured, the fastest first.
        plain: tokens per second of plain `generate()`, measured in turn with them.
        auto: tokens per second of `policy="auto"`, measured in turn with them.
        measurement: the step costs on this machine.
        ranked: all settings on the grid, the fastest predicted first.
    """

    trials: list[Trial]
    plain: float
    auto: float
    measurement: Measurement
    ranked: list[Ranked]

    @property
    def best(self) -> SpecBranchConfig:
        """The fastest measured settings. They are fixed: no planner adapts them to the text."""
        return self.trials[0].config

    @property
    def prediction_error(self) -> float:
        """The median relative error of the predicted speeds. They only decide which settings are measured."""
        return median(abs(trial.predicted / trial.measured - 1) for trial in self.trials)


def tune(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Inputs],
    max_new_tokens: int = 64,
    policies: Sequence[str] = POLICIES,
    finalists: int = 6,
    repeats: int = 2,
    runtime: str = "auto",
    progress: Progress | None = None,
) -> Tuning:
    """Search gamma, epsilon and the number of branches with greedy decoding on these prompts.

    Args:
        model: the target, with SpecBranch attached.
        draft: the draft.
        prompts: tokenized prompts.
        max_new_tokens: tokens to generate per prompt.
        policies: the policies to search.
        finalists: how many settings to measure, in addition to the defaults.
        repeats: how often each is run per prompt.
        runtime: as in `SpecBranchConfig`.
        progress: receives what is measured; advances after every generation, at most `tuning_generations` times.

    Example:
        >>> from hf_specbranch import load_demo_pair, specbranch
        >>> from hf_specbranch.planning.tune import tune
        >>> target, draft, tokenizer = load_demo_pair()
        >>> prompts = [tokenizer("def add(a, b):", return_tensors="pt")]
        >>> tuning = tune(specbranch(target), draft, prompts, max_new_tokens=12, finalists=1, repeats=1)
        >>> tuning.best.to_json_file("tuned.json")  # doctest: +SKIP
    """
    progress = progress or Progress()
    check_model(model, "target")
    check_model(draft, "draft")
    check_pair(model, draft, None, None)
    prompts, agreements = record_all(model, draft, prompts, max_new_tokens, progress)
    if not agreements:
        raise ValueError("the target ends every text after one token: give other prompts")
    measurement = measure_costs(model, draft, prompts, agreements, runtime=runtime, repeats=1, progress=progress)
    costs, captured, cheap = measurement.costs, measurement.captured, is_cheap(model, draft)
    ranked = rank(agreements, costs, policies, runtime, captured, cheap)
    chosen = {each.config: each.prediction.tokens_per_second for each in _finalists(ranked, finalists)}
    defaults = [SpecBranchConfig(policy=policy, runtime=runtime) for policy in policies]
    for config in defaults:
        prediction = predict(agreements, effective_config(config, captured, cheap), costs, captured)
        chosen.setdefault(config, prediction.tokens_per_second)
    auto = SpecBranchConfig(runtime=runtime)
    speeds: dict[SpecBranchConfig, list[float]] = {config: [] for config in (*chosen, auto)}
    plain = []
    for turn in range(repeats + 1):  # the first is a warm-up
        where = f"run {turn} of {repeats}" if turn else "warm-up"
        for inputs, agreement in zip(prompts, agreements):
            count = len(agreement.rank)
            for config in speeds:
                progress.doing(f"measuring {_in_words(config)}, {where}")
                seconds = decode_seconds(model, draft, inputs, config, count)
                if turn:
                    speeds[config].append((count - 1) / seconds)
                progress.advance()
            progress.doing(f"measuring plain generate(), {where}")
            seconds = plain_run_seconds(model, inputs, count) - plain_run_seconds(model, inputs, 1)
            if turn:
                plain.append((count - 1) / seconds)
            progress.advance()
    trials = [Trial(config, chosen[config], median(speeds[config])) for config in chosen]
    trials.sort(key=lambda trial: -trial.measured)
    return Tuning(trials, median(plain), median(speeds[auto]), measurement, ranked)


def record_all(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Inputs],
    max_new_tokens: int,
    progress: Progress,
) -> tuple[list[Inputs], list[Agreement]]:
    """Return the prompts whose texts have more than one token, and a recording of each."""
    agreements = []
    for number, inputs in enumerate(prompts, start=1):
        progress.doing(f"recording text {number} of {len(prompts)}")
        agreements.append(record_agreement(model, draft, inputs, max_new_tokens, candidates=max(BRANCHES) + 1))
        progress.advance()
    useful = [index for index, agreement in enumerate(agreements) if len(agreement.rank) > 1]
    return [prompts[index] for index in useful], [agreements[index] for index in useful]


def tuning_generations(prompts: int, finalists: int, repeats: int, policies: int) -> int:
    """Return the most often that `tune` advances its progress."""
    return prompts + generations(prompts, repeats=1) + prompts * (repeats + 1) * (finalists + policies + 2)


def _in_words(config: SpecBranchConfig) -> str:
    if config.policy == "auto":
        return "auto"
    return f"{config.policy}: gamma {config.draft_length}, epsilon {config.threshold()}, k {config.max_branches}"


def _finalists(ranked: Sequence[Ranked], count: int) -> list[Ranked]:
    """Return the best settings of each policy, then the best of all, leaving out those with an equal prediction.

    Predictions are more accurate within a policy than between policies, so each policy is measured at least once.
    """
    first = {each.config.policy: each for each in reversed(ranked)}
    finalists: list[Ranked] = []
    for each in [*sorted(first.values(), key=ranked.index), *ranked]:
        if len(finalists) < count and all(each.prediction != other.prediction for other in finalists):
            finalists.append(each)
    return finalists
