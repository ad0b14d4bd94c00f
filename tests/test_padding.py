"""Padded batches are read as plain generate() reads them, or left to transformers."""

import pytest
import torch
from transformers import GitConfig, GitForCausalLM, LlamaForCausalLM

from hf_specbranch.families.tiny import language_models

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
