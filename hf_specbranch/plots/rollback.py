"""What `head eval` found: rollback and tokens a pass by policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .drawing import new_figure, save_figure


def save_rollback(result: dict[str, Any], path: str | Path) -> None:
    """Draw the runs of `hf-specbranch head eval` (its JSON) and write a PNG.

    Args:
        result: what `--json` prints.
        path: the picture to write.

    Example:
        >>> import json
        >>> save_rollback(json.load(open("eval.json")), "rollback.png")  # doctest: +SKIP
    """
    figure = new_figure(11, 3.4)
    rollback, tokens = figure.subplots(1, 2)
    _grouped(rollback, result["runs"], "rollback_rate", "rollback rate")
    rollback.set_xlim(0, 1)
    _grouped(tokens, result["runs"], "tokens_per_pass", "tokens a target pass")
    tokens.legend(title="temperature", fontsize=7, title_fontsize=7)
    figure.suptitle(f"{result['prompts']['number']} prompts, drafts of at most {result['gamma']}", fontsize=9)
    save_figure(figure, path)


def _grouped(axes: Any, runs: list[dict[str, Any]], key: str, title: str) -> None:
    """A bar for each method and temperature."""
    methods = list(dict.fromkeys(run["method"] for run in runs))
    temperatures = list(dict.fromkeys(run["temperature"] for run in runs))
    height = 0.8 / len(temperatures)
    for number, temperature in enumerate(temperatures):
        values = {run["method"]: run[key] for run in runs if run["temperature"] == temperature}
        places = [methods.index(method) + (number + 0.5) * height - 0.4 for method in values]
        bars = axes.barh(places, list(values.values()), height=height * 0.95, label=f"{temperature:g}")
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
    axes.set_yticks(range(len(methods)), methods, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(title, fontsize=10)
