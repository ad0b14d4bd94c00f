"""Where every token is masked, sampling raises as in plain `generate()`, and greedy decoding goes on as it does."""

import copy

import pytest
import torch
from transformers import LogitsProcessor

from .models import PAD, POLICIES, VOCABULARY, attached, config, pairs, prompt


@pytest.fixture(scope="module")
def model(target):
    return attached(target)


class MaskAll(LogitsProcessor):
    """Allows nothing from its fifth call on."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores if self.calls < 5 else torch.full_like(scores, float("-inf"))


def nearly_everything(rows):
    """A text in which only five tokens have not been said."""
    text = torch.stack([torch.randperm(VOCABULARY)[:-5] for _ in range(rows)])
    return {"input_ids": text, "attention_mask": torch.ones_like(text)}


MASKED = {
    "own processor": lambda rows: {"logits_processor": [MaskAll()]},
    "everything said": lambda rows: {**nearly_everything(rows), "no_repeat_ngram_size": 1, "top_k": 0},
    "nothing but ends": lambda rows: {"min_new_tokens": 5, "eos_token_id": list(range(VOCABULARY))},
    "suppressed": lambda rows: {"suppress_tokens": list(range(VOCABULARY))},
}


@pytest.mark.compat
@pytest.mark.parametrize(("policy", "name"), pairs(POLICIES, MASKED))
def test_sampling_raises(name, policy, target, model, draft):
    for rows in (1, 2):
        kwargs = {**prompt(rows), "max_new_tokens": 12, "do_sample": True, "eos_token_id": None, "pad_token_id": PAD}
        with pytest.raises(RuntimeError, match="probability tensor"):
            target.generate(**{**kwargs, **MASKED[name](rows)})
        for drafts in ("sample", "greedy"):
            settings = config(policy, draft_sampling=drafts)
            with pytest.raises(RuntimeError, match="no token can be drawn for row .*every token is masked"):
                model.generate(**{**kwargs, **MASKED[name](rows)}, assistant_model=draft, specbranch=settings)


@pytest.mark.parametrize("policy", POLICIES)
def test_sampling_raises_where_stages_are_fixed(policy, model, draft, static_stages):
    kwargs = {**prompt(), "max_new_tokens": 12, "do_sample": True, "pad_token_id": PAD, **MASKED["nothing but ends"](1)}
    with pytest.raises(RuntimeError, match="no token can be drawn for row 0 at new token 0"):
        model.generate(**kwargs, assistant_model=draft, specbranch=config(policy))


@pytest.mark.parametrize(("policy", "name"), pairs(POLICIES, MASKED))
def test_greedy_decoding_goes_on_as_plain_generate_does(name, policy, target, model, draft):
    for rows in (1, 2):
        kwargs = {**prompt(rows), "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": PAD}
        kwargs |= {**MASKED[name](rows), "do_sample": False}
        plain = target.generate(**copy.deepcopy(kwargs))
        assert torch.equal(model.generate(**kwargs, assistant_model=draft, specbranch=config(policy)), plain)
