"""What a head is worth: how well it judges, and what that does to a generation."""

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
from .inputs import HeadInputs
from .metrics import (
    accuracy,
    best_confidence_threshold,
    confidence_verdict,
    confusion,
    first_confidence_verdict,
    macro_f1,
    majority_verdict,
)
from .model import LengthHead


@dataclass(frozen=True)
class EvalSettings:
    """How a head is measured.

    Args:
        temperatures: one round of measurements each; 0 is greedy.
        max_new_tokens: a prompt.
        batch_size: prompts at a time.
        max_branches: k_max.
        seed: of the sampled runs.
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
    """Judge the head on prompts it never saw.

    Args:
        head: what to measure.
        target: its target.
        draft: its draft.
        tokenizer: theirs.
        prompts: texts that were not used to train it.
        prompt_file: where they came from.
        settings: how.
        progress: show bars.

    Returns:
        `verdicts` (accuracy, macro-F1 and confusion of the head and of two baselines), `runs` (rollback rate and
        tokens per target pass of each method at each temperature) and what was measured on.

    Raises:
        ValueError: the head was made for another pair, or trained on these prompts.
    """
    head.check_pair(target, draft, tokenizer)
    record = prompts_record(prompt_file, [prompt.prompt for prompt in prompts])
    known = head.config.training.get("prompts", {})
    if record["sha256"] in [each.get("sha256") for each in known.get("sets", [known])]:
        raise ValueError(f"the head was trained on {prompt_file}: measure it on prompts it never saw")
    verdicts = judge_verdicts(head, target, draft, tokenizer, prompts, prompt_file, settings, progress)
    runs = measure_runs(head, target, draft, tokenizer, prompts, settings, progress)
    return {
        "prompts": record,
        "max_new_tokens": settings.max_new_tokens,
        "gamma": head.config.gamma,
        "confidence_threshold": head.config.confidence_threshold,
        "seed": settings.seed,
        "verdicts": verdicts,
        "runs": runs,
    }


def judge_verdicts(
    head: LengthHead,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: Any,
    prompts: list[Prompt],
    prompt_file: Path,
    settings: EvalSettings,
    progress: bool,
) -> dict[str, Any]:
    """Accuracy and macro-F1 of the head's likeliest class and of baselines fitted to these very lines."""
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
        decided = head.verdict(inputs.to(device)).cpu()
    threshold = best_confidence_threshold(samples, truth)
    said = {
        "head": logits.argmax(-1),
        "head_decisions": decided,
        "confidence": confidence_verdict(samples, threshold),
        "first_confidence": first_confidence_verdict(samples, truth),
        "majority": torch.full_like(truth, majority_verdict(truth)),
    }
    return {
        "lines": len(truth),
        "confidence_threshold": threshold,
        **{name: _scores(truth, verdict) for name, verdict in said.items()},
    }


def _scores(truth: Tensor, verdict: Tensor) -> dict[str, Any]:
    return {
        "accuracy": accuracy(truth, verdict),
        "macro_f1": macro_f1(truth, verdict),
        "confusion": confusion(truth, verdict).tolist(),
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
    """Each method at each temperature over all prompts, same gamma, same seeds."""
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
