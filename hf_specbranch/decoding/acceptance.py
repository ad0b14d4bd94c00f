"""Where a token is accepted: pure functions from the target's logits and the draft to a verify result.

Notation: `p` is the target's distribution and `q` the draft's, both after the logits processors. N draft tokens are
followed by the branch point, position N. Branches may have been drafted there, the main branch first, and at earlier
positions, in case the target rejects there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .resolve import NONE

NO_TOKEN = -2  # nothing can be drawn: the distribution has no valid value


class Acceptance(NamedTuple):
    """How far the target follows the draft, row by row."""

    accepted: Tensor  # [B] leading draft tokens that are accepted
    token: Tensor  # [B] the target's own token after them, or NO_TOKEN
    survivor: Tensor  # [B] the branch that starts with that token at that position, or NONE


class LeafContinuation(NamedTuple):
    """What the target says after a tree leaf that turned out to be its own token."""

    token: Tensor  # [B] the token after the leaf; NONE where the target's own token was no leaf
    leaf: Tensor  # [B] which leaf it was, or NONE


def accept_choices(choices: Tensor, draft_tokens: Tensor, length: Tensor, branches: Tensor, at: Tensor) -> Acceptance:
    """Accept draft tokens for as long as they are what the target chose.

    With choices `argmax p` this is greedy decoding. With choices drawn from `p` it is sampling from `p`, for any draft
    and any branches that do not depend on the draws.

    Args:
        choices: [B, N + 1] the target's token at each draft position and at the branch point.
        draft_tokens: [B, N] drafted tokens.
        length: [B] how many of them are real.
        branches: [B, K] the tokens that branches start with.
        at: [B, K] the position of each, or NONE where there is no branch.
    """
    if not draft_tokens.shape[1] and not branches.shape[1]:  # there is nothing to accept
        return Acceptance(torch.zeros_like(length), choices[:, 0], torch.full_like(length, NONE))
    accepted = _count_leading((choices[:, :-1] == draft_tokens) & _below(length, draft_tokens.shape[1]))
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
    """Speculative sampling: accept `x ~ q` with probability `min(1, p(x) / q(x))`.

    In place of the first rejected token, one is drawn from the residual `norm(max(0, p - q))`. The main branch's token
    at the branch point was drawn from `q` too, and is tested like the others. Wherever a token is rejected, the
    residual's may start another branch. Without branches the token after the draft (the bonus token) comes from `p`.

    Args:
        p: [B, N + 1, V] target probabilities at the draft positions and the branch point.
        q: [B, N + 1, V] draft probabilities there.
        draft_tokens: [B, N] tokens drawn from `q`.
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
    passed = _count_leading((uniform < chance) & _below(tested, positions))  # [B]
    where = passed.clamp(max=positions - 1)
    p_there = p[torch.arange(rows, device=p.device), where]  # [B, V]
    q_there = q[torch.arange(rows, device=p.device), where]
    source = torch.where((passed < tested)[:, None], residual(p_there, q_there), p_there)
    fresh = draw_if_possible(source, generator)
    main_accepted = passed > length  # all draft tokens, and the main branch's token after them
    token = torch.where(main_accepted, branches[:, 0], fresh)
    accepted = torch.minimum(passed, length)
    return Acceptance(accepted, token, _find(token, accepted, branches, at))


def continue_leaf(acceptance: Acceptance, choices: Tensor, leaves: Tensor, at: Tensor) -> LeafContinuation:
    """Find out whether the target's own token was verified as a tree leaf, and what the target chose after it.

    With choices `argmax p`, or drawn from `p`, given the text with that leaf, the further token is one of plain
    decoding: which leaves were verified depends on none of these draws.

    Args:
        choices: [B, W] the target's token after each leaf.
        leaves: [B, W] the leaves.
        at: [B, W] the draft position of each, or NONE.
    """
    leaf = _find(acceptance.token, acceptance.accepted, leaves, at)
    token = _pick(choices, leaf.clamp(min=0))
    leaf = torch.where(token == NO_TOKEN, NONE, leaf)  # the next round starts there, and reports it
    return LeafContinuation(torch.where(leaf == NONE, NONE, token), leaf)


def draw(p: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw a token from each distribution [..., V].

    The least of independent exponential waiting times with rates `p` is `x` with probability `p(x)`. Unlike
    `torch.multinomial` this never asks the device whether `p` is valid.
    """
    return (p / torch.empty_like(p).exponential_(generator=generator)).argmax(-1)


def draw_if_possible(p: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw a token; NO_TOKEN where a softmax has no value: all tokens are masked, or a score is not finite."""
    return torch.where(p[..., 0].isnan(), NO_TOKEN, draw(p, generator))


def acceptance_probability(p: Tensor, q: Tensor) -> Tensor:
    """Return `min(1, p(x) / q(x))`, with which a token `x` drawn from `q` is accepted."""
    return torch.where(q > 0, p / q.clamp(min=torch.finfo(q.dtype).tiny), 0).clamp(max=1)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return `norm(max(0, p - q))` over the last dimension; `p` itself where the two are equal."""
    rest = (p - q).clamp(min=0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total.clamp(min=torch.finfo(p.dtype).tiny), p)


def _below(length: Tensor, size: int) -> Tensor:
    return torch.arange(size, device=length.device) < length[:, None]  # [B, size]


def _count_leading(flags: Tensor) -> Tensor:
    """Count the flags that are set before the first that is not."""
    return flags.long().cumprod(1).sum(1)


def _pick(table: Tensor, index: Tensor) -> Tensor:
    return table.gather(1, index[:, None])[:, 0]


def _find(token: Tensor, position: Tensor, branches: Tensor, at: Tensor) -> Tensor:
    """Return the index of the branch that starts with `token` at `position`, or NONE."""
    if not branches.shape[1]:
        return torch.full_like(position, NONE)
    same = (branches == token[:, None]) & (at == position[:, None])
    return torch.where(same.any(1), same.long().argmax(1), NONE)
