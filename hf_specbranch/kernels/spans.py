"""Spans: which slots each query of a pass sees, as four numbers.

A query sees the text up to its place, and on a branch its own slots:

    first <= slot < end    or    own_first <= slot < own_end

Spans [B, Q, 4] stay the same size however long the text is, so a captured pass that reads them serves every length. A
mask [B, Q, S] would have to be as wide as the text can get. Kernels take spans where transformers has a mask, and tell
them apart by their dtype. `runtime.eager` makes them, and turns them into masks.
"""

from __future__ import annotations

import torch

from .backend import Value, constexpr, jit, tl

SPANS = torch.int32  # the dtype of spans


@jit
def blocks_of_spans(spans: Value, queries: Value, stride: Value, BLOCK: constexpr) -> Value:
    """Return the first block of keys that some query of a row sees, how many there are, and where the last key ends.

    Args:
        spans: of the row [Q, 4], with Q at most 64.
        queries: Q.
        stride: of a query.
        BLOCK: keys in a block.
    """
    query = tl.arange(0, 64)
    inside, at = query < queries, spans + query * stride
    first = tl.load(at, mask=inside, other=0, cache_modifier=".cg")
    end = tl.load(at + 1, mask=inside, other=0, cache_modifier=".cg")
    own_first = tl.load(at + 2, mask=inside, other=0, cache_modifier=".cg")
    own_end = tl.load(at + 3, mask=inside, other=0, cache_modifier=".cg")
    # An empty span must not widen the range.
    far: tl.constexpr = 2147483647
    lowest = tl.minimum(tl.where(first < end, first, far), tl.where(own_first < own_end, own_first, far))
    highest = tl.maximum(tl.where(first < end, end, 0), tl.where(own_first < own_end, own_end, 0))
    before_first, last = tl.min(lowest, 0) // BLOCK, tl.max(highest, 0)
    return before_first, tl.cdiv(last, BLOCK) - before_first, last


@jit
def splits_in_use(number: Value, splits: Value, LEAST: constexpr) -> Value:
    """Return how many of `splits` share a number of blocks.

    Up to 64 / LEAST blocks have a split each, up to 64 blocks share so many splits, and of more blocks each split has
    about LEAST: many splits take longer to combine than they save.
    """
    used = tl.maximum(tl.minimum(number, 64 // LEAST), tl.cdiv(number, LEAST))
    return tl.minimum(tl.maximum(used, 1), splits)
