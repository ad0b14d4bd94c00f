"""A benchmark's report as a picture: speed-up, rollback, accepted tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def check_plots(option: str) -> None:
    """Refuse before any work if there is nothing to draw with.

    Args:
        option: what asked for a picture, for the message.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise OSError(f"{option} needs matplotlib: pip install 'hf_specbranch[plot]', or leave it out")


def save_speedup(report: dict[str, Any], path: str | Path) -> None:
    """Draw a report of `hf-specbranch bench` (its JSON) and write a PNG.

    Args:
        report: what `--json` writes.
        path: the picture to write.

    Example:
        >>> import json
        >>> save_speedup(json.load(open("bench.json")), "bench.png")  # doctest: +SKIP
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ways = report["ways"]
    figure = Figure(figsize=(14, 1.8 + 0.32 * max(len(ways), 6)), layout="constrained")
    FigureCanvasAgg(figure)
    speed, rollback, accepted = figure.subplots(1, 3, width_ratios=(5, 4, 5))
    _bars(speed, ways, "ratio_to_plain", "speed over plain generate()", "{:.2f}x")
    _bars(rollback, ways, "rollback_rate", "rollback rate", "{:.2f}")
    rollback.set_xlim(0, 1)
    _histogram(accepted, ways)
    given = report["versions"]
    figure.suptitle(f"{given['device']}, torch {given['torch']}, transformers {given['transformers']}", fontsize=9)
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.tmp")
    figure.savefig(unfinished, format="png", dpi=120)
    unfinished.replace(path)


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
