"""The second kernel of split attention: it combines the partial results of the splits. See `attention.py`."""

from __future__ import annotations

from .backend import Value, constexpr, launch_dependents, tl, varying, wait_after
from .spans import blocks_of_spans

CHUNK = 16  # splits that are combined at a time


@varying("splits", "mask_row", "mask_query")
def combine_kernel(
    partial: Value,
    maxima: Value,
    sums: Value,
    sinks: Value,
    spans: Value,
    out: Value,
    size: Value,
    splits: Value,
    mask_row: Value,
    mask_query: Value,
    SINKS: constexpr,
    BY_SPANS: constexpr,
    BLOCK: constexpr,
    CHUNK: constexpr,
    SIZE: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    token, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    queries, heads = tl.num_programs(0), tl.num_programs(1)
    first = ((row * heads + head) * queries + token) * splits
    lane = tl.arange(0, SIZE)
    used = splits
    if BY_SPANS:  # the other splits have written nothing
        _first, number, _last = blocks_of_spans(spans + row * mask_row, queries, mask_query, BLOCK)
        used = tl.minimum(tl.maximum(number, 1), splits)
    wait_after(first + used, PDL)
    highest, whole = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    if SINKS:
        highest, whole = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634, whole + 1.0
    result = tl.zeros((SIZE,), tl.float32)
    for begin in range(0, used, CHUNK):
        split = begin + tl.arange(0, CHUNK)
        inside = split < used
        tops = tl.load(maxima + first + split, mask=inside, other=float("-inf"))
        totals = tl.load(sums + first + split, mask=inside, other=0.0)
        results = tl.load(
            partial + first * size + (split * size)[:, None] + lane[None, :],
            mask=inside[:, None] & (lane < size)[None, :],
            other=0.0,
        )
        new_highest = tl.maximum(highest, tl.max(tops, 0))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        share, rescale = tl.exp2(tops - base), tl.exp2(highest - base)
        whole = whole * rescale + tl.sum(share * totals, 0)
        result = result * rescale + tl.sum(results * share[:, None], 0)
        highest = new_highest
    result = result / tl.where(whole == 0.0, 1.0, whole)
    target = out + ((row * queries + token) * heads + head) * size
    tl.store(target + lane, result.to(out.dtype.element_ty), mask=lane < size)
