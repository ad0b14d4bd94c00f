"""Whether a model obeys masks is asked by trying."""

import copy

import pytest
from transformers import LlamaForCausalLM

from hf_specbranch.runners.probe import mask_maker_for

from .models import llama


class Disobedient(LlamaForCausalLM):
    """Sees everything that is cached in passes over so many tokens."""

    blind_at = 0

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, **kwargs):
        if past_key_values is not None and input_ids.shape[1] == self.blind_at and attention_mask is not None:
            attention_mask = attention_mask.clone().fill_(True)
        return super().forward(input_ids, attention_mask, past_key_values=past_key_values, **kwargs)


@pytest.mark.parametrize("blind_at", [1, 2])
def test_a_mask_ignored_in_one_pass_alone_is_noticed(blind_at):
    """One pass holds two branches, a later one continues one of them."""
    model = llama(seed=0, num_hidden_layers=1)  # or what went wrong would show in later passes too
    model.__class__ = Disobedient
    assert mask_maker_for(model, "target") is not None
    another = copy.deepcopy(model)
    another.blind_at = blind_at
    with pytest.raises(ValueError, match="does not compute the same logits under an explicit attention mask"):
        mask_maker_for(another, "target")
