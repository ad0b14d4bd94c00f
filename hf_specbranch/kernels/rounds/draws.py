"""Speculative sampling as choices: what the target takes at each position, as if all before it stood.

A drafted token `x ~ q` is the choice with probability `min(1, p(x) / q(x))`; else the choice is drawn from the residual
`norm(max(0, p - q))`, which never is `x`. Where nothing was drawn it comes from `p`. Draws at different positions are
independent, so following the chain for as long as it is what was chosen (`accept_choices`) is `accept_samples`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..backend import Value, constexpr, power_of_two, tl, varying
from .memory import LARGEST_BLOCK, warps


class Drawn(NamedTuple):
    """Tokens that were drawn from the draft's distributions."""

    tokens: Tensor  # [B, N] of the chain
    length: Tensor  # [B]
    scores: Tensor  # [B, N, V] the distributions they were drawn from
    branches: Tensor  # [B, K] of which the first was drawn too
    at: Tensor  # [B, K] where that stands if it stands behind the chain
    branch_scores: Tensor | None  # [B, V] the distribution it was drawn from


def drawn_choices(scores: Tensor, noise: Tensor, drawn: Drawn | None) -> Tensor:
    """The target's token at each position.

    Args:
        scores: [B, Q, V] after the processors.
        noise: [B, Q, V + 1] of exponential random numbers. The least of waiting times with rates `p` is `x` with
            probability `p(x)`; the last number decides whether a drafted token stands.
        drawn: what was drafted, if it was drawn.

    Returns:
        [B, Q]; -2 (`NO_TOKEN`) where every token is masked, or a score is infinite or NaN.
    """
    rows, queries, vocabulary = scores.shape
    choices = torch.empty((rows, queries), dtype=torch.long, device=scores.device)
    block = min(LARGEST_BLOCK, power_of_two(vocabulary))
    given = drawn or Drawn(choices, choices, scores, choices, choices, None)
    branch_scores = given.branch_scores
    _draws_kernel[(rows, queries)](
        scores, noise, choices, *given[:5], scores if branch_scores is None else branch_scores,
        scores.stride(0), scores.stride(1), queries, vocabulary, given.tokens.shape[1],
        given.tokens.stride(0), given.branches.stride(0),
        DRAWN=drawn is not None, BRANCH=branch_scores is not None, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return choices


@varying("scores_row", "scores_query", "queries", "vocabulary", "count", "chain_row", "branch_row")
def _draws_kernel(
    scores: Value, noise: Value, choices: Value, tokens: Value, lengths: Value, sent_scores: Value, branches: Value,
    at: Value, branch_scores: Value, scores_row: Value, scores_query: Value, queries: Value, vocabulary: Value,
    count: Value, chain_row: Value, branch_row: Value, DRAWN: constexpr, BRANCH: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    row, query = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scores += row * scores_row + query * scores_query
    noise += (row * queries + query) * (vocabulary + 1)
    offsets = tl.arange(0, BLOCK)

    largest = -float("inf")
    total = 0.0
    for first in range(0, vocabulary, BLOCK):
        value = tl.load(scores + first + offsets, mask=first + offsets < vocabulary, other=-float("inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(value, 0))
        base = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(value - base), 0)
        largest = new

    tested = row < 0
    stands = row < 0
    token = row * 0
    q = sent_scores
    if DRAWN:
        length = tl.load(lengths + row)
        tested = query < length
        q = sent_scores + (row * count + tl.minimum(query, count - 1)) * vocabulary
        token = tl.load(tokens + row * chain_row + tl.minimum(query, count - 1))
        if BRANCH:
            if query == length:
                tested = tl.load(at + row * branch_row) == length
                token = tl.load(branches + row * branch_row)
                q = branch_scores + row * vocabulary
        chance = tl.exp(tl.load(scores + token).to(tl.float32) - largest) / total
        believed = tl.load(q + token)
        uniform = 1.0 - tl.exp(-tl.load(noise + vocabulary))  # which may be rounded to 1
        stands = tested & (believed > 0) & ((believed <= chance) | (believed * uniform < chance))

    best = -1.0
    choice = query * 0
    best_left = 0.0
    choice_left = query * 0
    for first in range(0, vocabulary, BLOCK):
        inside = first + offsets < vocabulary
        value = tl.load(scores + first + offsets, mask=inside, other=-float("inf")).to(tl.float32)
        wait = tl.load(noise + first + offsets, mask=inside, other=1.0)
        p = tl.exp(value - largest) / total
        here = tl.max(p / wait, 0)
        choice = tl.where(here > best, first + tl.argmax(p / wait, 0), choice)
        best = tl.maximum(best, here)
        if DRAWN:
            drafted = tl.load(q + first + offsets, mask=inside, other=0.0)
            left = tl.maximum(p - tl.where(tested, drafted, 0.0), 0.0) / wait
            here = tl.max(left, 0)
            choice_left = tl.where(here > best_left, first + tl.argmax(left, 0), choice_left)
            best_left = tl.maximum(best_left, here)
    if DRAWN:
        choice = tl.where(best_left > 0, choice_left, choice)  # p itself where the two are equal
    choice = tl.where(total > 0, choice.to(tl.int64), -2)
    tl.store(choices + row * queries + query, tl.where(stands, token, choice))
