"""`hf-specbranch tune`: search fixed settings for a pair on this machine."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ..bench.plots import save_by_length
from ..bench.prompts import python_prompts, read_prompts
from ..config import POLICIES
from . import options
from .printing import Console, leaving_cleanly
from .progress import showing_progress

if TYPE_CHECKING:
    from ..planning.tune import Tuning

TUNED = tuple(policy for policy in POLICIES if policy not in ("auto", "autoregressive"))  # these have numbers to search


@options.with_model_options()
def tune(
    given: options.ModelOptions,
    out: Annotated[Path, typer.Option(help="Where to write the settings.")],
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with id and prompt. Default: our own.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Use N of them, drawn at random.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Per prompt.")] = 64,
    policy: Annotated[str | None, typer.Option(help="Search within one policy. Default: all.")] = None,
    finalists: Annotated[int, typer.Option(min=1, help="Settings to measure, in addition to the defaults.")] = 6,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each per prompt.")] = 2,
    runtime: options.Runtime = None,
    seed: Annotated[int, typer.Option(help="For drawing the prompts.")] = 0,
    png: Annotated[Path | None, typer.Option(help="Plot predicted and measured speed by draft length.")] = None,
    as_json: options.Json = False,
) -> None:
    """Search draft length, confidence threshold and branches, and write the best settings as JSON.

    Hundreds of settings are replayed on recorded texts, and the best few are measured.

    Example: hf-specbranch tune --prompts mine.jsonl --out tuned.json

    Then: hf-specbranch generate "def add(a, b):" --config tuned.json
    """
    with leaving_cleanly():
        if policy is not None and policy not in TUNED:
            raise ValueError(f"--policy {policy}: expected one of {', '.join(TUNED)}")
        options.check_file("--out", out)
        options.check_picture(png)
        texts = [each.prompt for each in (read_prompts(prompts) if prompts else python_prompts())]
        drawn = random.Random(seed).sample(texts, min(num_prompts, len(texts)))
        given.check()
        with showing_progress(quiet=as_json) as progress:
            progress.doing("importing torch and transformers")
            import torch

            from ..attach import specbranch
            from ..planning.tune import tune as run_tune
            from ..planning.tune import tuning_generations

            progress.doing("loading the models")
            torch.manual_seed(seed)
            large, small, tokenizer = given.open_pair()
        inputs = [dict(tokenizer(text, return_tensors="pt").to(large.device)) for text in drawn]
        policies = [policy] if policy is not None else TUNED
        total = tuning_generations(len(drawn), finalists, repeat, len(policies))
        with showing_progress(total, quiet=as_json) as progress:
            tuning = run_tune(
                specbranch(large),
                small,
                inputs,
                max_new_tokens,
                policies,
                finalists,
                repeat,
                runtime or "auto",
                progress,
            )
        tuning.best.to_json_file(out)
        if png is not None:
            save_by_length(tuning, png)
        if as_json:
            print(json.dumps(_as_dict(tuning, out)))
        else:
            _show(tuning, out)


def _as_dict(tuning: Tuning, out: Path) -> dict[str, object]:
    trials = [
        {"settings": trial.config.to_dict(), "predicted": trial.predicted, "measured": trial.measured}
        for trial in tuning.trials
    ]
    return {
        "out": str(out),
        "best": tuning.best.to_dict(),
        "plain": tuning.plain,
        "auto": tuning.auto,
        "prediction_error": tuning.prediction_error,
        "trials": trials,
    }


def _show(tuning: Tuning, out: Path) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("policy")
    for name in ("gamma", "epsilon", "k", "predicted", "measured"):
        table.add_column(name, justify="right")
    for trial in tuning.trials:
        config = trial.config
        numbers = f"{config.draft_length}", f"{config.threshold()}", f"{config.max_branches}"
        table.add_row(config.policy, *numbers, f"{trial.predicted:.1f}", f"{trial.measured:.1f}")
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "\ngamma: most tokens drafted at once; epsilon: drafting stops below this confidence; k: most branches. "
        "Predictions replay the recorded texts at the step costs measured first. They choose what is measured; the "
        f"measured speed decides. Their median error was {tuning.prediction_error:.0%}."
    )
    console.print(
        f'\nTokens per second. Plain generate() reaches {tuning.plain:.1f}, the default (policy "auto") '
        f"{tuning.auto:.1f}."
    )
    fastest = tuning.trials[0].measured
    if max(fastest, tuning.auto) < tuning.plain:
        console.print("None of them is faster than plain generate() here: generate without a draft.")
    elif fastest <= tuning.auto:
        console.print("The default is at least as fast as the best of these: no settings are needed.")
    console.print(f"The fastest settings are written to {out}")
