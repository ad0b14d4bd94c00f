"""Which branches to open: at the branch point, and at earlier positions for the likely rejections."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backend import Value, constexpr, jit, power_of_two, tl, varying
from ..parallel_build import room as index_memory
from .chunks import chunk_count
from .memory import FEW, PendingBuffers, warps


def fork(
    pending: PendingBuffers,
    point: Tensor,
    sent_length: Tensor,
    ahead: Tensor,
    rejections: tuple[Tensor, Tensor],
    tokens: Tensor,
    at: Tensor,
    width: Tensor,
    count: Tensor,
    branches: int,
    depth: int,
    k_max: int,
) -> None:
    """Choose the first tokens of the branches: more at the branch point the less confident the draft is.

    Args:
        pending: the pending draft, which has a token at the branch point.
        point: [B] the branch point's column.
        sent_length: [B] draft tokens before it.
        ahead: [B] bool: rows that draft past what is sent.
        rejections: the likely rejections, tokens and draft positions [B, n]; branches are opened for the first ones.
        tokens: [B, K] receives the token each branch starts with: the pending draft's own first.
        at: [B, K] receives its draft position, NONE where it is not opened.
        width: [B] receives the number of branches at the branch point.
        count: [B] drafted tokens, added to.
        branches: the most branches at the branch point.
        depth: tokens of a branch after its first.
        k_max: opens `max(1, floor(k_max * (1 - confidence)))` branches at the branch point; 0 opens one.
    """
    block = pending.block
    peaks, chunks = find_peaks(pending, point, 1)
    _fork_kernel[(pending.rows,)](
        pending.ids, pending.confidence, pending.scores, *peaks, point, sent_length, ahead, *rejections, tokens, at,
        width, count, pending.vocabulary, pending.ids.stride(0), pending.ring, branches, tokens.shape[1] - branches,
        rejections[0].stride(0), depth, k_max, CHUNKS=chunks, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip


@varying("vocabulary", "ids_stride", "ring", "branches", "rejection_branches", "rejection_stride", "depth", "k_max")
def _fork_kernel(
    ids: Value, confidence: Value, scores: Value, peaks: Value, peaks_at: Value, point: Value, sent_length: Value,
    ahead: Value, rejection_tokens: Value, rejection_at: Value, tokens: Value, at: Value, width: Value, count: Value,
    vocabulary: Value, ids_stride: Value, ring: Value, branches: Value, rejection_branches: Value,
    rejection_stride: Value, depth: Value, k_max: Value, CHUNKS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.load(point + row)
    entry = row * (ring + 1) + column % ring
    opens = tl.load(ahead + row).to(tl.int1)
    open_here = tl.floor(k_max * (1.0 - tl.load(confidence + entry))).to(tl.int64)
    open_here = tl.where(opens, tl.minimum(tl.maximum(open_here, 1), branches), 0)
    tl.store(width + row, open_here)
    tokens += row * (branches + rejection_branches)
    at += row * (branches + rejection_branches)
    length = tl.load(sent_length + row)
    own = tl.load(ids + row * ids_stride + column)
    tl.store(tokens, own)
    tl.store(at, tl.where(open_here > 0, length, -1))
    opened = tl.maximum(open_here - 1, 0)
    left, left_at = load_peaks(peaks, peaks_at, row, vocabulary, CHUNKS, BLOCK)
    for k in range(1, branches):
        _value, index, left, left_at = take_likeliest(
            scores + entry * vocabulary, vocabulary, own, left, left_at, CHUNKS, BLOCK
        )
        tl.store(tokens + k, index.to(tl.int64))
        tl.store(at + k, tl.where(k < open_here, length, -1))
    for k in range(0, rejection_branches):
        where = tl.load(rejection_at + row * rejection_stride + k)
        where = tl.where(opens, where, -1)
        tl.store(tokens + branches + k, tl.load(rejection_tokens + row * rejection_stride + k))
        tl.store(at + branches + k, where)
        opened += (where >= 0).to(tl.int64)
    tl.store(count + row, tl.load(count + row) + opened * (1 + depth))


def find_likely_rejections(
    pending: PendingBuffers, sent_length: Tensor, chances: Tensor, others: Tensor, tokens: Tensor, at: Tensor
) -> None:
    """Find the likeliest pairs of a draft position and a token other than the draft's, as `LikelyRejections.find` does.

    Args:
        pending: the pending draft, whose first tokens are sent.
        sent_length: [B] how many.
        chances: [B, N, K + 1] scratch: the probabilities of K other tokens at each position, then of the draft's own.
        others: [B, N, K] scratch: these tokens.
        tokens: [B, count] receives the tokens found.
        at: [B, count] receives their draft positions, NONE where there are no more.
    """
    rows, positions, alternatives = others.shape
    block = pending.block
    peaks, chunks = find_peaks(pending, pending.start, positions)
    _alternatives_kernel[(rows, positions)](
        pending.scores, *peaks, pending.ids, pending.start, chances, others, pending.vocabulary, pending.ids.stride(0),
        pending.ring, positions, alternatives, CHUNKS=chunks, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    size = power_of_two(positions * alternatives, FEW)
    _likeliest_pairs_kernel[(rows,)](
        chances, others, sent_length, tokens, at, positions, alternatives, tokens.shape[1], BLOCK=size,
        num_warps=max(1, size // 64),
    )  # fmt: skip


@varying("vocabulary", "ids_stride", "ring", "count", "alternatives")
def _alternatives_kernel(
    scores: Value, peaks: Value, peaks_at: Value, ids: Value, start: Value, chances: Value, others: Value,
    vocabulary: Value, ids_stride: Value, ring: Value, count: Value, alternatives: Value, CHUNKS: constexpr,
    BLOCK: constexpr,
) -> None:  # fmt: skip
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    left, left_at = load_peaks(peaks, peaks_at, row * count + place, vocabulary, CHUNKS, BLOCK)
    column = tl.minimum(tl.load(start + row) + place, ids_stride - 1)
    own = tl.load(ids + row * ids_stride + column)
    scores += (row * (ring + 1) + column % ring) * vocabulary
    chances += (row * count + place) * (alternatives + 1)
    others += (row * count + place) * alternatives
    tl.store(chances + alternatives, tl.load(scores + own))
    for k in range(0, alternatives):
        value, index, left, left_at = take_likeliest(scores, vocabulary, own, left, left_at, CHUNKS, BLOCK)
        tl.store(chances + k, tl.maximum(value, 0.0))
        tl.store(others + k, index.to(tl.int64))


@varying("positions", "alternatives", "count")
def _likeliest_pairs_kernel(
    chances: Value, others: Value, sent_length: Value, tokens: Value, at: Value, positions: Value,
    alternatives: Value, count: Value, BLOCK: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    place = pair // alternatives
    chances += row * positions * (alternatives + 1)
    inside = (place < positions) & (place < tl.load(sent_length + row))
    chance = tl.load(chances + place * (alternatives + 1) + pair % alternatives, mask=inside, other=0.0)
    # q_0(x_0) ... q_(i-1)(x_(i-1)) * q_i(y): the draft tokens before the position are accepted, and `y` replaces it.
    for before in range(0, positions):
        own = tl.load(chances + before * (alternatives + 1) + alternatives)
        chance = tl.where(place > before, chance * own, chance)
    for k in range(0, count):
        value, best = tl.max(chance, 0), tl.argmax(chance, 0)
        tl.store(tokens + row * count + k, tl.load(others + row * positions * alternatives + best))
        tl.store(at + row * count + k, tl.where(value > 0, best // alternatives, -1).to(tl.int64))
        chance = tl.where(pair == best, -1.0, chance)


def find_peaks(pending: PendingBuffers, first: Tensor, positions: int) -> tuple[tuple[Tensor, Tensor], int]:
    """Find the likeliest token of each chunk of some distributions, the draft's own left out.

    Args:
        pending: the pending draft.
        first: [B] the column of the first distribution.
        positions: how many columns from there.

    Returns:
        The probabilities and tokens, both [B, positions, C], and the number of chunks as a power of two.
    """
    count = chunk_count(pending.vocabulary)
    peaks = torch.empty((pending.rows, positions, count), device=first.device)
    peaks_at = index_memory((pending.rows, positions, count), torch.int32, first.device)
    _peaks_kernel[(count, positions, pending.rows)](
        pending.scores, pending.ids, first, peaks, peaks_at, pending.vocabulary, pending.ids.stride(0), pending.ring,
        BLOCK=pending.block, num_warps=warps(pending.block),
    )  # fmt: skip
    return (peaks, peaks_at), power_of_two(count)


@varying("vocabulary", "ids_stride", "ring")
def _peaks_kernel(
    scores: Value, ids: Value, first: Value, peaks: Value, peaks_at: Value, vocabulary: Value, ids_stride: Value,
    ring: Value, BLOCK: constexpr,
) -> None:  # fmt: skip
    chunk, place, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    column = tl.minimum(tl.load(first + row) + place, ids_stride - 1)
    own = tl.load(ids + row * ids_stride + column)
    scores += (row * (ring + 1) + column % ring) * vocabulary
    value, index = likeliest_after(scores, chunk, vocabulary, own, 2.0, -1, BLOCK)
    place = (row * tl.num_programs(1) + place) * tl.num_programs(0) + chunk
    tl.store(peaks + place, value)
    tl.store(peaks_at + place, index.to(tl.int32))


@jit
def load_peaks(
    peaks: Value, peaks_at: Value, place: Value, vocabulary: Value, CHUNKS: constexpr, BLOCK: constexpr
) -> tuple[Value, Value]:
    """Return the probabilities and tokens that `find_peaks` found in the chunks of a distribution."""
    count = tl.cdiv(vocabulary, BLOCK)
    chunk = tl.arange(0, CHUNKS)
    left = tl.load(peaks + place * count + chunk, mask=chunk < count, other=-1.0)
    return left, tl.load(peaks_at + place * count + chunk, mask=chunk < count, other=0)


@jit
def take_likeliest(
    scores: Value, vocabulary: Value, own: Value, left: Value, left_at: Value, CHUNKS: constexpr, BLOCK: constexpr
) -> tuple[Value, Value, Value, Value]:
    """Return probability and index of the likeliest token that is left, and what is left in each chunk after it.

    Of equally likely tokens the one with the lower index comes first.
    """
    chunk = tl.arange(0, CHUNKS)
    value = tl.max(left, 0)
    source = tl.argmax(left, 0)
    index = tl.sum(tl.where(chunk == source, left_at, 0), 0)
    following, following_at = likeliest_after(scores, source, vocabulary, own, value, index, BLOCK)
    left = tl.where(chunk == source, following, left)
    return value, index, left, tl.where(chunk == source, following_at, left_at)


@jit
def likeliest_after(
    scores: Value, chunk: Value, size: Value, own: Value, last_value: Value, last_index: Value, BLOCK: constexpr
) -> tuple[Value, Value]:
    """Return probability and index of the next token of a chunk in order of probability, then of index.

    It comes after the token with `last_value` and `last_index`; the token `own` is left out. Probability -1: none left.
    """
    index = chunk * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(scores + index, mask=index < size, other=-1.0)
    is_later = (value < last_value) | ((value == last_value) & (index > last_index))
    value = tl.where((index < size) & (index != own) & is_later, value, -1.0)
    return tl.max(value, 0), chunk * BLOCK + tl.argmax(value, 0)
