"""A benchmark's report as a picture: speed-up, rollback, accepted tokens; below, predicted against measured speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .by_length import Curve, draw_by_length
from .drawing import new_figure, save_figure


def save_speedup(report: dict[str, Any], path: str | Path) -> None:
    """Draw a report of `hf-specbranch bench` (its JSON) and write a PNG.

    Args:
        report: what `--json` writes.
        path: the picture to write.

    Example:
        >>> import json
        >>> save_speedup(json.load(open("bench.json")), "bench.png")  # doctest: +SKIP
    """
    ways, predictions = report["ways"], report.get("predictions")
    height = 1.8 + 0.32 * max(len(ways), 6)
    figure = new_figure(14, height + (4 if predictions else 0))
    above, below = figure.subfigures(2, 1, height_ratios=(height, 4)) if predictions else (figure, None)
    speed, rollback, accepted = above.subplots(1, 3, width_ratios=(5, 4, 5))
    if "plain" in ways:
        _bars(speed, ways, "ratio_to_plain", "speed over plain generate()", "{:.2f}x")
    else:
        _bars(speed, ways, "tokens_per_second", "tokens a second", "{:.1f}")
    _bars(rollback, ways, "rollback_rate", "rollback rate", "{:.2f}")
    rollback.set_xlim(0, 1)
    _histogram(accepted, ways)
    if below is not None:
        _predictions(below, report)
    given = report["versions"]
    figure.suptitle(f"{given['device']}, torch {given['torch']}, transformers {given['transformers']}", fontsize=9)
    save_figure(figure, path)


def _predictions(figure: Any, report: dict[str, Any]) -> None:
    """Each way's predicted and measured speed; by draft length where lengths were swept."""
    found = report["predictions"]
    sides = figure.subplots(1, 2 if found["by_length"] else 1, squeeze=False)[0]
    names = list(found["ways"])
    for what, marker in (("predicted", "|"), ("measured", "o")):
        speeds = [found["ways"][name][what]["tokens_per_second"] for name in names]
        sides[0].plot(speeds, names, linestyle="", marker=marker, ms=12 if marker == "|" else 6, mew=2, label=what)
    sides[0].invert_yaxis()
    sides[0].set(xlabel="tokens a second behind the first token", xlim=(0, None))
    off = found["median_error"]["tokens_per_second"]
    sides[0].set_title(f"each way at the step costs of the others: {off:.0%} off (median)", fontsize=10)
    sides[0].legend(fontsize=8)
    if found["by_length"]:
        curves = [
            Curve(name, *({row["max_draft_length"]: row[what] for row in rows} for what in ("predicted", "measured")))
            for name, rows in found["by_length"].items()
        ]
        draw_by_length(sides[1], curves)
        sides[1].set_title("fixed draft lengths", fontsize=10)


def _bars(axes: Any, ways: dict[str, Any], key: str, title: str, form: str) -> None:
    known = {name: row[key] for name, row in ways.items() if row[key] is not None}
    ours = ["tab:blue" if ways[name]["settings"] else "tab:gray" for name in known]
    bars = axes.barh(list(known), list(known.values()), color=ours)
    axes.bar_label(bars, labels=[form.format(value) for value in known.values()], padding=2, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(title, fontsize=10)


def _histogram(axes: Any, ways: dict[str, Any]) -> None:
    """How often a verdict accepted so many drafted tokens, as a part of all verdicts of a way."""
    for name, row in ways.items():
        counts = row["acceptance_histogram"]
        if counts and sum(counts) and row["rollback_rate"] is not None:
            axes.plot(range(len(counts)), [count / sum(counts) for count in counts], marker="o", ms=3, label=name)
    axes.set_title("drafted tokens accepted by a verdict", fontsize=10)
    axes.set(ylabel="part of verdicts", ylim=(0, None))
    if axes.lines:
        axes.legend(fontsize=7)
