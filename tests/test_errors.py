"""Bad requests are refused with one clear message, before any work."""

import copy

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_specbranch import SpecBranchConfig, specbranch

from .models import VOCABULARY, attached, config, llama, prompt
from .tokens import letter_tokenizer


@pytest.fixture
def model(target):
    """Fails the test if anything is computed before the error."""
    model = attached(target)
    model.register_forward_pre_hook(lambda *_: pytest.fail("worked before refusing"))
    return model


def rwkv():
    return RwkvForCausalLM(RwkvConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, pad_token_id=0))


def t5():
    sizes = dict(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **sizes))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"policy": "magic"},
            "policy='magic': expected one of 'auto', 'autoregressive', 'vanilla', 'pearl', 'specb",
        ),
        ({"max_draft_length": 0}, 'max_draft_length=0: expected a whole number of at least 1 or "auto"'),
        ({"max_draft_length": 2.5}, "max_draft_length=2.5: expected a whole number"),
        ({"max_branches": 0}, "max_branches=0: expected a whole number of at least 1"),
        ({"confidence_threshold": 1.5}, 'confidence_threshold=1.5: expected a number from 0 to 1, "auto" or "cost"'),
        ({"confidence_threshold": -0.1}, 'confidence_threshold=-0.1: expected a number from 0 to 1, "auto" or "cost"'),
        ({"runtime": "warp"}, "runtime='warp': expected one of"),
        ({"draft_sampling": "beam"}, "draft_sampling='beam': expected one of"),
        ({"overlap": 1}, "overlap=1: expected True or False"),
        ({"prefix_reuse": 1}, "prefix_reuse=1: expected True or False"),
        ({"memory_budget": -0.1}, "memory_budget=-0.1: expected a fraction of the GPU's memory, from 0 to 1"),
        ({"memory_budget": 1.5}, "memory_budget=1.5: expected a fraction"),
        ({"memory_budget": True}, "memory_budget=True: expected a fraction"),
        ({"memory_budget": "2 GB"}, "memory_budget='2 GB': expected a fraction"),
        ({"memory_budget": float("nan")}, "memory_budget=nan: expected a fraction"),
        ({"length_head": 3}, "length_head=3: expected None, a path, a repository id or a callable"),
        ({"gamma": 3}, r"unknown SpecBranchConfig settings \['gamma'\]: expected some of \['policy'"),
    ],
)
def test_settings_are_checked_on_creation(wrong, message):
    with pytest.raises(ValueError, match=message):
        SpecBranchConfig.from_dict(wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"use_cache": False}, "needs the cache"),
        ({"input_ids": torch.zeros((1, 0), dtype=torch.long), "attention_mask": None}, "the prompt is empty"),
        ({"length_head": "./no-such-head"}, "no length head at ./no-such-head: expected a folder"),
        ({"specbranch": 7}, "specbranch=7: expected a SpecBranchConfig"),
        ({"specbranch": {"policy": "magic"}}, "policy='magic'"),
    ],
)
def test_a_call_that_cannot_be_carried_out_is_refused(wrong, message, model, draft):
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
        model.generate(**{**prompt(), "max_new_tokens": 3, "assistant_model": draft, **wrong})


def test_a_prompt_longer_than_the_context_is_refused(draft):
    model = attached(llama(seed=0, max_position_embeddings=16))
    with pytest.raises(ValueError, match="the prompt has 20 tokens and LlamaForCausalLM a context of 16"):
        model.generate(**prompt(length=20), max_new_tokens=3, assistant_model=draft)


def test_settings_without_a_draft_are_refused(model):
    with pytest.raises(ValueError, match="policy='specbranch' needs a draft model: pass assistant_model="):
        model.generate(**prompt(), max_new_tokens=3, specbranch=config())


def test_the_autoregressive_policy_needs_no_draft(target):
    model = attached(target)
    out = model.generate(**prompt(), max_new_tokens=9, do_sample=False, specbranch=config("autoregressive"))
    assert torch.equal(out, target.generate(**prompt(), max_new_tokens=9, do_sample=False))


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize(
    ("make", "message"),
    [(rwkv, "the {} RwkvForCausalLM keeps a recurrent state"), (t5, "the {} T5.* is an encoder-decoder model")],
)
def test_models_that_cannot_take_a_role_are_refused(make, message, role, target, draft):
    with pytest.raises(ValueError, match=message.format(role)):
        if role == "target":
            specbranch(make())
        else:
            attached(target).generate(**prompt(), max_new_tokens=3, assistant_model=make())


