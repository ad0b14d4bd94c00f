"""The verdicts that are likely to end a chain early: `LikelyRejections.look` in two kernels."""

from __future__ import annotations

from torch import Tensor

from ..backend import Value, constexpr, power_of_two, tl, varying
from .likeliest import next_likeliest
from .memory import FEW, PendingBuffers, warps


def find_likely_rejections(
    pending: PendingBuffers, sent_length: Tensor, chances: Tensor, others: Tensor, tokens: Tensor, at: Tensor
) -> None:
    """Find the likeliest pairs of a chain position and a token other than the chain's.

    Args:
        line: its first tokens are the chain.
        chain_length: [B].
        chances: [B, N, K + 1] to work in: the probabilities of K other tokens at each position, then of the chain's.
        others: [B, N, K] to work in.
        tokens: [B, count] the tokens found.
        at: [B, count] their positions, NONE where there are no more.
    """
    rows, positions, alternatives = others.shape
    block = pending.block
    _others_kernel[(rows, positions)](
        pending.scores, pending.ids, pending.start, chances, others, pending.vocabulary, pending.ids.stride(0),
        pending.ring, positions, alternatives, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    size = power_of_two(positions * alternatives, FEW)
    _best_kernel[(rows,)](
        chances, others, sent_length, tokens, at, positions, alternatives, tokens.shape[1], BLOCK=size,
        num_warps=max(1, size // 64),
    )  # fmt: skip


@varying("vocabulary", "ids_stride", "ring", "count", "alternatives")
def _others_kernel(
    scores: Value, ids: Value, start: Value, chances: Value, others: Value, vocabulary: Value, ids_stride: Value,
    ring: Value, count: Value, alternatives: Value, BLOCK: constexpr,
) -> None:  # fmt: skip
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.minimum(tl.load(start + row) + place, ids_stride - 1)
    own = tl.load(ids + row * ids_stride + column)
    scores += (row * (ring + 1) + column % ring) * vocabulary
    chances += (row * count + place) * (alternatives + 1)
    others += (row * count + place) * alternatives
    tl.store(chances + alternatives, tl.load(scores + own))
    value = 2.0
    index = 0
    for k in range(0, alternatives):
        value, index = next_likeliest(scores, vocabulary, own, value, index, BLOCK)
        tl.store(chances + k, tl.maximum(value, 0.0))
        tl.store(others + k, index.to(tl.int64))


@varying("positions", "alternatives", "count")
def _best_kernel(
    chances: Value, others: Value, sent_length: Value, tokens: Value, at: Value, positions: Value,
    alternatives: Value, count: Value, BLOCK: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    place = pair // alternatives
    chances += row * positions * (alternatives + 1)
    inside = (place < positions) & (place < tl.load(sent_length + row))
    chance = tl.load(chances + place * (alternatives + 1) + pair % alternatives, mask=inside, other=0.0)
    for before in range(0, positions):
        stands = tl.load(chances + before * (alternatives + 1) + alternatives)
        chance = tl.where(place > before, chance * stands, chance)
    for k in range(0, count):
        value, best = tl.max(chance, 0), tl.argmax(chance, 0)
        tl.store(tokens + row * count + k, tl.load(others + row * positions * alternatives + best))
        tl.store(at + row * count + k, tl.where(value > 0, best // alternatives, -1).to(tl.int64))
        chance = tl.where(pair == best, -1.0, chance)
