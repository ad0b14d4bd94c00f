"""Pictures of what was measured; they need matplotlib, from the extra `plot`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ..planning.tune import Tuning


def check_plots(option: str) -> None:
    """Refuse before any work if matplotlib is not installed.

    Args:
        option: the option that needs it, for the message.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise OSError(f"{option} needs matplotlib: pip install 'hf_specbranch[plot]', or leave it out")


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a PNG; an existing picture is replaced only once the new one is complete."""
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.tmp")
    figure.savefig(unfinished, format="png", dpi=120)
    unfinished.replace(path)


def save_speedup(report: dict[str, Any], path: str | Path) -> None:
    """Draw a report of `hf-specbranch bench` (its JSON): speed-up, rollback and accepted tokens.

    Args:
        report: what `--json` writes.
        path: the picture to write.

    Example:
        >>> import json
        >>> save_speedup(json.load(open("bench.json")), "bench.png")  # doctest: +SKIP
    """
    methods = report["methods"]
    figure = new_figure(14, 1.8 + 0.32 * max(len(methods), 6))
    speed, rollback, accepted = figure.subplots(1, 3, width_ratios=(5, 4, 5))
    if "plain" in methods:
        _bars(speed, methods, "ratio_to_plain", "speed over plain generate()", "{:.2f}x")
    else:
        _bars(speed, methods, "tokens_per_second", "tokens per second", "{:.1f}")
    _bars(rollback, methods, "rollback_rate", "rollback rate", "{:.2f}")
    rollback.set_xlim(0, 1)
    _histogram(accepted, methods)
    given = report["versions"]
    figure.suptitle(f"{given['device']}, torch {given['torch']}, transformers {given['transformers']}", fontsize=9)
    save_figure(figure, path)


def _bars(axes: Any, methods: dict[str, Any], key: str, title: str, form: str) -> None:
    """Draw one bar per method; ours are blue."""
    known = {name: row[key] for name, row in methods.items() if row[key] is not None}
    colors = ["tab:blue" if methods[name]["settings"] else "tab:gray" for name in known]
    bars = axes.barh(list(known), list(known.values()), color=colors)
    axes.bar_label(bars, labels=[form.format(value) for value in known.values()], padding=2, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(title, fontsize=10)


def _histogram(axes: Any, methods: dict[str, Any]) -> None:
    """Draw how often a verification accepted so many draft tokens, as a fraction of all verifications."""
    for name, row in methods.items():
        counts = row["acceptance_histogram"]
        if counts and sum(counts) and row["rollback_rate"] is not None:
            axes.plot(range(len(counts)), [count / sum(counts) for count in counts], marker="o", ms=3, label=name)
    axes.set_title("draft tokens accepted per verification", fontsize=10)
    axes.set(ylabel="fraction of verifications", ylim=(0, None))
    if axes.lines:
        axes.legend(fontsize=7)


class Curve(NamedTuple):
    """Tokens per second of one policy by draft length."""

    name: str
    predicted: dict[int, float]
    measured: dict[int, float]


def draw_by_length(axes: Any, curves: list[Curve], plain: float | None = None) -> None:
    """Draw predictions as dashed lines and measurements as dots, one colour per policy."""
    for number, curve in enumerate(curves):
        color = f"C{number}"
        predicted = sorted(curve.predicted.items())
        axes.plot(*zip(*predicted), linestyle="--", marker=".", ms=3, color=color, label=f"{curve.name}, predicted")
        if measured := sorted(curve.measured.items()):
            axes.plot(*zip(*measured), linestyle="", marker="o", ms=5, color=color, label=f"{curve.name}, measured")
    if plain is not None:
        axes.axhline(plain, color="tab:gray", linewidth=1, label="plain generate()")
    lengths = sorted({length for curve in curves for length in curve.predicted})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.set(xlabel="maximum draft length", ylabel="tokens per second", ylim=(0, None))
    axes.legend(fontsize=7)


def tuning_curves(found: Tuning) -> list[Curve]:
    """Return the best prediction of each policy at each length, and what was measured there."""
    curves: dict[str, Curve] = {}
    for each in found.ranked:  # the fastest comes first
        curve = curves.setdefault(each.config.policy, Curve(each.config.policy, {}, {}))
        curve.predicted.setdefault(each.config.draft_length, each.prediction.tokens_per_second)
    for trial in found.trials:
        curve = curves[trial.config.policy]
        curve.measured.setdefault(trial.config.draft_length, trial.measured)
    return sorted(curves.values(), key=lambda curve: curve.name)


def save_by_length(found: Tuning, path: str | Path) -> None:
    """Draw what `tune` predicted and measured, and write a PNG.

    Args:
        found: the result of `hf_specbranch.planning.tune.tune`.
        path: the picture to write.

    Example:
        >>> save_by_length(tune(model, draft, prompts), "tuned.png")  # doctest: +SKIP
    """
    figure = new_figure(7, 4)
    axes = figure.subplots()
    draw_by_length(axes, tuning_curves(found), found.plain)
    axes.set_title("speed after the first token; predictions: the best settings at each length", fontsize=9)
    save_figure(figure, path)


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
    _grouped(tokens, result["runs"], "tokens_per_pass", "tokens per target pass")
    tokens.legend(title="temperature", fontsize=7, title_fontsize=7)
    figure.suptitle(f"{result['prompts']['number']} prompts, maximum draft length {result['gamma']}", fontsize=9)
    save_figure(figure, path)


def _grouped(axes: Any, runs: list[dict[str, Any]], key: str, title: str) -> None:
    """Draw one bar per method and temperature."""
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
