"""Padded batches are read as plain generate() reads them, or left to transformers."""

import copy

import pytest
import torch
from transformers import GitConfig, GitForCausalLM, LlamaForCausalLM

from hf_specbranch import padding_check
from hf_specbranch.families.tiny import language_models

from .families import make
from .models import VOCABULARY, attached, config, llama, noisy_copy, prompt
from .releases import GIT_IS_REFUSED


def same_as_plain(target, rows=3):
    draft, model = noisy_copy(target, noise=0.05, seed=1), attached(target)
    for policy in ("autoregressive", "vanilla", "specbranch"):
        arguments = dict(**prompt(rows, length=8), max_new_tokens=16, do_sample=False)
        got = model.generate(**arguments, assistant_model=draft, specbranch=config(policy, tree_leaves=2))
        assert torch.equal(got, target.generate(**arguments)), policy
    return model


@pytest.mark.compat
def test_a_decoder_that_counts_padding():
    """Whisper's decoder is given no positions by plain generate(), so that its padding counts."""
    whisper = next(family for family in language_models() if family.name == "whisper")
    assert same_as_plain(whisper.build()).specbranch_stats is not None


class CountsPadding(LlamaForCausalLM):
    """Prepares its inputs without positions."""

    def prepare_inputs_for_generation(self, *args, **kwargs):
        return {**super().prepare_inputs_for_generation(*args, **kwargs), "position_ids": None}


@pytest.mark.compat
def test_a_model_that_drops_positions():
    target = llama(seed=0)
    target.__class__ = CountsPadding
    assert same_as_plain(target).specbranch_stats is not None


@pytest.mark.parametrize("stages", ["eager", "static"])
def test_a_window_counts_hidden_tokens_after_the_first(stages, request):
    """They shift positions, and the tokens before them must not be seen for longer."""
    if stages == "static":
        request.getfixturevalue("static_stages")
    target = make("mistral-sliding")
    ids = prompt(rows=4, length=5)["input_ids"].clamp(min=3)
    mask = torch.tensor([[1, 1, 0, 1, 1], [1, 0, 0, 0, 1], [0, 1, 0, 1, 1], [1, 1, 1, 1, 0]])
    arguments = dict(input_ids=ids, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=None)
    out = attached(target).generate(**arguments)
    assert torch.equal(out, target.generate(**arguments))


@pytest.mark.skipif(GIT_IS_REFUSED, reason="this release takes no explicit mask")
def test_padding_read_in_a_way_of_its_own_is_left_to_transformers(caplog):
    """GIT widens the mask of padded batches by as many columns as an image would have."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    vision = dict(**sizes, image_size=8, patch_size=4)
    tokens = dict(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    target = GitForCausalLM(GitConfig(vision_config=vision, **sizes, **tokens, max_position_embeddings=64)).eval()
    for parameter in target.parameters():
        parameter.data.mul_(4.0)
    assert same_as_plain(target, rows=1).specbranch_stats is not None
    assert same_as_plain(target).specbranch_stats is None
    assert sum("reads padded batches in a way of its own" in record.message for record in caplog.records) == 1


@pytest.fixture
def checks(monkeypatch, tmp_path):
    """The models whose padded batches were compared with those of plain `generate()`; results are kept."""
    monkeypatch.setenv("HF_SPECBRANCH_CACHE", str(tmp_path))
    compared, passes = [], padding_check._passes

    def count(model):
        compared.append(model)
        return passes(model)

    monkeypatch.setattr(padding_check, "_passes", count)
    return compared


def test_equal_model_is_not_compared_again(checks, target):
    for again in (target, copy.deepcopy(target)):
        assert same_as_plain(again).specbranch_stats is not None
    assert len(checks) == 1


@pytest.mark.parametrize("change", [CountsPadding, None])
def test_other_code_and_other_weights_are_compared(change, checks, target):
    same_as_plain(target)
    other = copy.deepcopy(target)
    if change is None:
        other.model.embed_tokens.weight.data[0, 0] += 1
    else:
        other.__class__ = change
    same_as_plain(other)
    assert len(checks) == 2


def test_warm_up_of_batches_compares_padded_ones(checks, target):
    model = attached(copy.deepcopy(target))
    model.warm_up_specbranch(batch_sizes=(1,), max_length=32, progress=False)
    assert not checks
    model.warm_up_specbranch(batch_sizes=(1, 2), max_length=32, progress=False)
    assert checks == [model] and model.specbranch_stats is None
    model.generate(**prompt(2, length=8), max_new_tokens=4)
    assert len(checks) == 1
