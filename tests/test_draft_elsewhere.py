"""A draft on another GPU than the target's: captured stages, and copies between them.

One device stands in for two: what passes between the models is copied as if they were apart.
"""

import copy

import pytest
import torch

from hf_specbranch import specbranch
from hf_specbranch.decoding import sources
from hf_specbranch.decoding.draft_elsewhere import DraftElsewhere
from hf_specbranch.decoding.lookup import PassTimes

from .cpu_graphs import CpuGraphs
from .graphs import run_graphs_on_cpu
from .models import POLICIES, assert_counts_add_up, attached, config, prompt, slowly
from .sampling import SMALLEST_P, draw, exact_distribution, p_value, sampling_pair
from .sources import draft_is_worth, repetitive_pair
from .test_running_batch import Answers, some_prompts
from .test_static_stages import COUNTS


@pytest.fixture
def apart(monkeypatch):
    """Let drafts be on another device; returns the sources that were made for that."""
    made, init = [], DraftElsewhere.__init__

    def noted(self, *args):
        made.append(self)
        init(self, *args)

    monkeypatch.setattr(DraftElsewhere, "__init__", noted)
    monkeypatch.setattr(sources, "is_elsewhere", lambda drafter, here: True)
    return made


class Compared:
    """A target and draft apart, and the same together; the texts of both must be those of plain generate."""

    def __init__(self, target, draft, monkeypatch, device="cpu"):
        self.plain, self.monkeypatch, self.device = copy.deepcopy(target).to(device), monkeypatch, device
        models = [[copy.deepcopy(model).to(device) for model in (target, draft)] for _ in range(2)]
        self.pairs = [(specbranch(target), draft) for target, draft in models]

    def __call__(self, inputs, new_tokens=24, **settings):
        inputs = {name: each.to(self.device) for name, each in inputs.items()}
        found, kwargs = [], {**inputs, "max_new_tokens": new_tokens, "do_sample": False}
        expected = self.plain.generate(**kwargs)
        for is_apart, (model, draft) in zip((True, False), self.pairs):
            self.monkeypatch.setattr(sources, "is_elsewhere", lambda drafter, here, is_apart=is_apart: is_apart)
            assert torch.equal(model.generate(**kwargs, assistant_model=draft, specbranch=config(**settings)), expected)
            stats = model.specbranch_stats
            assert not stats.slowed_by
            assert_counts_add_up(stats)
            found.append(stats)
        for name in COUNTS:
            assert getattr(found[0], name) == getattr(found[1], name), name
        return found[0]


@pytest.mark.usefixtures("static_stages")
@pytest.mark.parametrize("rows", [slowly(1), 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_texts_and_counts_are_those_of_one_device(policy, rows, target, draft, apart, monkeypatch):
    compared = Compared(target, draft, monkeypatch)
    for epsilon, rejection_branches, tree_leaves in ((0.4, 0, 0), (0.0, 5, 4)):
        widths = {"max_rejection_branches": rejection_branches, "tree_leaves": tree_leaves}
        compared(prompt(rows), 16, policy=policy, epsilon=epsilon, **widths)
    assert bool(apart) == (policy != "autoregressive")


@pytest.mark.parametrize("policy", ["vanilla", slowly("specbranch")])
def test_captured_stages(policy, target, draft, apart, monkeypatch):
    """Operations are recorded, and replayed without Python code: addresses must be the same in every round."""
    run_graphs_on_cpu(monkeypatch, CpuGraphs)
    compared = Compared(target, draft, monkeypatch)
    for seed, tree_leaves in ((0, 0), (1, 3), (0, 0)):
        stats = compared(prompt(seed=seed), 16, policy=policy, kernels=False, tree_leaves=tree_leaves)
    assert apart and not stats.graphs_captured


def test_lookup_beside_the_draft(apart, monkeypatch):
    run_graphs_on_cpu(monkeypatch, CpuGraphs)
    draft_is_worth(1.0, monkeypatch)
    monkeypatch.setattr(PassTimes, "seconds", lambda self, count: 1.0)
    compared = Compared(*repetitive_pair(), monkeypatch)
    for seed in range(2):
        inputs = prompt(length=12, vocabulary=12, seed=seed)
        stats = compared(inputs, 40, policy="vanilla", kernels=False, prompt_lookup_num_tokens=4)
    assert apart and len(stats.sources) == 2 and all(counts["rounds"] for counts in stats.sources.values()), stats


@pytest.mark.usefixtures("static_stages")
@pytest.mark.parametrize("drafting", [slowly("greedy"), "sample"])
def test_samples_follow_the_target(drafting, apart):
    expected = exact_distribution(sampling_pair()[0])
    settings = config("specbranch", gamma=2, k=3, epsilon=0.5, draft_sampling=drafting)
    assert p_value(draw(settings, samples=8000), expected) > SMALLEST_P
    assert apart


@pytest.mark.usefixtures("static_stages")
def test_plans_may_change(target, draft, apart):
    model = attached(target)
    for seed in range(3):
        inputs = prompt(1, seed=seed)
        expected = target.generate(**inputs, max_new_tokens=60, do_sample=False)
        out = model.generate(**inputs, max_new_tokens=60, do_sample=False, assistant_model=draft)
        assert torch.equal(out, expected)
    assert apart


def test_rows_of_a_running_batch_take_other_texts(target, draft, apart, graph_runners):
    answers = Answers(target, draft, rows=2)
    with answers.engine:
        answers.compare(some_prompts(5))
    assert apart


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_gpu_that_stands_in_for_two(policy, rows, target, draft, apart, monkeypatch):
    compared = Compared(target, draft, monkeypatch, "cuda:0")
    for seed in range(3):
        for kernels in (True, False):
            stats = compared(prompt(rows, seed=seed), 40, policy=policy, kernels=kernels, tree_leaves=3)
    assert stats.runtime == "graph" and not stats.graphs_captured


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("policy", POLICIES)
def test_two_gpus(policy, target, draft):
    model, draft = specbranch(copy.deepcopy(target).to("cuda:0")), copy.deepcopy(draft).to("cuda:1")
    for seed in range(3):
        inputs = {name: each.to("cuda:0") for name, each in prompt(2, seed=seed).items()}
        expected = model.generate(**inputs, max_new_tokens=40, do_sample=False, specbranch=False)
        settings = config(policy, tree_leaves=3)
        out = model.generate(**inputs, max_new_tokens=40, do_sample=False, assistant_model=draft, specbranch=settings)
        assert torch.equal(out, expected) and not model.specbranch_stats.slowed_by
