"""Verdicts: pure functions from what the target said and what was drafted to what is committed.

Notation: `p` is the target's distribution, `q` the draft's, both after the logits processors. A chain of N
drafted tokens is followed by the branch point, position N. Branches may have been drafted there: the main branch
first, which continues the drafted line, then its siblings; and at earlier positions, in case the chain ends there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NONE = -1  # no branch survived
NO_TOKEN = -2  # nothing can be drawn: the distribution is not one


class Acceptance(NamedTuple):
    """What becomes of a chain, row by row."""

    accepted: Tensor  # [B] chain tokens that stand
    token: Tensor  # [B] the target's own token after them, or NO_TOKEN
    survivor: Tensor  # [B] which branch starts with that token in that place, or NONE


class LeafContinuation(NamedTuple):
    """What the target says behind runner-up tokens that it checked beside the chain."""

    token: Tensor  # [B] its token behind the verdict's, where that was a runner-up; else NONE
    leaf: Tensor  # [B] which runner-up that was, or NONE


def accept_choices(choices: Tensor, draft_tokens: Tensor, length: Tensor, branches: Tensor, at: Tensor) -> Acceptance:
    """Follow the drafted tokens for as long as they are what the target chose.

    With choices `argmax p` this is greedy decoding; with choices drawn from `p` it is sampling from `p`, for
    any chain and any branches that do not depend on the draws.

    Args:
        choices: [B, N + 1] the target's token at each chain position and at the branch point.
        chain: [B, N] drafted tokens.
        length: [B] how many of them are real.
        branches: [B, K] the tokens that branches start with.
        at: [B, K] the position of each, or NONE where there is no branch.
    """
    accepted = _leading((choices[:, :-1] == draft_tokens) & _before(length, draft_tokens.shape[1]))
    token = _pick(choices, accepted)
    return Acceptance(accepted, token, _find(token, accepted, branches, at))


def accept_samples(
    p: Tensor,
    q: Tensor,
    draft_tokens: Tensor,
    length: Tensor,
    branches: Tensor,
    at: Tensor,
    generator: torch.Generator | None = None,
) -> Acceptance:
    """Speculative sampling: each drafted token `x ~ q` stands with probability `min(1, p(x) / q(x))`; in place
    of the first that falls, one from the residual `norm(max(0, p - q))`.

    The main branch's token at the branch point was drawn from `q` too and is tested like the chain's. Wherever a
    token falls, the residual's may start another branch. Without branches the token behind the chain comes from `p`.

    Args:
        p: [B, N + 1, V] target probabilities at the chain positions and the branch point.
        q: [B, N + 1, V] draft probabilities there.
        chain: [B, N] tokens drawn from `q`.
        length: [B] how many of them are real.
        branches: [B, K] the tokens that branches start with: the main branch's, drawn from `q`, first.
        at: [B, K] the position of each, or NONE where there is no branch.
        generator: source of randomness.
    """
    rows, positions, _ = p.shape
    drawn = torch.cat([draft_tokens, draft_tokens.new_zeros(rows, 1)], dim=1)  # [B, N + 1]
    drawn.scatter_(1, length[:, None], branches[:, :1])
    tested = length + (at[:, 0] == length)  # [B] drafted tokens that face the test
    chance = acceptance_probability(p, q).gather(2, drawn[:, :, None])[:, :, 0]
    uniform = torch.rand((rows, positions), generator=generator, device=p.device, dtype=p.dtype)
    standing = _leading((uniform < chance) & _before(tested, positions))  # [B]
    where = standing.clamp(max=positions - 1)
    p_there = p[torch.arange(rows, device=p.device), where]  # [B, V]
    q_there = q[torch.arange(rows, device=p.device), where]
    source = torch.where((standing < tested)[:, None], residual(p_there, q_there), p_there)
    fresh = draw_if_possible(source, generator)
    main_stands = standing > length  # the whole chain, and the main branch's token behind it
    token = torch.where(main_stands, branches[:, 0], fresh)
    accepted = torch.minimum(standing, length)
    return Acceptance(accepted, token, _find(token, accepted, branches, at))


def continue_leaf(acceptance: Acceptance, choices: Tensor, leaves: Tensor, at: Tensor) -> LeafContinuation:
    """Whether the verdict's token was checked as a runner-up, and what the target chose behind it.

    With choices `argmax p`, or drawn from `p`, given the text with that runner-up, the further token is one of plain
    decoding: which runners-up were checked depends on none of these draws.

    Args:
        choices: [B, W] the target's token behind each runner-up.
        leaves: [B, W] the runners-up.
        at: [B, W] the chain position of each, or NONE.
    """
    leaf = _find(acceptance.token, acceptance.accepted, leaves, at)
    token = _pick(choices, leaf.clamp(min=0))
    leaf = torch.where(token == NO_TOKEN, NONE, leaf)  # the next round stands there, and says so
    return LeafContinuation(torch.where(leaf == NONE, NONE, token), leaf)


def draw(p: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """A token from each distribution [..., V].

    The least of independent exponential waiting times with rates `p` is `x` with probability `p(x)`. Unlike
    `torch.multinomial` this never asks the device whether `p` is valid.
    """
    return (p / torch.empty_like(p).exponential_(generator=generator)).argmax(-1)


def draw_if_possible(p: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """The same, and NO_TOKEN where a softmax has no value: every token is masked, or a score is infinite or NaN."""
    return torch.where(p[..., 0].isnan(), NO_TOKEN, draw(p, generator))


def acceptance_probability(p: Tensor, q: Tensor) -> Tensor:
    """The probability `min(1, p(x) / q(x))` with which a token `x` drawn from `q` stands."""
    return torch.where(q > 0, p / q.clamp(min=torch.finfo(q.dtype).tiny), 0).clamp(max=1)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """`norm(max(0, p - q))` over the last dimension; `p` itself where the two are equal."""
    rest = (p - q).clamp(min=0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total.clamp(min=torch.finfo(p.dtype).tiny), p)


def _before(length: Tensor, size: int) -> Tensor:
    return torch.arange(size, device=length.device) < length[:, None]  # [B, size]


def _leading(flags: Tensor) -> Tensor:
    """How many flags are set before the first that is not."""
    return flags.long().cumprod(1).sum(1)


def _pick(table: Tensor, index: Tensor) -> Tensor:
    return table.gather(1, index[:, None])[:, 0]


def _find(token: Tensor, position: Tensor, branches: Tensor, at: Tensor) -> Tensor:
    """Index of the branch that starts with `token` at `position`; NONE if there is none."""
    same = (branches == token[:, None]) & (at == position[:, None])
    return torch.where(same.any(1), same.long().argmax(1), NONE)
