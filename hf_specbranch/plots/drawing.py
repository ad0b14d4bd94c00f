"""What all pictures share."""

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


def new_figure(width: float, height: float) -> Any:
    """An empty figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a PNG; a picture that was there stays whole until the new one is."""
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.tmp")
    figure.savefig(unfinished, format="png", dpi=120)
    unfinished.replace(path)
