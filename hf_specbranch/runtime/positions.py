"""How a model encodes positions: in a learned table, or by rotary embeddings that may depend on the text's length.

Rotary embeddings of `rope_type` "longrope" and "dynamic" choose their frequencies once per pass, by the largest
position in it. Plain `generate()` decodes one token per pass, so each new token has the frequencies of its own length.
A pass over several draft tokens must give each token those same frequencies, whatever else is in the pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..model_state import every_module

TABLE_OFFSET = 8  # entries that a table may have beyond its positions; OPT's has two
LENGTH_DEPENDENT = ("longrope", "dynamic")


def learned_positions(model: PreTrainedModel) -> int | None:
    """Return the size of a model's table of positions; None if it computes positions and so has no last one.

    Example:
        >>> from hf_specbranch import load_demo_pair
        >>> target, _, _ = load_demo_pair()
        >>> print(learned_positions(target))  # rotary
        None
    """
    limit: int | None = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is None:
        return None
    words = model.get_input_embeddings()
    tables = (module for module in every_module(model) if isinstance(module, nn.Embedding) and module is not words)
    return limit if any(limit <= table.num_embeddings <= limit + TABLE_OFFSET for table in tables) else None


class LengthDependentRotary:
    """Gives each token of a pass the rotary frequencies that plain decoding gives it.

    True if the model has rotary modules whose frequencies depend on the length of the text.

    Example:
        >>> from hf_specbranch import load_demo_pair
        >>> target, _, _ = load_demo_pair()
        >>> bool(LengthDependentRotary(target))
        False
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.modules = length_dependent(every_module(model))

    def __bool__(self) -> bool:
        return bool(self.modules)

    @contextmanager
    def for_lengths(self, lengths: Tensor) -> Iterator[None]:
        """Inside the context, each token gets the frequencies of its own length.

        Args:
            lengths: [B, Q] the length of the text that ends with each token, in the longest row.
        """
        with ExitStack() as stack:
            if self.modules and int(lengths.max()) > min(map(_first_limit, self.modules)):
                for module in self.modules:
                    stack.enter_context(_per_token(module, lengths))
            yield

    def advance(self, length: int, like: Tensor) -> None:
        """Put the modules into the state that plain decoding leaves after a pass that reached this length."""
        for module in self.modules:
            for layer_type in _layer_types(module):
                module(like, position_ids=torch.full((1, 1), length - 1, device=like.device), **layer_type)


@contextmanager
def _per_token(module: nn.Module, lengths: Tensor) -> Iterator[None]:
    """Replace a module's forward by one that computes each token with the frequencies of its own length, [B, Q]."""
    original = module.forward

    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        chosen: list[Tensor] = []
        for length in torch.unique(lengths).tolist():  # a sync: such models are never captured
            # The largest position chooses the frequencies: every other token gets the last position of this length.
            positions = torch.where(lengths == length, position_ids, length - 1)
            positions = torch.cat([positions, torch.full_like(positions[..., :1], length - 1)], dim=-1)
            with _unchanged(module):
                found = [each[..., :-1, :] for each in original(x, positions, *args, **kwargs)]
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
    """Restore the frequencies that a module had: a call keeps those that it computes."""
    attributes, buffers = dict(module.__dict__), dict(module._buffers)
    try:
        yield
    finally:
        module._buffers.clear()
        module._buffers.update(buffers)
        module.__dict__.update(attributes)


def length_dependent(modules: list[nn.Module]) -> list[nn.Module]:
    """Return the modules that compute rotary frequencies which depend on the length of the text."""
    kinds = {kind for kind in set(map(type, modules)) if hasattr(kind, "rope_type")}
    rotary = [module for module in modules if "rope_type" in module.__dict__ or type(module) in kinds]
    return [module for module in rotary if _depends_on_length(module.rope_type)]


def _depends_on_length(kinds: Any) -> bool:
    return any(str(kind) in LENGTH_DEPENDENT for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))


def _layer_types(module: nn.Module) -> list[dict[str, str]]:
    kinds = module.rope_type
    return [{"layer_type": name} for name in kinds] if isinstance(kinds, dict) else [{}]


def _first_limit(module: Any) -> int:
    """Return the length up to which the frequencies are the original ones."""
    limits = [module.original_max_seq_len]
    settings = module.config.rope_parameters
    for each in settings.values() if isinstance(module.rope_type, dict) else [settings]:
        limits.append((each or {}).get("original_max_position_embeddings") or module.original_max_seq_len)
    return int(min(limits))
