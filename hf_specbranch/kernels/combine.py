"""The second part of split attention: it combines the results of the splits. See `attention.py`.

It is a kernel by itself, or part of a product that reads the heads: see `tile_splits.py`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .backend import Value, constexpr, dependent_launch, launch_dependents, power_of_two, tl, varying, wait_after
from .spans import blocks_of_spans, splits_in_use

CHUNK = 16  # splits that are combined at a time
MOST_FOR_PRODUCT = 32  # splits: each program of a product loads all of them


class Reader(NamedTuple):
    """What reads the heads of attention."""

    combines: bool = False  # up to `MOST_FOR_PRODUCT` splits, each program all of them
    needs_l1: bool = False  # its weights come through the L1 cache, beside attention that still runs


COMBINED = Reader()  # reads heads that a kernel by itself has combined


class SplitHeads(NamedTuple):
    """The heads of attention as results of splits, for a kernel that combines them.

    With spans only the first splits are in use (`splits_in_use`); the others hold nothing.
    """

    results: Tensor  # [B, Q, S, Hq * D] of float32: what attention over the keys of a split alone would give
    sums: Tensor  # [B, Q, Hq, S] of float32: the log2 of the sum of exponentials; -inf where nothing is visible
    spans: Tensor | None  # [B, 1, Q, 4]
    block: int  # keys in a block
    least: int  # blocks of a split; see `splits_in_use`
    dtype: torch.dtype  # of the heads
    leaves_l1: bool = False  # attention has left the L1 cache to a product that needs it

    @property
    def shape(self) -> torch.Size:
        """The shape of the heads: [B, Q, Hq * D]."""
        batch, queries, _, depth = self.results.shape
        return torch.Size((batch, queries, depth))

    @property
    def size(self) -> int:
        """D."""
        return self.results.shape[3] // self.sums.shape[2]

    def combined(self) -> Tensor:
        """Return the heads [B, Q, Hq * D] in their dtype."""
        batch, queries, heads, splits = self.sums.shape
        out = self.results.new_empty(self.shape, dtype=self.dtype)
        spans = self.results if self.spans is None else self.spans
        strides = (0, 0) if self.spans is None else (spans.stride(0), spans.stride(2))
        width = power_of_two(self.size, 16)
        combine_kernel[(queries, heads, batch)](
            self.results, self.sums, spans, out, self.size, splits, *strides,
            BY_SPANS=self.spans is not None, BLOCK=self.block, LEAST=self.least, CHUNK=CHUNK, SIZE=width,
            num_warps=max(1, CHUNK * width // 1024), **dependent_launch(out.device),
        )  # fmt: skip
        return out


def combined(heads: Tensor | SplitHeads) -> Tensor:
    """Return heads [B, Q, Hq * D], for readers that cannot combine splits themselves."""
    return heads.combined() if isinstance(heads, SplitHeads) else heads


def combine_reference(heads: SplitHeads, used: Tensor) -> Tensor:
    """Compute what `combined` does, in plain torch. `used`: the splits in use [B]."""
    splits = torch.arange(heads.sums.shape[3], device=used.device)
    inside = splits < used.view(-1, 1, 1, 1)  # [B, 1, 1, S]
    sums = heads.sums.masked_fill(~inside, -torch.inf) * math.log(2.0)
    shares = sums.softmax(-1).nan_to_num(0.0)  # NaN where nothing is visible
    results = heads.results.view(*heads.results.shape[:3], -1, heads.size).transpose(2, 3)  # [B, Q, Hq, S, D]
    results = results.masked_fill(~inside[..., None], 0.0)
    out: Tensor = (shares[..., None] * results).sum(3).flatten(2)
    return out.to(heads.dtype)


@varying("splits", "mask_row", "mask_query")
def combine_kernel(
    results: Value,
    sums: Value,
    spans: Value,
    out: Value,
    size: Value,
    splits: Value,
    mask_row: Value,
    mask_query: Value,
    BY_SPANS: constexpr,
    BLOCK: constexpr,
    LEAST: constexpr,
    CHUNK: constexpr,
    SIZE: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    token, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    queries, heads = tl.num_programs(0), tl.num_programs(1)
    place = row * queries + token
    lane = tl.arange(0, SIZE)
    used = splits
    if BY_SPANS:  # the other splits have written nothing
        _first, number, _last = blocks_of_spans(spans + row * mask_row, queries, mask_query, BLOCK)
        used = splits_in_use(number, splits, LEAST)
    wait_after(place + used, PDL)
    highest, whole = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    result = tl.zeros((SIZE,), tl.float32)
    for begin in range(0, used, CHUNK):
        split = begin + tl.arange(0, CHUNK)
        inside = split < used
        tops = tl.load(sums + (place * heads + head) * splits + split, mask=inside, other=float("-inf"))
        parts = tl.load(
            results + ((place * splits + split) * heads + head)[:, None] * size + lane[None, :],
            mask=inside[:, None] & (lane < size)[None, :],
            other=0.0,
        )
        new_highest = tl.maximum(highest, tl.max(tops, 0))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        share, rescale = tl.exp2(tops - base), tl.exp2(highest - base)
        whole = whole * rescale + tl.sum(share, 0)
        result = result * rescale + tl.sum(parts * share[:, None], 0)
        highest = new_highest
    result = result / tl.where(whole == 0.0, 1.0, whole)
    target = out + (place * heads + head) * size
    tl.store(target + lane, result.to(out.dtype.element_ty), mask=lane < size)
