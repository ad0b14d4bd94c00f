"""The kernels of a round decide what its torch code decides, one by one, stage by stage, and over whole generations.

Kernels run on a GPU, or on the CPU under Triton's interpreter (`TRITON_INTERPRET=1`), which one test here starts.
"""

import copy
import importlib
import os
import pkgutil
import subprocess
import sys
from functools import lru_cache
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from hf_specbranch import SpecBranchStats, SpeculationHook
from hf_specbranch.decoding.acceptance import NO_TOKEN, NONE, accept_choices, accept_samples
from hf_specbranch.decoding.assembly import Assembly
from hf_specbranch.decoding.draft_model import DraftModel
from hf_specbranch.decoding.drafter import Drafter, NoDrafter, own_token_first
from hf_specbranch.decoding.hooks import ConfidenceStop, HookList, LengthHeadHook, TopKBranches
from hf_specbranch.decoding.likely_rejections import LikelyRejections
from hf_specbranch.decoding.pending_draft import PendingDraft
from hf_specbranch.decoding.policies import POLICIES
from hf_specbranch.decoding.quick_drafter import QuickDrafter, is_plain
from hf_specbranch.decoding.quick_judge import QuickJudge
from hf_specbranch.decoding.quick_target import QuickTarget
from hf_specbranch.decoding.state import Branches, DraftTokens, Feedback, TreeLeaves, VerifyResult
from hf_specbranch.decoding.stopping import Stopper
from hf_specbranch.decoding.target import Target
from hf_specbranch.decoding.text import Text
from hf_specbranch.decoding.verifier import Verifier
from hf_specbranch.kernels import rounds
from hf_specbranch.kernels.backend import INTERPRETED
from hf_specbranch.kernels.parallel_build import is_dry_run
from hf_specbranch.kernels.rounds import inputs as inputs
from hf_specbranch.kernels.rounds import memory
from hf_specbranch.kernels.warm_up import _kernels_of_every_model
from hf_specbranch.runtime.base import Step
from hf_specbranch.runtime.eager import SMALLEST, EagerRunner
from hf_specbranch.runtime.mask_probe import mask_maker_for
from hf_specbranch.runtime.static_buffers import Buffers

from .dry_runs import recorded_dry_run
from .models import EOS, assert_counts_add_up, attached, config, llama, noisy_copy, prompt
from .test_fixed_stages import COUNTS

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
    """Vocabularies and slots are looked at in several pieces."""
    monkeypatch.setattr(memory, "LARGEST_BLOCK", 16)
    monkeypatch.setattr(inputs, "MOST", 32)


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


class OpenDesk(Buffers):
    """Memory that can be looked at by name."""

    def __init__(self):
        super().__init__(torch.device(DEVICE), static_shapes=True)

    def tensor(self, name, shape, dtype=torch.long):
        return self.memory.setdefault(name, super().tensor(name, shape, dtype))


class Half(SpeculationHook):
    fresh_lines, settings = True, ()

    def keep(self, survivor):
        return survivor.length // 2


def randint(low, high, shape):
    """Integers up to `high`, which may be a tensor."""
    return (low + torch.rand(shape, device=DEVICE) * (high - low + 1)).floor().long()


def distributions(shape):
    return (2 * torch.randn(shape, device=DEVICE)).softmax(-1)


def drafter(kind, case, dtype=torch.float32):
    """Two that are made of the same case hold the same, but for their kind."""
    rows, gamma, policy = case.rows, case.gamma, POLICIES[case.policy]
    most = gamma * case.width
    branches = case.width if policy.forks else 1
    rejection_branches, leaves = (
        min(case.rejection_branches, most) * policy.forks,
        min(case.leaves, most) * policy.drafts_first,
    )
    buffers, stats, runner = OpenDesk(), SpecBranchStats(), small_runner(case.vocabulary + case.own, dtype)
    torch.manual_seed(case.seed)
    processors = [RepetitionPenaltyLogitsProcessor(case.penalty)] if case.penalty != 1 else []
    draft = DraftModel(buffers, runner, padded(rows, PROMPT), case.vocabulary, processors, CAPACITY, stats)
    text = randint(0, case.vocabulary - 1, (rows, CAPACITY))
    reach = 2 * gamma + 2
    generator = buffers.generator("drafts", case.seed) if case.draws else None
    pending = PendingDraft(
        buffers, text, randint(PROMPT, PROMPT + 4, (rows,)), CAPACITY, reach, case.vocabulary, generator
    )
    rules = [ConfidenceStop(case.epsilon)] if case.epsilon > 0 else []
    hooks = HookList([*([Half()] if case.cuts else []), *rules, TopKBranches(case.width)])
    likely_rejections = LikelyRejections(buffers, pending, gamma, case.width, max(rejection_branches, leaves))
    made = kind(
        buffers,
        draft,
        pending,
        policy,
        gamma,
        branches,
        rejection_branches,
        leaves,
        likely_rejections,
        hooks,
        LIMIT,
        stats,
    )
    made.prefill(PROMPT)
    put_in_the_middle(made)
    return made


