"""The Triton operations of a round do what the torch ones do: one by one, stage by stage, over whole generations.

The contract is `DraftOps` on a `DraftRound`, and the `in_triton` forms of the verifier and of the target. Kernels run
on a GPU, or on the CPU under Triton's interpreter (`TRITON_INTERPRET=1`), which one test here starts.
"""

import ast
import copy
import importlib
import os
import pkgutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from hf_specbranch import SpecBranchStats, SpeculationHook, kernels
from hf_specbranch.decoding.acceptance import NO_TOKEN, accept_choices, accept_samples
from hf_specbranch.decoding.assembly import Assembly
from hf_specbranch.decoding.draft_model import DraftModel
from hf_specbranch.decoding.draft_state import DraftRound, LikelyRejections, PendingDraft, SideBranches, branch_depth
from hf_specbranch.decoding.drafter import Drafter, TorchDraftOps
from hf_specbranch.decoding.hooks import ConfidenceStop, HookList, LengthHeadHook, TopKBranches
from hf_specbranch.decoding.loop import NoDraft
from hf_specbranch.decoding.policies import POLICIES
from hf_specbranch.decoding.resolve import (
    NONE,
    RESULT_NUMBERS,
    BranchStarts,
    DraftTokens,
    Feedback,
    RoundResult,
    TreeLeaves,
    VerifyResult,
)
from hf_specbranch.decoding.stepwise_drafter import StepwiseDrafter
from hf_specbranch.decoding.target import Target
from hf_specbranch.decoding.text import Stopper, Text
from hf_specbranch.decoding.triton_draft_ops import TritonDraftOps, kernels_know
from hf_specbranch.decoding.verifier import Verifier
from hf_specbranch.kernels import rounds
from hf_specbranch.kernels.backend import INTERPRETED
from hf_specbranch.kernels.parallel_build import is_dry_run
from hf_specbranch.kernels.rounds import memory
from hf_specbranch.kernels.warm_up import _kernels_of_every_model
from hf_specbranch.runtime.base import Step
from hf_specbranch.runtime.eager import SMALLEST, EagerRunner
from hf_specbranch.runtime.mask_probe import mask_maker_for
from hf_specbranch.runtime.static_buffers import Buffers

from .dry_runs import recorded_dry_run
from .models import EOS, assert_counts_add_up, attached, config, llama, noisy_copy, prompt
from .test_static_stages import COUNTS

DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
PROMPT, LIMIT, SHOWN, CAPACITY = 6, 20, 64, 80  # columns of a prompt and of the longest text; slots
EVERY = ("vanilla", "pearl", "specbranch", "specbranch")  # the last has most to be tried

# The interpreter turns arrays of one element into numbers in a way that numpy has come to dislike.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning:triton.runtime.interpreter"
)


def where_kernels_run(test):
    return test if INTERPRETED else pytest.mark.gpu(test)


def on_kernels(examples=50):
    """Runs where Triton does, on few drawn examples."""
    few = settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    return lambda test: where_kernels_run(pytest.mark.usefixtures("small_blocks")(few(test)))


@pytest.fixture
def small_blocks(monkeypatch):
    """Vocabularies are looked at in several pieces."""
    monkeypatch.setattr(memory, "LARGEST_BLOCK", 16)


class Case(NamedTuple):
    """A drafter in the middle of a generation."""

    seed: int
    rows: int
    gamma: int
    vocabulary: int
    own: int  # tokens the draft has more than the target
    policy: str
    width: int
    rejection_branches: int
    leaves: int
    epsilon: float
    cuts: bool  # another hook decides how much is sent
    penalty: float  # for tokens that were said before
    draws: bool  # tokens are drawn


seeds = st.integers(0, 99)


def cases(*policies, **static_shapes):
    drawn = dict(
        seed=seeds,
        rows=st.integers(1, 3),
        gamma=st.integers(2, 4),
        vocabulary=st.sampled_from([11, 16, 40]),
        own=st.sampled_from([-3, 0, 5]),
        policy=st.sampled_from(policies),
        width=st.integers(1, 4),
        rejection_branches=st.integers(0, 4),
        leaves=st.integers(0, 4),
        epsilon=st.sampled_from([0.0, 0.3]),
        cuts=st.booleans(),
        penalty=st.just(1.0),
        draws=st.just(False),
    )
    return st.builds(Case, **{**drawn, **static_shapes})


class NamedBuffers(Buffers):
    """Buffers that can be read by name."""

    def __init__(self):
        super().__init__(torch.device(DEVICE), static_shapes=True)

    def tensor(self, name, shape, dtype=torch.long):
        return self.memory.setdefault(name, super().tensor(name, shape, dtype))


class Half(SpeculationHook):
    fresh_drafts, settings = True, ()

    def keep(self, survivor):
        return survivor.length // 2


def randint(low, high, shape):
    """Integers up to `high`, which may be a tensor."""
    return (low + torch.rand(shape, device=DEVICE) * (high - low + 1)).floor().long()


def distributions(shape):
    return (2 * torch.randn(shape, device=DEVICE)).softmax(-1)


def make_drafter(in_triton, case, dtype=torch.float32, kind=Drafter):
    """Two drafters that are made of the same case hold the same, whatever their operations."""
    rows, gamma, policy = case.rows, case.gamma, POLICIES[case.policy]
    most = gamma * case.width
    branches = case.width if policy.forks else 1
    rejection_branches = min(case.rejection_branches, most) * policy.forks
    leaves = min(case.leaves, most) * policy.drafts_first
    buffers, stats, runner = NamedBuffers(), SpecBranchStats(), small_runner(case.vocabulary + case.own, dtype)
    torch.manual_seed(case.seed)
    processors = [RepetitionPenaltyLogitsProcessor(case.penalty)] if case.penalty != 1 else []
    model = DraftModel(buffers, runner, padded(rows, PROMPT), case.vocabulary, processors, CAPACITY, stats)
    text = randint(0, case.vocabulary - 1, (rows, CAPACITY))
    generator = buffers.generator("drafts", case.seed) if case.draws else None
    start = randint(PROMPT, PROMPT + 4, (rows,))
    pending = PendingDraft(buffers, text, start, CAPACITY, 2 * gamma + 2, case.vocabulary, generator)
    rules = [ConfidenceStop(case.epsilon)] if case.epsilon > 0 else []
    hooks = HookList([*([Half()] if case.cuts else []), *rules, TopKBranches(case.width)])
    side = SideBranches(buffers, pending, model, branches - 1 + rejection_branches, branch_depth(policy, gamma))
    rejections = LikelyRejections(buffers, pending, gamma, case.width, max(rejection_branches, leaves))
    counts = gamma, branches, rejection_branches, leaves
    round = DraftRound(buffers, pending, side, rejections, policy, *counts, LIMIT, case.vocabulary)
    ops = TorchDraftOps(round, model, hooks)
    if in_triton:
        ops = TritonDraftOps(round, model, hooks, buffers, stepwise=kind is StepwiseDrafter)
    drafter = kind(buffers, model, round, ops, hooks, stats)
    drafter.prefill(PROMPT)
    put_in_the_middle(drafter)
    return drafter


