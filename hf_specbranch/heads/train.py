"""Fit a head to recorded drafts, and first, if there are any, to texts that the target has read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from .config import LengthHeadConfig
from .dataset import Manifest, labels, read_folders
from .metrics import (
    accuracy,
    best_confidence_threshold,
    choose_thresholds,
    confidence_prediction,
    confusion,
    macro_f1,
    majority_class,
)
from .model import LengthHead
from .network import CLASSES, Expectation, HeadInputs, Reading
from .train_settings import TrainSettings

TEXT_DROPOUT = 0.1  # on the target's states while learning from texts
AFTER_TEXTS = 0.1  # factor on the learning rate of what was learnt from texts
LARGEST_CLASS_WEIGHT = 20.0  # a very rare class must not dominate the loss


@dataclass
class Fitted:
    """A head and how its training went."""

    head: LengthHead
    history: list[dict[str, float]]  # one entry per epoch
    confusion: Tensor  # [3, 3] on the held-out prompts
    report: dict[str, Any]


def train(
    data: Path | Sequence[Path],
    settings: TrainSettings,
    device: str = "cpu",
    progress: bool = True,
    reading: Reading | None = None,
) -> Fitted:
    """Fit a head to the drafts in one or more folders; the same seed gives the same head.

    Args:
        data: folders written by `collect` with the same pair and settings.
        settings: how to fit.
        device: where to fit.
        progress: show a progress bar.
        reading: texts as the target saw them (`dataset.read_texts`), from which the head first learns which tokens the
            target's states predict; without, it learns that from the drafts alone.

    Returns:
        The head of the best epoch, its thresholds chosen on the held-out prompts.

    Raises:
        FileNotFoundError, ValueError: the data is missing, damaged or too little.
    """
    manifest, samples = read_folders([data] if isinstance(data, Path) else data)
    fit, held = split_by_prompt(samples["prompt"], settings.held_out, settings.seed)
    truth = labels(samples)
    config = _config(manifest, settings)
    x = HeadInputs(**{name: samples[name] for name in HeadInputs._fields}).matrix(config)  # [N, F]
    torch.manual_seed(settings.seed)
    head = LengthHead(config).to(device)
    _standardise(head, x[fit])
    if reading is not None and config.matches:
        _fit_to_texts(head, reading, settings, progress)
    history = _fit(head, x.to(device), truth.to(device), fit, held, settings, progress, reading is not None)
    head = head.cpu().eval()
    with torch.no_grad():
        offsets, logits = best_offsets(head(x[fit]), truth[fit]), head(x[held])
        before, after = (macro_f1(truth[held], each.argmax(-1)) for each in (logits, logits + offsets))
        if after >= before:  # with little data they fit the drafts that they were chosen on, and no others
            head.layers[-1].bias.add_(offsets)  # type: ignore[operator]
    held_drafts = {name: values[held] for name, values in samples.items()}
    with torch.no_grad():
        probabilities = head(x[held]).softmax(-1)
    thresholds = choose_thresholds(
        probabilities, held_drafts, config.confidence_threshold, settings.max_token_loss, settings.aim
    )
    prediction = probabilities.argmax(-1)
    report = _report(manifest, samples, truth, fit, held, prediction, settings, len(history))
    head.config = replace(config, none_threshold=thresholds[0], all_threshold=thresholds[1], training=report)
    return Fitted(head, history, confusion(truth[held], prediction), report)


def split_by_prompt(prompt: Tensor, held_out: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the drafts to fit and of those held out; no prompt is on both sides."""
    numbers = torch.tensor(sorted(set(prompt.tolist())))
    if len(numbers) < 2:
        raise ValueError(f"the drafts come from {len(numbers)} prompt: at least 2 are needed to hold some out")
    order = numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))]
    held = torch.isin(prompt, order[: max(1, min(len(order) - 1, round(held_out * len(order))))])
    return (~held).nonzero()[:, 0], held.nonzero()[:, 0]


