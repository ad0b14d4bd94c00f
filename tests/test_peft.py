"""PEFT models are attached as any other; their adapters may be switched, merged and deleted between calls."""

import copy
import logging

import pytest
import torch
from transformers import pipeline

from hf_specbranch import SpecBranchMixin, specbranch
from hf_specbranch.planning.knowledge import knowledge_of

from .models import VOCABULARY, config, llama, pairs, prompt
from .tokens import letter_tokenizer

peft = pytest.importorskip("peft")
# PEFT 0.21 reads a property that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing. is deprecated:FutureWarning")
GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
TARGETS = ["q_proj", "v_proj", "down_proj"]


def lora(seed, **changes):
    torch.manual_seed(seed)
    return peft.LoraConfig(r=4, lora_alpha=32, target_modules=TARGETS, init_lora_weights=False, **changes)


def two_adapters(model):
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(copy.deepcopy(model), lora(1), adapter_name="one").eval()
    wrapped.add_adapter("two", lora(2))
    return wrapped.eval()


@pytest.fixture(scope="module")
def plain(target):
    return two_adapters(target)


@pytest.fixture
def model(plain, draft):
    return specbranch(copy.deepcopy(plain), draft=draft)


def speculated(model):
    return model.specbranch_stats is not None


def test_the_wrapper_comes_back_and_its_model_is_attached(plain, draft):
    wrapped = copy.deepcopy(plain)
    model = specbranch(wrapped, draft=draft)
    assert model is wrapped and isinstance(model.get_base_model(), SpecBranchMixin)
    model.detach_specbranch()
    assert type(model.get_base_model()) is type(plain.get_base_model())


@pytest.mark.parametrize(("policy", "rows"), pairs(["auto", "specbranch", "vanilla", "autoregressive"], [1, 3]))
def test_tokens_are_those_of_the_plain_peft_model(rows, policy, plain, model):
    settings = {} if policy == "auto" else {"specbranch": config(policy)}
    assert torch.equal(model.generate(**prompt(rows), **GREEDY, **settings), plain.generate(**prompt(rows), **GREEDY))
    assert speculated(model) and (model.specbranch_stats.num_draft_tokens > 0) == (policy != "autoregressive")


def test_adapters_may_change_between_calls(plain, model, target):
    plain, texts = copy.deepcopy(plain), set()

    def same():
        assert torch.equal(got := model.generate(**prompt(), **GREEDY), plain.generate(**prompt(), **GREEDY))
        assert speculated(model)
        texts.add(str(got))

    same()
    for each in (plain, model):
        each.set_adapter("two")
    same()
    with plain.disable_adapter(), model.disable_adapter():
        same()
        assert torch.equal(model.generate(**prompt(), **GREEDY), target.generate(**prompt(), **GREEDY))
    same()
    for each in (plain, model):
        each.set_adapter("one")
        each.delete_adapter("two")
    same()
    assert len(texts) == 3  # one, two, none


def test_adapters_may_be_merged_and_unloaded(plain, model):
    plain = copy.deepcopy(plain)
    model.generate(**prompt(), **GREEDY)
    for each in (plain, model):
        each.merge_adapter()
    assert torch.equal(model.generate(**prompt(), **GREEDY), plain.generate(**prompt(), **GREEDY))
    for each in (plain, model):
        each.unmerge_adapter()
    merged, expected = model.merge_and_unload(), plain.merge_and_unload()
    assert torch.equal(merged.generate(**prompt(), **GREEDY), expected.generate(**prompt(), **GREEDY))
    assert isinstance(merged, SpecBranchMixin) and speculated(merged)


def test_an_attached_model_may_be_wrapped_later(target, plain, draft):
    attached = specbranch(copy.deepcopy(target), draft=draft)
    attached.generate(**prompt(), **GREEDY)
    model = two_adapters(attached)
    assert torch.equal(model.generate(**prompt(), **GREEDY), plain.generate(**prompt(), **GREEDY))
    assert speculated(model)


def test_a_peft_model_may_draft(target, plain):
    drafts = [copy.deepcopy(plain), specbranch(copy.deepcopy(plain))]
    for draft in drafts:
        model = specbranch(copy.deepcopy(target), draft=draft)
        for asked in ({}, {"assistant_model": draft}):
            got = model.generate(**prompt(2), **GREEDY, **asked)
            assert torch.equal(got, target.generate(**prompt(2), **GREEDY)) and speculated(model)


def test_the_adapter_of_a_draft_is_used(target):
    """The target's own adapter makes the base model a perfect draft, and only while it is active."""
    wrapped = peft.get_peft_model(copy.deepcopy(target), lora(1)).eval()
    merged = copy.deepcopy(wrapped).merge_and_unload()
    model = specbranch(merged, draft=wrapped)
    kwargs = {**prompt(), **GREEDY, "max_new_tokens": 30, "specbranch": config("vanilla", epsilon=0.0)}
    model.generate(**kwargs)
    assert model.specbranch_stats.draft_acceptance_rate > 0.9
    with wrapped.disable_adapter():
        model.generate(**kwargs)
    assert model.specbranch_stats.draft_acceptance_rate < 0.7