@lru_cache
def small_model(vocabulary, dtype):
    return llama(0, vocabulary, hidden=16, layers=1, max_position_embeddings=16).to(DEVICE, dtype)


def small_runner(vocabulary, dtype=torch.float32):
    model = small_model(vocabulary, dtype)
    return EagerRunner(model, mask_maker_for(model, "draft"))


def padded(rows, length):
    """[B, length] bool."""
    return torch.arange(length, device=DEVICE) >= randint(0, length - 2, (rows, 1))


def put_in_the_middle(drafter):
    """A draft is pending, part of it is being verified, and there are branches where the policy has any."""
    round, runner = drafter.round, drafter.model.runner
    pending, side, rejections = round.pending, round.side, round.rejections
    rows = (pending.count,)
    for part in (pending, side):
        part.scores.copy_(distributions(part.scores.shape))
        part.confidence.copy_(part.scores.max(-1).values)
    pending.end += randint(0, pending.reach, rows)
    pending.cached.copy_(pending.end - randint(0, 2, rows))
    round.sent_length.copy_(randint(0, pending.length.clamp(max=round.gamma), rows))
    round.point.copy_(pending.start + round.sent_length)
    round.count.copy_(randint(0, 9, rows))
    round.survived.copy_(randint(0, 1, rows))
    round.ahead.copy_(randint(0, 3, rows))  # mostly
    rejections.tokens.copy_(randint(0, 10, rejections.tokens.shape))
    rejections.at.copy_(randint(NONE, round.sent_length[:, None] - 1, rejections.at.shape))
    round.branch_tokens.copy_(randint(0, 10, round.branch_tokens.shape))
    if round.policy.drafts_ahead:
        longer = torch.maximum(pending.end, round.point + 1 + round.depth)
        pending.end.copy_(torch.where(round.ahead, longer, pending.end))
        round.width.copy_(torch.where(round.ahead, randint(1, round.branches, rows), 0))
        at = torch.where(round.order < round.width[:, None], round.sent_length[:, None], NONE)
        round.branch_at[:, : round.branches] = at
        earlier = round.branch_at[:, round.branches :]
        some = randint(NONE, round.sent_length[:, None] - 1, earlier.shape)
        earlier.copy_(torch.where(round.ahead[:, None], some, NONE))
    at = round.branch_at[:, 1:]
    forks = torch.where(at == NONE, round.point[:, None], pending.start[:, None] + at)
    side.open(round.point, forks, round.branch_tokens[:, 1:])
    side.tokens[:, :, 1:] = randint(0, 10, side.tokens[:, :, 1:].shape)
    runner.slot_positions.copy_(randint(0, 15, runner.slot_positions.shape))
    for layer in runner.cache.layers:
        for states in usable(layer):
            states.normal_()


def usable(layer):
    """Keys and values in the slots that can be used."""
    return [states[:, :, : layer.address.capacity] for states in (layer.keys, layer.values)]


def both(case):
    return make_drafter(False, case), make_drafter(True, case)


def a_result(drafter, seed):
    """Any that can come: with or without a survivor and a continuation, cut short or not, ending a text or not."""
    torch.manual_seed(seed)
    round, rows = drafter.round, []
    for b in range(round.pending.count):
        options = [NONE, *(k for k, at in enumerate(round.branch_at[b].tolist()) if at != NONE)]
        survivor = options[torch.randint(len(options), ())]
        length = int(round.sent_length[b])
        accepted = int(round.branch_at[b, survivor]) if survivor >= 0 else int(torch.randint(length + 1, ()))
        token = int(round.branch_tokens[b, survivor]) if survivor >= 0 else int(torch.randint(10, ()))
        # A leaf is an alternative to a draft token, so the main branch has no continuation.
        continuation = int(torch.randint(10, ())) if survivor != 0 and torch.rand(()) < 0.4 else NONE
        committed = allowed = accepted + 1 + (continuation >= 0)
        if torch.rand(()) < 0.4:
            committed = int(torch.randint(allowed, ()))
        finished = committed < allowed or bool(torch.rand(()) < 0.2)
        rows.append(
            [committed, accepted, token, survivor, continuation, finished, int(round.pending.start[b]) + committed]
        )
    result = RoundResult(torch.tensor(rows, device=DEVICE).T.contiguous().long())
    complete = [row[0] == row[1] + 1 + (row[4] >= 0) for row in rows]
    moved = any(whole and row[3] > 0 for whole, row in zip(complete, rows))
    return Feedback(result, None, moved, draft_ended=True)


def assert_same(got, expected, name=""):
    assert got.shape == expected.shape and got.dtype == expected.dtype, name
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, msg=lambda said: f"{name}: {said}")


def assert_alike(in_triton, in_torch):
    got, expected = state_of(in_triton), state_of(in_torch)
    if not in_triton.ops.keeps_scores:  # nothing would read them
        expected.pop("pending.scores")
    for name in expected:
        assert_same(got[name], expected[name], name)


def state_of(drafter):
    """Everything in a drafter's buffers, less scratch entries and branches that are not open."""
    round = drafter.round
    found, closed = dict(drafter.buffers.memory), round.branch_at == NONE
    for name in ("pending.ids", "pending.confidence", "pending.scores"):
        found[name] = found[name][:, :-1]
    for name in ("side.tokens", "side.confidence", "side.scores"):
        values = found[name]  # [B, W, ...]
        found[name] = values.masked_fill(closed[:, 1:].reshape(*values.shape[:2], *[1] * (values.ndim - 2)), 0)
    for name in ("branches.tokens", "branches.following"):
        if name in found:
            found[name] = found[name].masked_fill(closed, 0)
    found["rejections.tokens"] = round.rejections.tokens.masked_fill(round.rejections.at == NONE, 0)
    found.pop("fresh")  # concerns hooks only
    found.pop("drafted", None)
    return found


def some_logits(drafter, queries):
    """Logits over the draft's own vocabulary, some of them masked as by processors."""
    logits = 3 * torch.randn((drafter.round.pending.count, queries, drafter.model.own_vocabulary), device=DEVICE)
    logits = logits.masked_fill(torch.rand_like(logits) < 0.3, -torch.inf)
    logits[..., 3] = 1.0
    return logits


