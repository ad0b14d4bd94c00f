"""Attaching changes `generate()` and nothing else."""

import copy
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationMixin, LlamaForCausalLM, PreTrainedModel, pipeline

from hf_specbranch import SpecBranchMixin, specbranch

from .models import VOCABULARY, attached, config, llama, prompt
from .tokens import letter_tokenizer


@pytest.fixture
def plain(target):
    return copy.deepcopy(target)


@pytest.mark.compat
def test_attaching_keeps_object_class_and_weights(plain):
    weights = {name: tensor.data_ptr() for name, tensor in plain.state_dict().items()}
    model = specbranch(plain)
    assert model is plain
    assert isinstance(model, (SpecBranchMixin, LlamaForCausalLM, PreTrainedModel, GenerationMixin))
    assert type(model).__name__ == "LlamaForCausalLM" and type(model).__module__ == LlamaForCausalLM.__module__
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == weights
    assert model.can_generate()


def test_attaching_twice_is_harmless(plain, draft):
    model = specbranch(specbranch(plain, draft=draft))
    assert [cls.__name__ for cls in type(model).__mro__].count("SpecBranchMixin") == 1
    assert model._specbranch_memory.draft is draft


def test_detaching_restores_the_model(plain, draft):
    before = set(plain.__dict__)
    model = specbranch(plain, draft=draft)
    model.generate(**prompt(), max_new_tokens=3, do_sample=False)
    assert model.detach_specbranch() is plain
    assert type(plain) is LlamaForCausalLM
    assert set(plain.__dict__) == before


def test_the_draft_is_remembered_and_is_no_submodule(plain, draft):
    names = set(plain.state_dict())
    model = specbranch(plain, draft=draft, policy="vanilla")
    model.generate(**prompt(), max_new_tokens=9, do_sample=False)
    assert model.specbranch_stats.num_draft_tokens > 0
    assert set(model.state_dict()) == names
    assert draft not in list(model.modules())


def test_draft_of_the_call_wins_over_the_attached_one(plain, draft, stranger):
    calls = []
    probe = copy.deepcopy(stranger)
    probe.register_forward_pre_hook(lambda *_: calls.append(1))
    specbranch(plain, draft=draft).generate(**prompt(), max_new_tokens=3, do_sample=False, assistant_model=probe)
    assert calls


@pytest.mark.compat
def test_false_gives_transformers_own_assisted_decoding(plain, target, draft):
    kwargs = {**prompt(), "max_new_tokens": 9, "do_sample": False}
    out = specbranch(plain).generate(**kwargs, assistant_model=draft, specbranch=False)
    assert torch.equal(out, target.generate(**kwargs)) and plain.specbranch_stats is None


def test_arguments_may_be_given_by_position(plain, target, draft):
    ids = prompt()["input_ids"]
    plan = copy.deepcopy(target.generation_config)
    plan.update(max_new_tokens=6, do_sample=False)
    out = specbranch(plain, policy="vanilla").generate(ids, plan, None, None, None, None, draft)
    assert torch.equal(out, target.generate(ids, plan)) and plain.specbranch_stats.num_draft_tokens > 0


@pytest.mark.compat
def test_saving_and_loading_know_nothing_of_it(plain, draft, tmp_path):
    model = specbranch(plain, draft=draft)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LlamaForCausalLM and loaded.config.architectures == ["LlamaForCausalLM"]
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name])


def test_an_attached_model_can_be_copied_and_pickled():
    model = specbranch(llama(seed=0))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(twin, SpecBranchMixin) and type(twin).__name__ == "LlamaForCausalLM"
        assert torch.equal(twin.lm_head.weight, model.lm_head.weight)


def test_the_mixin_is_an_ordinary_base_class(target, draft):
    class FastLlama(SpecBranchMixin, LlamaForCausalLM):
        pass

    model = FastLlama(target.config).eval()
    model.load_state_dict(target.state_dict())
    kwargs = {**prompt(), "max_new_tokens": 9, "do_sample": False}
    out = model.generate(**kwargs, assistant_model=draft, specbranch={"policy": "vanilla"})
    assert torch.equal(out, target.generate(**kwargs)) and model.specbranch_stats.num_draft_tokens > 0
    with pytest.raises(TypeError, match="nothing to detach"):
        model.detach_specbranch()


@pytest.mark.compat
def test_pipeline_uses_the_remembered_draft(plain, target, draft):
    tokenizer = letter_tokenizer(VOCABULARY)
    kwargs = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    ours = pipeline("text-generation", model=specbranch(plain, draft=draft), tokenizer=tokenizer)
    theirs = pipeline("text-generation", model=copy.deepcopy(target), tokenizer=tokenizer)
    assert ours("abcdef", **kwargs) == theirs("abcdef", **kwargs)
    assert plain.specbranch_stats.num_draft_tokens > 0
    prompts = ["abcdef", "hij", "klmnop"]
    assert ours(prompts, batch_size=2, **kwargs) == theirs(prompts, batch_size=2, **kwargs)


def test_pipeline_takes_an_assistant_model(plain, target, draft):
    tokenizer = letter_tokenizer(VOCABULARY)
    kwargs = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    ours = pipeline("text-generation", model=specbranch(plain), tokenizer=tokenizer, assistant_model=draft)
    theirs = pipeline("text-generation", model=copy.deepcopy(target), tokenizer=tokenizer)
    assert ours("abcdef", **kwargs) == theirs("abcdef", **kwargs)
    assert plain.specbranch_stats.num_draft_tokens > 0


def test_two_threads_may_share_a_model(target, draft):
    from concurrent.futures import ThreadPoolExecutor

    model = attached(target)
    kwargs = {"max_new_tokens": 20, "do_sample": False}
    prompts = [prompt(seed=seed) for seed in range(8)]  # here: seeds are the process's, not a thread's

    def run(seed):
        settings = config("pearl" if seed % 2 else "vanilla", gamma=1 + seed % 4)
        return model.generate(**prompts[seed], **kwargs, assistant_model=draft, specbranch=settings)

    expected = [target.generate(**each, **kwargs) for each in prompts]
    with ThreadPoolExecutor(4) as threads:
        for got, wanted in zip(threads.map(run, range(8)), expected):
            assert torch.equal(got, wanted)