@lru_cache
def small_model(vocabulary, dtype):
    return llama(0, vocabulary, hidden=16, layers=1, max_position_embeddings=16).to(DEVICE, dtype)


def small_runner(vocabulary, dtype=torch.float32):
    model = small_model(vocabulary, dtype)
    return EagerRunner(model, mask_maker_for(model, "draft"))


def padded(rows, length):
    """[B, length] bool."""
    return torch.arange(length, device=DEVICE) >= randint(0, length - 2, (rows, 1))


def put_in_the_middle(made):
    """A line is drafted, part of it is a chain that is being verified, and branches stand where the policy has any."""
    pending, side_branches, likely_rejections, runner = (
        made.pending,
        made.side_branches,
        made.likely_rejections,
        made.model.runner,
    )
    rows = (pending.count,)
    for part in (pending, side_branches):
        part.scores.copy_(distributions(part.scores.shape))
        part.confidence.copy_(part.scores.max(-1).values)
    pending.end += randint(0, pending.reach, rows)
    pending.fed.copy_(pending.end - randint(0, 2, rows))
    made.sent_length.copy_(randint(0, pending.length.clamp(max=made.gamma), rows))
    made.point.copy_(pending.start + made.sent_length)
    made.count.copy_(randint(0, 9, rows))
    made.survived.copy_(randint(0, 1, rows))
    made.ahead.copy_(randint(0, 3, rows))  # mostly
    likely_rejections.tokens.copy_(randint(0, 10, likely_rejections.tokens.shape))
    likely_rejections.at.copy_(randint(NONE, made.sent_length[:, None] - 1, likely_rejections.at.shape))
    made.branch_tokens.copy_(randint(0, 10, made.branch_tokens.shape))
    if made.policy.drafts_ahead:
        ahead = made.ahead[:, None]
        pending.end.copy_(torch.where(made.ahead, torch.maximum(pending.end, made.point + 1 + made.depth), pending.end))
        made.width.copy_(torch.where(made.ahead, randint(1, made.branches, rows), 0))
        at = torch.where(made.order < made.width[:, None], made.sent_length[:, None], NONE)
        made.branch_at[:, : made.branches] = at
        rejection_branches = made.branch_at[:, made.branches :]
        rejection_branches.copy_(
            torch.where(ahead, randint(NONE, made.sent_length[:, None] - 1, rejection_branches.shape), NONE)
        )
    side_branches.open(made.point, forks_of(made), made.branch_tokens[:, 1:])
    side_branches.tokens[:, :, 1:] = randint(0, 10, side_branches.tokens[:, :, 1:].shape)
    runner.slot_positions.copy_(randint(0, 15, runner.slot_positions.shape))
    for layer in runner.cache.layers:
        layer.keys.normal_()
        layer.values.normal_()


def forks_of(made):
    at = made.branch_at[:, 1:]
    return torch.where(at == NONE, made.point[:, None], made.pending.start[:, None] + at)


def both(case):
    return drafter(Drafter, case), drafter(QuickDrafter, case)


def a_verdict(made, seed):
    """Any that can come: with or without a survivor and a bonus token, cut short or not, ending a text or not."""
    torch.manual_seed(seed)
    rows = []
    for b in range(made.pending.count):
        options = [NONE, *(k for k, at in enumerate(made.branch_at[b].tolist()) if at != NONE)]
        survivor = options[torch.randint(len(options), ())]
        length = int(made.sent_length[b])
        accepted = int(made.branch_at[b, survivor]) if survivor >= 0 else int(torch.randint(length + 1, ()))
        token = int(made.branch_tokens[b, survivor]) if survivor >= 0 else int(torch.randint(10, ()))
        continuation = int(torch.randint(10, ())) if torch.rand(()) < 0.4 else NONE
        committed = allowed = accepted + 1 + (continuation >= 0)
        if torch.rand(()) < 0.4:
            committed = int(torch.randint(allowed, ()))
        finished = committed < allowed or bool(torch.rand(()) < 0.2)
        rows.append(
            [committed, accepted, token, survivor, continuation, finished, int(made.pending.start[b]) + committed]
        )
    round_result = torch.tensor(rows, device=DEVICE).T.contiguous().long()
    complete = [row[0] == row[1] + 1 + (row[4] >= 0) for row in rows]
    moved = any(whole and row[3] > 0 for whole, row in zip(complete, rows))
    return Feedback(round_result, None, moved, draft_ended=True)


