"""Settings for a pair on this machine: first by replay, then the best few by measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import NamedTuple

from transformers import PreTrainedModel

from ..config import SpecBranchConfig
from ..decoding.assembly import is_cheap
from .agreement import Agreement, record_agreement
from .chooser import WORTH_OVERLAPPING
from .costs import StepCosts
from .measure import Inputs, Measurement, decode_seconds, generations, measure_costs, plain_run_seconds
from .replay import settled
from .simulate import Prediction, predict

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
THRESHOLDS = (0.0, 0.2, 0.4, 0.6, 0.8)
BRANCHES = (1, 2, 4, 8)
POLICIES = ("vanilla", "pearl", "specbranch")


class Ranked(NamedTuple):
    """A choice of settings and what is expected of it."""

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
    """Every choice on the grid, the fastest predicted first; of equals the one that drafts less.

    Args:
        agreements: recordings.
        costs: what a step takes.
        policies: where to search.
        runtime: put into the settings.
        captured: stages are captured, as on CUDA.
        cheap: the draft is small beside its target.

    Example:
        >>> from hf_specbranch.planning.simulate import Agreement, StepCosts
        >>> from hf_specbranch.planning.tune import rank
        >>> always_right = Agreement(confidence=(0.9,) * 65, rank=(0,) * 65, candidates=8)
        >>> best = rank([always_right], StepCosts(target_pass=0.01, draft_step=0.0001))[0]
        >>> best.config.max_draft_length
        16
    """
    overlap = costs.hidden >= WORTH_OVERLAPPING
    found = []
    for policy in policies:
        thresholds = THRESHOLDS if policy != "pearl" else THRESHOLDS[:1]  # it never stops early
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
            found.append(Ranked(config, predict(agreements, settled(config, captured, cheap), costs, captured)))
    return sorted(found, key=lambda each: (-each.prediction.tokens_per_second, each.prediction.draft_steps_per_pass))


@dataclass(frozen=True)
class Trial:
    """Settings that were run."""

    config: SpecBranchConfig
    predicted: float
    measured: float  # tokens per second behind the first token


@dataclass(frozen=True)
class Tuning:
    """The outcome of a search.

    Args:
        trials: what was run, the fastest first.
        plain: tokens per second of plain `generate()`, measured in turn with them.
        auto: those of the default, which plans for itself, likewise.
        measurement: step costs here.
        ranked: everything on the grid, the fastest predicted first.
    """

    trials: list[Trial]
    plain: float
    auto: float
    measurement: Measurement
    ranked: list[Ranked]

    @property
    def best(self) -> SpecBranchConfig:
        """The fastest of what was run; these settings stay as they are, whatever the text."""
        return self.trials[0].config


def tune(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Inputs],
    max_new_tokens: int = 64,
    policies: Sequence[str] = POLICIES,
    finalists: int = 6,
    repeats: int = 2,
    runtime: str = "auto",
    tick: Callable[[], None] = lambda: None,
) -> Tuning:
    """Search gamma, epsilon and the number of branches on these prompts, greedy.

    Args:
        model: the target, with SpecBranch attached.
        draft: the draft.
        prompts: tokenized prompts.
        max_new_tokens: how much text each is to give.
        policies: where to search.
        finalists: how many choices to measure, beside the defaults.
        repeats: runs of each on each prompt.
        runtime: as in `SpecBranchConfig`.
        tick: called after every generation; `tuning_generations` says how often.

    Example:
        >>> from hf_specbranch import load_demo_pair, specbranch
        >>> from hf_specbranch.planning.tune import tune
        >>> target, draft, tokenizer = load_demo_pair()
        >>> prompts = [tokenizer("def add(a, b):", return_tensors="pt")]
        >>> found = tune(specbranch(target), draft, prompts, max_new_tokens=12, finalists=1, repeats=1)
        >>> found.best.to_json_file("tuned.json")  # doctest: +SKIP
    """
    prompts, agreements = record_all(model, draft, prompts, max_new_tokens, tick)
    if not agreements:
        raise ValueError("the target ends every text after one token: give other prompts")
    measurement = measure_costs(model, draft, prompts, agreements, runtime=runtime, repeats=1, tick=tick)
    costs, captured, cheap = measurement.costs, measurement.captured, is_cheap(model, draft)
    ranked = rank(agreements, costs, policies, runtime, captured, cheap)
    chosen = {each.config: each.prediction.tokens_per_second for each in _finalists(ranked, finalists)}
    defaults = [SpecBranchConfig(policy=policy, runtime=runtime) for policy in policies]
    for config in defaults:
        said = predict(agreements, settled(config, captured, cheap), costs, captured)
        chosen.setdefault(config, said.tokens_per_second)
    auto = SpecBranchConfig(runtime=runtime)
    speeds: dict[SpecBranchConfig, list[float]] = {config: [] for config in (*chosen, auto)}
    plain = []
    for turn in range(repeats + 1):  # the first is a warm-up
        for inputs, agreement in zip(prompts, agreements):
            count = len(agreement.rank)
            for config in speeds:
                seconds = decode_seconds(model, draft, inputs, config, count)
                if turn:
                    speeds[config].append((count - 1) / seconds)
                tick()
            seconds = plain_run_seconds(model, inputs, count) - plain_run_seconds(model, inputs, 1)
            if turn:
                plain.append((count - 1) / seconds)
            tick()
    trials = [Trial(config, chosen[config], median(speeds[config])) for config in chosen]
    trials.sort(key=lambda trial: -trial.measured)
    return Tuning(trials, median(plain), median(speeds[auto]), measurement, ranked)


def record_all(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Inputs],
    max_new_tokens: int,
    tick: Callable[[], None],
) -> tuple[list[Inputs], list[Agreement]]:
    """The prompts that give more than one token, and a recording of each."""
    agreements = []
    for inputs in prompts:
        agreements.append(record_agreement(model, draft, inputs, max_new_tokens, candidates=max(BRANCHES) + 1))
        tick()
    useful = [index for index, agreement in enumerate(agreements) if len(agreement.rank) > 1]
    return [prompts[index] for index in useful], [agreements[index] for index in useful]


def tuning_generations(prompts: int, finalists: int, repeats: int, policies: int) -> int:
    """At most how often `tune` will tick."""
    return prompts + generations(prompts, repeats=1) + prompts * (repeats + 1) * (finalists + policies + 2)


def _finalists(ranked: Sequence[Ranked], count: int) -> list[Ranked]:
    """The best of each policy, then the best of all; no two that are predicted to do exactly the same rounds.

    Predictions err less within a policy than between policies, so none is left unmeasured.
    """
    first = {each.config.policy: each for each in reversed(ranked)}
    found: list[Ranked] = []
    for each in [*sorted(first.values(), key=ranked.index), *ranked]:
        if len(found) < count and all(each.prediction != other.prediction for other in found):
            found.append(each)
    return found
