"""Stages with static shapes, as CUDA graphs capture them, run eagerly: the same tokens and counts as without."""

import pytest
import torch
from transformers import LogitsProcessor

from hf_specbranch import SpeculationHook, load_demo_pair
from hf_specbranch.bench import python_prompts
from hf_specbranch.decoding import call_costs
from hf_specbranch.decoding.draft_model import DraftModel
from hf_specbranch.decoding.scoring import has_static_form
from hf_specbranch.planning.costs import StepCosts
from hf_specbranch.runtime.eager import EagerRunner
from hf_specbranch.runtime.mask_probe import mask_maker_for
from hf_specbranch.runtime.overlap import Overlap
from hf_specbranch.runtime.static_buffers import Buffers, HostCopies
from hf_specbranch.stats import SpecBranchStats

from .models import EOS, assert_counts_add_up, attached, config, prompt, slowly
from .sampling import SMALLEST_P, draw, exact_distribution, p_value, sampling_pair

pytestmark = pytest.mark.usefixtures("static_stages")


def both(model, draft, monkeypatch, **kwargs):
    """Return the outputs and statistics with static shapes and without."""
    static_shapes = model.generate(**kwargs, assistant_model=draft), model.specbranch_stats
    assert not model.specbranch_stats.slowed_by
    with monkeypatch.context() as patch:
        patch.setattr(EagerRunner, "captures", False)
        return static_shapes, (model.generate(**kwargs, assistant_model=draft), model.specbranch_stats)


COUNTS = (
    "new_tokens", "target_forwards", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "rollback_tokens",
    "wasted_branch_tokens", "branch_points", "branch_hits", "rejection_points", "rejection_hits",
    "acceptance_histogram", "tree_leaves", "tree_leaf_hits",
)  # fmt: skip


@pytest.mark.parametrize("rows", [slowly(1), 3])
@pytest.mark.parametrize("policy", [*map(slowly, ("autoregressive", "pearl")), "vanilla", "specbranch"])
@pytest.mark.parametrize(
    ("gamma", "epsilon", "rejection_branches", "tree_leaves"), [(4, 0.4, 0, 0), (3, 0.0, 5, 4), slowly(1, 0.9, 2, 1)]
)
def test_tokens_and_counts_equal_dynamic_shapes(
    gamma, epsilon, rejection_branches, tree_leaves, policy, rows, target, draft, monkeypatch
):
    model = attached(target)
    kwargs = {**prompt(rows), "max_new_tokens": 16, "do_sample": False}
    settings = config(
        policy, gamma=gamma, epsilon=epsilon, max_rejection_branches=rejection_branches, tree_leaves=tree_leaves
    )
    (out, stats), (expected, counts) = both(model, draft, monkeypatch, **kwargs, specbranch=settings)
    assert torch.equal(out, expected) and torch.equal(out, target.generate(**kwargs))
    assert_counts_add_up(stats)
    if policy == "vanilla" and epsilon > 0:  # the token at which a draft stops is sent too
        assert stats.target_forwards < counts.target_forwards + (rows == 1)  # in one text it may not matter
        return
    for name in COUNTS:
        assert getattr(stats, name) == getattr(counts, name), name


@pytest.mark.parametrize("rows", [slowly(1), 3])
def test_a_draft_that_stops_takes_no_further_steps(rows, target, draft, monkeypatch):
    """Everything else is as if all steps ran."""
    model, asked = attached(target), {**prompt(rows), "max_new_tokens": 30, "do_sample": False}
    found = []
    for stepwise_from in (0.15, 0.2):
        monkeypatch.setattr("hf_specbranch.config.STEPWISE", stepwise_from)
        settings = config("vanilla", gamma=6, epsilon=0.15, tree_leaves=3)
        out = model.generate(**asked, assistant_model=draft, specbranch=settings)
        assert torch.equal(out, target.generate(**asked))
        found.append(model.specbranch_stats)
    stepwise, whole = found
    for name in COUNTS:
        assert getattr(stepwise, name) == getattr(whole, name), name
    rounds = whole.target_forwards - 1
    assert whole.draft_forwards == 1 + 6 * rounds and rounds < stepwise.draft_forwards - 1 < 6 * rounds