def assert_same(got, expected, name=""):
    assert got.shape == expected.shape and got.dtype == expected.dtype, name
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, msg=lambda said: f"{name}: {said}")


def assert_alike(quick, plain):
    got, expected = what_is_read(quick), what_is_read(plain)
    for name in expected:
        assert_same(got[name], expected[name], name)


def what_is_read(made):
    """Everything on a drafter's desk, less the entries that nobody reads and branches that are not open."""
    found, closed = dict(made.buffers.memory), made.branch_at == NONE
    for name in ("line.ids", "line.confidence", "line.scores"):
        found[name] = found[name][:, :-1]
    for name in ("siblings.tokens", "siblings.confidence", "siblings.scores"):
        values = found[name]  # [B, W, ...]
        found[name] = values.masked_fill(closed[:, 1:].reshape(*values.shape[:2], *[1] * (values.ndim - 2)), 0)
    for name in ("branches.tokens", "branches.following"):
        if name in found:
            found[name] = found[name].masked_fill(closed, 0)
    found["foresight.tokens"] = made.likely_rejections.tokens.masked_fill(made.likely_rejections.at == NONE, 0)
    del found["fresh"]  # is of interest to hooks alone
    return found


def line_tips(made, queries):
    pending = made.pending
    columns = (pending.end[:, None] - queries + pending.offsets[:queries]).clamp(min=0)
    return (
        pending.ids.gather(1, columns), columns, made.model.positions.gather(1, columns),
        made.model.text_up_to(columns, SHOWN),
    )  # fmt: skip


def branch_tips(made, step):
    side_branches = made.side_branches
    tokens, columns, slots = side_branches.inputs(step)
    own = tokens, slots, made.model.positions.gather(1, columns), side_branches.visible(step, SHOWN)
    return tuple(torch.cat(parts, dim=1) for parts in zip(line_tips(made, 1), own))


def what_the_draft_says(made, queries):
    """Logits over its own vocabulary, what they mean for the target's, noise, and tokens drawn with that."""
    logits = 3 * torch.randn((made.pending.count, queries, made.model.own_vocabulary), device=DEVICE)
    logits = logits.masked_fill(torch.rand_like(logits) < 0.3, -torch.inf)  # as by processors
    logits[..., 3] = 1.0
    said = made.model.distribution(logits, lambda: None, [])
    noise = torch.empty((*said.shape[:2], min(said.shape[2], logits.shape[2])), device=DEVICE).exponential_()
    return logits, said, noise, (said[..., : noise.shape[2]] / noise).argmax(-1)


def assert_tips(got, expected, queries=slice(None)):
    for name, one, other in zip(rounds.ForwardInputs._fields, got, expected, strict=True):
        assert torch.equal(one[:, queries], other[:, queries]), name


# ---- kernel by kernel


@on_kernels()
@given(cases(*EVERY), st.integers(0, 2), st.booleans(), st.booleans())
def test_kernel_advance_notes_a_distribution_and_extends_the_line(case, further, sticky, is_drawn):
    plain, quick = both(case)
    pending, (logits, said, noise, drawn) = plain.pending, what_the_draft_says(plain, 1)
    flag, bound = plain.ahead.clone(), pending.end + randint(-2, 1, (case.rows,))
    pending.note(said[:, 0])
    pending.next.copy_(drawn[:, 0] if is_drawn else pending.next)
    going = flag & (pending.end < bound + further) & ~plain.hooks.stop(pending.state(pending.end))
    pending.extend(going)
    plain.count += going

    after, flag = quick._pending_inputs(1, SHOWN), flag.clone()
    rounds.advance(
        logits, quick.pending_buffers, after, quick.model.positions, flag, bound, quick.count, further, case.epsilon,
        sticky, noise=noise if is_drawn else None,
    )  # fmt: skip
    assert torch.equal(flag, going if sticky else plain.ahead)
    assert_alike(quick, plain)
    assert_tips(after, line_tips(plain, 1))


@on_kernels(examples=15)
@given(cases("specbranch", width=st.integers(2, 4)), st.integers(0, 3), st.booleans())
def test_kernel_advance_extends_all_branches(case, step, is_drawn):
    plain, quick = both(case)
    step, side_branches, pending = step % plain.depth, plain.side_branches, plain.pending
    for made in (plain, quick):
        made.pending.end.copy_(made.point + 1 + made.sent_length % (made.depth + 1))
    logits, said, noise, drawn = what_the_draft_says(plain, 1 + side_branches.most)
    after = rounds.ForwardInputs(*(part.clone() for part in branch_tips(plain, step)))
    pending.note(said[:, 0])
    side_branches.extend(step, logits[:, 1:])
    if is_drawn:
        pending.next.copy_(drawn[:, 0])
        side_branches.tokens[:, :, step + 1] = drawn[:, 1:]
    going = plain.ahead & (pending.end < plain.point + 1 + plain.depth)
    pending.extend(going)
    plain.count += going

    rounds.advance(
        logits, quick.pending_buffers, after, quick.model.positions, quick.ahead, quick.point, quick.count,
        1 + quick.depth, side_branches=quick.side_branch_buffers, step=step, noise=noise if is_drawn else None,
    )  # fmt: skip
    assert_alike(quick, plain)
    assert_tips(after, line_tips(plain, 1), slice(0, 1))
    if step + 1 < plain.depth:
        assert_tips(after, branch_tips(plain, step + 1))


