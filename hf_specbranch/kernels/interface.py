"""The split attention under transformers' `AttentionInterface`, by the name "specbranch".

model.set_attn_implementation("specbranch")
"""

from __future__ import annotations

from threading import Lock
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from .attention import attend, attend_reference, fits
from .blocks import Blocks, blocks_in_use

NAME = "specbranch"
UNCAPPED = "specbranch_uncapped"  # in place of an implementation that ignores `softcap` and `s_aux`


def specbranch_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers asks for it.

    A few queries under an explicit mask go to the split kernel. Long prompts, and what it cannot take, go to sdpa. A
    sliding window is in the mask already.

    Returns:
        [B, Q, Hq, D] and None: no weights are kept.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    compiling = torch.compiler.is_compiling()  # the compiler cannot look into a kernel of ours
    if attention_mask is not None and dropout == 0 and not compiling and fits(query, key, value, attention_mask):
        blocks = _blocks(attention_mask, query, key)
        return attend(query, key, value, attention_mask, scaling, softcap, s_aux, blocks), None
    if softcap is None and s_aux is None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, None
    if attention_mask is None:
        past = key.shape[2] - query.shape[2]
        attention_mask = query.new_ones((query.shape[2], key.shape[2]), dtype=torch.bool).tril(past)[None, None]
    return attend_reference(query, key, value, attention_mask, scaling, softcap, s_aux), None


def _uncapped_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return specbranch_attention(*args, **{**kwargs, "softcap": None, "s_aux": None})


class _OnePass:
    """Lists of blocks in use, made once for all layers that are given the same mask.

    Only between `begin` and `end`: whoever calls them vouches that a mask does not change meanwhile.
    """

    def __init__(self) -> None:
        self.active = 0
        self.lock = Lock()  # two models may run at the same time
        self.known: dict[tuple[int, int], tuple[ref[Tensor], Blocks]] = {}

    def begin(self) -> None:
        with self.lock:
            self.active += 1

    def forget(self) -> None:
        self.known.clear()

    def end(self) -> None:
        with self.lock:
            self.active -= 1
        self.forget()


one_pass = _OnePass()


def _blocks(mask: Tensor, query: Tensor, key: Tensor) -> Blocks | None:
    if not one_pass.active:
        return None
    name = id(mask), query.shape[-1]
    held, blocks = one_pass.known.get(name, (None, None))
    if held is None or held() is not mask or blocks is None:
        blocks = blocks_in_use(mask, query.shape[0], key.shape[2], query)
        one_pass.known[name] = ref(mask), blocks
    return blocks


def register() -> None:
    """Make the names known to transformers. Masks that are not 4D already are made as for sdpa."""
    for name, function in ((NAME, specbranch_attention), (UNCAPPED, _uncapped_attention)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
