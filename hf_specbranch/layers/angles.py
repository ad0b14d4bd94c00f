"""Cosines and sines of rotary positions through our kernel."""

from __future__ import annotations

import logging
import math
from collections.abc import Container
from functools import cache
from itertools import product
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels.angles import angles
from ..kernels.rotation import Table
from ..model_state import every_module
from .base import Replacement
from .kept_errors import error_of

logger = logging.getLogger(__name__)

POSITIONS = 2047 * torch.arange(16)  # of the check
AXES = 3  # time, height and width, where a text may contain images


class AnglesForward(Replacement):
    """Replaces the module that computes cosines and sines of rotary positions.

    Positions may be given on several axes, [axes, B, Q]; some modules take nothing else. If all axes share one memory,
    the text has no images and one axis tells all.

    Args:
        module: the module.
        table: where it puts the angle of pair i, see `Rotation`.
        wide: it returns float32 whatever the dtype of the model is.
        dims: how many dimensions positions may have, 2 or 3. Others are left to the module.
    """

    def __init__(self, module: Any, table: Table, wide: bool, dims: Container[int] = (2, 3)) -> None:
        super().__init__()
        self.module, self.table, self.wide, self.dims = module, table, wide, dims

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        given = position_ids
        if given.ndim == 3 and len(given) == AXES and given.stride(0) == 0:
            position_ids = given[0]
        if given.ndim not in self.dims or position_ids.ndim != 2:  # the module joins different axes in its own way
            cos, sin = type(self.module).forward(self.module, x, given, *_named(layer_type))
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
    x = model.get_input_embeddings().weight[:1, None]
    found = ((module, _recognise(module, x)) for module in every_module(model) if layer_types_of(module))
    return {module: ours for module, ours in found if ours is not None}


def _recognise(module: nn.Module, x: Tensor) -> AnglesForward | None:
    """Return a replacement for the positions for which it computes what the module does; None if there are none."""

    def positions(dims: int) -> Tensor:
        line = POSITIONS.to(x.device)
        return line[None] if dims == 2 else line.expand(AXES, 1, -1)

    @cache
    def expected(dims: int) -> list[tuple[Tensor, Tensor]]:
        return _outputs(module, x, positions(dims))

    def error(ours: AnglesForward, dims: int) -> float:
        return error_of(module, lambda: _error(ours, x, positions(dims), expected(dims)))

    for table, wide in product(get_args(Table), (False, True)):
        ours = AnglesForward(module, table, wide)
        if taken := [dims for dims in (2, 3) if error(ours, dims) <= 1]:
            return AnglesForward(module, table, wide, taken)
    logger.info("%s computes rotary angles by its own code", type(module).__name__)
    return None


def _outputs(module: nn.Module, x: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return cosines and sines by type of layer; nothing if the module does not take such positions."""
    outputs: list[tuple[Tensor, Tensor]] = []
    try:
        for layer_type in layer_types_of(module):
            cos, sin = module(x, positions, *_named(layer_type))
            outputs.append((cos, sin))
    except Exception as error:  # most modules take positions of one shape only
        logger.debug("%s does not take positions %s: %r", type(module).__name__, list(positions.shape), error)
        return []
    return outputs


def _error(ours: AnglesForward, x: Tensor, positions: Tensor, expected: list[tuple[Tensor, Tensor]]) -> float:
    """Return the largest difference over the largest that passes; infinity if there is nothing to compare with."""
    errors = [math.inf] if not expected else []
    for layer_type, outputs in zip(layer_types_of(ours.module), expected):
        for one, other in zip(ours(x, positions, layer_type), outputs, strict=True):
            if one.shape != other.shape or one.dtype != other.dtype:
                return math.inf
            most = 1e-5 if other.dtype == torch.float32 else 8e-3  # two units in the last place of bfloat16
            errors.append(float((one.float() - other.float()).abs().max()) / most)
    return max(errors)


def _named(layer_type: str | None) -> tuple[str, ...]:
    return () if layer_type is None else (layer_type,)
