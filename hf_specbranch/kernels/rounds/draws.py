"""Speculative sampling as choices: the target's token at each position, given that all tokens before it are accepted.

A drafted token `x ~ q` is the choice with probability `min(1, p(x) / q(x))`. Otherwise the choice is drawn from the
residual `norm(max(0, p - q))`, which is never `x`. Where no draft token was drawn, the choice is drawn from `p`. Draws
at different positions are independent, so accepting draft tokens for as long as they equal the choices
(`accept_choices`) is speculative sampling (`accept_samples`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..backend import Value, constexpr, jit, tl, varying
from ..parallel_build import room as index_memory
from .chunks import chunk_count, chunk_size, combined, search_chunks
from .memory import warps


class Drawn(NamedTuple):
    """Draft tokens that were drawn from the draft's distributions."""

    tokens: Tensor  # [B, N] the draft tokens under verification
    length: Tensor  # [B] how many are real
    scores: Tensor  # [B, N, V] the distributions they were drawn from
    branches: Tensor  # [B, K] the token each branch starts with; that of the main branch was drawn too
    at: Tensor  # [B, K] how many draft tokens must be accepted for a branch to live on; NONE: there is no such branch
    branch_scores: Tensor | None  # [B, V] the distribution that the main branch's token was drawn from


def drawn_choices(scores: Tensor, noise: Tensor, drawn: Drawn | None) -> Tensor:
    """Return the target's token at each position.

    Args:
        scores: [B, Q, V] after the processors.
        noise: [B, Q, V + 1] exponential random numbers. The first arrival among waiting times with rates `p` is token
            `x` with probability `p(x)`. The last number decides whether a draft token is accepted.
        drawn: the draft tokens, if they were drawn.

    Returns:
        [B, Q]; -2 (`NO_TOKEN`) where every token is masked, or a score is infinite or NaN.
    """
    rows, queries, vocabulary = scores.shape
    choices = index_memory((rows, queries), torch.long, scores.device)
    given = drawn or Drawn(choices, choices, scores, choices, choices, None)
    branch_scores = given.branch_scores
    found, chunks = search_chunks(scores, vocabulary)
    block, count = chunk_size(vocabulary), chunk_count(vocabulary)
    rates = torch.empty((2, rows, queries, count), device=scores.device)
    tokens = index_memory((2, rows, queries, count), torch.long, scores.device)
    inputs = (
        scores, noise, *given[:5], scores if branch_scores is None else branch_scores, *found[:2], *rates, *tokens,
        choices, scores.stride(0), scores.stride(1), queries, vocabulary, given.tokens.shape[1],
        given.tokens.stride(0), given.branches.stride(0),
    )  # fmt: skip
    how = {
        "DRAWN": drawn is not None, "BRANCH": branch_scores is not None, "CHUNKS": chunks, "BLOCK": block,
    }  # fmt: skip
    if count > 1:
        _draw_kernel[(count, queries, rows)](*inputs, **how, SEARCH=True, num_warps=warps(block))
    _draw_kernel[(1, queries, rows)](*inputs, **how, SEARCH=False, num_warps=warps(block) if count == 1 else 1)
    return choices


