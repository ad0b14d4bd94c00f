"""Predicted and measured speed against draft length."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .drawing import new_figure, save_figure

if TYPE_CHECKING:
    from ..planning.tune import Tuning


class Curve(NamedTuple):
    """Tokens per second of one policy by draft length."""

    name: str
    predicted: dict[int, float]
    measured: dict[int, float]


def draw_by_length(axes: Any, curves: list[Curve], plain: float | None = None) -> None:
    """Dashed what was predicted, dots what was measured, one colour for each policy."""
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
    axes.set(xlabel="longest draft", ylabel="tokens a second", ylim=(0, None))
    axes.legend(fontsize=7)


def tuning_curves(found: Tuning) -> list[Curve]:
    """The best prediction of each policy at each length, and what was measured there."""
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
        found: the outcome of `hf_specbranch.planning.tune.tune`.
        path: the picture to write.

    Example:
        >>> save_by_length(tune(model, draft, prompts), "tuned.png")  # doctest: +SKIP
    """
    figure = new_figure(7, 4)
    axes = figure.subplots()
    draw_by_length(axes, tuning_curves(found), found.plain)
    axes.set_title("speed behind the first token; predictions: the best settings at each length", fontsize=9)
    save_figure(figure, path)
