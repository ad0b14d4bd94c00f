"""The running batch: rows take one text after another, and each answer is that of its prompt alone."""

import copy
import random
import threading
import time

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopPLogitsWarper
from transformers.generation import PromptLookupCandidateGenerator

from hf_specbranch import load_demo_pair, specbranch
from hf_specbranch.decoding.stepwise_drafter import StepwiseDrafter
from hf_specbranch.serving.completion import Completion, CompletionSettings
from hf_specbranch.serving.engine import Engine
from hf_specbranch.serving.row_sampling import RowSampling, Sampling, within_top_p

from .kernels import DEVICE, INTERPRETED, where_triton_runs
from .models import VOCABULARY, assert_counts_add_up, config, llama, noisy_copy, slowly
from .sampling import NEW_TOKENS, PROMPT, ROWS, SEQUENCES, SMALLEST_P, exact_distribution, p_value, sampling_pair
from .sampling import VOCABULARY as FEW


class Answers:
    """An engine, and a plain model that says what its answers must be."""

    def __init__(self, target, draft, rows=4, policy="vanilla", **settings):
        self.plain = target
        self.engine = Engine(specbranch(copy.deepcopy(target), draft), None, rows, settings=config(policy, **settings))

    def ask(self, prompts, **settings):
        """Submit prompts, one of them while others run, and wait for the answers."""
        done, answers = threading.Semaphore(0), []
        for at, (prompt, count) in enumerate(prompts):
            wanted = CompletionSettings(count, ends=self.engine.ends, **settings)
            finished = lambda each: each.finished and done.release()  # noqa: E731
            answers.append(self.engine.submit(Completion(prompt, wanted, None, finished)))
            if at == len(prompts) // 2:
                time.sleep(0.05)
        for _ in answers:
            assert done.acquire(timeout=600 if INTERPRETED else 60)
        return answers

    def expected(self, prompt, count):
        ids = torch.tensor([prompt])
        out = self.plain.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
        return out[0, len(prompt) :].tolist()

    def compare(self, prompts):
        for (prompt, count), answer in zip(prompts, self.ask(prompts), strict=True):
            assert answer.tokens == self.expected(prompt, count), answer.error
            assert answer.finish_reason == ("stop" if answer.tokens[-1] in self.engine.ends else "length")
            assert_counts_add_up(answer.stats)
            assert answer.stats.new_tokens == len(answer.tokens)


def slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def some_prompts(count, seed=0, longest=40):
    chance = random.Random(seed)
    lengths = [(chance.randint(1, longest), chance.randint(1, 16)) for _ in range(count)]
    return [([chance.randrange(3, VOCABULARY) for _ in range(length)], new) for length, new in lengths]


@pytest.mark.parametrize("policy", ["vanilla", *slow("specbranch", "pearl", "autoregressive", "auto")])
def test_greedy_answers_are_those_of_generate_alone(policy, target, draft):
    more = {"max_rejection_branches": 3} if policy == "specbranch" else {}
    answers = Answers(target, draft, policy=policy, prompt_lookup_num_tokens=4 if policy == "vanilla" else 0, **more)
    with answers.engine:
        answers.compare(some_prompts(9))


def test_first_token_comes_from_the_pass_that_reads_the_prompt(target, draft):
    """Before any draft; and an answer of one token takes no round."""
    answers, seen = Answers(target, draft), []
    ended = threading.Semaphore(0)

    def grown(answer):
        seen.append((len(answer.tokens), answer.stats.target_forwards, answer.stats.draft_forwards))
        if answer.finished:
            ended.release()

    prompt = some_prompts(1, longest=40)[0][0]
    with answers.engine as engine:
        for count in (12, 1):
            seen.clear()
            engine.submit(Completion(prompt, CompletionSettings(count), None, grown))
            assert ended.acquire(timeout=60)
            assert seen[0] == (1, 1, 0) and [length for length, *_ in seen] == sorted({each[0] for each in seen})
            assert seen[-1][0] == count
        assert engine.stats.new_tokens == 13


def test_answers_move_between_batches_of_other_sizes(target, draft, monkeypatch):
    monkeypatch.setattr("hf_specbranch.serving.scheduler.PATIENCE", 2)
    answers = Answers(target, draft, rows=6, policy="specbranch")
    long = [(prompt, 40) for prompt, _ in some_prompts(2, seed=5)]
    with answers.engine:
        answers.compare([*long, *some_prompts(8, seed=6)])


def test_captured_batches_sample_only_where_asked(target, draft, graph_runners):
    """A greedy batch, then a sampled one, then a greedy one again: the same texts as without captured stages."""
    prompts, texts = some_prompts(4, seed=8), []
    for captured in (True, False):
        answers = Answers(target, draft, rows=2, kernels=True, runtime="auto" if captured else "eager")
        answers.engine.captured = captured
        with answers.engine:
            answers.compare(prompts)
            both = answers.ask(prompts, sampling=Sampling(0.9, 0.8, 5)), answers.ask(prompts, sampling=Sampling(1.1))
            answers.compare(prompts)
        texts.append([[answer.tokens for answer in each] for each in both])
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]