def test_a_draft_without_weights_is_refused(model, draft):
    with torch.device("meta"):
        empty = type(draft)(draft.config)
    with pytest.raises(ValueError, match="the draft LlamaForCausalLM has weights on the meta device"):
        model.generate(**prompt(), max_new_tokens=3, assistant_model=empty)


def test_a_refused_draft_leaves_the_model_unattached(target):
    plain = copy.deepcopy(target)
    with pytest.raises(ValueError, match="the draft RwkvForCausalLM keeps a recurrent state"):
        specbranch(plain, draft=rwkv())
    assert type(plain) is type(target)


def test_a_draft_that_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match="the draft must be a transformers PreTrainedModel, not dict"):
        model.generate(**prompt(), max_new_tokens=3, assistant_model={})


@pytest.mark.compat
def test_a_model_whose_attention_takes_no_masks_is_refused(draft):
    bloom = BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)).eval()
    with pytest.raises(ValueError, match="BloomForCausalLM fails with an explicit attention mask and a cache"):
        specbranch(bloom).generate(**prompt(), max_new_tokens=3, assistant_model=draft)


def test_an_attention_without_explicit_masks_is_refused(draft):
    model = attached(llama(seed=0, attn_implementation="flex_attention"))
    with pytest.raises(ValueError, match="uses attn_implementation='flex_attention'.*load it with"):
        model.generate(**prompt(), max_new_tokens=3, assistant_model=draft)


def test_vocabularies_that_differ_are_refused_by_name(model):
    other = llama(seed=0, vocabulary=60)
    other.name_or_path = "org/other-draft"
    with pytest.raises(ValueError, match=r"vocabulary sizes differ \(target .*: 48 entries, draft org/other-draft: 60"):
        model.generate(**prompt(), max_new_tokens=3, assistant_model=other)


def test_tokenizers_that_agree_allow_any_padding(target):
    tokenizer, draft = letter_tokenizer(VOCABULARY), llama(seed=0, vocabulary=64)
    kwargs = {**prompt(), "max_new_tokens": 12, "do_sample": False}
    out = attached(target).generate(**kwargs, assistant_model=draft, tokenizer=tokenizer, assistant_tokenizer=tokenizer)
    assert torch.equal(out, target.generate(**kwargs))


def test_a_failing_draft_leaves_the_model_usable(target, draft):
    model, broken = attached(target), copy.deepcopy(draft)
    drafting = {"assistant_model": broken, "specbranch": {"policy": "vanilla"}}
    model.generate(**prompt(), max_new_tokens=3, do_sample=False, **drafting)
    handle = broken.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        model.generate(**prompt(), max_new_tokens=9, do_sample=False, **drafting)
    handle.remove()
    kwargs = {**prompt(), "max_new_tokens": 9, "do_sample": False}
    assert torch.equal(model.generate(**kwargs, **drafting), target.generate(**kwargs))
    assert torch.equal(model.generate(**kwargs), target.generate(**kwargs))


# ---- warm-up


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_sizes": ()}, "batch_sizes="),
        ({"batch_sizes": (1, 0)}, "expected whole numbers above 0"),
        ({"max_length": 3}, "max_length=3"),
        ({"specbranch": {"policy": "autoregressive"}, "num_beams": 2}, "nothing to warm up"),
    ],
)
def test_warm_up_refuses_before_it_generates(arguments, words, target):
    model = attached(target)
    with pytest.raises(ValueError, match=words):
        model.warm_up_specbranch(**{"max_length": 64, "progress": False, **arguments})


@pytest.mark.parametrize("way", ["wrapper", "in place", "forward"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_compiled_models_are_refused(way, role, target):
    pair = {"target": attached(target), "draft": llama(seed=1)}
    pair["target"].detach_specbranch()
    if way == "wrapper":
        pair[role] = torch.compile(pair[role], backend="eager")
    elif way == "in place":
        pair[role].compile(backend="eager")
    else:
        pair[role].forward = torch.compile(pair[role].forward, backend="eager")
    with pytest.raises(ValueError, match=f"the {role} is under torch.compile"):
        specbranch(pair["target"], draft=pair["draft"])
