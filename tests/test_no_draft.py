"""Without a draft an attached model decodes through the same loop, and what that cannot serve is plain `generate()`."""

import copy
import logging

import pytest
import torch
from transformers import LogitsProcessor, StaticCache

from hf_specbranch import specbranch

from .models import attached, llama, prompt, slowly

GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}


@pytest.fixture
def model(target):
    return attached(target)


@pytest.mark.compat
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_text_is_that_of_plain_generate(rows, target, model):
    got = model.generate(**prompt(rows), **GREEDY)
    assert torch.equal(got, target.generate(**prompt(rows), **GREEDY))
    assert model.specbranch_stats.new_tokens == rows * GREEDY["max_new_tokens"]


def test_rows_of_one_length_may_end_apart(target, model):
    inputs = {"input_ids": torch.randint(3, 48, (4, 6), generator=torch.Generator().manual_seed(1))}
    asked = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": [5, 7, 9, 11], "pad_token_id": 0}
    expected = target.generate(**inputs, **asked)
    assert len({int((row != 0).sum()) for row in expected}) > 1  # they do
    assert torch.equal(model.generate(**inputs, **asked), expected)


def test_scores_are_those_of_plain_generate(target, model):
    asked = {**GREEDY, "output_scores": True, "return_dict_in_generate": True}
    ours, plain = model.generate(**prompt(), **asked), target.generate(**prompt(), **asked)
    torch.testing.assert_close(torch.stack(ours.scores), torch.stack(plain.scores))
    assert torch.equal(ours.sequences, plain.sequences) and ours.stats.new_tokens == 24


class InPlace(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores[:, 3] += 1.0
        return scores


def test_a_processor_may_change_scores_in_place(target, model):
    got = model.generate(**prompt(2), **GREEDY, logits_processor=[InPlace()])
    assert torch.equal(got, target.generate(**prompt(2), **GREEDY, logits_processor=[InPlace()]))


def own_records(caplog):
    return [record for record in caplog.records if record.name.startswith("hf_specbranch")]


SILENT = {
    "false": {"specbranch": False},
    "beams": {"num_beams": 3},
    "beam sampling": {"num_beams": 3, "do_sample": True},
    "no cache": {"use_cache": False},
    "early exit": {"assistant_early_exit": 1},
}


@pytest.mark.compat
@pytest.mark.parametrize("name", [slowly(name) if name in ("beam sampling", "no cache") else name for name in SILENT])
def test_other_calls_are_plain_generate_without_a_word(name, target, model, caplog):
    asked = {**GREEDY, **SILENT[name]}
    with caplog.at_level(logging.WARNING, logger="hf_specbranch"):
        torch.manual_seed(3)
        got = model.generate(**prompt(), **asked)
    asked.pop("specbranch", None)
    torch.manual_seed(3)
    assert torch.equal(got, target.generate(**prompt(), **asked))
    assert model.specbranch_stats is None and not own_records(caplog)


def test_custom_generate_is_given_the_call(model):
    assert model.generate(**prompt(), custom_generate=lambda model, input_ids, **_: input_ids[:, :2]).shape == (1, 2)


def test_a_model_that_a_check_refuses_is_plain(caplog):
    """With eager attention that ignores the mask, or a prompt beyond the context: nobody has asked for speculation."""
    short = llama(seed=3, max_position_embeddings=12)
    inputs = prompt(length=16)
    with caplog.at_level(logging.WARNING, logger="hf_specbranch"):
        got = attached(short).generate(**inputs, **GREEDY)
        assert torch.equal(got, short.generate(**inputs, **GREEDY))
        blind = llama(seed=4)
        blind.forward = ignoring_masks(blind)
        expected = blind.generate(**prompt(), **GREEDY)
        model = specbranch(blind)
        assert torch.equal(model.generate(**prompt(), **GREEDY), expected) and model.specbranch_stats is None
    assert not own_records(caplog)


def ignoring_masks(model):
    original = type(model).forward

    def forward(*args, attention_mask=None, **kwargs):
        if attention_mask is not None and attention_mask.ndim == 4:
            attention_mask = torch.ones_like(attention_mask)
        return original(model, *args, attention_mask=attention_mask, **kwargs)

    return forward


def test_a_model_that_needs_its_mask_is_given_one(target):
    """It derives something from the length of its cache where it is given no mask."""
    counting = copy.deepcopy(target)
    original = type(counting).forward

    def forward(*args, attention_mask=None, past_key_values=None, input_ids=None, **kwargs):
        if attention_mask is None and past_key_values is not None and input_ids.shape[1] == 1:
            kwargs["position_ids"] = torch.full_like(input_ids, past_key_values.get_seq_length())
        return original(
            counting,
            *args,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            input_ids=input_ids,
            **kwargs,
        )

    counting.forward = forward
    model = specbranch(counting)
    got = model.generate(**prompt(), **GREEDY)
    assert model.specbranch_stats is not None
    assert torch.equal(got, target.generate(**prompt(), **GREEDY))


def test_a_cache_of_the_caller_is_kept_up_to_date(target, model):
    caches = [StaticCache(config=target.config, max_cache_len=64) for _ in range(2)]
    plain = target.generate(**prompt(), **GREEDY, past_key_values=caches[0])
    ours = model.generate(**prompt(), **GREEDY, past_key_values=caches[1])
    assert torch.equal(ours, plain) and caches[0].get_seq_length() == caches[1].get_seq_length()


class KeepsATable(torch.nn.Module):
    def forward(self, x):
        self.table = x.new_ones(x.shape[-1])
        return x * self.table


def test_a_model_can_be_trained_after_it_has_generated(target):
    """Nothing that a pass leaves in the model belongs to torch's inference mode."""
    changed = copy.deepcopy(target)
    changed.model.norm = torch.nn.Sequential(changed.model.norm, KeepsATable())
    model = specbranch(changed)
    with torch.no_grad():
        assert torch.equal(model.generate(**prompt(), **GREEDY), target.generate(**prompt(), **GREEDY))
    table = model.model.norm[1].table
    weight = torch.nn.Parameter(torch.ones_like(table))
    (weight * table).sum().backward()
    assert weight.grad is not None


def test_a_hook_may_keep_what_it_is_shown(target):
    model, kept = attached(target), []
    model.model.norm.register_forward_hook(lambda module, args, output: kept.append(output))
    model.generate(**prompt(), **GREEDY)
    weight = torch.nn.Parameter(torch.ones_like(kept[-1]))
    (weight * kept[-1]).sum().backward()
    assert weight.grad is not None
