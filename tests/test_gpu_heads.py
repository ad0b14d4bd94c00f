"""On a GPU: heads of the target draft the same tokens in captured stages, and keep the text."""

import copy

import pytest
import torch

from hf_specbranch import SpecBranchConfig, specbranch

from .models import assert_counts_add_up, prompt
from .target_heads import target_and_block_draft, target_and_eagle3, target_and_mtp

pytestmark = pytest.mark.gpu
PAIRS = [target_and_eagle3, target_and_mtp, target_and_block_draft]


def both_on_gpu(pair):
    """The target and its head, copied together: they share weights."""
    target, head = copy.deepcopy(pair())
    target.to("cuda")
    head.to("cuda")
    return target, head


@pytest.mark.parametrize("leaves", [0, 4])
@pytest.mark.parametrize("settings", [{"runtime": "eager"}, {"kernels": False}, {"kernels": True}], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=["EAGLE-3", "MTP", "DFlash"])
def test_greedy_text_is_that_of_plain_generate(pair, settings, leaves):
    target, head = both_on_gpu(pair)
    model, accepted = specbranch(copy.deepcopy(target)), 0
    config = SpecBranchConfig(
        policy="vanilla", max_draft_length=3, confidence_threshold=0.0, tree_leaves=leaves, **settings
    )
    for rows, length in ((1, 12), (3, 17), (1, 40)):
        inputs = {name: value.to("cuda") for name, value in prompt(rows, length, vocabulary=12).items()}
        asked = {**inputs, "max_new_tokens": 40, "do_sample": False}
        out = model.generate(**asked, assistant_model=head, specbranch=config)
        assert torch.equal(out, target.generate(**asked))
        assert_counts_add_up(model.specbranch_stats)
        assert not model.specbranch_stats.slowed_by
        accepted += model.specbranch_stats.num_accepted_tokens
    assert accepted > 10


@pytest.mark.parametrize("pair", PAIRS, ids=["EAGLE-3", "MTP", "DFlash"])
def test_half_precision_runs_captured(pair):
    target, head = both_on_gpu(pair)
    model = specbranch(target.to(torch.bfloat16))
    inputs = {name: value.to("cuda") for name, value in prompt(2, 12, vocabulary=12).items()}
    asked = {**inputs, "max_new_tokens": 40, "do_sample": False, "assistant_model": head.to(torch.bfloat16)}
    model.generate(**asked, specbranch={"policy": "vanilla"})
    assert model.specbranch_stats.runtime == "graph" and not model.specbranch_stats.slowed_by
    assert model.specbranch_stats.num_accepted_tokens > 5


@pytest.mark.parametrize("pair", PAIRS, ids=["EAGLE-3", "MTP", "DFlash"])
def test_captured_stages_accept_as_much_as_a_cpu(pair):
    """Stale or misplaced states would show in the acceptance."""
    counts = []
    for on_gpu in (False, True):
        target, head = both_on_gpu(pair) if on_gpu else pair()
        model = specbranch(copy.deepcopy(target))
        inputs = {name: value.to(target.device) for name, value in prompt(1, 12, vocabulary=12).items()}
        config = SpecBranchConfig(policy="vanilla", max_draft_length=3, confidence_threshold=0.0)
        model.generate(**inputs, max_new_tokens=40, do_sample=False, assistant_model=head, specbranch=config)
        counts.append(model.specbranch_stats.num_accepted_tokens)
    assert abs(counts[0] - counts[1]) <= 3
