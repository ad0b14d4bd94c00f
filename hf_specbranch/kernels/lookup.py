"""The longest match of a text's end in the text itself, in one kernel; see `decoding.lookup_match.find_in_text`.

A program goes through the text of one row. At each column it counts how many tokens agree with the end of the text,
backwards from there. The largest pair (count, column) is the longest match, the latest of several.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import (
    Value,
    constexpr,
    dependent_launch,
    launch_dependents,
    power_of_two,
    tl,
    varying,
    wait_for_dependencies,
)

BLOCK = 1024  # columns at a time


def match_ends(
    ids: Tensor, length: Tensor, first: Tensor, longest: int, shortest: int, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the longest match of each text's end.

    Args:
        ids: [B, C] texts, of int64.
        length: [B] tokens of each.
        first: [B, 1] the first column that is not padding.
        longest: the most tokens that are compared.
        shortest: the fewest tokens that make a match.
        count: how many tokens to return.

    Returns:
        What followed each match [B, count], how many of these exist [B], and how many tokens agree [B].
    """
    rows = ids.shape[0]
    tokens, available, matched = (ids.new_empty(shape) for shape in ((rows, count), (rows,), (rows,)))
    _match_kernel[(rows,)](
        ids, length, first, tokens, available, matched, ids.stride(0), length.stride(0), first.stride(0), count,
        LONGEST=longest, SHORTEST=shortest, COUNT=power_of_two(count), BLOCK=BLOCK, num_warps=8,
        **dependent_launch(ids.device),
    )  # fmt: skip
    return tokens, available, matched


def fits(ids: Tensor, length: Tensor, first: Tensor) -> bool:
    """Return whether the kernel can take these tensors."""
    return ids.stride(1) == 1 and all(each.dtype == torch.int64 for each in (ids, length, first))


@varying("count")
def _match_kernel(
    ids: Value,
    length: Value,
    first: Value,
    tokens: Value,
    available: Value,
    matched: Value,
    ids_row: Value,
    length_row: Value,
    first_row: Value,
    count: Value,
    LONGEST: constexpr,
    SHORTEST: constexpr,
    COUNT: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row = tl.program_id(0)
    text = ids + row.to(tl.int64) * ids_row
    last = tl.load(length + row * length_row) - 1
    begin = tl.load(first + row * first_row)
    best = tl.full((BLOCK,), -1, tl.int64)
    for start in range(0, tl.maximum(last, 0).to(tl.int32), BLOCK):
        column = start + tl.arange(0, BLOCK).to(tl.int64)
        agree = (column >= begin) & (column < last)
        agreed = tl.zeros((BLOCK,), tl.int64)
        for back in tl.static_range(LONGEST):
            inside = agree & (column - back >= begin)
            there = tl.load(text + column - back, mask=inside, other=-2)
            own = tl.load(text + last - back, mask=last - back >= begin, other=-1)
            agree = inside & (there == own)
            agreed += agree.to(tl.int64)
        best = tl.maximum(best, tl.where(agreed > 0, (agreed << 32) + column, -1))
    longest = tl.max(best, 0)
    agreed_there, place = longest >> 32, longest & 0xFFFFFFFF
    found = (longest >= 0) & (agreed_there >= SHORTEST)
    index = tl.arange(0, COUNT)
    period = tl.maximum(last - place, 1)  # where the match overlaps with the end, what follows is repeated
    following = tl.load(text + place + 1 + index % period, mask=found & (index < count), other=0)
    tl.store(tokens + row * count + index, following, mask=index < count)
    tl.store(available + row, tl.where(found, count, 0).to(tl.int64))
    tl.store(matched + row, tl.where(found, agreed_there, 0))
