"""Spans: which slots each query of a pass sees, as four numbers.

A query sees the text up to its place, and on a branch its own slots:

    first <= slot < end    or    own_first <= slot < own_end

Spans [B, Q, 4] stay the same size however long the text is, so a captured pass that reads them serves every length. A
mask [B, Q, S] would have to be as wide as the text can get.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.int32


def make_spans(first: Tensor, end: Tensor, own_first: Tensor | None = None, own_end: Tensor | None = None) -> Tensor:
    """Return spans [B, Q, 4] of queries that see `first` to `end` (exclusive), and `own_first` to `own_end` if given.

    Args:
        first: [B, 1] or [B, Q].
        end: [B, Q].
        own_first: [B, Q], or None where queries have no slots of their own.
        own_end: as `own_first`.

    Example:
        >>> columns = torch.tensor([[5, 6]])  # two tokens of a text whose first two slots are padding
        >>> make_spans(torch.tensor([[2]]), columns + 1).tolist()
        [[[2, 6, 0, 0], [2, 7, 0, 0]]]
    """
    none = torch.zeros_like(end)
    own_first, own_end = none if own_first is None else own_first, none if own_end is None else own_end
    return torch.stack([first.expand_as(end), end, own_first, own_end], dim=-1).to(DTYPE)


def leading_padding(attention: Tensor) -> Tensor:
    """Return [B, 1] how many slots are hidden before the first visible one, given attention [B, S] of bool.

    Example:
        >>> leading_padding(torch.tensor([[False, True, False, True], [True, True, True, True]])).tolist()
        [[1], [0]]
    """
    return (attention.cumsum(1) == 0).sum(1, keepdim=True)


def is_spans(visible: Tensor) -> bool:
    """Return whether this is spans, and not a mask."""
    return visible.dtype == DTYPE


def spans_to_mask(spans: Tensor, width: int, seen: Tensor | None = None) -> Tensor:
    """Return the mask [B, Q, width] of these spans.

    Args:
        spans: [B, Q, 4].
        width: how many slots.
        seen: [B, width or more] bool: slots that are not hidden from all queries.

    Example:
        >>> spans = torch.tensor([[[1, 3, 4, 5]]], dtype=torch.int32)
        >>> spans_to_mask(spans, 6).int().tolist()
        [[[0, 1, 1, 0, 1, 0]]]
    """
    slots = torch.arange(width, device=spans.device, dtype=DTYPE)
    first, end, own_first, own_end = (each[..., None] for each in spans.unbind(-1))
    visible = ((slots >= first) & (slots < end)) | ((slots >= own_first) & (slots < own_end))
    return visible if seen is None else visible & seen[:, None, :width]


def within_window(spans: Tensor, window: int) -> Tensor:
    """Return what is left of spans [B, Q, 4] in a layer that sees the last `window` positions only.

    A query comes after the text before it and after its own slots, itself included. So its place in the text is
    `end + own_end - own_first - 1`. A branch is shorter than any window.

    Example:
        >>> within_window(torch.tensor([[[0, 10, 0, 0], [0, 10, 20, 22]]], dtype=torch.int32), 4).tolist()
        [[[6, 10, 0, 0], [8, 10, 20, 22]]]
    """
    first, end, own_first, own_end = spans.unbind(-1)
    earliest = end + own_end - own_first - window
    return torch.stack([torch.maximum(first, earliest), end, own_first, own_end], dim=-1)
