"""The verify result of a round, from the target's choices: which draft tokens are accepted, and which branch survives.

This is `accept_choices` and `continue_leaf` of `decoding.acceptance` in one kernel. It also writes the accepted tokens
to the text, and what the result means for it.
"""

from __future__ import annotations

from torch import Tensor

from ..backend import Value, constexpr, power_of_two, tl, varying
from .memory import FEW, load_text_length, store_round_result


def verify_draft(
    choices: Tensor,
    draft_tokens: tuple[Tensor, Tensor],
    branches: tuple[Tensor, Tensor],
    following: Tensor | None,
    leaves: tuple[Tensor, Tensor] | None,
    drafted: Tensor,
    ids: Tensor,
    round_result: Tensor,
    limit: Tensor,
    verify_result: Tensor,
    where: Tensor,
) -> None:
    """Verify draft tokens, write what is accepted after the text, and write the verify result and the round result.

    Args:
        choices: [B, N + 1 + W] the target's tokens at the draft positions, at the branch point and after each leaf. -2
            (`NO_TOKEN`) goes into the verify result, but not into the text.
        draft_tokens: the draft tokens [B, N] and their number [B].
        branches: the tokens [B, K] that branches start with, and their draft positions [B, K].
        following: [B, K] the second token of each branch, if a leaf continuation may skip to it.
        leaves: the tree leaves [B, W] and their draft positions [B, W], if any.
        drafted: [B, 6] the fields of `Drafted`, copied to the verify result.
        ids: [B, C] the text, written to.
        round_result: [7, B] packed; see `RoundResult` in `decoding.state`. It holds the last round's and receives this
            one's, for a text that only its longest length ends.
        limit: [B] the longest length of each row.
        verify_result: [B, 10 + N] receives the fields of `VerifyResult` in `decoding.state`.
        where: [B] receives the query whose logits the last token was chosen from.
    """
    rows, count = draft_tokens[0].shape
    tokens, at = leaves or branches
    size = power_of_two(max(count, branches[0].shape[1], tokens.shape[1]), FEW)
    _verify_kernel[(rows,)](
        choices, *draft_tokens, *branches, branches[0] if following is None else following, tokens, at, drafted, ids,
        round_result, limit, verify_result, where, round_result.stride(0), choices.shape[1], count,
        draft_tokens[0].stride(0), branches[0].shape[1], branches[0].stride(0), tokens.shape[1], tokens.stride(0),
        ids.stride(0), verify_result.shape[1],
        FOLLOWING=following is not None, LEAVES=leaves is not None, BLOCK=size, num_warps=1,
    )  # fmt: skip


@varying("result_stride", "choices_stride", "count", "draft_stride", "branch_count", "branch_stride", "leaf_count",
         "leaf_stride", "ids_stride", "verify_stride")  # fmt: skip
def _verify_kernel(
    choices: Value, draft_tokens: Value, sent_length: Value, branch_tokens: Value, branch_at: Value, following: Value,
    leaf_tokens: Value, leaf_at: Value, drafted: Value, ids: Value, round_result: Value, limit: Value,
    verify_result: Value, where: Value, result_stride: Value, choices_stride: Value, count: Value, draft_stride: Value,
    branch_count: Value, branch_stride: Value, leaf_count: Value, leaf_stride: Value, ids_stride: Value,
    verify_stride: Value,
    FOLLOWING: constexpr, LEAVES: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    nth = tl.arange(0, BLOCK)
    choices += row * choices_stride
    verify_result += row * verify_stride
    tokens = tl.load(draft_tokens + row * draft_stride + nth, mask=nth < count, other=-1)
    chosen = tl.load(choices + nth, mask=nth < count, other=-2)
    length = tl.minimum(tl.load(sent_length + row), count)
    # The first draft token that differs from the target's choice ends the acceptance.
    differs = (tokens != chosen) & (nth < length)
    accepted = tl.min(tl.where(differs, nth.to(tl.int64), length), 0)
    token = tl.load(choices + accepted)  # the target's own

    first = tl.load(branch_tokens + row * branch_stride + nth, mask=nth < branch_count, other=-1)
    place = tl.load(branch_at + row * branch_stride + nth, mask=nth < branch_count, other=-1)
    survivor = tl.min(tl.where((first == token) & (place == accepted), nth.to(tl.int64), BLOCK), 0)
    survivor = tl.where(survivor == BLOCK, -1, survivor)

    continuation = token * 0 - 1
    chosen_at = accepted
    if LEAVES:
        first = tl.load(leaf_tokens + row * leaf_stride + nth, mask=nth < leaf_count, other=-1)
        place = tl.load(leaf_at + row * leaf_stride + nth, mask=nth < leaf_count, other=-1)
        leaf = tl.min(tl.where((first == token) & (place == accepted), nth.to(tl.int64), BLOCK), 0)
        found = leaf < BLOCK
        continuation = tl.load(choices + count + 1 + leaf, mask=found, other=-1)
        found = found & (continuation >= 0)
        continuation = tl.maximum(continuation, -1)
        chosen_at = tl.where(found, count + 1 + leaf, accepted)
    if FOLLOWING:
        next_token = tl.load(following + row * branch_stride + survivor, mask=survivor >= 0, other=-1)
        survivor = tl.where((continuation == -1) | (continuation == next_token), survivor, -1)

    before = load_text_length(round_result, row, result_stride)
    ids += row * ids_stride + before
    tl.store(ids + nth, tokens, mask=nth < accepted)
    valid_token = tl.maximum(token, 0)
    tl.store(ids + accepted, valid_token)
    tl.store(ids + accepted + 1, continuation, mask=continuation >= 0)
    tl.store(verify_result, accepted)
    tl.store(verify_result + 1, token)
    tl.store(verify_result + 2, survivor)
    tl.store(verify_result + 3, continuation)
    tl.store(verify_result + 4 + nth, tl.load(drafted + row * 6 + nth, mask=nth < 6), mask=nth < 6)
    tl.store(verify_result + 10 + nth, tokens, mask=nth < count)
    tl.store(where + row, chosen_at)

    longest = tl.load(limit + row)
    committed = tl.minimum(accepted + 1 + (continuation >= 0).to(tl.int64), longest - before)
    length = before + committed
    finished = length >= longest
    store_round_result(
        round_result, row, result_stride, committed, accepted, valid_token, survivor, continuation, finished, length
    )
