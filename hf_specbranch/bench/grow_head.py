"""Grows a length head along with its pair.

The grown target's hidden states and embeddings are the small one's, followed by zeros (see `grow`). A head
whose weights are zero on the new dimensions predicts the same for the grown pair as the small head for the small one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..heads import LengthHead
from ..heads.config import LengthHeadConfig, ModelIdentity


def grow_head(head: LengthHead, target: PreTrainedModel, draft: PreTrainedModel) -> LengthHead:
    """Return the head for the wider hidden states of its pair's grown twins.

    Args:
        head: trained for the small pair.
        target: the small target, grown.
        draft: the small draft, grown.

    Returns:
        A new head on the target's device.

    Example:
        >>> from hf_specbranch import load_demo_pair
        >>> from hf_specbranch.bench import grow
        >>> target, draft, tokenizer, head = load_demo_pair(head=True)
        >>> twin = grow(target, "160m")
        >>> grow_head(head, twin, draft).config.target.hidden_size
        768
    """
    old = head.config
    config = replace(old, target=ModelIdentity.of(target), draft=ModelIdentity.of(draft))
    if config.target.hidden_size < old.target.hidden_size:
        raise ValueError(
            f"the head reads states of {old.target.hidden_size} entries, the target has {config.target.hidden_size}: "
            "give the grown target"
        )
    grown = LengthHead(config)
    every = _places(old, config)
    context = every[: old.context_size]
    hidden = torch.arange(old.target.hidden_size)
    places: dict[str, Tensor] = {"mean": every, "std": every}
    if old.matches:
        places |= {"expectation.state.weight": context, "expectation.key.weight": hidden}
    else:
        places["layers.0.weight"] = every
    with torch.no_grad():
        for name, value in grown.state_dict().items():
            given = head.state_dict()[name].to(value.device)
            if name not in places:
                value.copy_(given)
                continue
            value.fill_(1.0 if name == "std" else 0.0)
            value[..., places[name]] = given
    return grown.to(target.device).eval()


def _places(old: LengthHeadConfig, new: LengthHeadConfig) -> Tensor:
    """Return the place of each old input among the new ones, [F_old]."""
    places, first = [], 0
    for name, width in old.feature_sizes.items():
        if name in ("hidden", "committed", "drafted"):  # blocks of one state or embedding each
            block = torch.arange(old.target.hidden_size)
            starts = torch.arange(width // old.target.hidden_size) * new.target.hidden_size
            places.append(first + (starts[:, None] + block).flatten())
        else:
            places.append(first + torch.arange(width))
        first += new.feature_sizes[name]
    return torch.cat(places)
