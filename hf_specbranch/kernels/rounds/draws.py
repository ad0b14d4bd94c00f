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

from ..backend import Value, constexpr, power_of_two, tl, varying
from .memory import LARGEST_BLOCK, warps


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
    choices = torch.empty((rows, queries), dtype=torch.long, device=scores.device)
    block = min(LARGEST_BLOCK, power_of_two(vocabulary))
    given = drawn or Drawn(choices, choices, scores, choices, choices, None)
    branch_scores = given.branch_scores
    _drawn_choices_kernel[(rows, queries)](
        scores, noise, choices, *given[:5], scores if branch_scores is None else branch_scores,
        scores.stride(0), scores.stride(1), queries, vocabulary, given.tokens.shape[1],
        given.tokens.stride(0), given.branches.stride(0),
        DRAWN=drawn is not None, BRANCH=branch_scores is not None, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return choices


@varying("scores_row", "scores_query", "queries", "vocabulary", "count", "tokens_row", "branch_row")
def _drawn_choices_kernel(
    scores: Value, noise: Value, choices: Value, tokens: Value, lengths: Value, sent_scores: Value, branches: Value,
    at: Value, branch_scores: Value, scores_row: Value, scores_query: Value, queries: Value, vocabulary: Value,
    count: Value, tokens_row: Value, branch_row: Value, DRAWN: constexpr, BRANCH: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    row, query = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scores += row * scores_row + query * scores_query
    noise += (row * queries + query) * (vocabulary + 1)
    offsets = tl.arange(0, BLOCK)

    # Softmax in one reading: the sum is rescaled whenever a larger value is found.
    largest = -float("inf")
    total = 0.0
    for first in range(0, vocabulary, BLOCK):
        value = tl.load(scores + first + offsets, mask=first + offsets < vocabulary, other=-float("inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(value, 0))
        base = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(value - base), 0)
        largest = new

    tested = row < 0  # false: no draft token is tested here
    accepted = row < 0
    token = row * 0
    q = sent_scores
    if DRAWN:
        length = tl.load(lengths + row)
        tested = query < length
        q = sent_scores + (row * count + tl.minimum(query, count - 1)) * vocabulary
        token = tl.load(tokens + row * tokens_row + tl.minimum(query, count - 1))
        if BRANCH:
            if query == length:
                tested = tl.load(at + row * branch_row) == length
                token = tl.load(branches + row * branch_row)
                q = branch_scores + row * vocabulary
        p_token = tl.exp(tl.load(scores + token).to(tl.float32) - largest) / total
        q_token = tl.load(q + token)
        uniform = 1.0 - tl.exp(-tl.load(noise + vocabulary))  # may be rounded to 1
        accepted = tested & (q_token > 0) & ((q_token <= p_token) | (q_token * uniform < p_token))

    best = -1.0
    choice = query * 0
    best_residual = 0.0
    residual_choice = query * 0
    for first in range(0, vocabulary, BLOCK):
        inside = first + offsets < vocabulary
        value = tl.load(scores + first + offsets, mask=inside, other=-float("inf")).to(tl.float32)
        wait = tl.load(noise + first + offsets, mask=inside, other=1.0)
        p = tl.exp(value - largest) / total
        here = tl.max(p / wait, 0)
        choice = tl.where(here > best, first + tl.argmax(p / wait, 0), choice)
        best = tl.maximum(best, here)
        if DRAWN:
            q_here = tl.load(q + first + offsets, mask=inside, other=0.0)
            residual = tl.maximum(p - tl.where(tested, q_here, 0.0), 0.0) / wait
            here = tl.max(residual, 0)
            residual_choice = tl.where(here > best_residual, first + tl.argmax(residual, 0), residual_choice)
            best_residual = tl.maximum(best_residual, here)
    if DRAWN:
        choice = tl.where(best_residual > 0, residual_choice, choice)  # p itself, where p and q are equal
    choice = tl.where(total > 0, choice.to(tl.int64), -2)
    tl.store(choices + row * queries + query, tl.where(accepted, token, choice))
