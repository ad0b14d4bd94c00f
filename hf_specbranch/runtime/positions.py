"""How many positions a model knows, if it looks them up."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from .module_walk import every_module

OFFSET = 8  # entries that a table may have besides; OPT's has two


def learned_positions(model: PreTrainedModel) -> int | None:
    """The size of a model's table of positions; None if it computes them, so that there is always a next one.

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
    return limit if any(limit <= table.num_embeddings <= limit + OFFSET for table in tables) else None