def drawn_with(drafter, logits):
    """What logits mean for the target's vocabulary, noise, and the tokens drawn with that noise."""
    q = drafter.model.distribution(logits, lambda: None, [])
    noise = torch.empty((*q.shape[:2], min(q.shape[2], logits.shape[2])), device=DEVICE).exponential_()
    return q, noise, (q[..., : noise.shape[2]] / noise).argmax(-1)


def assert_inputs(got, expected, queries=slice(None)):
    for name, one, other in zip(rounds.ForwardInputs._fields, got, expected, strict=True):
        assert torch.equal(one[:, queries], other[:, queries]), name


# ---- operation by operation


@on_kernels()
@given(cases(*EVERY), st.integers(0, 2), st.booleans())
def test_extend(case, further, stops):
    pair = both(case)
    bound = pair[0].round.pending.end + randint(-2, 1, (case.rows,))
    logits, flags, after = some_logits(pair[0], 1), [], []
    for drafter in pair:
        ops, flag = drafter.ops, drafter.round.ahead.clone()
        ops.point_inputs()
        ops.extend(logits, flag, bound, further, stops)
        flags.append(flag)
        after.append(ops.draft_inputs(1))
    assert torch.equal(*flags)
    assert_alike(*reversed(pair))
    assert_inputs(after[1], after[0])  # the kernel has written the inputs of the next step


@on_kernels(examples=15)
@given(cases("vanilla"))
def test_more_steps(case):
    """A host that stops a draft hears the confidence of its last token."""
    pair = [make_drafter(in_triton, case, kind=StepwiseDrafter) for in_triton in (False, True)]
    bound, found = pair[0].round.pending.end + randint(-1, 2, (case.rows,)), []
    logits = some_logits(pair[0], 1)
    for drafter in pair:
        ops, own = drafter.ops, drafter.round
        own.going.fill_(True)
        own.bound.copy_(bound)
        ops.draft_inputs(0)
        before = own.pending.end.clone()
        ops.extend(logits, own.going, own.bound, stops=True)
        found.append(drafter._more_steps() if ops.more_steps is None else ops.more_steps)
        last = own.pending.confidence[own.pending.rows, before % own.pending.ring]
        going = own.going & (own.pending.end < own.bound)
        expected = torch.where(going, 1 + last * rounds.CONFIDENCE_UNITS, 0)
        torch.testing.assert_close(found[-1].float(), expected, rtol=0, atol=2)
    assert torch.equal(*(more > 0 for more in found))


@on_kernels(examples=15)
@given(cases("specbranch", width=st.integers(2, 4)), st.integers(0, 3))
def test_extend_branches(case, step):
    pair = both(case)
    step, logits, after = step % pair[0].depth, some_logits(pair[0], 1 + pair[0].round.side.most), []
    for drafter in pair:
        round, ops = drafter.round, drafter.ops
        round.pending.end.copy_(round.point + 1 + round.sent_length % (round.depth + 1))
        before = TorchDraftOps(round, drafter.model, drafter.hooks).branch_inputs(step)
        ops.inputs = rounds.ForwardInputs(*(part.clone() for part in before))
        ops.feeds_main = True
        ops.extend_branches(logits, step)
        last = step + 1 == round.depth
        after.append(ops.draft_inputs(1) if last else ops.branch_inputs(step + 1))
    assert_alike(*reversed(pair))
    assert_inputs(after[1], after[0], slice(0, 1) if step + 1 == pair[0].depth else slice(None))


@on_kernels(examples=15)
@given(cases("specbranch", width=st.integers(2, 4)), st.integers(0, 3))
def test_drawn_tokens(case, step):
    """With given noise, the kernel draws the tokens that the waiting times say."""
    plain, quick = both(case)
    step, logits = step % plain.depth, some_logits(plain, 1 + plain.round.side.most)
    q, noise, drawn = drawn_with(plain, logits)
    round, side = plain.round, plain.round.side
    for drafter in (plain, quick):
        drafter.round.pending.end.copy_(drafter.round.point + 1 + drafter.round.sent_length % (drafter.depth + 1))
    before = plain.ops.branch_inputs(step)
    round.pending.record(q[:, 0])
    side.extend(step, logits[:, 1:])
    round.pending.next.copy_(drawn[:, 0])
    side.tokens[:, :, step + 1] = drawn[:, 1:]
    going = round.ahead & (round.pending.end < round.point + 1 + round.depth)
    round.pending.extend(going)
    round.count += going

    state = quick.round
    rounds.advance(
        logits, quick.ops.pending, rounds.ForwardInputs(*(part.clone() for part in before)), quick.model.positions,
        state.ahead, state.point, state.count, 1 + state.depth, side=quick.ops.side, step=step, noise=noise,
    )  # fmt: skip
    assert_alike(quick, plain)