def best_offsets(logits: Tensor, truth: Tensor) -> Tensor:
    """Return [3], the offsets to logits [N, 3] with the highest macro-F1 of the likeliest class.

    Training with equal class weights predicts every class equally often. The macro-F1 is highest where rarer classes
    are predicted less often.
    """
    steps = [step / 10 for step in range(-6, 7)]
    choices = [torch.tensor([none, 0.0, everything]) for none in steps for everything in steps]
    choices.sort(key=lambda offsets: float(offsets.abs().sum()))  # of equally good ones, the smallest
    return max(choices, key=lambda offsets: macro_f1(truth, (logits + offsets).argmax(-1)))


def _config(manifest: Manifest, settings: TrainSettings) -> LengthHeadConfig:
    return LengthHeadConfig(
        target=manifest.target,
        draft=manifest.draft,
        gamma=manifest.settings.gamma,
        features=settings.features,
        num_layers=manifest.settings.num_layers,
        drafted_tokens=manifest.settings.drafted_tokens,
        match_size=settings.match_size,
        query_size=settings.query_size,
        layer_sizes=settings.layer_sizes,
        dropout=settings.dropout,
        confidence_threshold=manifest.settings.confidence_threshold,
        tokenizer_hash=manifest.tokenizer_hash,
    )


def _standardise(head: LengthHead, x: Tensor) -> None:
    """Set mean and deviation. Token embeddings share one scale and keep 0 at 0, so that they stay in one space."""
    std = x.std(0)
    head.mean.copy_(x.mean(0))
    head.std.copy_(torch.where(std > 1e-4, std, torch.ones_like(std)))
    if head.config.matches:
        first = head.config.context_size
        tokens = slice(first, first + head.config.feature_sizes["drafted"])
        one = x[:, tokens][:, : head.config.target.hidden_size]  # every draft has a first token
        head.mean[tokens], head.std[tokens] = 0.0, float(one.std().clamp(min=1e-4))


def _fit_to_texts(head: LengthHead, reading: Reading, settings: TrainSettings, progress: bool) -> None:
    """Fit the expectation to texts that the target has read."""
    config, device = head.config, head.mean.device
    parts = {"hidden": reading.hidden.flatten(1), "committed": reading.embeddings[reading.tokens[:, 0]]}
    context = torch.cat([part.float() for name, part in parts.items() if name in config.features], dim=1).to(device)
    size = config.context_size
    context = (context - head.mean[:size]) / head.std[:size]
    reading = Reading(*(values.to(device) for values in reading))
    table = reading.embeddings / head.std[size]
    learn_expectation(
        head.expectation, context, reading, table, settings.text_epochs, TEXT_DROPOUT, settings.seed, progress
    )


def learn_expectation(
    expectation: Expectation,
    context: Tensor,
    reading: Reading,
    table: Tensor,
    epochs: int,
    dropout: float,
    seed: int,
    progress: bool,
) -> list[float]:
    """Fit an expectation to texts that the target has read; return the loss of each epoch.

    Args:
        expectation: the module to fit, on the device of the tensors.
        context: [M, C] the states, standardised.
        reading: the target's predictions.
        table: [V, H] the embeddings, standardised.
        epochs: epochs over all positions.
        dropout: on the states.
        seed: seed of order and dropout.
        progress: show a progress bar.
    """
    batch_size, peak = 512, 2e-3
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(expectation.parameters(), lr=peak, weight_decay=0.02)
    steps = epochs * -(-len(context) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=steps + 1)
    losses = []
    for _ in (bar := tqdm(range(epochs), desc="texts", unit="epoch", disable=not progress)):
        total = 0.0
        for rows in torch.split(torch.randperm(len(context), generator=order), batch_size):
            part = reading.at(rows)
            loss = expectation.loss(nn.functional.dropout(context[rows], dropout), part, table)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * len(rows)
        losses.append(total / len(context))
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    return losses