@on_kernels(examples=15)
@given(cases("vanilla", "specbranch", leaves=st.integers(1, 8)))
def test_kernel_foresee_finds_the_likeliest_corrections(case):
    plain, quick = both(case)
    plain.likely_rejections.look(plain.sent_length)
    quick._find_likely_rejections()
    assert_alike(quick, plain)


@on_kernels()
@given(cases("pearl", "specbranch"))
def test_kernel_fork_opens_the_branches(case):
    plain, quick = both(case)
    pending, ahead = plain.pending, plain.ahead[:, None]
    state, own = pending.state(plain.point), pending.ids.gather(1, plain.point[:, None])
    width = plain.hooks.fork(state).clamp(max=plain.branches) if plain.policy.forks else torch.ones_like(plain.width)
    plain.width.copy_(torch.where(plain.ahead, width, 0))
    plain.branch_tokens[:, : plain.branches] = own_token_first(state.scores, own, plain.branches)
    is_open = plain.order < plain.width[:, None]
    plain.branch_at[:, : plain.branches] = torch.where(is_open, plain.sent_length[:, None], NONE)
    plain.branch_tokens[:, plain.branches :] = plain.likely_rejections.tokens[:, : plain.rejection_branches]
    plain.branch_at[:, plain.branches :] = torch.where(
        ahead, plain.likely_rejections.at[:, : plain.rejection_branches], NONE
    )
    plain.count += (plain.branch_at[:, 1:] != NONE).sum(1) * (1 + plain.depth)

    rounds.fork(
        quick.pending_buffers, quick.point, quick.sent_length, quick.ahead, (quick.likely_rejections.tokens,
        quick.likely_rejections.at),
        quick.branch_tokens, quick.branch_at, quick.width, quick.count, quick.branches, quick.depth, quick.widest,
    )  # fmt: skip
    assert torch.equal(quick.branch_tokens, plain.branch_tokens)
    assert_alike(quick, plain)


@on_kernels()
@given(cases(*EVERY), seeds)
def test_kernel_follow_goes_where_the_verdict_says(case, seed):
    plain, quick = both(case)
    feedback = a_verdict(plain, seed)
    plain._follow(feedback)

    pending, side_branches, runner = quick.pending_buffers, quick.side_branch_buffers, quick.model.runner
    if feedback.moved:
        rounds.adopt(
            feedback.round_result, pending, side_branches, [(layer.keys, layer.values) for layer in runner.cache.layers]
        )
    said = (
        feedback.round_result,
        pending,
        side_branches,
        runner.slot_positions,
        quick.limit,
        quick.depth,
        feedback.moved,
    )
    rounds.resolve_pending(*said, quick.after)
    plain.count.zero_()
    assert_alike(quick, plain)
    assert_same(runner.slot_positions, plain.model.runner.slot_positions)
    for got, expected in zip(runner.cache.layers, plain.model.runner.cache.layers, strict=True):
        assert torch.equal(got.keys, expected.keys) and torch.equal(got.values, expected.values)

    room = torch.where(feedback.finished, 0, plain.limit - plain.pending.start)
    empty = plain.pending.length == 0
    assert_same(quick.after.room, room)
    assert_same(quick.after.empty, empty)
    assert_same(quick.after.going, empty & (room > 1))
    assert_same(quick.after.bound, plain.pending.start + room - 1)


@on_kernels()
@given(cases(*EVERY))
def test_kernel_send_cuts_a_chain_off_the_line(case):
    plain, quick = both(case)
    room, pending = randint(0, case.gamma + 3, (case.rows,)), plain.pending
    kept = plain._cut(None)
    plain.sent_length.copy_(torch.minimum(kept, room - 1).clamp(min=0, max=plain.gamma))
    plain.ahead.copy_(plain.policy.drafts_ahead & (room > plain.sent_length + 1))
    plain.survived.fill_(False)
    plain.width.zero_()
    plain.branch_at.fill_(NONE)
    plain.point.copy_(pending.start + plain.sent_length)
    plain.sent_tokens.copy_(pending.tokens(plain.gamma))

    given_ = kept if quick.asks else None
    epsilon = quick.epsilon if quick.policy.forks else 0.0
    ahead = quick.policy.drafts_ahead
    rounds.send(quick.pending_buffers, quick.survived, room, given_, quick.sent, quick.pending.reach, epsilon, ahead)
    assert_alike(quick, plain)


