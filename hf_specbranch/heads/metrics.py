"""How good predictions are: scores, their effect on decoding, the thresholds that suit them, and pictures."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .network import ALL, CLASSES, NONE, SOME, prediction_by_thresholds


def confusion(truth: Tensor, prediction: Tensor) -> Tensor:
    """Return [3, 3] counts: true class by row, predicted class by column."""
    n = len(CLASSES)
    return torch.bincount(truth * n + prediction, minlength=n * n).view(n, n)


def macro_f1(truth: Tensor, prediction: Tensor) -> float:
    """Return the mean over the classes of 2 tp / (2 tp + fp + fn); a class that never occurs counts as 0."""
    table = confusion(truth, prediction).double()
    hits = table.diagonal()
    f1 = 2 * hits / (table.sum(0) + table.sum(1)).clamp(min=1)
    return float(f1.mean())


def accuracy(truth: Tensor, prediction: Tensor) -> float:
    return float((truth == prediction).double().mean())


def majority_class(truth: Tensor) -> int:
    return int(torch.bincount(truth, minlength=len(CLASSES)).argmax())


def confidence_prediction(samples: dict[str, Tensor], threshold: float) -> Tensor:
    """Return [N], predicted by one threshold on confidence: none if the first token is below it, all if no token is."""
    inside = torch.arange(samples["confidence"].shape[1]) < samples["length"][:, None]
    sure = (samples["confidence"] >= threshold) | ~inside  # [N, G]
    prediction = torch.where(sure.all(1), ALL, SOME)
    return torch.where(sure[:, 0], prediction, NONE)


def best_confidence_threshold(samples: dict[str, Tensor], truth: Tensor) -> float:
    """Return the confidence threshold with the highest macro-F1 on these drafts."""
    grid = [step / 100 for step in range(100)]
    return max(grid, key=lambda threshold: macro_f1(truth, confidence_prediction(samples, threshold)))


def first_confidence_prediction(samples: dict[str, Tensor], truth: Tensor) -> Tensor:
    """Return [N], the best prediction by one threshold on the first token's confidence: a class on either side."""
    confidence = samples["confidence"][:, 0]
    rules = ((step / 100, low, high) for step in range(100) for low in range(3) for high in range(3) if low < high)
    predictions = (torch.where(confidence < threshold, low, high) for threshold, low, high in rules)
    return max(predictions, key=lambda prediction: macro_f1(truth, prediction))


class Effect(NamedTuple):
    """What a rule for sending drafts would have led to, with one round per draft."""

    tokens_per_pass: float
    rollback_tokens: float  # per draft


def confidence_cut(samples: dict[str, Tensor], epsilon: float) -> Tensor:
    """Return [N], how many tokens confidence sends: up to the first below epsilon; all of a fresh draft."""
    inside = torch.arange(samples["confidence"].shape[1]) < samples["length"][:, None]
    sure = (samples["confidence"] >= epsilon) & inside
    fresh = samples["kind"][:, 0] > 0
    return torch.where(fresh, samples["length"], sure.long().cumprod(1).sum(1))


def effect(samples: dict[str, Tensor], prediction: Tensor, epsilon: float) -> Effect:
    """Return the effect: of `n` tokens sent, `a` acceptable, `1 + min(a, n)` commit and `n - min(a, n)` roll back."""
    options = torch.stack([torch.zeros_like(prediction), confidence_cut(samples, epsilon), samples["length"]])
    sent = options.gather(0, prediction[None])[0]
    kept = torch.minimum(sent, samples["accepted"])
    return Effect(float(1 + kept.double().mean()), float((sent - kept).double().mean()))