def _rates(head: LengthHead, settings: TrainSettings, read: bool) -> list[dict[str, Any]]:
    """Return parameter groups: what was learnt from texts is only fine-tuned on the fewer drafts."""
    known = [weight for name, weight in head.named_parameters() if name.startswith("expectation.")]
    fresh = [weight for name, weight in head.named_parameters() if not name.startswith("expectation.")]
    slow = settings.learning_rate * (AFTER_TEXTS if read else 1.0)
    return [{"params": fresh}] + ([{"params": known, "lr": slow}] if known else [])


def _fit(
    head: LengthHead,
    x: Tensor,
    truth: Tensor,
    fit: Tensor,
    held: Tensor,
    settings: TrainSettings,
    progress: bool,
    read: bool,
) -> list[dict[str, float]]:
    """Train until the held-out macro-F1 stops rising, and leave the head at its best epoch."""
    counts = torch.bincount(truth[fit], minlength=len(CLASSES)).clamp(min=1)
    weights = (len(fit) / (len(CLASSES) * counts)).clamp(max=LARGEST_CLASS_WEIGHT)
    loss_of = nn.CrossEntropyLoss(weight=weights.to(x))
    optimizer = torch.optim.AdamW(
        _rates(head, settings, read), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    order = torch.Generator().manual_seed(settings.seed)
    history: list[dict[str, float]] = []
    best, best_state, best_epoch = -1.0, head.state_dict(), 0
    for epoch in (bar := tqdm(range(settings.epochs), unit="epoch", disable=not progress)):
        head.train()
        total = 0.0
        shuffled = fit[torch.randperm(len(fit), generator=order)]
        for batch in torch.split(shuffled, settings.batch_size):
            loss = loss_of(head(x[batch]), truth[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(batch)
        head.eval()
        with torch.no_grad():
            logits = head(x[held])
        f1 = macro_f1(truth[held].cpu(), logits.argmax(-1).cpu())
        held_loss = float(loss_of(logits, truth[held]))
        history.append({"loss": total / len(fit), "held_out_loss": held_loss, "held_out_macro_f1": f1})
        bar.set_postfix(loss=f"{total / len(fit):.3f}", macro_f1=f"{f1:.3f}")
        if f1 > best:
            best, best_epoch = f1, epoch
            best_state = {name: values.clone() for name, values in head.state_dict().items()}
        if epoch - best_epoch >= settings.patience:
            break
    head.load_state_dict(best_state)
    return history


def _report(
    manifest: Manifest,
    samples: dict[str, Tensor],
    truth: Tensor,
    fit: Tensor,
    held: Tensor,
    prediction: Tensor,
    settings: TrainSettings,
    epochs: int,
) -> dict[str, Any]:
    """Return what the model card says about the training. The keys belong to the file format: `lines` are drafts."""
    fit_drafts, held_drafts = ({name: values[rows] for name, values in samples.items()} for rows in (fit, held))
    threshold = best_confidence_threshold(fit_drafts, truth[fit])
    by_confidence = confidence_prediction(held_drafts, threshold)
    majority = torch.full_like(prediction, majority_class(truth[fit]))
    scores = {"head": prediction, "confidence": by_confidence, "majority": majority}
    return {
        "prompts": {**manifest.prompts, "number": len(set(samples["prompt"].tolist()))},
        "temperatures": list(manifest.settings.temperatures),
        "lines": len(truth),
        "held_out_lines": len(held),
        "classes": torch.bincount(truth, minlength=len(CLASSES)).tolist(),
        "epochs": epochs,
        "settings": {
            **asdict(settings),
            "features": list(settings.features),
            "layer_sizes": list(settings.layer_sizes),
        },
        "macro_f1": {name: round(macro_f1(truth[held], prediction), 4) for name, prediction in scores.items()},
        "accuracy": {name: round(accuracy(truth[held], prediction), 4) for name, prediction in scores.items()},
        "confidence_threshold": round(threshold, 2),
    }