@on_kernels()
@given(cases(*EVERY), st.integers(1, 3))
def test_kernel_read_on_gives_the_last_tokens_of_the_line(case, queries):
    quick = drafter(QuickDrafter, case)
    quick.pending.end.copy_(randint(1, 20, (case.rows,)))
    assert_tips(quick._pending_inputs(queries, SHOWN), line_tips(quick, queries))


@on_kernels()
@given(cases("pearl", "specbranch"))
def test_kernel_open_branches_gives_the_first_token_of_each(case):
    plain, quick = both(case)
    plain.side_branches.open(plain.point, forks_of(plain), plain.branch_tokens[:, 1:])
    for written in (quick.side_branches.point, quick.side_branches.forks, quick.side_branches.tokens[:, :, 0]):
        written.zero_()
    before = quick._inputs(1 + quick.side_branches.most, SHOWN)
    rounds.open_branches(
        quick.pending_buffers, quick.side_branch_buffers, quick.point, quick.branch_tokens, quick.branch_at,
        quick.model.positions, quick.model.seen, before,
    )  # fmt: skip
    assert_alike(quick, plain)
    assert torch.equal(quick.side_branches.tokens, plain.side_branches.tokens)
    assert_tips(before, branch_tips(plain, 0))


@on_kernels()
@given(cases(*EVERY))
def test_kernel_tally_counts_what_stands_drafted(case):
    plain, quick = both(case)
    assert_same(quick.drafted(), plain.drafted())


# ---- the target's side


def a_text(case, base=0):
    """A text in the middle of a generation; its desk; and whether each slot is seen, `base` of them before the text."""
    torch.manual_seed(case.seed)
    buffers, rows = OpenDesk(), case.rows
    words = randint(0, case.vocabulary - 1, (rows, PROMPT))
    text = Text(buffers, words, CAPACITY, Stopper([], LIMIT), pad_token=0, in_step=False)
    text.ids.copy_(randint(0, case.vocabulary - 1, text.ids.shape))
    text.lengths = randint(PROMPT + 1, LIMIT - 1, (rows,)).tolist()
    text.length.copy_(torch.tensor(text.lengths))
    text.continuation.copy_(randint(NONE, 2, (rows,)))
    return text, buffers, padded(rows, base + PROMPT)


def a_chain(case, count, leaves):
    """Few different tokens, so that the target agrees now and then."""
    tokens, length = randint(0, 2, (case.rows, count + 1))[:, :count], randint(0, count, (case.rows,))
    if leaves is None:
        return DraftTokens(tokens, length)
    at = randint(NONE, length[:, None] - 1, (case.rows, leaves + 1))[:, :leaves]
    return DraftTokens(tokens, length, leaves=TreeLeaves(randint(0, 2, (case.rows, leaves + 1))[:, :leaves], at))


@on_kernels(examples=15)
@given(cases("specbranch"), st.integers(0, 4), st.sampled_from([None, 0, 3]), st.integers(0, 3))
def test_kernel_with_chain_gives_what_the_target_reads(case, count, leaves, base):
    read = []

    def forward(*inputs):
        read.append(inputs)
        return Step(torch.zeros((*inputs[0].shape, case.vocabulary)))

    runner = small_runner(case.vocabulary)
    for kind in (Target, QuickTarget):
        text, buffers, seen = a_text(case, base)
        first = base - seen.sum(1)
        target = kind(buffers, runner, text, None, seen, first, CAPACITY, {}, (), SpecBranchStats())
        target._pass(a_chain(case, count, leaves), SHOWN, forward)
    for expected, got in zip(*read, strict=True):
        assert torch.equal(got, expected)


