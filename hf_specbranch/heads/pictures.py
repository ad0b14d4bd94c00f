"""Learning curve and confusion matrix as pictures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from .model import CLASSES
from .train import Fitted


def check_pictures() -> None:
    """Refuse before the training if there is nothing to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise OSError("pictures need matplotlib: pip install 'hf_specbranch[plot]', or pass --no-pictures")


def save_pictures(fitted: Fitted, folder: Path) -> None:
    """Write learning_curve.png and confusion_matrix.png into the head's folder."""
    _save(_learning_curve(fitted.history), folder / "learning_curve.png")
    _save(_confusion(fitted), folder / "confusion_matrix.png")


def _figure() -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _learning_curve(history: list[dict[str, float]]) -> Any:
    figure, axes = _figure()
    epochs = range(1, len(history) + 1)
    axes.plot(epochs, [entry["loss"] for entry in history], label="loss, fitted")
    axes.plot(epochs, [entry["held_out_loss"] for entry in history], label="loss, held out")
    axes.plot(epochs, [entry["held_out_macro_f1"] for entry in history], label="macro-F1, held out")
    axes.set(xlabel="epoch", ylim=(0, None))
    axes.legend()
    return figure


def _confusion(fitted: Fitted) -> Any:
    figure, axes = _figure()
    table = fitted.confusion.double()
    shares = table / table.sum(1, keepdim=True).clamp(min=1)
    axes.imshow(shares.tolist(), cmap="Blues", vmin=0, vmax=1)
    for row in range(len(CLASSES)):
        for column in range(len(CLASSES)):
            dark = float(shares[row, column]) > 0.5
            axes.text(
                column, row, int(table[row, column]), ha="center", va="center", color="white" if dark else "black"
            )
    ticks = range(len(CLASSES))
    axes.set(xticks=ticks, yticks=ticks, xticklabels=CLASSES, yticklabels=CLASSES, xlabel="said", ylabel="accepted")
    return figure


def _save(figure: Any, path: Path) -> None:
    unfinished = path.with_name(f".{path.name}.tmp")
    figure.savefig(unfinished, format="png", dpi=120)
    unfinished.replace(path)
