"""The rule of a round, and everything that applies it: statistics, timeline, drafter and replay agree with it."""

import itertools

import pytest
import torch

from hf_specbranch import SpecBranchConfig, SpecBranchStats
from hf_specbranch.decoding.resolve import (
    NONE,
    Accounting,
    Drafted,
    RoundResult,
    RowResult,
    VerifyResult,
    resolve,
    resolve_rows,
    side_branch_to_adopt,
)
from hf_specbranch.planning.agreement import Agreement
from hf_specbranch.planning.replay import replay
from hf_specbranch.timeline.recording import ACCEPTED, ROLLED_BACK, WASTED
from hf_specbranch.timeline.tokens import TokenLog


def cases(depths=(0, 1, 3)):
    """Yield everything that can happen to one row, as the arguments of `resolve`."""
    shapes = itertools.product(depths, range(4), range(5), (0, 1, 3), (0, 2))
    for depth, sent, ahead, branches, rejection_branches in shapes:
        drafted = Drafted(sent, ahead, branches, rejection_branches, leaves=0, new=0)
        for accepted in range(sent + 1):
            survivors = [NONE]
            if accepted == sent and ahead:
                survivors += range(max(1, branches))
            elif accepted < sent:
                survivors += range(max(1, branches), max(1, branches) + rejection_branches)
            for survivor, has_continuation in itertools.product(survivors, (False, True)):
                if has_continuation and (accepted == sent or (survivor > 0 and depth == 0)):
                    continue  # leaves are alternatives to draft tokens; a branch that goes on has a second token
                allowed = accepted + 1 + has_continuation
                for committed in range(allowed + 1):
                    endings = (False, True) if committed == allowed or committed <= accepted else (True,)
                    for finished in endings:
                        yield drafted, accepted, survivor, has_continuation, committed, finished, depth


def test_every_drafted_token_ends_in_one_way():
    count = 0
    for case in cases():
        drafted, *_, depth = case
        found = resolve(*case)
        side = (max(0, drafted.branches - 1) + drafted.rejection_branches) * (1 + depth)
        total = found.accepted + found.pending + found.rolled_back + found.wasted
        assert total == drafted.sent + drafted.ahead + side, case
        assert min(found.accepted, found.pending, found.rolled_back, found.wasted) >= 0, case
        count += 1
    assert count > 5000


def test_accepted_tokens_are_committed_ones():
    for case in cases():
        _, accepted, survivor, has_continuation, committed, finished, _ = case
        found = resolve(*case)
        assert found.accepted <= committed, case
        own = committed > accepted and survivor == NONE  # a token of the target's own is no draft token
        assert found.accepted == committed - own * (committed - accepted), case
        assert not (finished and found.pending), case


@pytest.mark.parametrize(
    ("drafted", "outcome", "expected"),
    [
        # rejected, no branch
        (Drafted(4, 0, 0, 0, 0, 4), (1, NONE, False, 2, False, 0), (1, 0, NONE, 0, 3, 0)),
        # all accepted, PEARL's draft goes on
        (Drafted(2, 3, 0, 0, 0, 5), (2, 0, False, 3, False, 2), (3, 0, 0, 2, 0, 0)),
        # all accepted, a side branch at the branch point survives
        (Drafted(2, 3, 3, 0, 0, 11), (2, 2, False, 3, False, 2), (2, 1, 2, 2, 0, 6)),
        # rejected, a rejection branch has the correction
        (Drafted(3, 3, 1, 2, 0, 12), (1, 1, False, 2, False, 2), (1, 1, 1, 2, 2, 6)),
        # rejected, the correction was a tree leaf, and the branch goes on with its continuation
        (Drafted(3, 3, 1, 2, 4, 12), (1, 1, True, 3, False, 2), (1, 2, 1, 1, 2, 6)),
        # the text ends at a tree leaf: the leaf is no draft token
        (Drafted(2, 0, 0, 0, 4, 2), (0, NONE, True, 1, True, 0), (0, 0, NONE, 0, 2, 0)),
        # a slower row cuts the round short: the draft goes on
        (Drafted(4, 0, 0, 0, 0, 4), (3, NONE, False, 2, False, 0), (2, 0, 0, 2, 0, 0)),
    ],
)
def test_examples(drafted, outcome, expected):
    assert tuple(resolve(drafted, *outcome)) == expected