@on_kernels()
@given(
    cases("specbranch", penalty=st.sampled_from([1.0, 1.3])), st.integers(0, 4), st.sampled_from([None, 1, 4]),
    st.integers(1, 5), st.booleans(),
)  # fmt: skip
def test_kernel_verdict_is_that_of_the_judge(case, count, leaves, branches, follows):
    found = []
    for kind in (Verifier, QuickJudge):
        text, buffers, _ = a_text(case)
        draft_tokens, queries = a_chain(case, count, leaves), count + 1 + (leaves or 0)
        at = randint(NONE, draft_tokens.length[:, None], (case.rows, branches))
        following = randint(0, 2, at.shape) if follows else None
        options = Branches(randint(0, 2, at.shape), at, None, following)
        logits = torch.randn((case.rows, queries, case.vocabulary), device=DEVICE)
        logits.scatter_(2, randint(0, 2, (case.rows, queries, 1)), 9.0)
        drafted, verify_result = (
            randint(0, 9, (case.rows, 6)),
            torch.zeros((case.rows, 10 + count)).to(logits.device).long(),
        )
        before = list(text.lengths)
        penalty = [RepetitionPenaltyLogitsProcessor(case.penalty)] if case.penalty != 1 else []
        verifier = kind(buffers, text, penalty, case.vocabulary, False, None)
        where = verifier._decide(logits, draft_tokens, options, drafted, verify_result)
        if kind is Verifier:
            text.commit([VerifyResult.of(numbers) for numbers in verify_result.tolist()])
            lengths = list(text.lengths)
        written = [text.ids[b, :length] for b, length in enumerate(lengths)]
        found.append((where, verify_result, text.round_result, before, *written))
    for expected, got in zip(*found, strict=True):
        assert torch.equal(got, expected) if torch.is_tensor(got) else got == expected


def some_drawn(rows, count, vocabulary, has_branch):
    """A chain drawn from its distributions, and a main branch behind it in some rows."""
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
def test_kernel_draws_takes_drafted_tokens_or_one_from_what_is_left(seed, rows, count, leaves, vocabulary, kind):
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
def test_kernel_verdict_reports_that_nothing_can_be_drawn(case):
    text, _, _ = a_text(case)
    draft_tokens, before = a_chain(case, 2, None), list(text.lengths)
    none = torch.full((case.rows, 1), NONE, device=DEVICE)
    drafted, verify_result = (
        randint(0, 9, (case.rows, 6)),
        torch.zeros((case.rows, 12), dtype=torch.long, device=DEVICE),
    )
    limit = torch.tensor([LIMIT], device=DEVICE)
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
        text.round_result,
        limit,
        verify_result,
        where,
    )
    assert verify_result[:, 1].tolist() == [NO_TOKEN] * case.rows
    assert text.round_result[2].tolist() == [0] * case.rows  # tokens that are read must exist
    assert [int(text.ids[b, length]) for b, length in enumerate(before)] == [0] * case.rows


@on_kernels(examples=1)
@given(seeds)
def test_kernel_draws_gives_the_verdicts_of_speculative_sampling_as_often(seed):
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
def test_kernels_of_two_rounds_leave_behind_what_the_drafter_leaves(case, seed):
    if case.draws:  # one draw a step: siblings are drawn together with the line, or after it
        case = case._replace(width=1, rejection_branches=0)
    plain, quick = both(case)
    for nth in range(2):
        feedback = a_verdict(plain, seed + nth)
        for made in (plain, quick):
            made._draft(feedback, begins=made.policy.drafts_first, shown=SHOWN)
            if made.policy.drafts_ahead:
                made._branch(SHOWN)
        assert_alike(quick, plain)
        assert_same(quick.drafted(), plain.drafted())
        read = torch.arange(SHOWN, device=DEVICE) < plain.pending.fed[:, None]  # [B, slots] the line's own
        for got, expected in zip(quick.model.runner.cache.layers, plain.model.runner.cache.layers, strict=True):
            for name in ("keys", "values"):
                one, other = (getattr(layer, name)[:, :, :SHOWN].transpose(1, 2)[read] for layer in (got, expected))
                assert_same(one, other, name)


@pytest.fixture
def parts_used(monkeypatch):
    """The kinds of target, drafter and judge of each generation."""
    kinds = []
    with_drafter = Assembly.with_drafter

    def observer(self, plan, parts):
        made = with_drafter(self, plan, parts)
        kinds.append((type(made.target), type(made.drafter), type(made.verifier)))
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
    "vanilla": dict(gamma=3, tree_leaves=4),
    "pearl": dict(gamma=3),
    "autoregressive": dict(),
}


def assert_same_as_without(model, plain, draft, kwargs, plan, monkeypatch):
    """Tokens as plain `generate()` gives them, counts as stages give them that ask the device."""
    out, stats = generate(model, draft, kwargs, config(**plan), monkeypatch)
    expected = model.generate(**kwargs, assistant_model=draft, specbranch=config(**plan, runtime="eager"))
    assert torch.equal(out, expected) and torch.equal(out, plain.generate(**kwargs))
    assert_counts_add_up(stats)
    for name in COUNTS:
        assert getattr(stats, name) == getattr(model.specbranch_stats, name), name


@where_kernels_run
@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", PLANS)
def test_generations_are_those_of_plain_generate_and_of_stages_that_ask(policy, rows, target, parts_used, monkeypatch):
    plain, draft, kwargs = pair_and_prompt(target, rows)
    assert_same_as_without(attached(plain), plain, draft, kwargs, {"policy": policy, **PLANS[policy]}, monkeypatch)
    drafts = NoDrafter if policy == "autoregressive" else QuickDrafter
    assert parts_used[0] == (QuickTarget, drafts, QuickJudge)


