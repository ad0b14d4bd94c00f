"""The split attention under transformers' `AttentionInterface`, by the name "specbranch".

    model.set_attn_implementation("specbranch")

`override_attention` selects it temporarily; `original_attention` says what a config names otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from .attention import MOST_QUERIES, attend, attend_in_splits, fits
from .attention_reference import attend_reference
from .backend import serves
from .blocks import Blocks, blocks_in_use
from .combine import COMBINED, Reader, SplitHeads, combined
from .pending_norms import PendingNorms
from .prefill_attention import attend_chunk
from .spans import SPANS

NAME = "specbranch"
UNCAPPED = "specbranch_uncapped"  # replaces an implementation that ignores `softcap` and `s_aux`


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
    """Compute attention with the signature that transformers expects.

    A few queries under an explicit mask go to the split kernel. Long prompts, and whatever the kernel cannot take, go
    to sdpa. The mask already contains a sliding window. In place of a mask our own runner gives spans (`spans.py`).

    Args:
        query: [B, Hq, Q, D].
        key: [B, Hkv, S, D].
        value: [B, Hkv, S, D].
        attention_mask: [B, 1, Q, S], or spans [B, 1, Q, 4], or None.

    Returns:
        [B, Q, Hq, D] and None: no weights are kept.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask is not None and attention_mask.dtype == SPANS:
        heads = combined(attend_by_spans(query, key, value, attention_mask, scaling, softcap, s_aux))
        return heads.view(query.shape[0], query.shape[2], query.shape[1], -1), None
    compiling = torch.compiler.is_compiling()  # the compiler cannot trace our kernels
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


def attend_by_spans(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    reader: Reader = COMBINED,
    pending: PendingNorms | None = None,
) -> Tensor | SplitHeads:
    """Compute attention under spans. There is no other way to: most of the cache may not even be mapped to memory.

    Returns:
        [B, Q, Hq * D], in splits where the reader has to combine any; see `attend_in_splits`.
    """
    if (allowed := _allowed_keys.get()) is not None and key.untyped_storage().data_ptr() not in allowed:
        raise ValueError("the model computes keys from all of the cache, most of which may not be mapped to memory")
    if query.shape[2] > MOST_QUERIES:
        return attend_chunk(query, key, value, spans, scaling, softcap, sinks).flatten(2)
    if serves(query.device) and not fits(query, key, value, spans):
        raise ValueError(f"the kernel cannot take queries {tuple(query.shape)} and values {tuple(value.shape)}")
    return attend_in_splits(query, key, value, spans, scaling, softcap, sinks, None, reader, pending)


_allowed_keys: ContextVar[set[int] | None] = ContextVar("allowed_keys", default=None)  # addresses of their memory


@contextmanager
def keys_must_be(states: Iterable[Tensor]) -> Iterator[None]:
    """Refuse spans for keys in other memory than that of these, in this thread and while the context lasts.

    Multi-head latent attention keeps compressed keys, and expands all that the cache returns. It needs masks, under
    which the cache returns no more than has memory.
    """
    before = _allowed_keys.set({each.untyped_storage().data_ptr() for each in states})
    try:
        yield
    finally:
        _allowed_keys.reset(before)


def _uncapped_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return specbranch_attention(*args, **{**kwargs, "softcap": None, "s_aux": None})


class _OnePass:
    """Lists of visible blocks, computed once for all layers that are given the same mask.

    They are kept between `begin` and `end` only: the caller guarantees that a mask does not change in between without
    a call of `forget`.
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
    """Register both names with transformers. Masks that are not 4D already are made as for sdpa."""
    for name, function in ((NAME, specbranch_attention), (UNCAPPED, _uncapped_attention)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@dataclass
class _Override:
    """An attention that is overridden at the moment."""

    config: Any  # held, so that its identity is not used again
    original: str
    contexts: int = 0  # that override it; they may overlap, in several threads


class _Overrides:
    """The configs whose attention is overridden, by identity. An entry lives as long as one of its contexts."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.active: dict[int, _Override] = {}

    def begin(self, config: Any, attention: str) -> None:
        with self.lock:
            override = self.active.setdefault(id(config), _Override(config, config._attn_implementation))
            override.contexts += 1
            config._attn_implementation_internal = attention

    def end(self, config: Any) -> None:
        """Restore the original when the last context ends."""
        with self.lock:
            override = self.active[id(config)]
            override.contexts -= 1
            if not override.contexts:
                config._attn_implementation_internal = override.original
                del self.active[id(config)]

    def original(self, config: Any) -> str:
        with self.lock:
            override = self.active.get(id(config))
            name: str = config._attn_implementation if override is None else override.original
            return name


_overrides = _Overrides()


@contextmanager
def override_attention(config: Any, attention: str) -> Iterator[None]:
    """Make a config name this attention while the context lasts. The last of overlapping contexts restores it.

    Example:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(_attn_implementation="sdpa", _attn_implementation_internal="sdpa")
        >>> with override_attention(config, "specbranch"):
        ...     config._attn_implementation_internal, original_attention(config)
        ('specbranch', 'sdpa')
    """
    _overrides.begin(config, attention)
    try:
        yield
    finally:
        _overrides.end(config)


def original_attention(config: Any) -> str:
    """Return the attention that a config names when nothing overrides it. Other threads may ask meanwhile."""
    return _overrides.original(config)
