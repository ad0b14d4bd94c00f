"""How well verdicts fit outcomes, and what they would have cost."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from .model import ALL, CLASSES, NONE, SOME, verdict_by_thresholds


def confusion(truth: Tensor, verdict: Tensor) -> Tensor:
    """[3, 3] how often truth (row) was given which verdict (column)."""
    n = len(CLASSES)
    return torch.bincount(truth * n + verdict, minlength=n * n).view(n, n)


def macro_f1(truth: Tensor, verdict: Tensor) -> float:
    """Mean over the classes of 2 tp / (2 tp + fp + fn); a class that occurs nowhere counts as 0."""
    table = confusion(truth, verdict).double()
    hits = table.diagonal()
    f1 = 2 * hits / (table.sum(0) + table.sum(1)).clamp(min=1)
    return float(f1.mean())


def accuracy(truth: Tensor, verdict: Tensor) -> float:
    return float((truth == verdict).double().mean())


def majority_verdict(truth: Tensor) -> int:
    return int(torch.bincount(truth, minlength=len(CLASSES)).argmax())


def confidence_verdict(samples: dict[str, Tensor], threshold: float) -> Tensor:
    """[N] what one threshold on confidence says: none if it stops at once, all if it never stops, else some."""
    inside = torch.arange(samples["confidence"].shape[1]) < samples["length"][:, None]
    sure = (samples["confidence"] >= threshold) | ~inside  # [N, G]
    verdict = torch.where(sure.all(1), ALL, SOME)
    return torch.where(sure[:, 0], verdict, NONE)


def best_confidence_threshold(samples: dict[str, Tensor], truth: Tensor) -> float:
    """The threshold with the highest macro-F1 on these lines."""
    grid = [step / 100 for step in range(100)]
    return max(grid, key=lambda threshold: macro_f1(truth, confidence_verdict(samples, threshold)))


def first_confidence_verdict(samples: dict[str, Tensor], truth: Tensor) -> Tensor:
    """[N] the best that one threshold on the first token's confidence can say: two classes, one on either side."""
    confidence = samples["confidence"][:, 0]
    rules = ((step / 100, low, high) for step in range(100) for low in range(3) for high in range(3) if low < high)
    verdicts = (torch.where(confidence < threshold, low, high) for threshold, low, high in rules)
    return max(verdicts, key=lambda verdict: macro_f1(truth, verdict))


class Effect(NamedTuple):
    """What a rule of cutting would have led to, one round a line."""

    tokens_per_pass: float
    rollback_tokens: float  # a line


def confidence_cut(samples: dict[str, Tensor], epsilon: float) -> Tensor:
    """[N] how many tokens confidence sends: up to the first below epsilon; all of a line that stopped there."""
    inside = torch.arange(samples["confidence"].shape[1]) < samples["length"][:, None]
    sure = (samples["confidence"] >= epsilon) & inside
    fresh = samples["kind"][:, 0] > 0
    return torch.where(fresh, samples["length"], sure.long().cumprod(1).sum(1))


def effect(samples: dict[str, Tensor], verdict: Tensor, epsilon: float) -> Effect:
    """With `n` tokens sent, `a` of the line acceptable: `1 + min(a, n)` come out, `n - min(a, n)` roll back."""
    options = torch.stack([torch.zeros_like(verdict), confidence_cut(samples, epsilon), samples["length"]])
    sent = options.gather(0, verdict[None])[0]
    kept = torch.minimum(sent, samples["accepted"])
    return Effect(float(1 + kept.double().mean()), float((sent - kept).double().mean()))


def choose_thresholds(
    probabilities: Tensor, samples: dict[str, Tensor], epsilon: float, max_token_loss: float, aim: str = "rollback"
) -> tuple[float, float]:
    """The best thresholds for a purpose, judged at every temperature by itself.

    Args:
        probabilities: [N, 3] a head's, on lines it was not fitted to.
        samples: these lines.
        epsilon: the confidence threshold the head will work beside.
        max_token_loss: the part of the tokens per pass (without a head) that may be given up.
        aim: "rollback": roll back least among those that keep the tokens per pass. "tokens": most tokens per
            pass among those that also roll back no more than without a head.

    Returns:
        `(none_threshold, all_threshold)`; 1.0 never speaks.
    """
    temperature = samples.get("temperature", torch.zeros(len(probabilities)))
    groups = [
        (probabilities[rows], {name: values[rows] for name, values in samples.items()})
        for rows in (temperature == value for value in sorted(set(temperature.tolist())))
    ]
    silent = [effect(lines, torch.full((len(given),), SOME), epsilon) for given, lines in groups]
    grid = [step / 50 for step in range(5, 51)]
    best, best_score = (1.0, 1.0), _score(silent, aim)
    for thresholds in itertools.product(grid, grid):
        reached = [effect(lines, verdict_by_thresholds(given, *thresholds), epsilon) for given, lines in groups]
        allowed = all(
            now.tokens_per_pass >= (1 - max_token_loss) * alone.tokens_per_pass
            and (aim == "rollback" or now.rollback_tokens <= alone.rollback_tokens)
            for now, alone in zip(reached, silent)
        )
        if allowed and (score := _score(reached, aim)) > best_score:
            best, best_score = thresholds, score
    return best


def _score(effects: list[Effect], aim: str) -> float:
    if aim == "tokens":
        return sum(each.tokens_per_pass for each in effects)
    return -sum(each.rollback_tokens for each in effects)
