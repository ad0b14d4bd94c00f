"""The settings of training a length head."""

from __future__ import annotations

from dataclasses import dataclass

from .config import FEATURES


@dataclass(frozen=True)
class TrainSettings:
    """How a head is fitted.

    Args:
        features: what it reads; see `LengthHeadConfig`.
        match_size: see `LengthHeadConfig`.
        query_size: see `LengthHeadConfig`.
        layer_sizes: widths of its hidden layers.
        dropout: on them, and on the target's features.
        epochs: the largest number of epochs.
        patience: stop after this many epochs without a better macro-F1 on the held-out prompts.
        batch_size: drafts per step.
        learning_rate: of AdamW.
        weight_decay: of AdamW.
        held_out: fraction of the prompts kept for early stopping and for choosing the thresholds.
        text_epochs: epochs over the positions of the texts, if texts were read.
        max_token_loss: fraction of the tokens per pass that the thresholds may give up for less rollback.
        aim: what the thresholds are chosen for, "rollback" or "tokens"; see `metrics.choose_thresholds`.
        seed: seed of the split, the weights and the order.
    """

    features: tuple[str, ...] = FEATURES
    match_size: int = 48
    query_size: int = 256
    layer_sizes: tuple[int, ...] = (256, 64)
    dropout: float = 0.3
    epochs: int = 40
    patience: int = 8
    batch_size: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    held_out: float = 0.2
    text_epochs: int = 6
    max_token_loss: float = 0.01
    aim: str = "rollback"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.aim not in ("rollback", "tokens"):
            raise ValueError(f"aim={self.aim!r}: expected 'rollback' or 'tokens'")
