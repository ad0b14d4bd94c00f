"""Turns visibility of slots into the attention masks that a model takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..kernels.attention_interface import original_attention

FULL, SLIDING = "full_attention", "sliding_attention"
# Attention implementations that take an explicit mask: a boolean one, and one that is added to the scores.
MASKED_ATTENTION = ("sdpa", "eager")


class MaskMaker:
    """Turns visibility [B, Q, S] into masks [B, 1, Q, S], one for each kind of layer in the model.

    Args:
        model: the model the masks are for.
        by_layer_type: return a dict keyed by layer type, as hybrid models take it; otherwise one mask.
    """

    def __init__(self, model: PreTrainedModel, by_layer_type: bool) -> None:
        config = model.config.get_text_config(decoder=True)
        self.by_layer_type = by_layer_type
        self.kinds = layer_kinds(config)
        self.window: int | None = getattr(config, "sliding_window", None)
        self.additive = original_attention(config) == "eager"
        self.dtype = model.dtype

    def __call__(self, visible: Tensor, positions: Tensor, slot_positions: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the masks of one pass.

        Args:
            visible: [B, Q, S] which slots each query attends to.
            positions: [B, Q] positions of the queries.
            slot_positions: [B, S] positions of the tokens in the slots.
        """
        masks = {
            kind: self._to_mask(self._within_window(kind, visible, positions, slot_positions)) for kind in self.kinds
        }
        return masks if self.by_layer_type else next(iter(masks.values()))

    def _within_window(self, kind: str, visible: Tensor, positions: Tensor, slot_positions: Tensor) -> Tensor:
        if kind == FULL or self.window is None:
            return visible
        return visible & (positions[:, :, None] - slot_positions[:, None, :] < self.window)

    def _to_mask(self, visible: Tensor) -> Tensor:
        mask = visible[:, None]  # [B, 1, Q, S]
        if not self.additive:
            return mask
        lowest = torch.finfo(self.dtype).min
        return torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill_(~mask, lowest)


def layer_kinds(config: Any) -> list[str]:
    """Return the kinds of attention among a model's layers, each once."""
    if (types := getattr(config, "layer_types", None)) is not None:
        return sorted(set(types))
    return [FULL if getattr(config, "sliding_window", None) is None else SLIDING]