def test_tensors_follow_the_rule():
    every = [case for case in cases() if not case[5]]  # rows that go on
    numbers = [(c, a, s, 5 if more else NONE, f) for _, a, s, more, c, f, _ in every]
    committed, accepted, survivor, continuation, finished = torch.tensor(numbers).T
    rows = resolve_rows(committed, accepted, survivor, continuation, finished.bool())
    adopted = side_branch_to_adopt(rows, survivor)
    for index, case in enumerate(every):
        found = resolve(*case)
        assert bool(rows.moved[index]) == (found.from_branch > 0), case
        assert int(adopted[index]) == (found.survivor - 1 if found.from_branch else NONE), case
        assert bool(rows.rejected[index]) == (rows.complete[index] and case[2] == NONE), case
        if rows.survived[index]:
            assert found.survivor != NONE, case


def as_results(case):
    drafted, accepted, survivor, has_continuation, committed, finished, depth = case
    tokens = list(range(100, 100 + drafted.sent))
    continuation = 8 if has_continuation else NONE
    new = drafted.sent + drafted.ahead + (max(0, drafted.branches - 1) + drafted.rejection_branches) * (1 + depth)
    result = VerifyResult(accepted, 7, survivor, continuation, drafted._replace(new=new), tokens)
    return result, RowResult(committed, accepted, 7, survivor, continuation, finished)


def test_timeline_and_statistics_count_alike():
    for case in cases(depths=(0, 2)):
        (result, row), depth = as_results(case), case[-1]
        drafted, stats, log = result.drafted, SpecBranchStats(), TokenLog()
        accounting = Accounting(stats, depth)
        log.extend([0] * (drafted.sent + drafted.ahead), [None] * (drafted.sent + drafted.ahead), "draft")
        first = max(1, drafted.branches)
        others = [*range(1, drafted.branches), *range(first, first + drafted.rejection_branches)]
        for branch in others:
            log.side[branch] = log.add([0] * (1 + depth), [None] * (1 + depth), "branches", branch)
        accounting.add([result], [row])
        accounting.flush()
        log.resolve(result, row, result.resolve(row.committed, row.finished, depth))
        fates = [each.fate for each in log.drafted]
        if drafted.sent or drafted.ahead:
            assert fates.count(ACCEPTED) == stats.num_accepted_tokens, case
            assert fates.count(ROLLED_BACK) == stats.rollback_tokens, case
            assert fates.count(WASTED) == stats.wasted_branch_tokens, case
            assert len(log.pending) == sum(accounting.pending), case
        assert len(log.committed) == row.committed, case
        assert [each.drafted is None for each in log.committed].count(False) == fates.count(ACCEPTED), case


def test_named_fields_of_a_round_result():
    packed = torch.arange(14).view(7, 2)
    result = RoundResult(packed)
    for index, name in enumerate(RoundResult.FIELDS):
        if name != "finished":
            assert torch.equal(getattr(result, name), packed[index]), name
    assert result.finished.tolist() == [True, True]


# ---- the planner's replay


def agreement(ranks):
    chances = ((0.6, 0.2, 0.1, 0.05, 0.01),) * len(ranks)
    return Agreement(confidence=(0.6,) * len(ranks), rank=tuple(ranks), candidates=4, chances=chances)


@pytest.mark.parametrize("policy", ["vanilla", "pearl", "specbranch"])
def test_replay_commits_what_the_rule_commits(policy):
    """Without tree leaves and rejection branches a round of the replay is one call of the rule."""
    generator = torch.Generator().manual_seed(0)
    gamma = 3
    for _ in range(60):
        ranks = torch.randint(0, 3, (14,), generator=generator).tolist()
        settings = SpecBranchConfig(policy, gamma, confidence_threshold=0.0, max_rejection_branches=0, tree_leaves=0)
        at, pending = 1, 0
        for played in replay(agreement(ranks), settings):
            room = len(ranks) - at
            sent = pending or (gamma if policy != "pearl" else 0)
            sent = min(sent, gamma, room - 1)
            ahead_drafts = policy != "vanilla" and room > sent + 1
            forks = policy == "specbranch"
            depth = gamma if forks else gamma - 1
            width = 1 if not forks else max(1, int(4 * (1 - 0.6)))
            accepted = next((i for i in range(sent) if ranks[at + i] != 0), sent)
            rank = ranks[at + accepted]
            survivor = rank if accepted == sent and ahead_drafts and rank < width else NONE
            ahead = 1 + depth if ahead_drafts else 0
            drafted = Drafted(sent, ahead, width if forks and ahead_drafts else 0, 0, 0, 0)
            finished = at + accepted + 1 >= len(ranks)
            found = resolve(drafted, accepted, survivor, False, accepted + 1, finished, depth)
            assert played.committed == accepted + 1
            at, pending = at + accepted + 1, found.pending
        assert at == len(ranks)