@varying("scores_row", "scores_query", "queries", "vocabulary", "count", "tokens_row", "branch_row")
def _draw_kernel(
    scores: Value, noise: Value, drafted: Value, lengths: Value, sent_scores: Value, branches: Value,
    at: Value, branch_scores: Value, largest: Value, total: Value, rates: Value, residual_rates: Value, tokens: Value,
    residual_tokens: Value, choices: Value, scores_row: Value, scores_query: Value, queries: Value, vocabulary: Value,
    count: Value, tokens_row: Value, branch_row: Value,
    DRAWN: constexpr, BRANCH: constexpr, SEARCH: constexpr, CHUNKS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Draw from every chunk (SEARCH), one program each; or decide between the chunks and the draft token."""
    query, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    place = row * queries + query
    scores += row * scores_row + query * scores_query
    noise += place * (vocabulary + 1)
    top, whole, _token = combined(
        scores, scores, largest, total, largest, tokens, place, vocabulary, DRAWS=False, CHUNKS=CHUNKS, BLOCK=BLOCK
    )
    tested = row < 0  # false: no draft token is tested here
    token = row * 0
    q = sent_scores
    if DRAWN:
        length = tl.load(lengths + row)
        tested = query < length
        q = sent_scores + (row * count + tl.minimum(query, count - 1)) * vocabulary
        token = tl.load(drafted + row * tokens_row + tl.minimum(query, count - 1))
        if BRANCH:
            if query == length:
                tested = tl.load(at + row * branch_row) == length
                token = tl.load(branches + row * branch_row)
                q = branch_scores + row * vocabulary
    if SEARCH:
        chunk = tl.program_id(0)
        rate, choice, residual, residual_choice = _draw_from_chunk(
            scores, noise, q, chunk, tested, top, whole, vocabulary, DRAWN, BLOCK
        )
        place = place * tl.num_programs(0) + chunk
        tl.store(rates + place, rate)
        tl.store(tokens + place, choice.to(tl.int64))
        tl.store(residual_rates + place, residual)
        tl.store(residual_tokens + place, residual_choice.to(tl.int64))
    else:
        if CHUNKS == 1:
            rate, choice, residual, residual_choice = _draw_from_chunk(
                scores, noise, q, 0, tested, top, whole, vocabulary, DRAWN, BLOCK
            )
        else:
            chunks = tl.cdiv(vocabulary, BLOCK)
            rate, choice = _fastest(rates + place * chunks, tokens + place * chunks, chunks, CHUNKS)
            residual, residual_choice = _fastest(
                residual_rates + place * chunks, residual_tokens + place * chunks, chunks, CHUNKS
            )
        accepted = row < 0
        choice = choice.to(tl.int64)
        if DRAWN:
            p_token = tl.exp(tl.load(scores + token).to(tl.float32) - top) / whole
            q_token = tl.load(q + token)
            uniform = 1.0 - tl.exp(-tl.load(noise + vocabulary))  # may be rounded to 1
            accepted = tested & (q_token > 0) & ((q_token <= p_token) | (q_token * uniform < p_token))
            choice = tl.where(residual > 0, residual_choice.to(tl.int64), choice)  # p itself, where p and q are equal
        choice = tl.where(whole > 0, choice, -2)
        tl.store(choices + place, tl.where(accepted, token, choice))


@jit
def _draw_from_chunk(
    scores: Value, noise: Value, q: Value, chunk: Value, tested: Value, top: Value, whole: Value, vocabulary: Value,
    DRAWN: constexpr, BLOCK: constexpr,
) -> tuple[Value, Value, Value, Value]:  # fmt: skip
    """Return rate and index of the token drawn from `p` in a chunk, and of that drawn from the residual."""
    index = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = index < vocabulary
    value = tl.load(scores + index, mask=inside, other=-float("inf")).to(tl.float32)
    wait = tl.load(noise + index, mask=inside, other=1.0)
    p = tl.exp(value - top) / whole
    rate = tl.max(p / wait, 0)
    choice = chunk * BLOCK + tl.argmax(p / wait, 0)
    residual = rate * 0.0
    residual_choice = choice
    if DRAWN:
        q_here = tl.load(q + index, mask=inside, other=0.0)
        speed = tl.maximum(p - tl.where(tested, q_here, 0.0), 0.0) / wait
        residual = tl.max(speed, 0)
        residual_choice = chunk * BLOCK + tl.argmax(speed, 0)
    return rate, choice, residual, residual_choice


@jit
def _fastest(rates: Value, tokens: Value, chunks: Value, CHUNKS: constexpr) -> tuple[Value, Value]:
    """Return the largest rate of all chunks, and its token."""
    chunk = tl.arange(0, CHUNKS)
    rate = tl.load(rates + chunk, mask=chunk < chunks, other=-1.0)
    return tl.max(rate, 0), tl.load(tokens + tl.argmax(rate, 0))
