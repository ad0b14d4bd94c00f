"""The rule of a round: what a verify result means for the text, the draft and the statistics.

This is the reference. The accounting and the timeline call `resolve`. The drafter applies the same rule to tensors
(`resolve_rows`, and `kernels/rounds/resolve.py` in Triton), and the planner's replay to recorded texts; tests compare
each of them with `resolve` case by case.

A row has a *pending draft*: `sent` tokens that the target verifies, and `ahead` tokens drafted after them. Where the
method branches, the `ahead` tokens are the main branch (branch 0), and side branches start with other tokens: at the
branch point, after all of the sent tokens, or at an earlier position, where the target may reject (rejection branches).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NONE = -1  # no branch, no token


class Drafted(NamedTuple):
    """What was drafted in one row when the target verified it."""

    sent: int  # draft tokens under verification
    ahead: int  # tokens drafted after them
    branches: int  # branches at the branch point, the main one included; 0 if the method does not branch
    rejection_branches: int  # side branches at earlier positions
    leaves: int  # tree leaves that the target verified
    new: int  # tokens drafted in this round


class Resolution(NamedTuple):
    """What became of the drafted tokens of one row.

    Every token of the pending draft and of the side branches is committed, still pending, rolled back or wasted.
    """

    from_draft: int  # leading tokens of the pending draft that are in the text now
    from_branch: int  # leading tokens of the surviving side branch that are in the text now
    survivor: int  # the branch whose remaining tokens are the pending draft: 0 the main one, from 1 on a side branch
    pending: int  # drafted tokens that remain after the text
    rolled_back: int  # tokens after a rejection, or after the end of the text
    wasted: int  # tokens on branches that lost

    @property
    def accepted(self) -> int:
        """Drafted tokens that are in the text now."""
        return self.from_draft + self.from_branch


def resolve(
    drafted: Drafted, accepted: int, survivor: int, has_continuation: bool, committed: int, finished: bool, depth: int
) -> Resolution:
    """Return what a verify result means.

    The target agrees with the first `accepted` sent tokens and adds one of its own, with which branch `survivor`
    starts. If that token was a tree leaf, the target has continued it by one more token, and `survivor` is a branch
    that goes on with both.

    Args:
        drafted: what was drafted.
        accepted: sent tokens that the target agreed with.
        survivor: the branch that starts with the target's own token, or NONE.
        has_continuation: the target's own token was a tree leaf, and a token after it is known.
        committed: tokens that were added to the text. A stopping criterion, or a slower row of the batch, may leave
            fewer than the verify result allows.
        finished: the text of this row is complete.
        depth: tokens of a side branch after its first.

    Example:
        >>> # Four tokens sent, two accepted, no branch for the target's correction: two are rolled back.
        >>> resolve(Drafted(4, 0, 0, 0, 0, 4), 2, NONE, False, committed=3, finished=False, depth=0)
        Resolution(from_draft=2, from_branch=0, survivor=-1, pending=0, rolled_back=2, wasted=0)
        >>> # All sent tokens accepted, and the main branch starts with the target's token.
        >>> resolve(Drafted(2, 3, 2, 0, 0, 9), 2, 0, False, committed=3, finished=False, depth=2)
        Resolution(from_draft=3, from_branch=0, survivor=0, pending=2, rolled_back=0, wasted=3)
    """
    sent, ahead = drafted.sent, drafted.ahead
    complete = committed == accepted + 1 + has_continuation
    is_side = survivor > 0
    side_tokens = (max(0, drafted.branches - 1) + drafted.rejection_branches) * (1 + depth)
    from_draft = min(committed, accepted + (survivor == 0))
    from_branch = min(max(0, committed - accepted), 1 + has_continuation) if is_side else 0

    if from_branch:  # a side branch becomes the pending draft
        left, lost_draft, lost_ahead = 1 + depth - from_branch, sent - accepted, ahead
        side_tokens -= 1 + depth
    elif survivor == 0 or not complete:  # the pending draft goes on
        reached_ahead = from_draft > sent
        left = sent + ahead - from_draft
        lost_draft = lost_ahead = 0
        if finished and not reached_ahead:  # the main branch never began
            left, lost_draft, lost_ahead = 0, sent - from_draft, ahead
    else:  # rejected, and no branch starts with the correction
        left, lost_draft, lost_ahead = 0, sent - accepted, ahead
    rolled_back = lost_draft + (left if finished else 0) + (0 if drafted.branches else lost_ahead)
    wasted = side_tokens + (lost_ahead if drafted.branches else 0)
    pending = 0 if finished else left
    lives_on = survivor if from_branch or (survivor == 0 and complete) else 0 if pending else NONE
    return Resolution(from_draft, from_branch, lives_on, pending, rolled_back, wasted)


class ResolvedRows(NamedTuple):
    """The same rule for all rows at once, as far as the drafter needs it; [B] each."""

    complete: Tensor  # bool: everything that the verify result allowed was committed
    rejected: Tensor  # bool: no branch starts with the target's own token
    moved: Tensor  # bool: a side branch becomes the pending draft
    survived: Tensor  # bool: a drafted branch outlived the round, and the row goes on


def resolve_rows(
    committed: Tensor, accepted: Tensor, survivor: Tensor, continuation: Tensor, finished: Tensor
) -> ResolvedRows:
    """Apply the rule to tensors; see `resolve`. `continuation` is the token after a tree leaf, or NONE."""
    complete = committed == accepted + 1 + (continuation >= 0)
    rejected = complete & (survivor == NONE)
    moved = complete & (survivor > 0)
    return ResolvedRows(complete, rejected, moved, complete & ~rejected & ~finished)


def side_branch_to_adopt(rows: ResolvedRows, survivor: Tensor) -> Tensor:
    """[B] the index of the side branch that becomes the pending draft, counted from 0, or NONE."""
    return torch.where(rows.moved, survivor - 1, NONE)
