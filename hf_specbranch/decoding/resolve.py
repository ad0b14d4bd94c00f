"""The rule of a round: what a verify result means for the text, the draft and the statistics; and the data of a round.

`resolve` is the reference. The accounting and the timeline call it. The drafter applies the same rule to tensors
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

from ..stats import SpecBranchStats

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


class TreeLeaves(NamedTuple):
    """Alternatives to single draft tokens, which the target verifies in the same pass."""

    tokens: Tensor  # [B, W]
    at: Tensor  # [B, W] the draft position each is an alternative for, or NONE: there is no such leaf

    def to(self, device: torch.device) -> TreeLeaves:
        return TreeLeaves(self.tokens.to(device), self.at.to(device))


class DraftTokens(NamedTuple):
    """The draft tokens under verification, row by row."""

    tokens: Tensor  # [B, N]
    length: Tensor  # [B] how many are real
    q: Tensor | None = None  # [B, N, V] the draft's distributions, where the tokens were drawn from them
    leaves: TreeLeaves | None = None
    memory: int = -1  # names the static buffers that hold the tokens; captured stages have read their address

    @property
    def is_empty(self) -> bool:
        """Whether there is no room for a draft token or a tree leaf."""
        return self.tokens.shape[1] == 0 and self.leaves is None

    @property
    def most_committed(self) -> int:
        """The most tokens that a round adds: the draft, the target's own token, and the one after a tree leaf."""
        return self.tokens.shape[1] + 1 + (self.leaves is not None and self.leaves.tokens.shape[1] > 0)

    def to(self, device: torch.device) -> DraftTokens:
        q = None if self.q is None else self.q.to(device)
        leaves = None if self.leaves is None else self.leaves.to(device)
        return DraftTokens(self.tokens.to(device), self.length.to(device), q, leaves, self.memory)


class BranchStarts(NamedTuple):
    """The first tokens of the branches drafted for likely verify results: the main branch first."""

    tokens: Tensor  # [B, K] the token each branch starts with
    at: Tensor  # [B, K] how many draft tokens must be accepted for it to live on; NONE: there is no such branch
    q: Tensor | None = None  # [B, V] the draft's distribution at the branch point
    following: Tensor | None = None  # [B, K] the second token of each, where a leaf continuation may skip to it

    def to(self, device: torch.device) -> BranchStarts:
        q = None if self.q is None else self.q.to(device)
        following = None if self.following is None else self.following.to(device)
        return BranchStarts(self.tokens.to(device), self.at.to(device), q, following)


class VerifyResult(NamedTuple):
    """One row's verify result and what was drafted at that time, on the host."""

    accepted: int  # draft tokens that the target agreed with
    token: int  # its own token after them
    survivor: int  # the branch that starts with that token (and goes on with the leaf continuation), or NONE
    continuation: int  # the target's token after its own, where that was a tree leaf; else NONE
    drafted: Drafted
    sent_tokens: list[int]  # the draft tokens under verification, and padding

    @classmethod
    def unpack(cls, numbers: list[int]) -> VerifyResult:
        """Read a row as the verifier wrote it."""
        counts = 4 + len(Drafted._fields)
        accepted, token, survivor, continuation = numbers[:4]
        return cls(accepted, token, survivor, continuation, Drafted(*numbers[4:counts]), numbers[counts:])

    @property
    def offered(self) -> list[int]:
        """The tokens that the text may gain."""
        more = [] if self.continuation < 0 else [self.continuation]
        return [*self.sent_tokens[: self.accepted], self.token, *more]

    @property
    def has_continuation(self) -> bool:
        return self.continuation >= 0

    def without_draft(self) -> VerifyResult:
        """Return the result of a row in which nothing was drafted."""
        return self._replace(accepted=0, survivor=NONE, continuation=NONE, drafted=Drafted(0, 0, 0, 0, 0, 0))

    def resolve(self, committed: int, finished: bool, depth: int) -> Resolution:
        """Apply the rule of a round; see `resolve.resolve`."""
        return resolve(self.drafted, self.accepted, self.survivor, self.has_continuation, committed, finished, depth)


RESULT_NUMBERS = 4 + len(Drafted._fields)  # of a packed verify result, before the draft tokens


