"""Lookup on the device: the longest match of each row's end, with static shapes and without a sync.

The rule is that of `text_index.TextIndex.match` and `LookupCorpus.match`; tests compare them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..corpus import CANDIDATES, ORDER, CorpusTables, hash_runs
from ..kernels.backend import serves
from ..kernels.lookup import fits, match_ends
from .text_index import SHORTEST


class Matches(NamedTuple):
    """The longest match of each row."""

    tokens: Tensor  # [B, N] what followed there
    length: Tensor  # [B] how many of these exist
    matched: Tensor  # [B] tokens that agree; 0: there is no match


def find_in_text(ids: Tensor, length: Tensor, first: Tensor, longest: int, count: int) -> Matches:
    """Find the longest match of each text's end in the text itself, by a kernel where there is one."""
    if serves(ids.device) and fits(ids, length, first):
        return Matches(*match_ends(ids, length, first, longest, min(SHORTEST, longest), count))
    return find_in_text_reference(ids, length, first, longest, count)


def find_in_text_reference(ids: Tensor, length: Tensor, first: Tensor, longest: int, count: int) -> Matches:
    """Find the longest match of each text's end in the text itself; of several, the latest.

    Args:
        ids: [B, C] texts.
        length: [B] tokens of each.
        first: [B, 1] the first column that is not padding.
        longest: the most tokens that are compared.
        count: how many tokens to return. Where the match overlaps with the end, what follows is repeated.

    Example:
        >>> text = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 0]])
        >>> find_in_text_reference(text, torch.tensor([7]), torch.zeros(1, 1).long(), 4, 3).tokens.tolist()
        [[8, 5, 6]]
    """
    rows, capacity = ids.shape
    columns = torch.arange(capacity, device=ids.device)  # of the last token of an occurrence
    last = length[:, None] - 1
    agree = (columns < last) & (columns >= first)
    matched = torch.zeros_like(ids)
    for back in range(longest):
        own = ids.gather(1, (last - back).clamp(min=0))  # [B, 1]
        agree = agree & (columns - back >= first) & (last - back >= first) & (ids.roll(back, 1) == own)
        matched = matched + agree
    best = (matched * capacity + columns).argmax(1, keepdim=True)  # [B, 1]
    agreed = matched.gather(1, best)
    period = (last - best).clamp(min=1)
    places = best + 1 + torch.arange(count, device=ids.device) % period
    agreed = torch.where(agreed >= min(SHORTEST, longest), agreed, 0)[:, 0]
    available = torch.where(agreed > 0, count, 0)
    return Matches(ids.gather(1, places.clamp(max=capacity - 1)), available, agreed)


def find_in_corpus(
    ids: Tensor, length: Tensor, first: Tensor, longest: int, count: int, corpus: CorpusTables
) -> Matches:
    """Find the longest match of each text's end in a corpus. Takes the arguments of `find_in_text_reference`."""
    device, size = ids.device, corpus.tokens.shape[0]
    if not len(corpus.keys) or longest < ORDER:
        none = torch.zeros_like(length)
        return Matches(none[:, None].expand(-1, count), none, none)
    back = torch.arange(longest, device=device)  # [L]
    own_columns = length[:, None] - 1 - back
    ending = torch.where(own_columns >= first, ids.gather(1, own_columns.clamp(min=0)), -2)  # [B, L], the last first
    key = hash_runs(ending[:, :ORDER].flip(1))  # [B, 1]
    after, before = torch.searchsorted(corpus.keys, key, right=True), torch.searchsorted(corpus.keys, key)
    nth = after - 1 - torch.arange(CANDIDATES, device=device)  # [B, K] occurrences, the latest first
    exists = nth >= before
    place = corpus.places[nth.clamp(min=0)]  # [B, K]
    there = corpus.tokens[(place[:, :, None] - 1 - back).clamp(min=0)]  # [B, K, L]
    matched = ((there == ending[:, None]) & exists[:, :, None]).long().cumprod(2).sum(2)
    best = (matched * CANDIDATES - torch.arange(CANDIDATES, device=device)).argmax(1, keepdim=True)
    agreed, place = matched.gather(1, best), place.gather(1, best)
    tokens = corpus.tokens[(place + torch.arange(count, device=device)).clamp(max=size - 1)]  # [B, N]
    available = (tokens >= 0).long().cumprod(1).sum(1)
    agreed = torch.where((agreed >= ORDER) & (available[:, None] > 0), agreed, 0)[:, 0]
    return Matches(tokens.clamp(min=0), torch.where(agreed > 0, available, 0), agreed)


def longer_of(first: Matches, second: Matches) -> Matches:
    """Return the longer match of each row; of equal ones the first."""
    second_wins = second.matched > first.matched
    return Matches(
        torch.where(second_wins[:, None], second.tokens, first.tokens),
        torch.where(second_wins, second.length, first.length),
        torch.maximum(first.matched, second.matched),
    )
