"""Rotary embeddings that depend on the length of the text (`rope_type` "longrope" and "dynamic").

Their frequencies are chosen once per pass, by the largest position in it. Plain `generate()` decodes one token per
pass, so each new token has the frequencies of its own length. A pass over several drafted tokens must give each of them
the same, whatever else is in the pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .module_walk import every_module

LENGTH_DEPENDENT = ("longrope", "dynamic")


class LengthDependentRotary:
    """The rotary modules of a model whose frequencies depend on length.

    Example:
        >>> from hf_specbranch import load_demo_pair
        >>> target, _, _ = load_demo_pair()
        >>> bool(LengthDependentRotary(target))
        False
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.modules = [module for module in every_module(model) if _depends_on_length(module)]

    def __bool__(self) -> bool:
        return bool(self.modules)

    @contextmanager
    def for_lengths(self, lengths: Tensor) -> Iterator[None]:
        """In this pass give each token the frequencies of its own length.

        Args:
            lengths: [B, Q] the length of the text that ends with each token, in the longest row.
        """
        with ExitStack() as stack:
            if self.modules and int(lengths.max()) > min(map(_first_limit, self.modules)):
                for module in self.modules:
                    stack.enter_context(_per_token(module, lengths))
            yield

    def advance(self, length: int, like: Tensor) -> None:
        """Leave the modules in the state of a plain run whose last pass reached this length."""
        for module in self.modules:
            for layer_type in _types(module):
                module(like, position_ids=torch.full((1, 1), length - 1, device=like.device), **layer_type)


@contextmanager
def _per_token(module: nn.Module, lengths: Tensor) -> Iterator[None]:
    own = module.forward

    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        chosen: list[Tensor] = []
        for length in torch.unique(lengths).tolist():  # waits for the device: such models are not captured
            # The largest position decides, so that of every other token becomes this length's last one.
            positions = torch.where(lengths == length, position_ids, length - 1)
            positions = torch.cat([positions, torch.full_like(positions[..., :1], length - 1)], dim=-1)
            with _unchanged(module):
                found = [each[..., :-1, :] for each in own(x, positions, *args, **kwargs)]
            here = (lengths == length)[..., None]
            chosen = [torch.where(here, *pair) for pair in zip(found, chosen or found)]
        return tuple(chosen)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Frequencies that a call computes are kept by the module; restores those it had."""
    attributes, buffers = dict(module.__dict__), dict(module._buffers)
    try:
        yield
    finally:
        module._buffers.clear()
        module._buffers.update(buffers)
        module.__dict__.update(attributes)


def _depends_on_length(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    return any(str(kind) in LENGTH_DEPENDENT for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))


def _types(module: nn.Module) -> list[dict[str, str]]:
    kinds = module.rope_type
    return [{"layer_type": name} for name in kinds] if isinstance(kinds, dict) else [{}]


def _first_limit(module: Any) -> int:
    """The length up to which frequencies are the original ones."""
    limits = [module.original_max_seq_len]
    settings = module.config.rope_parameters
    for each in settings.values() if isinstance(module.rope_type, dict) else [settings]:
        limits.append((each or {}).get("original_max_position_embeddings") or module.original_max_seq_len)
    return int(min(limits))