class RowResult(NamedTuple):
    """What a round meant for one row, on the host; the fields of `RoundResult`."""

    committed: int  # tokens added to the text
    accepted: int  # draft tokens that the target agreed with
    token: int  # its own token after them
    survivor: int  # the branch that goes on after what the verify result allowed, or NONE
    continuation: int  # the target's token after its own, or NONE
    finished: bool  # the row's text is complete

    @property
    def complete(self) -> bool:
        """Whether everything that was allowed was committed; a stop, or a slower row, may leave less."""
        return self.committed == self.accepted + 1 + (self.continuation >= 0)


class RoundResult:
    """What a round meant for all rows, on the device: one tensor [7, B] with a name for each row of it.

    Kernels read and write it in this order (`kernels/rounds/memory.py`).
    """

    FIELDS = (*RowResult._fields, "length")

    def __init__(self, packed: Tensor) -> None:
        self.packed = packed  # [7, B]
        self.committed, self.accepted, self.token, self.survivor, self.continuation = packed[:5]  # [B] each
        self.finished_flag, self.length = packed[5], packed[6]  # [B]; the text's length, in columns

    @property
    def finished(self) -> Tensor:
        """[B] bool: the row's text is complete."""
        return self.finished_flag > 0

    def to(self, device: torch.device) -> RoundResult:
        return self if device == self.packed.device else RoundResult(self.packed.to(device))


class Feedback(NamedTuple):
    """What a round meant, for the drafter."""

    result: RoundResult
    features: Tensor | None  # [B, layers, H] target hidden states at the last verified position, if hooks want them
    moved: bool  # in some row a side branch becomes the pending draft
    draft_ended: bool  # some row has no pending draft left


def count_round(
    stats: SpecBranchStats, result: VerifyResult, row: RowResult, resolution: Resolution, source: str = ""
) -> None:
    """Add one round of one row to the statistics; `source` is the name of what has drafted."""
    drafted = result.drafted
    stats.num_draft_tokens += drafted.new
    stats.tree_leaves += drafted.leaves
    stats.tree_leaf_hits += result.has_continuation
    if not (drafted.sent or drafted.ahead):
        return
    stats.num_drafts += 1
    if source:
        counts = stats.sources.setdefault(source, {"rounds": 0, "drafted": 0, "accepted": 0})
        counts["rounds"] += 1
        counts["drafted"] += drafted.new
        counts["accepted"] += resolution.accepted
    if drafted.branches and row.complete and row.accepted == drafted.sent:
        stats.branch_points += 1
        stats.branch_hits += row.survivor != NONE
    elif drafted.rejection_branches and row.complete:
        stats.rejection_points += 1
        stats.rejection_hits += row.survivor != NONE
    histogram = stats.acceptance_histogram
    histogram.extend([0] * (resolution.accepted + 1 - len(histogram)))
    histogram[resolution.accepted] += 1
    stats.num_accepted_tokens += resolution.accepted
    stats.rollback_tokens += resolution.rolled_back
    stats.wasted_branch_tokens += resolution.wasted


class Accounting:
    """Counts rounds. `add` resolves a round at once; `flush` counts it later, while the device runs the next one.

    Args:
        stats: where to count.
        depth: tokens of a side branch after its first.
        keeps_drafts: what is left of a draft stays pending. Otherwise the source makes a new draft in every round.
    """

    def __init__(self, stats: SpecBranchStats, depth: int, keeps_drafts: bool = True) -> None:
        self.stats, self.depth, self.keeps_drafts = stats, depth, keeps_drafts
        self.uncounted: list[tuple[VerifyResult, RowResult, Resolution, str]] = []
        self.pending: list[int] = []  # drafted tokens after the text of each unfinished row

    def add(self, results: list[VerifyResult], rows: list[RowResult], source: str = "") -> None:
        """Take a round of a draft source; `flush` counts it."""
        self.flush()
        resolved = [result.resolve(row.committed, row.finished, self.depth) for result, row in zip(results, rows)]
        if not self.keeps_drafts:
            resolved = [each._replace(pending=0, rolled_back=each.rolled_back + each.pending) for each in resolved]
        self.uncounted = [(*each, source) for each in zip(results, rows, resolved)]
        self.pending = [each.pending for each, row in zip(resolved, rows) if not row.finished]

    def flush(self) -> None:
        """Count the round that was added last."""
        for each in self.uncounted:
            count_round(self.stats, *each)
        self.uncounted = []

    def close(self) -> None:
        """Count what is pending as rolled back: another drafter takes over, or the text ends."""
        self.flush()
        self.stats.rollback_tokens += sum(self.pending)
        self.pending = []
