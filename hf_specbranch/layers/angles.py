"""Cosines and sines of rotary positions through our kernel."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels.angles import angles
from ..kernels.rotation import Table
from ..model_state import every_module
from .base import Replacement

POSITIONS = 2047 * torch.arange(16)  # of the check


class AnglesForward(Replacement):
    """Replaces the module that computes cosines and sines of rotary positions.

    Args:
        module: the module.
        table: where it puts the angle of pair i, see `Rotation`.
        wide: it returns float32 whatever the dtype of the model is.
    """

    def __init__(self, module: Any, table: Table, wide: bool) -> None:
        super().__init__()
        self.module, self.table, self.wide = module, table, wide

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        frequencies, dtype = self.module.inv_freq, torch.float32 if self.wide else x.dtype
        scaling, neighbours = self.module.attention_scaling, self.table == "neighbours"
        cos, sin = angles(position_ids, frequencies, scaling, dtype, neighbours)
        if self.table == "once":
            cos, sin = cos[..., : len(frequencies)], sin[..., : len(frequencies)]
        return cos, sin


def looks_like_angles(module: Any) -> bool:
    """Return whether a module computes rotary angles from frequencies that do not depend on the length of the text."""
    frequencies = getattr(module, "inv_freq", None)
    return (
        isinstance(frequencies, Tensor)
        and frequencies.dim() == 1
        and isinstance(getattr(module, "attention_scaling", None), int | float)
        and getattr(module, "rope_type", None) in ("default", "linear", "llama3", "yarn")
    )


@torch.no_grad()
def recognise_angles(model: PreTrainedModel) -> dict[nn.Module, AnglesForward]:
    """Replace the modules that compute cosines and sines of positions; checked up to large positions."""
    found: dict[nn.Module, AnglesForward] = {}
    x = model.get_input_embeddings().weight[:1, None]
    positions = POSITIONS.to(x.device)[None]
    for module in every_module(model):
        if not looks_like_angles(module):
            continue
        for table in get_args(Table):
            try:
                own = module(x, positions)
                ours = AnglesForward(module, table, own[0].dtype == torch.float32)
                pairs = zip(ours(x, positions), own, strict=True)
                error = max(float((got.float() - expected.float()).abs().max()) for got, expected in pairs)
            except (TypeError, ValueError, RuntimeError, AttributeError):
                continue
            if error <= (1e-5 if own[0].dtype == torch.float32 else 8e-3):  # two units in the last place of bfloat16
                found[module] = ours
                break
    return found