@where_kernels_run
@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", ["vanilla", "specbranch"])
def test_generations_end_where_plain_generate_ends(policy, rows, target, monkeypatch):
    """Also in the middle of what a verdict allows, and one row before the other."""
    plain, draft, kwargs = pair_and_prompt(target, rows)
    text = plain.generate(**kwargs)[0, kwargs["input_ids"].shape[1] :].tolist()
    for last in text[6:8]:
        kwargs["eos_token_id"] = [EOS, last]
        assert_same_as_without(attached(plain), plain, draft, kwargs, {"policy": policy, **PLANS[policy]}, monkeypatch)


@where_kernels_run
@pytest.mark.parametrize(("policy", "most"), [("autoregressive", 1), ("vanilla", 5)])
def test_a_round_begun_behind_the_end_counts_nowhere(policy, most, target, monkeypatch):
    """Wherever the text ends, and however much more of it was allowed."""
    plain, draft, kwargs = pair_and_prompt(target, rows=1)
    text = plain.generate(**kwargs)[0, kwargs["input_ids"].shape[1] :].tolist()
    assert text[4] not in text[:4]
    for further in range(most + 2):
        kwargs |= {"eos_token_id": [EOS, text[4]], "max_new_tokens": 5 + further}
        assert_same_as_without(attached(plain), plain, draft, kwargs, {"policy": policy, **PLANS[policy]}, monkeypatch)


@where_kernels_run
@pytest.mark.parametrize("policy", ["vanilla", pytest.param("specbranch", marks=pytest.mark.slow)])
def test_generations_with_processors_take_the_kernels(policy, target, parts_used, monkeypatch):
    plain, draft, kwargs = pair_and_prompt(target, rows=1, repetition_penalty=1.3)
    assert_same_as_without(attached(plain), plain, draft, kwargs, {"policy": policy, **PLANS[policy]}, monkeypatch)
    assert parts_used[0] == (QuickTarget, QuickDrafter, QuickJudge)


@where_kernels_run
@pytest.mark.slow
def test_drawn_texts_take_the_kernels_and_are_repeatable(target, parts_used, monkeypatch):
    plain, draft, kwargs = pair_and_prompt(target, rows=1, do_sample=True, temperature=1.2, max_new_tokens=8)
    plan = config(**PLANS["specbranch"], draft_sampling="sample")
    texts = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        texts.append(generate(attached(plain), draft, kwargs, plan, monkeypatch)[0])
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    assert parts_used[0] == (QuickTarget, QuickDrafter, QuickJudge)


class RehearsingDesk(Buffers):
    """Rehearses every stage each time, if the stage says that it can be."""

    in_parallel, met = 0, set()

    def run(self, key, stage, only_our_kernels=False):
        if only_our_kernels:
            with recorded_dry_run() as dry_run:
                stage()
            type(self).in_parallel += 1
            type(self).met.update(dry_run.kernels)
        stage()


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU stages are rehearsed in test_gpu.py")
@pytest.mark.parametrize("policy", PLANS)
def test_a_rehearsal_leaves_no_trace(policy, target, monkeypatch):
    plain, draft, kwargs = pair_and_prompt(target, rows=1)
    forward, inside = EagerRunner.forward_uncaptured, []

    def by_kernels_alone(self, tokens, *inputs, **extra):
        """In a rehearsal a pass in kernels writes nothing and returns what was in memory."""
        if not is_dry_run():
            return forward(self, tokens, *inputs, **extra)
        assert 0 <= tokens.min() and tokens.max() < self.model.config.vocab_size
        inside.append(self)
        return Step(torch.randn((*tokens.shape, self.model.config.vocab_size)))

    monkeypatch.setattr(EagerRunner, "forward_uncaptured", by_kernels_alone)
    plan = config(policy, **PLANS[policy])
    out, _ = generate(attached(plain), draft, kwargs, plan, monkeypatch, RehearsingDesk)
    assert torch.equal(out, plain.generate(**kwargs)) and inside
    assert RehearsingDesk.in_parallel > 10 and len(RehearsingDesk.met) >= 2


@where_kernels_run
def test_without_kernels_the_bookkeeping_is_done_in_torch(target, parts_used, monkeypatch):
    plain, draft, kwargs = pair_and_prompt(target, rows=1)
    out, _ = generate(attached(plain), draft, kwargs, config(kernels=False), monkeypatch)
    assert torch.equal(out, plain.generate(**kwargs)) and parts_used == [(Target, Drafter, Verifier)]


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
def test_kernels_know_our_own_rules_beside_hooks_that_cut_lines(hooks):
    assert is_plain(POLICIES["specbranch"], 4, HookList(hooks))


