"""On a GPU: drafts with another tokenizer and candidate generators, in captured stages."""

import copy

import pytest
import torch

from hf_specbranch import specbranch

from .models import assert_counts_add_up, prompt
from .sampling import SMALLEST_P, exact_distribution, p_value, sampling_pair
from .sources import draw_with, repetitive_pair
from .test_candidates import BigramCandidates
from .two_tokenizers import pair, prompts, with_other_letters

pytestmark = pytest.mark.gpu


def to_gpu(inputs):
    return {name: tensor.to("cuda") for name, tensor in inputs.items()}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("policy", ["auto", "pearl", "specbranch"])
def test_greedy_text_with_another_tokenizer(policy, rows):
    target, draft, ours, theirs = pair()
    plain, draft = target.to("cuda"), draft.to("cuda")
    model, captured = specbranch(copy.deepcopy(plain), draft), []
    asked = {**to_gpu(prompts(rows)), "max_new_tokens": 24, "do_sample": False}
    for _ in range(3):
        out = model.generate(**asked, tokenizer=ours, assistant_tokenizer=theirs, specbranch={"policy": policy})
        assert torch.equal(out, plain.generate(**asked))
        assert_counts_add_up(model.specbranch_stats)
        captured.append(model.specbranch_stats.graphs_captured)
    stats = model.specbranch_stats
    assert not stats.slowed_by and stats.num_accepted_tokens > stats.new_tokens / 4
    assert captured[0] > 0 and captured[2] == 0


@pytest.mark.parametrize("draws", [False, True])
def test_candidate_generators(draws):
    target, draft = repetitive_pair()
    generator, plain = BigramCandidates(draft, draws), target.to("cuda")
    model, asked = specbranch(copy.deepcopy(plain)), {**to_gpu(prompt(3, length=12, vocabulary=12)), "do_sample": False}
    for count in (20, 40):
        out = model.generate(**asked, max_new_tokens=count, assistant_model=generator)
        assert torch.equal(out, plain.generate(**asked, max_new_tokens=count))
    assert not model.specbranch_stats.slowed_by and model.specbranch_stats.num_accepted_tokens > 0


@pytest.mark.parametrize("source", ["shared", "re-encoded", "candidates"])
def test_sampled_text_has_the_targets_distribution(source):
    model, draft = sampling_pair()
    expected = exact_distribution(model)
    arguments = {"assistant_model": BigramCandidates(draft, draws=True)}
    if source != "candidates":
        sampling = "sample" if source == "shared" else "greedy"
        arguments = {**with_other_letters(draft), "specbranch": {"policy": "vanilla", "draft_sampling": sampling}}
        arguments["assistant_model"] = copy.deepcopy(arguments["assistant_model"]).to("cuda")
    model = specbranch(copy.deepcopy(model).to("cuda"))
    assert p_value(draw_with(model, arguments, samples=3_000), expected) > SMALLEST_P