def test_what_is_known_of_a_pair_is_known_for_one_adapter(model, draft):
    inner = model.get_base_model()
    first = knowledge_of(inner, draft)
    model.set_adapter("two")
    second = knowledge_of(inner, draft)
    with model.disable_adapter():
        third = knowledge_of(inner, draft)
    model.set_adapter("one")
    assert knowledge_of(inner, draft) is first
    assert len({id(each) for each in (first, second, third)}) == 3


@pytest.mark.gpu
def test_models_with_adapters_are_captured(plain, draft):
    plain, draft = copy.deepcopy(plain).cuda(), copy.deepcopy(draft).cuda()
    model, inputs = specbranch(copy.deepcopy(plain), draft=draft), {k: v.cuda() for k, v in prompt().items()}
    for name in ("one", "two"):
        for each in (plain, model):
            each.set_adapter(name)
        assert torch.equal(model.generate(**inputs, **GREEDY), plain.generate(**inputs, **GREEDY))
        assert model.specbranch_stats.runtime == "graph"


def test_adapters_of_transformers_may_be_switched(target, draft):
    plain = copy.deepcopy(target)
    for seed, name in ((1, "one"), (2, "two")):
        plain.add_adapter(lora(seed), adapter_name=name)
    plain.eval()
    model = specbranch(copy.deepcopy(plain), draft=draft)
    texts = set()

    def same():
        assert torch.equal(got := model.generate(**prompt(), **GREEDY), plain.generate(**prompt(), **GREEDY))
        assert speculated(model)
        texts.add(str(got))

    for name in ("one", "two", "one"):
        for each in (plain, model):
            each.set_adapter(name)
        same()
    for each in (plain, model):
        each.disable_adapters()
    same()
    for each in (plain, model):
        each.enable_adapters()
        each.delete_adapter("one")
        each.set_adapter("two")
    same()
    assert len(texts) == 3


def test_adapters_chosen_per_row_fall_back(plain, model, caplog):
    names = {"adapter_names": ["one", "two", "__base__"]}
    with caplog.at_level(logging.WARNING):
        got = model.generate(**prompt(3), **GREEDY, **names)
    assert torch.equal(got, plain.generate(**prompt(3), **GREEDY, **names))
    assert "adapters per row" in caplog.text and not speculated(model)
    model.generate(**prompt(3), **GREEDY)
    assert speculated(model)


def prompt_tuned(model, kind="prompt"):
    torch.manual_seed(3)
    tuning = {"prompt": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}[kind]
    return peft.get_peft_model(copy.deepcopy(model), tuning(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()


def test_prompt_learning_falls_back(target, draft, caplog):
    plain = prompt_tuned(target)
    model = specbranch(copy.deepcopy(plain), draft=draft)
    with caplog.at_level(logging.WARNING):
        got = model.generate(**prompt(), **GREEDY)
    assert torch.equal(got, plain.generate(**prompt(), **GREEDY))
    assert "prompt learning" in caplog.text and not speculated(model)


def test_a_draft_with_prompt_learning_is_refused(target, draft):
    with pytest.raises(ValueError, match="the draft is a PEFT model with prompt learning .*PROMPT_TUNING"):
        specbranch(copy.deepcopy(target), draft=prompt_tuned(draft))
    with pytest.raises(ValueError, match="the draft is a PEFT model with prompt learning"):
        specbranch(copy.deepcopy(target)).generate(**prompt(), **GREEDY, assistant_model=prompt_tuned(draft))


def test_the_pipeline_task_takes_peft_models(plain, draft):
    tokenizer, asked = letter_tokenizer(VOCABULARY), {**GREEDY, "return_full_text": False}
    theirs = pipeline("text-generation", model=copy.deepcopy(plain), tokenizer=tokenizer, device="cpu")
    wrapped = copy.deepcopy(plain)
    ours = pipeline("specbranch-text-generation", model=wrapped, draft=draft, tokenizer=tokenizer, device="cpu")
    assert ours("abcdef", **asked) == theirs("abcdef", **asked)
    assert speculated(wrapped)
    again = pipeline("specbranch-text-generation", model=wrapped, tokenizer=tokenizer, device="cpu")
    assert again("abcdef", **asked) == theirs("abcdef", **asked)


def test_a_wrapper_around_something_else_is_refused(draft):
    with pytest.raises(TypeError, match="the target must be a transformers PreTrainedModel, not Linear"):
        specbranch(torch.nn.Linear(2, 2), draft=draft)


def test_vocabularies_of_a_peft_draft_are_checked(target):
    other = peft.get_peft_model(llama(seed=0, vocabulary=60), lora(1))
    with pytest.raises(ValueError, match="vocabulary sizes differ"):
        specbranch(copy.deepcopy(target), draft=other).generate(**prompt(), **GREEDY)