@pytest.mark.parametrize("hook", [Stops(), Forks(), SureStop(0.2), ConfidenceStop(0.2)], ids=names)
def test_kernels_leave_hooks_that_stop_or_fork_to_torch(hook):
    assert not is_plain(POLICIES["specbranch"], 4, HookList([hook, *OURS]))


def test_kernels_leave_branches_of_one_token_to_torch():
    assert not is_plain(POLICIES["pearl"], 1, HookList(OURS))
    assert is_plain(POLICIES["pearl"], 2, HookList(OURS)) and is_plain(POLICIES["vanilla"], 1, HookList(OURS))


TYPES = {
    int: "i32", float: "fp32", torch.int64: "*i64", torch.bool: "*i1", torch.float32: "*fp32", torch.bfloat16: "*bf16",
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
        assert [*types, *constants] == wanted
        baked = {(wanted.index(name),): value for name, value in constants.items()}
        source = ASTSource(self.kernel, {**types, **dict.fromkeys(constants, "constexpr")}, baked)
        compiled = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
        assert compiled.asm["cubin"]
        self.built.add(self.kernel.__name__)


class Deaf(QuickDrafter):
    """A drafter that runs no model."""

    def _forward(self, inputs):
        shape = (*inputs.tokens.shape, self.model.own_vocabulary)
        return torch.zeros(shape, dtype=torch.bfloat16, device=self.device)


def build_the_drafters(case):
    made = drafter(Deaf, case, torch.bfloat16)
    acceptance = a_verdict(made, seed=0)
    for moved in (False, True) if made.side_branches.most else (False,):
        made._draft(acceptance._replace(moved=moved), begins=True, shown=SHOWN)
    if made.policy.drafts_ahead:
        made._branch(SHOWN)
    made.drafted()


def build_the_targets(case, leaves):
    text, buffers, seen = a_text(case)
    draft_tokens, count, runner = a_chain(case, 3, leaves), 4 + (leaves or 0), small_runner(case.vocabulary)
    target = QuickTarget(buffers, runner, text, None, seen, -seen.sum(1), CAPACITY, {}, (), SpecBranchStats())
    logits = torch.zeros((case.rows, count, case.vocabulary), device=DEVICE)
    target._pass(draft_tokens, SHOWN, lambda *inputs: Step(logits))
    verifier = QuickJudge(buffers, text, [], case.vocabulary, False, None)
    rounds.drawn_choices(logits, torch.zeros((case.rows, count, case.vocabulary + 1)), None)
    for has_branch in (False, True):
        drawn = some_drawn(case.rows, 3, case.vocabulary, has_branch)
        rounds.drawn_choices(logits, torch.zeros((case.rows, count, case.vocabulary + 1)), drawn)
    options, drafted, verify_result = (torch.zeros((case.rows, n), dtype=torch.long, device=DEVICE) for n in (4, 6, 13))
    for following in (None, options):
        verifier._decide(logits, draft_tokens, Branches(options, options, None, following), drafted, verify_result)


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
    build_the_drafters(case._replace(policy="vanilla", gamma=1))
    build_the_targets(case, leaves=None)
    build_the_targets(case, leaves=3)
    assert built == every


@pytest.mark.skipif(INTERPRETED, reason="kernels are no kernels under the interpreter")
def test_what_is_built_aside_is_what_the_first_rounds_launch():
    pytest.importorskip("triton")
    with recorded_dry_run() as aside:
        _kernels_of_every_model(torch.device(DEVICE))
    case = Case(
        seed=0, rows=1, gamma=3, vocabulary=40, own=0, policy="vanilla", width=4, rejection_branches=0, leaves=0,
        epsilon=0.4, cuts=False, penalty=1.0, draws=False,
    )  # fmt: skip
    text, buffers, seen = a_text(case)
    verifier = QuickJudge(buffers, text, [], case.vocabulary, False, None)
    draft_tokens, branches = verifier.nothing
    target = QuickTarget(
        buffers, small_runner(case.vocabulary), text, None, seen, -seen.sum(1), SMALLEST, {}, (), SpecBranchStats()
    )
    logits = torch.zeros((1, 1, case.vocabulary), device=DEVICE)
    drafted, verify_result = (torch.zeros((1, n), dtype=torch.long, device=DEVICE) for n in (6, 10))
    with recorded_dry_run() as rounds_begin:
        target._pass(draft_tokens, SMALLEST, lambda *_: Step(logits))
        verifier._decide(logits, draft_tokens, branches, drafted, verify_result)
    built, needed = aside.specializations, rounds_begin.specializations
    assert len(built) == 4 and len(needed) == 2 and needed <= built


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this test starts the interpreter")
def test_kernels_of_a_round_under_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    assert ran.stdout.startswith("....................")