@pytest.mark.parametrize("rows", [1, 3])
def test_a_draft_stops_where_a_step_costs_more_than_it_saves(rows, target, draft, monkeypatch):
    """The cheaper a step, the longer the drafts; what is generated stays the same."""
    model, asked = attached(target), {**prompt(rows), "max_new_tokens": 24, "do_sample": False}
    expected, drafted = target.generate(**asked), []
    for step in (0.0, 0.1, 100.0):
        monkeypatch.setattr(call_costs, "predicted_costs", lambda *_, step=step: StepCosts(1.0, draft_step=step))
        settings = config("vanilla", gamma=6, epsilon="cost", tree_leaves=3)
        out = model.generate(**asked, assistant_model=draft, specbranch=settings)
        stats = model.specbranch_stats
        assert torch.equal(out, expected) and not stats.slowed_by
        assert_counts_add_up(stats)
        drafted.append((stats.draft_forwards - 1) / (stats.target_forwards - 1))
    assert 4.5 < drafted[0] <= 6 and drafted[0] > drafted[1] > drafted[2] == 1  # the last drafts have less room


@pytest.mark.parametrize("length", [32, 33, 70])
def test_prefill_equals_ordinary_prefill(length, draft):
    """Keys and values equal those of the model's own pass over the whole text."""
    tokens = prompt(length=length)["input_ids"]
    caches = []
    for static_shapes in (True, False):
        runner = EagerRunner(draft, mask_maker_for(draft, "draft"))
        buffers = Buffers(draft.device, static_shapes=static_shapes)
        everything = torch.ones_like(tokens, dtype=torch.bool)
        model = DraftModel(buffers, runner, everything, draft.config.vocab_size, [], 256, SpecBranchStats())
        with torch.no_grad():
            model.prefill(tokens)
        caches.append(torch.stack([torch.stack([layer.keys, layer.values]) for layer in runner.cache.layers]))
    torch.testing.assert_close(caches[0][..., :length, :], caches[1][..., :length, :], atol=1e-5, rtol=1e-5)
    assert caches[0][..., length - 1, :].abs().sum() > 0


def test_discarded_round_is_not_counted():
    stats, device = SpecBranchStats(), torch.device("cpu")
    with Overlap(device, device, stats, enabled=False) as overlap:
        for round in (1, 2):
            with overlap.working("draft"):
                stats.draft_forwards, stats.draft_positions = 3 * round, 4 * round
            with overlap.working("verify"):
                stats.target_forwards, stats.target_positions, stats.row_passes = round, 5 * round, round
            with overlap.working("branch"):
                pass
        overlap.discard_round()
        work = overlap.take()
    assert (stats.target_forwards, stats.target_positions, stats.row_passes) == (1, 5, 1)
    assert (stats.draft_forwards, stats.draft_positions) == (3, 4)
    assert (work["draft"].forwards, work["verify"].positions) == (3, 5)


def test_host_copies_arrive_in_order_unchanged():
    host_copies, numbers = HostCopies(torch.device("cpu")), torch.tensor([[1, 2]])
    for _ in range(3):
        host_copies.send(numbers)
        numbers += 2
    assert host_copies.read() == [[1, 2]]
    host_copies.skip()
    assert host_copies.read() == [[5, 6]]


def test_rejection_branches_save_draft_forwards(target, draft):
    """The tokens are the same, and fewer rounds start by drafting."""
    model, kwargs = attached(target), {**prompt(), "max_new_tokens": 60, "do_sample": False}
    forwards = []
    for rejection_branches in (0, 8):
        settings = config(gamma=4, epsilon=0.0, max_rejection_branches=rejection_branches)
        out = model.generate(**kwargs, assistant_model=draft, specbranch=settings)
        assert torch.equal(out, target.generate(**kwargs))
        assert (model.specbranch_stats.rejection_hits > 0) == (rejection_branches > 0)
        forwards.append(model.specbranch_stats.draft_forwards)
    assert forwards[1] < forwards[0]


@pytest.mark.parametrize("rejection_branches", [slowly(0), 6])
def test_tree_leaves_save_target_passes(rejection_branches, target, draft):
    """The tokens are the same, in fewer target passes."""
    model, kwargs = attached(target), {**prompt(), "max_new_tokens": 60, "do_sample": False}
    passes = []
    for tree_leaves in (0, 6):
        settings = config(gamma=4, epsilon=0.0, max_rejection_branches=rejection_branches, tree_leaves=tree_leaves)
        out = model.generate(**kwargs, assistant_model=draft, specbranch=settings)
        assert torch.equal(out, target.generate(**kwargs))
        assert (model.specbranch_stats.tree_leaf_hits > 0) == (tree_leaves > 0)
        passes.append(model.specbranch_stats.target_forwards)
    assert passes[1] < passes[0]


