"""`pipeline()` takes a SpecBranch model as any other, and knows a task that loads the draft itself."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import TextGenerationPipeline, TextIteratorStreamer, TextStreamer, pipeline
from transformers.pipelines import check_task

import hf_specbranch
from hf_specbranch import SpecBranchConfig, load_demo_pair, specbranch

from .models import VOCABULARY, llama, slowly

pytestmark = pytest.mark.compat
FOLDER = Path(hf_specbranch.__file__).parent / "demo_pair"
PROMPTS = ["def add(a, b):", "class Stack:\n", "import os\n\n\ndef walk(", "for i in range("]
CHAT = [{"role": "user", "content": "def add(a, b):"}]
TEMPLATE = "{% for m in messages %}# {{ m['role'] }}\n{{ m['content'] }}\n{% endfor %}# assistant\n"
GREEDY = {"do_sample": False, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def pair():
    target, draft, tokenizer = load_demo_pair()
    tokenizer.chat_template = TEMPLATE
    return target, draft, tokenizer


@pytest.fixture(scope="module")
def plain(pair):
    target, _, tokenizer = pair
    return pipeline("text-generation", model=target, tokenizer=tokenizer, device="cpu")


@pytest.fixture(scope="module")
def attached_pipe(pair):
    target, draft, tokenizer = pair
    model = specbranch(copy.deepcopy(target), draft=draft, policy="vanilla")  # short texts may not be worth a draft
    return pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")


@pytest.fixture(scope="module")
def task_pipe(pair):
    target, draft, tokenizer = pair
    settings = {"specbranch": SpecBranchConfig(policy="vanilla"), "device": "cpu"}
    model = copy.deepcopy(target)
    return pipeline("specbranch-text-generation", model=model, draft=draft, tokenizer=tokenizer, **settings)


@pytest.fixture
def pipe(attached_pipe):
    attached_pipe.model.specbranch_stats = None
    return attached_pipe


def assert_it_speculated(pipe):
    assert pipe.model.specbranch_stats.num_accepted_tokens > 0


@pytest.mark.matrix
def test_default_length_is_not_taken_for_the_users(pipe):
    settings = SpecBranchConfig(policy="vanilla", confidence_threshold=0.0)
    pipe(PROMPTS[0], do_sample=False, max_new_tokens=40, specbranch=settings)
    stats = pipe.model.specbranch_stats
    assert 0 < stats.num_draft_tokens < 12 * stats.num_drafts  # transformers' default is 20


@pytest.mark.parametrize(
    "given",
    [slowly(PROMPTS[0]), PROMPTS[:2], CHAT, slowly([CHAT, [{"role": "user", "content": "class Stack:"}]])],
    ids=["a string", "a list", "a chat", "several chats"],
)
def test_greedy_text_is_that_of_a_plain_pipeline(given, pipe, plain):
    assert pipe(given, **GREEDY) == plain(given, **GREEDY)
    assert_it_speculated(pipe)


@pytest.mark.matrix
def test_batches_give_the_text_of_a_plain_pipeline(pipe, plain):
    asked = {**GREEDY, "batch_size": 3, "return_full_text": False}
    assert pipe(PROMPTS, **asked) == plain(PROMPTS, **asked)
    assert_it_speculated(pipe)


def test_a_streamer_gets_the_text(pipe, plain, pair):
    streamer = TextIteratorStreamer(pair[2], skip_prompt=True)
    said = pipe(PROMPTS[0], **GREEDY, streamer=streamer, return_full_text=False)
    assert "".join(streamer) == said[0]["generated_text"] == plain(PROMPTS[0], **GREEDY)[0]["generated_text"][14:]


def test_text_streamer_prints_as_in_a_plain_pipeline(pipe, plain, pair, capsys):
    for each in (pipe, plain):
        each(PROMPTS[0], **GREEDY, streamer=TextStreamer(pair[2]))
    ours, theirs = capsys.readouterr().out.split(PROMPTS[0])[1:]
    assert ours == theirs


@pytest.mark.matrix
def test_sampling_follows_the_seed(pipe):
    def sampled(seed):
        torch.manual_seed(seed)
        return pipe(PROMPTS[0], do_sample=True, temperature=1.0, max_new_tokens=12)[0]["generated_text"]

    assert sampled(1) == sampled(1) != sampled(2)
    assert_it_speculated(pipe)


def test_sampling_with_top_k_1_is_greedy(pipe, plain):
    asked = {"do_sample": True, "top_k": 1, "max_new_tokens": 8}
    assert pipe(PROMPTS[0], **asked) == plain(PROMPTS[0], **asked)
    assert_it_speculated(pipe)


def test_several_continuations_may_be_asked_for(pipe):
    torch.manual_seed(0)
    said = pipe(PROMPTS[0], do_sample=True, num_return_sequences=3, max_new_tokens=8)
    assert len({each["generated_text"] for each in said}) > 1 and len(said) == 3


def test_settings_may_be_given_with_the_call(pipe):
    pipe(PROMPTS[0], **GREEDY, specbranch=SpecBranchConfig(policy="vanilla"))
    assert pipe.model.specbranch_stats.policy == "vanilla"


# ---- the task that loads the draft itself


def test_task_takes_text_generation_arguments(task_pipe, plain):
    asked = {**GREEDY, "batch_size": 2, "return_full_text": False}
    assert task_pipe(PROMPTS[:3], **asked) == plain(PROMPTS[:3], **asked)
    assert task_pipe(CHAT, **GREEDY) == plain(CHAT, **GREEDY)
    assert_it_speculated(task_pipe)


@pytest.mark.matrix
def test_target_draft_and_head_may_be_named(plain):
    pipe = pipeline(
        "specbranch-text-generation",
        model=str(FOLDER / "target"),
        draft=str(FOLDER / "weak"),
        length_head=str(FOLDER / "weak_head"),
        dtype=torch.float32,
        device="cpu",
        specbranch=SpecBranchConfig(policy="specbranch", max_draft_length=4),
    )
    assert pipe(PROMPTS[0], **GREEDY) == plain(PROMPTS[0], **GREEDY)
    draft = pipe.model._specbranch_memory.draft
    assert draft.dtype == torch.float32 and draft.num_parameters() < pipe.model.num_parameters()
    assert_it_speculated(pipe)


def test_a_model_that_remembers_its_draft_needs_no_other(pair, plain):
    target, draft, tokenizer = pair
    model = specbranch(copy.deepcopy(target), draft=draft, policy="vanilla")
    pipe = pipeline("specbranch-text-generation", model=model, tokenizer=tokenizer, device="cpu")
    assert pipe(PROMPTS[0], **GREEDY) == plain(PROMPTS[0], **GREEDY)
    assert_it_speculated(pipe)


@pytest.mark.matrix
@pytest.mark.parametrize("draft", [None, "lookup"])
def test_no_draft_model_is_needed(draft, pair, plain):
    target, _, tokenizer = pair
    pipe = pipeline(
        "specbranch-text-generation", model=copy.deepcopy(target), draft=draft, tokenizer=tokenizer, device="cpu"
    )
    assert pipe(PROMPTS[0], **GREEDY) == plain(PROMPTS[0], **GREEDY)
    assert pipe.model.specbranch_stats.draft_forwards == 0


def test_a_draft_with_another_vocabulary_is_refused(pair):
    target, _, tokenizer = pair
    stranger = llama(seed=0, vocabulary=VOCABULARY)
    with pytest.raises(ValueError, match=f"vocabulary sizes differ .* draft .*: {VOCABULARY}"):
        pipeline("specbranch-text-generation", model=target, draft=stranger, tokenizer=tokenizer, device="cpu")


def test_a_draft_that_is_nowhere_is_told(pair, tmp_path):
    target, _, tokenizer = pair
    with pytest.raises(OSError, match="nowhere"):
        pipeline(
            "specbranch-text-generation",
            model=copy.deepcopy(target),
            draft=tmp_path / "nowhere",
            tokenizer=tokenizer,
            device="cpu",
        )


def test_importing_the_package_makes_the_task_known():
    task, loading, _ = check_task("specbranch-text-generation")
    assert task == "specbranch-text-generation" and loading["type"] == "text"
    assert issubclass(loading["impl"], TextGenerationPipeline)