@pytest.mark.parametrize(("policy", "epsilon"), [("vanilla", 0.3), ("vanilla", "cost"), slowly("specbranch", 0.3)])
def test_takeover_captures_nothing(policy, epsilon, target, draft, graph_runners):
    """With the runners of a GPU, in static shapes: what other texts have captured is replayed."""
    answers = Answers(target, draft, policy=policy, epsilon=epsilon, kernels=True)
    answers.engine.sizes = [3]
    with answers.engine:
        answers.compare(some_prompts(7))
    assert answers.engine.stats.runtime == "graph" and answers.engine.stats.graphs_captured > 0
    again = Engine(answers.engine.settings.model, None, 3, settings=answers.engine.settings.config)
    answers.engine, again.sizes = again, [3]
    with again:
        answers.compare(some_prompts(7, seed=9))
    if policy == "vanilla":  # others may meet a kind of round that is new
        assert again.stats.graphs_captured == 0


@where_triton_runs
@pytest.mark.parametrize("epsilon", [0.5, "cost"])
def test_next_text_forgets_a_draft_that_had_begun(epsilon, target, request, monkeypatch):
    """A draft may begin before the host has the result that ends a text. As the target itself it is always right."""
    if DEVICE == "cpu":
        request.getfixturevalue("graph_runners")
    begun, begin = [], StepwiseDrafter.begin
    monkeypatch.setattr(StepwiseDrafter, "begin", lambda self, *given: begun.append(1) or begin(self, *given))
    settings = dict(gamma=3, epsilon=epsilon, prompt_lookup_num_tokens=4, kernels=True)
    target = copy.deepcopy(target).to(DEVICE)
    answers = Answers(target, copy.deepcopy(target), rows=1, **settings)
    with answers.engine:
        answers.compare([(prompt, 8) for prompt, _ in some_prompts(2, seed=4, longest=8)])
        counts = answers.engine.stats.sources["draft model"]
    assert begun and counts["accepted"] == counts["drafted"] > 4


def test_seeded_answer_does_not_depend_on_the_batch(target, draft):
    prompts = some_prompts(5, seed=3)
    texts = []
    for rows, policy in ((1, "autoregressive"), (4, "vanilla"), (3, "specbranch")):
        answers = Answers(target, draft, rows=rows, policy=policy)
        with answers.engine:
            both = [answers.ask(prompts, sampling=Sampling(0.8, 0.9, seed)) for seed in (1, 2)]
        texts.append([[answer.tokens for answer in each] for each in both])
    assert texts[0] == texts[1] == texts[2]
    assert texts[0][0] != texts[0][1]


def test_rows_with_other_settings_stay_greedy(target, draft):
    answers = Answers(target, draft)
    done = threading.Semaphore(0)
    finished = lambda each: each.finished and done.release()  # noqa: E731
    with answers.engine as engine:
        given = []
        for at, (prompt, count) in enumerate(some_prompts(8, seed=4)):
            sampling = Sampling(2.0, 1.0, at) if at % 2 else Sampling()
            given.append(Completion(prompt, CompletionSettings(count, sampling, ends=engine.ends), None, finished))
            engine.submit(given[-1])
        for _ in given:
            assert done.acquire(timeout=60)
    for answer in given[::2]:
        assert answer.tokens == answers.expected(answer.prompt, answer.settings.max_tokens)


@pytest.mark.parametrize("policy", ["vanilla", *slow("specbranch")])
@pytest.mark.parametrize("temperature, top_p", [(0.7, 0.8), pytest.param(1.0, 1.0, marks=pytest.mark.slow)])
def test_distribution_is_the_targets(policy, temperature, top_p):
    model, draft = sampling_pair()
    counts, weights = np.zeros(len(SEQUENCES)), FEW ** torch.arange(NEW_TOKENS - 1, -1, -1)
    ids = PROMPT.expand(ROWS, -1)
    for call in range(6):
        sampling = RowSampling(ROWS)
        for row in range(ROWS):
            sampling.set_row(row, Sampling(temperature, top_p, seed=call * ROWS + row))
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=draft, do_sample=False,
            max_new_tokens=NEW_TOKENS, logits_processor=[sampling], specbranch=config(policy),
        )  # fmt: skip
        counts += np.bincount(((out[:, PROMPT.shape[1] :]) * weights).sum(1).numpy(), minlength=len(SEQUENCES))
    assert model.specbranch_stats.draft_acceptance_rate > 0.3
    warpers = [TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p)]
    assert p_value(counts, exact_distribution(model, warpers)) > SMALLEST_P
    warpers[0] = TemperatureLogitsWarper(1.3 * temperature)
    assert p_value(counts, exact_distribution(model, warpers)) < SMALLEST_P


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_tokens_of_transformers(top_p):
    scores = 3 * torch.randn((6, 5, 300), generator=torch.Generator().manual_seed(0))
    expected = TopPLogitsWarper(top_p)(None, scores.reshape(-1, 300)).view_as(scores)
    assert torch.equal(within_top_p(scores, torch.tensor(1 - top_p)), expected)
    assert torch.equal(within_top_p(scores, torch.tensor(0.0)), scores)