@on_kernels(examples=15)
@given(cases("vanilla", "specbranch", own=st.just(0)), seeds)
def test_tokens_of_a_shortlist(case, seed):
    """To search the logits of a shortlist gives what searching those of the whole vocabulary gives."""
    drafters = make_drafter(True, case), make_drafter(True, case)
    torch.manual_seed(seed)
    ids = torch.randperm(case.vocabulary, device=DEVICE)[: max(2, case.vocabulary // 2)].sort().values
    logits = torch.randn((case.rows, 1, len(ids)), device=DEVICE)
    whole = torch.full((case.rows, 1, case.vocabulary), -torch.inf, device=DEVICE).index_copy_(2, ids, logits)
    for drafter, values, listed in zip(drafters, (whole, logits), (None, ids)):
        ops, state = drafter.ops, drafter.round
        state.pending.scores.zero_()
        ops.point_inputs()
        rounds.advance(
            values, ops.pending, ops.inputs, drafter.model.positions, state.ahead, state.point, state.count,
            token_ids=listed,
        )  # fmt: skip
    assert_alike(*reversed(drafters))
    assert_same(drafters[1].round.pending.scores, drafters[0].round.pending.scores)
    assert_inputs(drafters[1].ops.inputs, drafters[0].ops.inputs)


def test_distributions_are_kept_where_they_are_read():
    greedy = Case(0, 1, 3, 16, 0, "vanilla", 2, 0, 0, 0.3, False, 1.0, False)
    changes = {"greedy": {}, "leaves": {"leaves": 2}, "drawn": {"draws": True}, "branches": {"policy": "specbranch"}}
    kept = {name: make_drafter(True, greedy._replace(**each)).ops.keeps_scores for name, each in changes.items()}
    assert kept == {"greedy": False, "leaves": True, "drawn": True, "branches": True}


@on_kernels(examples=15)
@given(cases("vanilla", "specbranch", leaves=st.integers(1, 8)))
def test_find_rejections(case):
    pair = both(case)
    for drafter in pair:
        drafter.ops.find_rejections()
    assert_alike(*reversed(pair))


@on_kernels()
@given(cases("pearl", "specbranch"))
def test_fork_and_first_inputs(case):
    pair, found = both(case), []
    for drafter in pair:
        drafter.ops.fork()
        found.append(drafter.ops.branch_inputs(0))
    assert torch.equal(pair[0].round.branch_tokens, pair[1].round.branch_tokens)
    assert_alike(*reversed(pair))
    assert torch.equal(pair[0].round.side.tokens, pair[1].round.side.tokens)
    assert_inputs(found[1], found[0])


@on_kernels()
@given(cases(*EVERY), seeds)
def test_adopt(case, seed):
    pair = both(case)
    feedback = a_result(pair[0], seed)
    for drafter in pair:
        drafter.ops.adopt(feedback.result, feedback.moved)
    assert_alike(*reversed(pair))
    plain, quick = (drafter.model.runner for drafter in pair)
    assert_same(quick.slot_positions, plain.slot_positions)
    for got, expected in zip(quick.cache.layers, plain.cache.layers, strict=True):
        assert all(map(torch.equal, usable(got), usable(expected)))


def assert_adopt_follows_the_rule(in_triton, case, seed):
    """`adopt` leaves of each row what `resolve` says, for one verify result."""
    drafter = make_drafter(in_triton, case)
    feedback, round = a_result(drafter, seed), drafter.round
    drafted = [VerifyResult.unpack([0, 0, 0, 0, *numbers]).drafted for numbers in drafter.drafted().tolist()]
    drafter.ops.adopt(feedback.result, feedback.moved)
    for b, numbers in enumerate(feedback.result.packed.T.tolist()):
        committed, accepted, token, survivor, continuation, finished, length = numbers
        result = VerifyResult(accepted, token, survivor, continuation, drafted[b], [])
        expected = result.resolve(committed, bool(finished), round.depth)
        assert int(round.pending.start[b]) == length
        assert int(round.pending.length[b]) == expected.pending


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(cases(*EVERY), seeds)
def test_adopt_in_torch_follows_the_rule(case, seed):
    assert_adopt_follows_the_rule(False, case, seed)


@on_kernels()
@given(cases(*EVERY), seeds)
def test_adopt_in_triton_follows_the_rule(case, seed):
    assert_adopt_follows_the_rule(True, case, seed)


def test_a_drafter_that_keeps_a_rejected_draft_is_noticed(monkeypatch):
    """A planted fault: rejected tokens stay pending."""
    case = Case(0, 3, 3, 16, 0, "vanilla", 1, 0, 0, 0.0, False, 1.0, False)
    adopt = TorchDraftOps.adopt

    def keep(self, result, moved):
        end = self.round.pending.end.clone()
        adopt(self, result, moved)
        self.round.pending.end.copy_(torch.maximum(self.round.pending.end, end))

    monkeypatch.setattr(TorchDraftOps, "adopt", keep)
    with pytest.raises(AssertionError):
        for seed in range(20):
            assert_adopt_follows_the_rule(False, case._replace(seed=seed), seed)


@on_kernels()
@given(cases(*EVERY))
def test_send(case):
    pair = both(case)
    room = randint(0, case.gamma + 3, (case.rows,))
    for drafter in pair:
        drafter.round.room.copy_(room)
        drafter.ops.send(None if drafter.ops.cuts_by_confidence else drafter._kept(None))
    assert_alike(*reversed(pair))


@on_kernels()
@given(cases(*EVERY), st.sampled_from((2, 16)))
def test_draft_inputs(case, reread):
    pair = both(case)
    for drafter in pair:
        drafter.model.reread = reread  # more where the draft has missed some rounds
        torch.manual_seed(case.seed)
        drafter.round.pending.end.copy_(randint(2, 20, (case.rows,)))
    found = [[drafter.ops.draft_inputs(step) for step in (0, 1)] for drafter in pair]
    for expected, got in zip(*found, strict=True):
        assert_inputs(got, expected)


@on_kernels()
@given(cases(*EVERY))
def test_drafted(case):
    plain, quick = both(case)
    assert_same(quick.drafted(), plain.drafted())


# ---- the target's side


def a_text(case, base=0, padding=0):
    """A text in the middle of a generation, its buffers, and which slots are seen, `base` of them before the text."""
    torch.manual_seed(case.seed)
    buffers, rows = NamedBuffers(), case.rows
    words = randint(0, case.vocabulary - 1, (rows, PROMPT))
    text = Text(buffers, words, CAPACITY, Stopper([], LIMIT), pad_token=0, in_step=False, padding=padding)
    text.ids.copy_(randint(0, case.vocabulary - 1, text.ids.shape))
    text.lengths = randint(PROMPT + 1, LIMIT - 1, (rows,)).tolist()[: rows - padding]
    text.length.copy_(torch.tensor(text.lengths + [PROMPT] * padding))
    text.result.continuation.copy_(randint(NONE, 2, (rows,)))
    return text, buffers, padded(rows, base + PROMPT)


def a_draft(case, count, leaves):
    """Few different tokens, so that the target agrees now and then."""
    tokens, length = randint(0, 2, (case.rows, count + 1))[:, :count], randint(0, count, (case.rows,))
    if leaves is None:
        return DraftTokens(tokens, length)
    at = randint(NONE, length[:, None] - 1, (case.rows, leaves + 1))[:, :leaves]
    return DraftTokens(tokens, length, leaves=TreeLeaves(randint(0, 2, (case.rows, leaves + 1))[:, :leaves], at))


@on_kernels(examples=15)
@given(
    cases("specbranch"), st.integers(0, 4), st.sampled_from([None, 0, 3]), st.integers(0, 3), st.sampled_from([0, 3])
)
def test_target_inputs(case, count, leaves, base, spare):
    """With leaves, the first token fills memory that is larger than needed."""
    written, width = [], count + 1 if leaves is None else count + 2 + leaves + spare
    runner = small_runner(case.vocabulary)
    runner.takes_spans = True
    for in_triton in (False, True):
        text, buffers, seen = a_text(case, base)
        first = base - seen.sum(1)
        target = Target(
            buffers, runner, text, None, seen, first, CAPACITY, {}, (), SpecBranchStats(), in_triton=in_triton
        )
        written.append(target.memory.inputs(width))
        target._write(a_draft(case, count, leaves), written[-1])
    for expected, got in zip(*written, strict=True):
        assert torch.equal(got, expected)
        if leaves is not None and spare:
            assert torch.equal(got[:, -spare:], got[:, :1].expand_as(got[:, -spare:]))


@on_kernels()
@given(
    cases("specbranch", penalty=st.sampled_from([1.0, 1.3])), st.integers(0, 4), st.sampled_from([None, 1, 4]),
    st.integers(1, 5), st.booleans(),
)  # fmt: skip
def test_verify(case, count, leaves, branches, follows):
    """If there are several rows, the last one is padding."""
    found, padding = [], int(case.rows > 1)
    for in_triton in (False, True):
        text, buffers, _ = a_text(case, padding=padding)
        draft_tokens, queries = a_draft(case, count, leaves), count + 1 + (leaves or 0)
        at = randint(NONE, draft_tokens.length[:, None], (case.rows, branches))
        following = randint(0, 2, at.shape) if follows else None
        options = BranchStarts(randint(0, 2, at.shape), at, None, following)
        logits = torch.randn((case.rows, queries, case.vocabulary), device=DEVICE)
        logits.scatter_(2, randint(0, 2, (case.rows, queries, 1)), 9.0)
        drafted, verify_result = (
            randint(0, 9, (case.rows, 6)),
            torch.zeros((case.rows, RESULT_NUMBERS + count)).to(logits.device).long(),
        )
        before = list(text.lengths)
        penalty = [RepetitionPenaltyLogitsProcessor(case.penalty)] if case.penalty != 1 else []
        verifier = Verifier(buffers, text, penalty, case.vocabulary, False, None, in_triton=in_triton)
        verify = verifier._verify_in_triton if in_triton else verifier._verify_in_torch
        where = verify(logits, draft_tokens, options, drafted, verify_result)
        if not in_triton:
            text.commit([VerifyResult.unpack(numbers) for numbers in verify_result.tolist()][: case.rows - padding])
            lengths = list(text.lengths)
        written = [text.ids[b, :length] for b, length in enumerate(lengths)]
        text.result.packed[1:5, case.rows - padding :] = 0  # of a row that gains nothing, nobody reads these
        found.append((where, verify_result, text.result.packed, before, *written))
    for expected, got in zip(*found, strict=True):
        assert torch.equal(got, expected) if torch.is_tensor(got) else got == expected


def some_drawn(rows, count, vocabulary, has_branch):
    """A draft drawn from its distributions, and a main branch after it in some rows."""
    scores, at_point = distributions((rows, count, vocabulary)), distributions((rows, vocabulary))
    tokens, length = scores.flatten(0, 1).multinomial(1).view(rows, count), randint(0, count, (rows,))
    branches = torch.cat([at_point.multinomial(1), randint(0, vocabulary - 1, (rows, 2))], dim=1)
    at = torch.where(randint(0, 1, (rows, 1)) == 1, length[:, None], NONE).repeat(1, 3)
    return rounds.Drawn(tokens, length, scores, branches, at, at_point if has_branch else None)


def chosen(scores, noise, drawn):
    """What `drawn_choices` says."""
    p, wait, uniform = scores.softmax(-1), noise[..., :-1], 1 - torch.exp(-noise[..., -1])
    plain, impossible = (p / wait).argmax(-1), p[..., 0].isnan()
    if drawn is None:
        return torch.where(impossible, NO_TOKEN, plain)
    rows, queries, _ = p.shape
    q, token = torch.zeros_like(p), torch.zeros_like(plain)
    count = drawn.tokens.shape[1]
    q[:, :count], token[:, :count] = drawn.scores, drawn.tokens
    tested = torch.arange(queries, device=DEVICE) < drawn.length[:, None]
    if drawn.branch_scores is not None:
        point = torch.arange(rows, device=DEVICE), drawn.length
        q[point], token[point], tested[point] = (
            drawn.branch_scores,
            drawn.branches[:, 0],
            drawn.at[:, 0] == drawn.length,
        )
    q = q * tested[:, :, None]
    chance = (p / q).gather(2, token[:, :, None])[:, :, 0]
    left = (p - q).clamp(min=0) / wait
    choices = torch.where(tested & (uniform < chance), token, left.argmax(-1))
    return torch.where(impossible, NO_TOKEN, choices)


@on_kernels()
@given(seeds, st.integers(1, 3), st.integers(1, 4), st.integers(0, 3), st.sampled_from([5, 40]), st.integers(0, 2))
def test_drawn_choices(seed, rows, count, leaves, vocabulary, kind):
    torch.manual_seed(seed)
    scores = 2 * torch.randn((rows, count + 1 + leaves, vocabulary), device=DEVICE)
    scores = scores.masked_fill(torch.rand_like(scores) < 0.3, -torch.inf)
    scores[..., 3] = 1.0
    scores[torch.rand(scores.shape[:2], device=DEVICE) < 0.1] = -torch.inf  # nothing can be drawn
    noise = torch.empty((rows, count + 1 + leaves, vocabulary + 1), device=DEVICE).exponential_()
    drawn = some_drawn(rows, count, vocabulary, has_branch=kind == 2) if kind else None
    assert torch.equal(rounds.drawn_choices(scores, noise, drawn), chosen(scores, noise, drawn))


@on_kernels(examples=5)
@given(cases("specbranch"))
def test_verify_reports_that_nothing_can_be_drawn(case):
    text, _, _ = a_text(case)
    draft_tokens, before = a_draft(case, 2, None), list(text.lengths)
    none = torch.full((case.rows, 1), NONE, device=DEVICE)
    drafted, verify_result = (
        randint(0, 9, (case.rows, 6)),
        torch.zeros((case.rows, 12), dtype=torch.long, device=DEVICE),
    )
    limit = torch.full((case.rows,), LIMIT, device=DEVICE)
    choices = torch.full((case.rows, 3), NO_TOKEN, device=DEVICE)
    lengths, where = torch.zeros_like(draft_tokens.length), torch.zeros_like(draft_tokens.length)
    rounds.verify_draft(
        choices,
        (draft_tokens.tokens, lengths),
        (none, none),
        None,
        None,
        drafted,
        text.ids,
        text.result.packed,
        limit,
        verify_result,
        where,
    )
    assert verify_result[:, 1].tolist() == [NO_TOKEN] * case.rows
    assert text.result.token.tolist() == [0] * case.rows  # tokens that are read must exist
    assert [int(text.ids[b, length]) for b, length in enumerate(before)] == [0] * case.rows


@on_kernels(examples=1)
@given(seeds)
def test_drawn_choices_are_speculative_sampling(seed):
    torch.manual_seed(seed)
    rows, count, vocabulary = 1500, 2, 5
    one = some_drawn(1, count, vocabulary, has_branch=True)
    logits = 2 * torch.randn((1, count + 1, vocabulary), device=DEVICE)
    p, q = logits.softmax(-1).expand(rows, -1, -1), torch.cat([one.scores, one.branch_scores[:, None]], dim=1)
    q = q.expand(rows, -1, -1)
    tokens = q.flatten(0, 1).multinomial(1).view(rows, count + 1)
    length, point = torch.full((rows,), count, device=DEVICE), torch.full((rows, 1), count, device=DEVICE)
    drawn = rounds.Drawn(tokens[:, :count], length, q[:, :count].contiguous(), tokens[:, count:].contiguous(), point,
                         q[:, count].contiguous())  # fmt: skip
    noise = torch.empty((rows, count + 1, vocabulary + 1), device=DEVICE).exponential_()
    choices = rounds.drawn_choices(logits.expand(rows, -1, -1), noise, drawn)
    quick = accept_choices(choices, drawn.tokens, length, drawn.branches, point)
    plain = accept_samples(p, q, drawn.tokens, length, drawn.branches, point)
    counts = [(each.accepted * vocabulary + each.token).bincount(minlength=3 * vocabulary) for each in (quick, plain)]
    both_counts = torch.stack(counts).double()[:, sum(counts) > 0]
    expected = both_counts.mean(0)
    chi = ((both_counts - expected) ** 2 / expected).sum().item()
    freedom = both_counts.shape[1] - 1
    assert chi < freedom + 4 * (2 * freedom) ** 0.5, (chi, freedom)
    first = torch.where(quick.accepted > 0, drawn.tokens[:, 0], quick.token).bincount(minlength=vocabulary) / rows
    assert (first - p[0, 0]).abs().max() < 4 * (0.25 / rows) ** 0.5


# ---- whole stages, whole generations


@on_kernels(examples=6)
@given(cases(*EVERY, gamma=st.integers(2, 3), penalty=st.sampled_from([1.0, 1.3]), draws=st.booleans()), seeds)
def test_two_rounds(case, seed):
    if case.draws:  # one draw per step: side branches are drawn with the pending draft, or after it
        # A draft with fewer tokens takes fewer random numbers per draw in Triton.
        case = case._replace(width=1, rejection_branches=0, own=max(0, case.own))
    plain, quick = both(case)
    for nth in range(2):
        feedback = a_result(plain, seed + nth)
        for drafter in (plain, quick):
            drafter._propose(feedback, is_new=drafter.policy.drafts_first, shown=SHOWN)
            if drafter.policy.drafts_ahead:
                drafter._branch(SHOWN)
        assert_alike(quick, plain)
        assert_same(quick.drafted(), plain.drafted())
        read = torch.arange(SHOWN, device=DEVICE) < plain.round.pending.cached[:, None]  # [B, slots]
        for got, expected in zip(quick.model.runner.cache.layers, plain.model.runner.cache.layers, strict=True):
            for name in ("keys", "values"):
                one, other = (getattr(layer, name)[:, :, :SHOWN].transpose(1, 2)[read] for layer in (got, expected))
                assert_same(one, other, name)


@on_kernels(examples=8)
@given(cases("vanilla", gamma=st.integers(2, 4), epsilon=st.sampled_from([0.2, 0.3]), draws=st.booleans()), seeds)
def test_two_rounds_step_by_step(case, seed):
    """What is sent is the same. In one stage the draft also reads the token at which it stops."""
    case = case._replace(own=max(0, case.own))
    whole, stepwise = make_drafter(False, case), make_drafter(True, case, kind=StepwiseDrafter)
    for nth in range(1 if case.draws else 2):  # a step that is not taken draws nothing
        feedback = a_result(whole, seed + nth)
        whole._propose(feedback, is_new=True, shown=SHOWN)
        stepwise._run_propose(feedback, is_new=True, shown=SHOWN)
        sent, expected = ({name: state_of(each)[name] for name in SENT} for each in (stepwise, whole))
        is_sent = torch.arange(case.gamma, device=DEVICE) < whole.round.sent_length[:, None]
        for found in (sent, expected):
            found["sent.tokens"] = found["sent.tokens"].masked_fill(~is_sent, 0)
        for name in SENT:
            assert_same(sent[name], expected[name], name)


SENT = ("sent.tokens", "sent.length", "pending.start", "pending.end", "rejections.tokens", "rejections.at", "count")


@pytest.fixture
def parts_used(monkeypatch):
    """Whether target, drafter and verifier of each generation work in Triton."""
    kinds = []
    with_drafter = Assembly.with_drafter

    def observer(self, plan, parts):
        made = with_drafter(self, plan, parts)
        drafts = isinstance(made.drafter, NoDraft) or isinstance(made.drafter.ops, TritonDraftOps)
        kinds.append((made.target.in_triton, drafts, made.verifier.in_triton))
        return made

    monkeypatch.setattr(Assembly, "with_drafter", observer)
    return kinds


def generate(model, draft, kwargs, plan, monkeypatch, buffers=Buffers):
    """Tokens and statistics, from stages of fixed shape: captured on a GPU, run as they are elsewhere."""
    with monkeypatch.context() as patch:
        if INTERPRETED:
            patch.setattr(EagerRunner, "captures", True)
            patch.setattr(EagerRunner, "buffers", lambda self, settings: buffers(self.device, static_shapes=True))
        out = model.generate(**kwargs, assistant_model=draft, specbranch=plan)
    assert not model.specbranch_stats.slowed_by
    return out, model.specbranch_stats


def pair_and_prompt(target, rows, noise=0.15, **more):
    plain = copy.deepcopy(target).to(DEVICE)
    draft = noisy_copy(plain, noise, seed=1)
    given_ = {name: tensor.to(DEVICE) for name, tensor in prompt(rows).items()}
    return plain, draft, {**given_, "max_new_tokens": 16, "do_sample": False, **more}


PLANS = {
    "specbranch": dict(gamma=3, max_rejection_branches=3, tree_leaves=3),
    "vanilla": dict(gamma=3, tree_leaves=4, epsilon=0.0),  # the eager runtime does not send the token where it stops
    "pearl": dict(gamma=3),
    "autoregressive": dict(),
}


def assert_same_as_without(model, plain, draft, kwargs, plan, monkeypatch):
    """Tokens equal plain `generate()`; counts equal those of the eager runtime."""
    out, stats = generate(model, draft, kwargs, config(**plan), monkeypatch)
    expected = model.generate(**kwargs, assistant_model=draft, specbranch=config(**plan, runtime="eager"))
    assert torch.equal(out, expected) and torch.equal(out, plain.generate(**kwargs))
    assert_counts_add_up(stats)
    for name in COUNTS:
        assert getattr(stats, name) == getattr(model.specbranch_stats, name), name


@where_kernels_run
@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", PLANS)
def test_generations_equal_plain_and_eager(policy, rows, target, parts_used, monkeypatch):
    plain, draft, kwargs = pair_and_prompt(target, rows)
    assert_same_as_without(attached(plain), plain, draft, kwargs, {"policy": policy, **PLANS[policy]}, monkeypatch)
    assert parts_used[-2] == (True, True, True)  # before it a batch may be checked; after it comes the eager runtime


@where_kernels_run
@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", ["vanilla", "specbranch"])
def test_generations_end_where_plain_generate_ends(policy, rows, target, monkeypatch):
    """Also in the middle of a verify result, and one row before the other."""
    plain, draft, kwargs = pair_and_prompt(target, rows)
    text = plain.generate(**kwargs)[0, kwargs["input_ids"].shape[1] :].tolist()
    for last in text[6:8]:
        kwargs["eos_token_id"] = [EOS, last]
        assert_same_as_without(attached(plain), plain, draft, kwargs, {"policy": policy, **PLANS[policy]}, monkeypatch)


@where_kernels_run
@pytest.mark.parametrize(("policy", "most"), [("autoregressive", 1), ("vanilla", 5)])
def test_a_round_started_after_the_end_counts_nowhere(policy, most, target, monkeypatch):
    """Wherever the text ends, and however much more of it was allowed."""
    plain, draft, kwargs = pair_and_prompt(target, rows=1)
    text = plain.generate(**kwargs)[0, kwargs["input_ids"].shape[1] :].tolist()
    assert text[4] not in text[:4]
    for further in range(most + 2):
        kwargs |= {"eos_token_id": [EOS, text[4]], "max_new_tokens": 5 + further}
        assert_same_as_without(attached(plain), plain, draft, kwargs, {"policy": policy, **PLANS[policy]}, monkeypatch)


@where_kernels_run
@pytest.mark.parametrize("policy", ["vanilla", pytest.param("specbranch", marks=pytest.mark.slow)])
def test_generations_with_processors(policy, target, parts_used, monkeypatch):
    plain, draft, kwargs = pair_and_prompt(target, rows=1, repetition_penalty=1.3)
    assert_same_as_without(attached(plain), plain, draft, kwargs, {"policy": policy, **PLANS[policy]}, monkeypatch)
    assert parts_used[-2] == (True, True, True)


@where_kernels_run
@pytest.mark.slow
def test_drawn_texts_are_repeatable(target, parts_used, monkeypatch):
    plain, draft, kwargs = pair_and_prompt(target, rows=1, do_sample=True, temperature=1.2, max_new_tokens=8)
    plan = config(**PLANS["specbranch"], draft_sampling="sample")
    texts = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        texts.append(generate(attached(plain), draft, kwargs, plan, monkeypatch)[0])
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    assert parts_used == [(True, True, True)] * 3


class DryRunBuffers(Buffers):
    """Takes a dry run of every stage each time, if the stage allows that."""

    in_parallel, met = 0, set()

    def run(self, key, stage, only_our_kernels=False):
        if only_our_kernels:
            with recorded_dry_run() as dry_run:
                stage()
            type(self).in_parallel += 1
            type(self).met.update(dry_run.kernels)
        stage()


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU dry runs are tested in test_gpu.py")
@pytest.mark.parametrize("policy", PLANS)
def test_a_dry_run_leaves_no_trace(policy, target, monkeypatch):
    plain, draft, kwargs = pair_and_prompt(target, rows=1)
    forward, inside = EagerRunner.forward_uncaptured, []

    def by_kernels_alone(self, tokens, *inputs, **extra):
        """In a dry run a pass in kernels writes nothing and returns what was in memory."""
        if not is_dry_run():
            return forward(self, tokens, *inputs, **extra)
        assert 0 <= tokens.min() and tokens.max() < self.model.config.vocab_size
        inside.append(self)
        return Step(torch.randn((*tokens.shape, self.model.config.vocab_size)))

    monkeypatch.setattr(EagerRunner, "forward_uncaptured", by_kernels_alone)
    plan = config(policy, **PLANS[policy])
    out, _ = generate(attached(plain), draft, kwargs, plan, monkeypatch, DryRunBuffers)
    assert torch.equal(out, plain.generate(**kwargs)) and inside
    assert DryRunBuffers.in_parallel > 10 and len(DryRunBuffers.met) >= 2


@where_kernels_run
def test_without_kernels_operations_run_in_torch(target, parts_used, monkeypatch):
    plain, draft, kwargs = pair_and_prompt(target, rows=1)
    out, _ = generate(attached(plain), draft, kwargs, config(kernels=False), monkeypatch)
    assert torch.equal(out, plain.generate(**kwargs)) and parts_used == [(False, False, False)]


# ---- where they are used, and that they can be built


class Stops(SpeculationHook):
    def stop(self, state):
        return state.confidence < 0.2


class Forks(SpeculationHook):
    def fork(self, state):
        return torch.ones_like(state.length)


class SureStop(ConfidenceStop):
    def stop(self, state):
        return state.confidence < 2 * self.epsilon


OURS = [ConfidenceStop(0.3), TopKBranches(4)]


def names(*hooks):
    return "+".join(type(hook).__name__ for hook in hooks)


@pytest.mark.parametrize(
    "hooks", [OURS, OURS[1:], [Half(), *OURS], [LengthHeadHook(len), *OURS]], ids=lambda all: names(*all)
)
def test_kernels_know_our_rules_and_allow_hooks_that_cut(hooks):
    assert kernels_know(POLICIES["specbranch"], 4, HookList(hooks))


@pytest.mark.parametrize("hook", [Stops(), Forks(), SureStop(0.2), ConfidenceStop(0.2)], ids=names)
def test_kernels_leave_other_stop_and_fork_hooks_to_torch(hook):
    assert not kernels_know(POLICIES["specbranch"], 4, HookList([hook, *OURS]))


def test_kernels_leave_branches_of_one_token_to_torch():
    assert not kernels_know(POLICIES["pearl"], 1, HookList(OURS))
    assert kernels_know(POLICIES["pearl"], 2, HookList(OURS)) and kernels_know(POLICIES["vanilla"], 1, HookList(OURS))


KERNEL_FILES = sorted(Path(kernels.__path__[0]).rglob("*.py"))


def unknown_varying(source):
    """Names in `@varying(...)` that are no parameters of the kernel below: Triton ignores them without a word."""
    unknown = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        parameters = {argument.arg for argument in function.args.args}
        for decorator in function.decorator_list:
            if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "varying":
                names = {ast.literal_eval(name) for name in decorator.args}
                unknown += [f"{function.name}: {name}" for name in sorted(names - parameters)]
    return unknown


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda path: path.stem)
def test_varying_names_parameters(path):
    assert not unknown_varying(path.read_text())


def test_unknown_varying_is_noticed():
    kernel = '@varying("count", "outcomes")\ndef _fork_kernel(ids, count): ...\n'
    assert unknown_varying(kernel) == ["_fork_kernel: outcomes"]
    assert sum("@varying(" in path.read_text() for path in KERNEL_FILES) > 5


TYPES = {
    int: "i32", float: "fp32", torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1", torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
}  # fmt: skip


class Builder:
    """Stands in for a kernel: what would be launched is compiled for an H100, which takes no GPU."""

    def __init__(self, kernel, built):
        self.kernel, self.built = kernel, built

    def __getitem__(self, grid):
        return self.build

    def build(self, *arguments, num_warps, **constants):
        from triton import compile as compile_kernel
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        wanted = [parameter.name for parameter in self.kernel.params]
        types = {name: TYPES[getattr(value, "dtype", type(value))] for name, value in zip(wanted, arguments)}
        assert {*types, *constants} == set(wanted)
        baked = {(wanted.index(name),): value for name, value in constants.items()}
        source = ASTSource(self.kernel, {name: types.get(name, "constexpr") for name in wanted}, baked)
        compiled = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
        assert compiled.asm["cubin"]
        self.built.add(self.kernel.__name__)


class WithoutModel(Drafter):
    """A drafter that runs no model."""

    def _forward(self, inputs, shown):
        shape = (*inputs.tokens.shape, self.model.own_vocabulary)
        return torch.zeros(shape, dtype=torch.bfloat16, device=self.device)


def build_the_drafters(case):
    drafter = make_drafter(True, case, torch.bfloat16, WithoutModel)
    feedback = a_result(drafter, seed=0)
    for moved in (False, True) if drafter.round.side.most else (False,):
        drafter._propose(feedback._replace(moved=moved), is_new=True, shown=SHOWN)
    if drafter.policy.drafts_ahead:
        drafter._branch(SHOWN)
    drafter.drafted()


def build_the_targets(case, leaves):
    text, buffers, seen = a_text(case)
    draft_tokens, count, runner = a_draft(case, 3, leaves), 4 + (leaves or 0), small_runner(case.vocabulary)
    target = Target(
        buffers, runner, text, None, seen, -seen.sum(1), CAPACITY, {}, (), SpecBranchStats(), in_triton=True
    )
    logits = torch.zeros((case.rows, count, case.vocabulary), device=DEVICE)
    target._pass(draft_tokens, SHOWN, lambda *inputs: Step(logits))
    verifier = Verifier(buffers, text, [], case.vocabulary, False, None, in_triton=True)
    rounds.drawn_choices(logits, torch.zeros((case.rows, count, case.vocabulary + 1)), None)
    for has_branch in (False, True):
        drawn = some_drawn(case.rows, 3, case.vocabulary, has_branch)
        rounds.drawn_choices(logits, torch.zeros((case.rows, count, case.vocabulary + 1)), drawn)
    options, drafted, verify_result = (torch.zeros((case.rows, n), dtype=torch.long, device=DEVICE) for n in (4, 6, 13))
    for following in (None, options):
        verifier._verify_in_triton(
            logits, draft_tokens, BranchStarts(options, options, None, following), drafted, verify_result
        )


@pytest.mark.skipif(INTERPRETED, reason="kernels are no kernels under the interpreter")
def test_kernels_compile_for_a_gpu(monkeypatch):
    """The interpreter accepts what the compiler does not."""
    pytest.importorskip("triton")
    built, every = set(), set()
    for found in pkgutil.iter_modules(rounds.__path__):
        module = importlib.import_module(f"{rounds.__name__}.{found.name}")
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel"):
                every.add(name)
                monkeypatch.setattr(module, name, Builder(kernel.jitted, built))
    case = Case(
        seed=0, rows=2, gamma=3, vocabulary=40, own=0, policy="specbranch", width=4, rejection_branches=4, leaves=4,
        epsilon=0.4, cuts=False, penalty=1.0, draws=False,
    )  # fmt: skip
    build_the_drafters(case._replace(vocabulary=20_000))
    build_the_drafters(case._replace(cuts=True, penalty=1.3))
    build_the_drafters(case._replace(draws=True))
    build_the_drafters(case._replace(policy="vanilla", gamma=1))  # this one sends the token where it stops
    build_the_targets(case, leaves=None)
    build_the_targets(case, leaves=3)
    assert built == every


@pytest.mark.skipif(INTERPRETED, reason="kernels are no kernels under the interpreter")
def test_background_build_covers_the_first_rounds():
    pytest.importorskip("triton")
    with recorded_dry_run() as aside:
        _kernels_of_every_model(torch.device(DEVICE))
    case = Case(
        seed=0, rows=1, gamma=3, vocabulary=40, own=0, policy="vanilla", width=4, rejection_branches=0, leaves=0,
        epsilon=0.4, cuts=False, penalty=1.0, draws=False,
    )  # fmt: skip
    text, buffers, seen = a_text(case)
    verifier = Verifier(buffers, text, [], case.vocabulary, False, None, in_triton=True)
    draft_tokens, branches = verifier.nothing
    target = Target(
        buffers, small_runner(case.vocabulary), text, None, seen, -seen.sum(1), SMALLEST, {}, (), SpecBranchStats(),
        in_triton=True,
    )  # fmt: skip
    logits = torch.zeros((1, 1, case.vocabulary), device=DEVICE)
    drafted, verify_result = (torch.zeros((1, n), dtype=torch.long, device=DEVICE) for n in (6, 10))
    with recorded_dry_run() as rounds_begin:
        target._pass(draft_tokens, SMALLEST, lambda *_: Step(logits))
        verifier._verify_in_triton(logits, draft_tokens, branches, drafted, verify_result)
    built, needed = aside.specializations, rounds_begin.specializations
    of_every_model = {each for each in needed if (torch.float32, True) not in each}  # others read logits
    assert len(of_every_model) == 2 and of_every_model <= built


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this test starts the interpreter")
def test_operations_under_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    assert ran.stdout.startswith("....................")
