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

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        if position_ids.ndim > 2:  # on several axes, which the module joins in a way of its own
            cos, sin = type(self.module).forward(self.module, x, position_ids)
            return cos, sin
        frequencies, scaling = frequencies_of(self.module, layer_type)
        dtype = torch.float32 if self.wide else x.dtype
        cos, sin = angles(position_ids, frequencies, scaling, dtype, self.table == "neighbours")
        if self.table == "once":
            cos, sin = cos[..., : len(frequencies)], sin[..., : len(frequencies)]
        return cos, sin


def frequencies_of(module: Any, layer_type: str | None) -> tuple[Any, Any]:
    """Return the frequencies for layers of a type and the factor of cosines and sines; None where they are missing."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    return getattr(module, f"{prefix}inv_freq", None), getattr(module, f"{prefix}attention_scaling", None)


def layer_types_of(module: Any) -> list[str | None]:
    """Return the types of layers that a module computes rotary angles for; [None] if it does so for all layers at once.

    Nothing for other modules, and where frequencies depend on the length of the text.
    """
    kinds = getattr(module, "rope_type", None)
    by_type: dict[str | None, Any] = kinds if isinstance(kinds, dict) else {None: kinds}
    for layer_type, kind in by_type.items():
        frequencies, scaling = frequencies_of(module, layer_type)
        usable = isinstance(frequencies, Tensor) and frequencies.dim() == 1 and isinstance(scaling, int | float)
        if not usable or kind not in ("default", "linear", "llama3", "yarn"):
            return []
    return list(by_type)


@torch.no_grad()
def recognise_angles(model: PreTrainedModel) -> dict[nn.Module, AnglesForward]:
    """Replace the modules that compute cosines and sines of positions; checked up to large positions."""
    found: dict[nn.Module, AnglesForward] = {}
    x = model.get_input_embeddings().weight[:1, None]
    positions = POSITIONS.to(x.device)[None]
    for module in every_module(model):
        calls = [(x, positions) if each is None else (x, positions, each) for each in layer_types_of(module)]
        for table in get_args(Table) if calls else ():
            try:
                wide = module(*calls[0])[0].dtype == torch.float32
                ours = AnglesForward(module, table, wide)
                error = max(_error(ours(*call), module(*call)) for call in calls)
            except (TypeError, ValueError, RuntimeError, AttributeError):
                continue
            if error <= (1e-5 if wide else 8e-3):  # two units in the last place of bfloat16
                found[module] = ours
                break
    return found


def _error(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
    return max(float((one.float() - other.float()).abs().max()) for one, other in zip(got, expected, strict=True))
