"""Attention in plain torch: the reference of `attention.py` and `prefill_attention.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from .spans import SPANS


def attend_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute what `attend` does, in plain torch: at least float32 throughout, rounded once at the end."""
    if mask is not None and mask.dtype == SPANS:
        first, end, own_first, own_end = mask[..., None].unbind(3)  # [B, 1, Q, 1] each
        slot = torch.arange(key.shape[2], device=key.device)
        mask = ((first <= slot) & (slot < end)) | ((own_first <= slot) & (slot < own_end))
    groups, wide = query.shape[1] // key.shape[1], torch.promote_types(query.dtype, torch.float32)
    key, value = (states.to(wide).repeat_interleave(groups, dim=1) for states in (key, value))
    scores = query.to(wide) @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2
        scores = scores if mask.dtype == torch.bool else scores + mask
        scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.to(wide).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : key.shape[2]]  # NaN where nothing is visible
    return (weights @ value).transpose(1, 2).to(query.dtype)
