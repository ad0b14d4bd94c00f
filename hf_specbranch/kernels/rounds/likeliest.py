"""Tokens of a distribution in order of probability, one at a time."""

from __future__ import annotations

from ..backend import Value, constexpr, jit, tl


@jit
def next_likeliest(
    scores: Value, size: Value, apart: Value, last_value: Value, last_index: Value, BLOCK: constexpr
) -> Value:
    """The likeliest token behind the last one (by probability, then by number), `apart` left out: (value, index)."""
    offsets = tl.arange(0, BLOCK)
    best_value = -1.0
    best_index = 0
    for first in range(0, size, BLOCK):
        index = first + offsets
        value = tl.load(scores + index, mask=index < size, other=-1.0)
        behind = (value < last_value) | ((value == last_value) & (index > last_index))
        value = tl.where((index < size) & (index != apart) & behind, value, -1.0)
        here = tl.max(value, 0)
        best_index = tl.where(here > best_value, first + tl.argmax(value, 0), best_index)
        best_value = tl.maximum(best_value, here)
    return best_value, best_index
