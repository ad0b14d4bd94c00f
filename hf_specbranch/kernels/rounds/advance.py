"""The end of a draft step: from the draft's logits to a distribution, a chosen token and the inputs of the next step.

The pending draft gains the chosen token where its row goes on. It stops where the confidence is below epsilon, before
that token or after it. A side branch gains its token in any case.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backend import Value, constexpr, jit, tl, varying
from ..parallel_build import room as index_memory
from . import memory
from .chunks import chunk_count, chunk_size, combined, search_chunks
from .memory import ForwardInputs, PendingBuffers, SideBranchBuffers

CONFIDENCE_UNITS = 1 << 20  # in which a confidence is a whole number


def advance(
    logits: Tensor,
    pending: PendingBuffers,
    inputs: ForwardInputs,
    positions: Tensor,
    flag: Tensor,
    bound: Tensor,
    count: Tensor,
    further: int = 0,
    epsilon: float = 0.0,
    sticky: bool = False,
    inclusive: bool = False,
    side: SideBranchBuffers | None = None,
    step: int = 0,
    noise: Tensor | None = None,
    goes_on: Tensor | None = None,
    token_ids: Tensor | None = None,
    keeps_scores: bool = True,
) -> None:
    """Record the distribution after each branch, choose its next token, and write the inputs of the next step.

    Args:
        logits: [B, Q, V'] after the last tokens, the pending draft first; the processors are applied.
        pending: the pending draft, which is extended.
        inputs: receives the inputs of the next step; their spans grow by the new slot.
        positions: [B, C] by column.
        flag: [B] bool: rows that may go on.
        bound: [B] the column where they stop, but for `further`.
        count: [B] drafted tokens, added to.
        further: added to the bound.
        epsilon: a pending draft stops at a token with less confidence.
        sticky: a row that stops is taken out of `flag`.
        inclusive: the token at which it stops is appended too.
        side: the side branches, extended too if given.
        step: which step of the side branches this is.
        noise: [B, Q, V'] exponential random numbers, with which tokens are drawn; None takes the likeliest.
        goes_on: [B] receives 1 plus the confidence in units of `1 / CONFIDENCE_UNITS` where the pending draft can take
            another step, else 0.
        token_ids: [V'] the token of each logit; None: its index. The probabilities of other tokens are not written.
        keeps_scores: record the distributions; without it, only the confidence.
    """
    others = 0 if side is None else side.most
    unused = (pending.next, pending.next, pending.next, pending.confidence, pending.scores, pending.next)
    depth = side.depth if side is not None else 1
    known, vocabulary = min(logits.shape[2], pending.vocabulary), pending.vocabulary
    found, chunks = search_chunks(logits, known, noise)
    norms = torch.empty((pending.rows, 1 + others, 2), device=logits.device)
    entries = index_memory((pending.rows, 1 + others), torch.long, logits.device)
    block, listed = pending.block, token_ids is not None
    chunks_to_write = chunk_count(known if listed else vocabulary)
    whole = chunks_to_write == 1
    _advance_kernel[(pending.rows, 1 + others)](
        logits, pending.confidence if noise is None else noise, *found, norms, entries, pending.ids, *pending[2:],
        count, flag, bound, count if goes_on is None else goes_on, entries if token_ids is None else token_ids,
        *(side or unused), *inputs, positions, further, epsilon, step,
        logits.stride(0), logits.stride(1), known, vocabulary, pending.ids.stride(0), pending.ring, others, depth,
        positions.stride(0), inputs.tokens.stride(0), logits.shape[1],
        STICKY=sticky, INCLUSIVE=inclusive, TELLS=goes_on is not None, UNITS=CONFIDENCE_UNITS, LISTED=listed,
        DRAWS=noise is not None, WHOLE=whole and keeps_scores, CHUNKS=chunks, BLOCK=chunk_size(known), OUT_BLOCK=block,
        num_warps=memory.warps(block) if whole or chunks == 1 else 1,
    )  # fmt: skip
    if keeps_scores and not whole:
        _distribution_kernel[(chunks_to_write, 1 + others, pending.rows)](
            logits, norms, entries, pending.scores, pending.scores if side is None else side.scores,
            entries if token_ids is None else token_ids, logits.stride(0), logits.stride(1), known, vocabulary,
            LISTED=listed, BLOCK=block, num_warps=memory.warps(block),
        )  # fmt: skip


@varying("further", "step", "row_stride", "query_stride", "known", "vocabulary", "ids_stride", "ring", "most",
         "depth", "positions_stride", "inputs_stride", "queries")  # fmt: skip
def _advance_kernel(
    logits: Value, noise: Value, largest: Value, total: Value, rate: Value, found: Value, norms: Value, entries: Value,
    ids: Value, end: Value, cached: Value, next_token: Value, confidence: Value, scores: Value,
    count: Value, flag: Value, bound: Value, more_steps: Value, token_ids: Value,
    point: Value, forks: Value, side_tokens: Value, side_confidence: Value, side_scores: Value,
    side_slots: Value,
    input_tokens: Value, input_slots: Value, input_positions: Value, spans: Value, positions: Value,
    further: Value, epsilon: Value, step: Value, row_stride: Value, query_stride: Value, known: Value,
    vocabulary: Value, ids_stride: Value, ring: Value, most: Value, depth: Value, positions_stride: Value,
    inputs_stride: Value, queries: Value,
    STICKY: constexpr, INCLUSIVE: constexpr, TELLS: constexpr, UNITS: constexpr, LISTED: constexpr, DRAWS: constexpr,
    WHOLE: constexpr, CHUNKS: constexpr, BLOCK: constexpr, OUT_BLOCK: constexpr,
) -> None:  # fmt: skip
    row, branch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * row_stride + branch * query_stride
    at = row * queries + branch
    top_value, whole, best = combined(
        logits, noise + at * known, largest, total, rate, found, at, known, DRAWS, CHUNKS, BLOCK
    )  # fmt: skip
    if LISTED:
        best = tl.load(token_ids + best)
    top = 1.0 / whole  # the probability of the likeliest token

    if branch == 0:
        next_column = tl.load(end + row)  # the column of the chosen token
        entry = row * (ring + 1) + next_column % ring
        tl.store(confidence + entry, top)
        tl.store(next_token + row, best)
        tl.store(cached + row, next_column)
        out = scores + entry * vocabulary
        last = tl.load(bound + row) + further
        extends = tl.load(flag + row).to(tl.int1) & (next_column < last)
        goes_on = extends & (top >= epsilon)
        if STICKY:
            tl.store(flag + row, goes_on)
        if not INCLUSIVE:
            extends = goes_on
        tl.store(ids + row * ids_stride + next_column, best, mask=extends)
        tl.store(count + row, tl.load(count + row) + extends.to(tl.int64))
        before = tl.load(ids + row * ids_stride + next_column - 1)
        token = tl.where(extends, best, before)
        column = next_column + extends.to(tl.int64) - 1
        tl.store(end + row, column + 1)
        if TELLS:
            tl.store(more_steps + row, tl.where(goes_on & (column + 1 < last), 1 + (top * UNITS).to(tl.int64), 0))
        slot = column
        more = column >= 0
    else:
        entry = (row * most + branch - 1) * depth + step
        tl.store(side_confidence + entry, top)
        out = side_scores + entry * vocabulary
        token = best
        tl.store(side_tokens + (row * most + branch - 1) * (depth + 1) + step + 1, token)
        column = tl.load(forks + row * most + branch - 1) + step + 1
        more = step + 1 < depth
        slot = tl.load(point + row) + tl.load(side_slots + (branch - 1) * depth + step + 1, mask=more, other=0)

    place = row * inputs_stride + branch
    tl.store(input_tokens + place, token)
    tl.store(input_slots + place, slot, mask=more)
    tl.store(input_positions + place, tl.load(positions + row * positions_stride + column))
    # The pending draft sees the text up to its new token; a side branch sees one more slot of its own.
    bound_of_span = tl.where(branch == 0, 1, 3)
    tl.store(spans + place * 4 + bound_of_span, (slot + 1).to(tl.int32), mask=more)

    if WHOLE:
        write_chunk(logits, out, token_ids, 0, top_value, whole, known, vocabulary, LISTED, OUT_BLOCK)
    else:
        place = row * (1 + most) + branch
        tl.store(norms + place * 2, top_value)
        tl.store(norms + place * 2 + 1, whole)
        tl.store(entries + place, entry)


@varying("row_stride", "query_stride", "known", "vocabulary")
def _distribution_kernel(
    logits: Value, norms: Value, entries: Value, scores: Value, side_scores: Value, token_ids: Value,
    row_stride: Value, query_stride: Value, known: Value, vocabulary: Value, LISTED: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    chunk, branch, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    logits += row * row_stride + branch * query_stride
    place = row * tl.num_programs(1) + branch
    out = scores
    if branch > 0:
        out = side_scores
    out += tl.load(entries + place) * vocabulary
    largest, total = tl.load(norms + place * 2), tl.load(norms + place * 2 + 1)
    write_chunk(logits, out, token_ids, chunk, largest, total, known, vocabulary, LISTED, BLOCK)


@jit
def write_chunk(
    logits: Value, out: Value, token_ids: Value, chunk: Value, largest: Value, total: Value, known: Value,
    vocabulary: Value, LISTED: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Write a chunk of the distribution; tokens that the draft does not know have probability 0."""
    index = chunk * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + index, mask=index < known, other=-float("inf")).to(tl.float32)
    chance = tl.exp(value - largest) / total
    if LISTED:
        tl.store(out + tl.load(token_ids + index, mask=index < known, other=0), chance, mask=index < known)
    else:
        tl.store(out + index, chance, mask=index < vocabulary)
