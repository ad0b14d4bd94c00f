"""The verdict on a round: `accept_choices`, `continue_leaf`, what they add to the text, and the report on it."""

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
    """Judge a chain, write what is allowed behind the text, and report.

    Args:
        choices: [B, N + 1 + W] the target's tokens at the chain positions, at the branch point, behind runners-up; -2
            (`NO_TOKEN`) is reported, but never written to the text.
        chain: its tokens [B, N] and lengths [B].
        branches: the tokens [B, K] that branches start with, and their positions.
        following: [B, K] the token behind each branch's first, if runners-up may skip to it.
        leaves: the runners-up [B, W] and their positions, if any.
        drafted: [B, 6] goes into the report as it is.
        ids: [B, C] the text, written to.
        told: [7, B] what the last verdict meant, and the text's length; becomes what this one means, as if nothing but
            its longest length ended a text.
        limit: [1] the longest length.
        report: [B, 10 + N]; see `VerifyResult`.
        where: [B] the query whose logits the last token was chosen from.
    """
    rows, count = draft_tokens[0].shape
    tokens, at = leaves or branches
    size = power_of_two(max(count, branches[0].shape[1], tokens.shape[1]), FEW)
    _verify_kernel[(rows,)](
        choices, *draft_tokens, *branches, branches[0] if following is None else following, tokens, at, drafted, ids,
        round_result, limit, verify_result, where, round_result.stride(0), choices.shape[1], count,
        draft_tokens[0].stride(0), branches[0].shape[1],
        branches[0].stride(0), tokens.shape[1], tokens.stride(0), ids.stride(0), verify_result.shape[1],
        FOLLOWING=following is not None, LEAVES=leaves is not None, BLOCK=size, num_warps=1,
    )  # fmt: skip


@varying("result_stride", "choices_stride", "count", "chain_stride", "branch_count", "branch_stride", "leaf_count",
         "leaf_stride", "ids_stride", "report_stride")  # fmt: skip
def _verify_kernel(
    choices: Value, draft_tokens: Value, sent_length: Value, branch_tokens: Value, branch_at: Value, following: Value,
    leaf_tokens: Value, leaf_at: Value, drafted: Value, ids: Value, round_result: Value, limit: Value,
    verify_result: Value,
    where: Value, result_stride: Value, choices_stride: Value, count: Value, chain_stride: Value, branch_count: Value,
    branch_stride: Value, leaf_count: Value, leaf_stride: Value, ids_stride: Value, report_stride: Value,
    FOLLOWING: constexpr, LEAVES: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    nth = tl.arange(0, BLOCK)
    choices += row * choices_stride
    verify_result += row * report_stride
    mine = tl.load(draft_tokens + row * chain_stride + nth, mask=nth < count, other=-1)
    theirs = tl.load(choices + nth, mask=nth < count, other=-2)
    length = tl.minimum(tl.load(sent_length + row), count)
    wrong = (mine != theirs) & (nth < length)
    accepted = tl.min(tl.where(wrong, nth.to(tl.int64), length), 0)
    token = tl.load(choices + accepted)

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
    tl.store(ids + nth, mine, mask=nth < accepted)
    known = tl.maximum(token, 0)
    tl.store(ids + accepted, known)
    tl.store(ids + accepted + 1, continuation, mask=continuation >= 0)
    tl.store(verify_result, accepted)
    tl.store(verify_result + 1, token)
    tl.store(verify_result + 2, survivor)
    tl.store(verify_result + 3, continuation)
    tl.store(verify_result + 4 + nth, tl.load(drafted + row * 6 + nth, mask=nth < 6), mask=nth < 6)
    tl.store(verify_result + 10 + nth, mine, mask=nth < count)
    tl.store(where + row, chosen_at)

    most = tl.load(limit)
    committed = tl.minimum(accepted + 1 + (continuation >= 0).to(tl.int64), most - before)
    length = before + committed
    store_round_result(
        round_result, row, result_stride, committed, accepted, known, survivor, continuation, length >= most, length
    )