def choose_thresholds(
    probabilities: Tensor, samples: dict[str, Tensor], epsilon: float, max_token_loss: float, aim: str = "rollback"
) -> tuple[float, float]:
    """Return the best thresholds for an aim; the limits hold at every temperature by itself.

    Args:
        probabilities: [N, 3] a head's, on drafts it was not fitted to.
        samples: these drafts.
        epsilon: the confidence threshold that decides where the head predicts "some".
        max_token_loss: the fraction of the tokens per pass (without a head) that may be given up.
        aim: "rollback": the least rollback among thresholds that keep the tokens per pass. "tokens": the most tokens
            per pass among thresholds that also roll back no more than without a head.

    Returns:
        `(none_threshold, all_threshold)`; a class with threshold 1.0 is never predicted.
    """
    temperature = samples.get("temperature", torch.zeros(len(probabilities)))
    groups = [
        (probabilities[rows], {name: values[rows] for name, values in samples.items()})
        for rows in (temperature == value for value in sorted(set(temperature.tolist())))
    ]
    without = [effect(drafts, torch.full((len(given),), SOME), epsilon) for given, drafts in groups]
    grid = [step / 50 for step in range(5, 51)]
    best, best_score = (1.0, 1.0), _score(without, aim)
    for thresholds in itertools.product(grid, grid):
        reached = [effect(drafts, prediction_by_thresholds(given, *thresholds), epsilon) for given, drafts in groups]
        allowed = all(
            now.tokens_per_pass >= (1 - max_token_loss) * alone.tokens_per_pass
            and (aim == "rollback" or now.rollback_tokens <= alone.rollback_tokens)
            for now, alone in zip(reached, without)
        )
        if allowed and (score := _score(reached, aim)) > best_score:
            best, best_score = thresholds, score
    return best


def _score(effects: list[Effect], aim: str) -> float:
    if aim == "tokens":
        return sum(each.tokens_per_pass for each in effects)
    return -sum(each.rollback_tokens for each in effects)


def check_pictures() -> None:
    """Refuse, before the training starts, if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise OSError("pictures need matplotlib: pip install 'hf_specbranch[plot]', or pass --no-pictures")


def best_epoch(history: list[dict[str, float]]) -> int:
    """Return the epoch, counted from 1, whose weights a head has: the first with the highest macro-F1."""
    return 1 + max(range(len(history)), key=lambda epoch: history[epoch]["held_out_macro_f1"])


def save_pictures(history: list[dict[str, float]], confusion: Tensor, saved_f1: float, folder: Path) -> None:
    """Write learning_curve.png and confusion_matrix.png into a head's folder.

    Args:
        history: one entry per epoch.
        confusion: [3, 3] on the held-out prompts.
        saved_f1: the macro-F1 of the saved head on them, after its class offsets were fitted.
        folder: the head's.
    """
    _save(_learning_curve(history, saved_f1), folder / "learning_curve.png")
    _save(_confusion_matrix(confusion.double()), folder / "confusion_matrix.png")


def _figure() -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _learning_curve(history: list[dict[str, float]], saved_f1: float) -> Any:
    figure, axes = _figure()
    epochs = range(1, len(history) + 1)
    axes.plot(epochs, [entry["loss"] for entry in history], label="loss, fitted")
    axes.plot(epochs, [entry["held_out_loss"] for entry in history], label="loss, held out")
    axes.plot(epochs, [entry["held_out_macro_f1"] for entry in history], label="macro-F1, held out")
    axes.plot(best_epoch(history), saved_f1, "k*", label="macro-F1 as saved, with class offsets")
    axes.set(xlabel="epoch", ylim=(0, None))
    axes.legend()
    return figure


def _confusion_matrix(table: Tensor) -> Any:
    figure, axes = _figure()
    shares = table / table.sum(1, keepdim=True).clamp(min=1)
    image = axes.imshow(shares.tolist(), cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, label="share of the row")
    for row in range(len(CLASSES)):
        for column in range(len(CLASSES)):
            dark = float(shares[row, column]) > 0.5
            axes.text(
                column, row, int(table[row, column]), ha="center", va="center", color="white" if dark else "black"
            )
    ticks = range(len(CLASSES))
    axes.set(
        xticks=ticks,
        yticks=ticks,
        xticklabels=CLASSES,
        yticklabels=CLASSES,
        xlabel="predicted",
        ylabel="really accepted",
    )
    axes.set_title("held-out drafts, by count")
    return figure


def _save(figure: Any, path: Path) -> None:
    unfinished = path.with_name(f".{path.name}.tmp")
    figure.savefig(unfinished, format="png", dpi=120, bbox_inches="tight", pad_inches=0.1)  # equal margins
    unfinished.replace(path)