def test_finished_rows_leave_the_others_unchanged(target, draft, monkeypatch):
    model = attached(target)
    kwargs = {**prompt(4), "max_new_tokens": 24, "do_sample": False, "eos_token_id": [EOS, *range(10, 18)]}
    (out, stats), (expected, _) = both(
        model, draft, monkeypatch, **kwargs, specbranch=config(gamma=4, max_rejection_branches=6)
    )
    assert torch.equal(out, expected) and torch.equal(out, target.generate(**kwargs))
    assert_counts_add_up(stats)


@pytest.mark.parametrize("extra", [slowly({"min_new_tokens": 20}), {"min_length": 25}, {"repetition_penalty": 1.3}])
def test_processors_run_inside_the_stage(extra, target, draft, monkeypatch):
    model = attached(target)
    kwargs = {**prompt(2), "max_new_tokens": 28, "do_sample": False, "eos_token_id": [EOS, *range(10, 30)], **extra}
    (out, _), (expected, _) = both(model, draft, monkeypatch, **kwargs, specbranch=config(gamma=3))
    assert torch.equal(out, expected) and torch.equal(out, target.generate(**kwargs))


def test_length_head_runs_inside_the_stage(monkeypatch):
    target, draft, tokenizer, head = load_demo_pair(draft="weak", head=True)
    model = attached(target)
    inputs = tokenizer(python_prompts()[3].prompt, return_tensors="pt")
    kwargs = {**inputs, "max_new_tokens": 16, "do_sample": False, "length_head": head}
    (out, stats), (expected, counts) = both(
        model, draft, monkeypatch, **kwargs, specbranch={"policy": "specbranch", "max_draft_length": 8}
    )
    assert torch.equal(out, expected)
    for name in COUNTS:
        assert getattr(stats, name) == getattr(counts, name), name


@pytest.mark.parametrize("drafting", [pytest.param("greedy", marks=pytest.mark.slow), "sample"])
@pytest.mark.parametrize(
    ("policy", "epsilon"),
    [slowly("vanilla", 0.2), slowly("pearl", 0.2), ("vanilla", "cost"), ("specbranch", 0.2)],
)
def test_samples_follow_the_targets_distribution(policy, epsilon, drafting):
    model, _ = sampling_pair()
    more = {"draft_sampling": drafting, "max_rejection_branches": 3, "tree_leaves": 3}
    settings = config(policy, gamma=2, k=3, epsilon=epsilon, **more)
    assert p_value(draw(settings, samples=6_000), exact_distribution(model)) > SMALLEST_P


@pytest.mark.parametrize(
    ("rows", "settings"), [(2, {}), (1, {"policy": "vanilla", "confidence_threshold": "cost"})], ids=["auto", "cost"]
)
def test_sampling_is_repeatable(rows, settings, target, draft, monkeypatch):
    """Whatever was measured or is still in memory."""
    monkeypatch.setattr(call_costs, "predicted_costs", lambda *_: StepCosts(1.0, draft_step=0.2))
    model = attached(target)
    kwargs = {**prompt(rows), "max_new_tokens": 30, "do_sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.9}
    texts = []
    for _ in range(3):
        torch.manual_seed(7)
        texts.append(model.generate(**kwargs, assistant_model=draft, specbranch=settings))
        assert not model.specbranch_stats.slowed_by
    assert torch.equal(*texts[:2]) and torch.equal(*texts[1:])


class HostProcessor(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


class HostHook(SpeculationHook):
    def stop(self, state):
        return state.confidence < 0.2


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        slowly({"logits_processor": [HostProcessor()]}, "HostProcessor runs on the host"),
        ({"no_repeat_ngram_size": 3}, "NoRepeatNGramLogitsProcessor runs on the host"),
        ({"speculation_hooks": [HostHook()]}, "the hook HostHook runs on the host"),
        ({"return_dict_in_generate": True, "output_scores": True}, "are returned"),
    ],
)
def test_slowed_by_names_the_reason(extra, reason, target, draft):
    model = attached(target)
    kwargs = {**prompt(), "max_new_tokens": 20, "do_sample": False}
    out = model.generate(**kwargs, **extra, assistant_model=draft)
    assert reason in model.specbranch_stats.slowed_by
    sequences = out if torch.is_tensor(out) else out.sequences
    plain = {name: value for name, value in extra.items() if name != "speculation_hooks"}
    expected = target.generate(**kwargs, **plain)
    assert torch.equal(sequences, expected if torch.is_tensor(expected) else expected.sequences)


def test_penalty_that_ignores_the_prompt_has_no_static_form():
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    assert has_static_form(RepetitionPenaltyLogitsProcessor(1.2))
    assert not has_static_form(RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=3))
