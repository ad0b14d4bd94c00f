"""Measure a head: how good its predictions are, and what they do to rollback and tokens per pass."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..bench.prompts import Prompt
from ..config import SpecBranchConfig
from ..stats import SpecBranchStats
from .collect import PairRunner, collect
from .dataset import UNBOUNDED, CollectSettings, labels, prompts_record, read_samples
from .metrics import (
    accuracy,
    best_confidence_threshold,
    confidence_prediction,
    confusion,
    first_confidence_prediction,
    macro_f1,
    majority_class,
)
from .model import LengthHead
from .network import HeadInputs

ROW_NAMES = {
    "head": "head",
    "head_decisions": "head, as it decides",
    "confidence": "best threshold on confidence",
    "first_confidence": "best threshold on the first token's confidence",
    "majority": "majority class",
}
LEGEND = (
    "macro-F1: mean over the classes none, some, all. head: its likeliest class; as it decides: with its thresholds.",
    "rollback rate: rolled back / (accepted + rolled back) draft tokens. tokens per pass: new tokens per target pass.",
    "branch hits: fraction of the branch points at which a branch matched the target's choice.",
)


@dataclass(frozen=True)
class EvalSettings:
    """How a head is measured.

    Args:
        temperatures: every method is measured at each; 0 is greedy.
        max_new_tokens: tokens per prompt.
        batch_size: prompts at a time.
        max_branches: k_max.
        seed: seed of the sampled runs.
    """

    temperatures: tuple[float, ...] = (0.0, 0.8)
    max_new_tokens: int = 128
    batch_size: int = 40
    max_branches: int = 4
    seed: int = 0


def evaluate(
    head: LengthHead,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: Any,
    prompts: list[Prompt],
    prompt_file: Path,
    settings: EvalSettings,
    progress: bool = True,
) -> dict[str, Any]:
    """Measure a head on prompts it was not trained on.

    Args:
        head: what to measure.
        target: its target.
        draft: its draft model.
        tokenizer: the pair's.
        prompts: texts that were not used to train it.
        prompt_file: where they came from.
        settings: how to measure.
        progress: show progress bars.

    Returns:
        `predictions` (accuracy, macro-F1 and confusion of the head and of two baselines), `runs` (rollback rate and
        tokens per target pass of each method at each temperature) and the settings.

    Raises:
        ValueError: the head was made for another pair, or trained on these prompts.
    """
    head.check_pair(target, draft, tokenizer)
    record = prompts_record(prompt_file, [prompt.prompt for prompt in prompts])
    known = head.config.training.get("prompts", {})
    if record["sha256"] in [each.get("sha256") for each in known.get("sets", [known])]:
        raise ValueError(f"the head was trained on {prompt_file}: measure it on other prompts")
    predictions = measure_predictions(head, target, draft, tokenizer, prompts, prompt_file, settings, progress)
    runs = measure_runs(head, target, draft, tokenizer, prompts, settings, progress)
    return {
        "prompts": record,
        "max_new_tokens": settings.max_new_tokens,
        "gamma": head.config.gamma,
        "confidence_threshold": head.config.confidence_threshold,
        "seed": settings.seed,
        "predictions": predictions,
        "runs": runs,
    }


def measure_predictions(
    head: LengthHead,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: Any,
    prompts: list[Prompt],
    prompt_file: Path,
    settings: EvalSettings,
    progress: bool,
) -> dict[str, Any]:
    """Return accuracy and macro-F1 of the head's likeliest class and of baselines fitted to these very drafts."""
    config = head.config
    wanted = CollectSettings(
        gamma=config.gamma,
        confidence_threshold=config.confidence_threshold,
        max_branches=settings.max_branches,
        temperatures=settings.temperatures,
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.batch_size,
        max_samples=UNBOUNDED,
        num_layers=config.num_layers,
        drafted_tokens=config.drafted_tokens,
        seed=settings.seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        collect(target, draft, tokenizer, prompts, prompt_file, Path(folder), wanted, progress)
        _, samples = read_samples(Path(folder))
    truth = labels(samples)
    inputs = HeadInputs(**{name: samples[name] for name in HeadInputs._fields}).matrix(config)
    device = head.mean.device
    with torch.no_grad():
        logits = head.eval()(inputs.to(device)).cpu()
        decided = head.predict(inputs.to(device)).cpu()
    threshold = best_confidence_threshold(samples, truth)
    predictions = {
        "head": logits.argmax(-1),
        "head_decisions": decided,
        "confidence": confidence_prediction(samples, threshold),
        "first_confidence": first_confidence_prediction(samples, truth),
        "majority": torch.full_like(truth, majority_class(truth)),
    }
    return {
        "drafts": len(truth),
        "confidence_threshold": threshold,
        **{name: _scores(truth, prediction) for name, prediction in predictions.items()},
    }


def _scores(truth: Tensor, prediction: Tensor) -> dict[str, Any]:
    return {
        "accuracy": accuracy(truth, prediction),
        "macro_f1": macro_f1(truth, prediction),
        "confusion": confusion(truth, prediction).tolist(),
    }


def measure_runs(
    head: LengthHead,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: Any,
    prompts: list[Prompt],
    settings: EvalSettings,
    progress: bool,
) -> list[dict[str, Any]]:
    """Run each method at each temperature over all prompts, with the same gamma and the same seeds."""
    config = SpecBranchConfig(
        policy="specbranch",
        max_draft_length=head.config.gamma,
        confidence_threshold=head.config.confidence_threshold,
        max_branches=settings.max_branches,
    )
    methods = {
        "vanilla, fixed length": replace(config, policy="vanilla", confidence_threshold=0.0),
        "vanilla": replace(config, policy="vanilla"),
        "pearl": replace(config, policy="pearl"),
        "specbranch": config,
        "specbranch + head": replace(config, length_head=head),
    }
    runner = PairRunner(target, draft, tokenizer)
    plan = [(temperature, name) for temperature in settings.temperatures for name in methods]
    runs = []
    for temperature, name in tqdm(plan, unit="run", disable=not progress):
        total = SpecBranchStats()
        for first in range(0, len(prompts), settings.batch_size):
            texts = [prompt.prompt for prompt in prompts[first : first + settings.batch_size]]
            runner.generate(
                texts, temperature, settings.max_new_tokens, settings.seed + first, specbranch=methods[name]
            )
            _add(total, runner.model.specbranch_stats)
        runs.append(
            {
                "temperature": temperature,
                "method": name,
                "rollback_rate": total.rollback_rate,
                "tokens_per_pass": total.mean_acceptance_length,
                "branch_hit_rate": total.branch_hit_rate,
                "new_tokens": total.new_tokens,
                "rollback_tokens": total.rollback_tokens,
                "wasted_branch_tokens": total.wasted_branch_tokens,
                "num_draft_tokens": total.num_draft_tokens,
            }
        )
    return runs


COUNTS = (
    "new_tokens",
    "row_passes",
    "num_draft_tokens",
    "num_accepted_tokens",
    "rollback_tokens",
    "wasted_branch_tokens",
    "branch_points",
    "branch_hits",
)


def _add(total: SpecBranchStats, part: SpecBranchStats) -> None:
    for name in COUNTS:
        setattr(total, name, getattr(total, name) + getattr(part, name))


def eval_table(result: dict[str, Any]) -> str:
    """Format the result of `evaluate` as two tables: predictions, and their effect on decoding."""
    predictions = result["predictions"]
    lines = [
        f"{result['prompts']['number']} prompts of {result['prompts']['file']}, {result['max_new_tokens']} new tokens, "
        f"gamma {result['gamma']}, epsilon {result['confidence_threshold']}, seed {result['seed']}",
        "",
        f"{'predictions for ' + format(predictions['drafts'], ',') + ' drafts':48s} macro-F1  accuracy",
    ]
    for name, words in ROW_NAMES.items():
        lines.append(f"{words:48s} {predictions[name]['macro_f1']:8.3f}  {predictions[name]['accuracy']:8.3f}")
    lines += ["", f"{'temperature':12s} {'method':24s} rollback rate  tokens per pass  branch hits"]
    for run in result["runs"]:
        lines.append(
            f"{run['temperature']:<12} {run['method']:24s} {run['rollback_rate']:13.3f}  "
            f"{run['tokens_per_pass']:15.3f}  {run['branch_hit_rate']:11.3f}"
        )
    return "\n".join([*lines, "", *LEGEND])