def test_cancelled_answer_frees_its_row(target, draft):
    answers = Answers(target, draft, rows=1)
    with answers.engine as engine:
        grown = threading.Event()
        endless = Completion([5, 6], CompletionSettings(200), None, lambda each: grown.set())
        engine.submit(endless)
        assert grown.wait(60)
        endless.cancel()
        answers.compare(some_prompts(2))
        assert endless.finish_reason == "cancelled" and len(endless.tokens) < 200


def test_failure_ends_running_answers_and_no_others(target, draft):
    answers = Answers(target, draft, rows=2)
    engine, forward = answers.engine, answers.engine.settings.model.forward
    with engine:
        answers.compare(some_prompts(2))
        engine.settings.model.forward = lambda *args, **kwargs: 1 / 0
        failed = answers.ask(some_prompts(1))
        assert failed[0].finish_reason == "error" and "ZeroDivisionError" in failed[0].error
        engine.settings.model.forward = forward
        answers.compare(some_prompts(3))
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(Completion([5], CompletionSettings(1), None))


def test_failure_in_the_last_round_of_an_answer_ends_it(target, draft):
    answers = Answers(target, draft, rows=1)
    with answers.engine:
        failed = answers.ask([([5, 6], 1)], logprobs=VOCABULARY + 1)  # found out after the token was added
        assert failed[0].finish_reason == "error" and len(failed[0].tokens) == 1
        answers.compare(some_prompts(2))


def test_answer_that_cannot_be_delivered_leaves_the_others_alone(target, draft):
    answers = Answers(target, draft, rows=4)
    with answers.engine as engine:
        undelivered = engine.submit(Completion([5, 6], CompletionSettings(200), None, lambda each: 1 / 0))
        answers.compare(some_prompts(3))
    assert undelivered.finish_reason == "cancelled" and len(undelivered.tokens) < 200


def test_closing_at_once_fails_what_is_left(target, draft):
    engine = Answers(target, draft, rows=1).engine
    with engine:
        left = [engine.submit(Completion([5, 6], CompletionSettings(200), None)) for _ in range(3)]
        engine.close(drain=False)
    assert all(each.finish_reason == "error" and "closed" in each.error for each in left)


def test_bad_requests_and_models_are_refused(target, draft):
    engine = Answers(target, draft).engine
    for prompt in ([], [5] * 256):
        with pytest.raises(ValueError, match="a prompt of"):
            engine.submit(Completion(prompt, CompletionSettings(1), None))
    with pytest.raises(ValueError, match="attach it"):
        Engine(copy.deepcopy(target), None)
    with pytest.raises(ValueError, match="context"):
        Engine(specbranch(copy.deepcopy(target), draft), None, max_length=1000)
    other = specbranch(llama(1), noisy_copy(target, 0.2, 1))
    other.generation_config.no_repeat_ngram_size = 2
    with pytest.raises(ValueError, match="no_repeat_ngram_size"):
        Engine(other, None)
    candidates = PromptLookupCandidateGenerator(max_length=64)
    with pytest.raises(ValueError, match="CandidateGenerator"):
        Engine(specbranch(copy.deepcopy(target), candidates), None)


def test_stop_strings_and_logprobs():
    target, draft, tokenizer = load_demo_pair()
    prompts = ["def add(a, b):\n    return a", "import os\nimport sys\n"]
    with Engine(specbranch(target, draft), tokenizer, rows=2) as engine:
        wanted = CompletionSettings(24, ends=engine.ends, logprobs=3)
        plain = engine.complete(prompts, wanted)
        stop = plain[1].text()[5:8]
        stopped = engine.complete(prompts, CompletionSettings(24, stop=(stop, "never"), ends=engine.ends))[1]
    assert stopped.text() == plain[1].text()[: plain[1].text().find(stop)] and stopped.finish_reason == "stop"
    assert stopped.tokens == plain[1].tokens[: len(stopped.tokens)] and len(stopped.tokens) < 24
    for answer in plain:
        assert answer.text() == tokenizer.decode(answer.tokens, skip_special_tokens=True)
        with torch.no_grad():
            logits = target(torch.tensor([answer.prompt + answer.tokens])).logits[0, len(answer.prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        for at, found in enumerate(answer.logprobs):
            assert found.token == answer.tokens[at] and len(found.top) == 3
            for token, value in ((found.token, found.logprob), *found.top):
                assert value == pytest.approx(float(expected[at, token]), abs=1e-3)
        assert len(answer.logprobs) == len(answer.tokens)
