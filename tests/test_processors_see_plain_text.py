"""A user's processors and stopping criteria get the calls of plain `generate()`: the same texts, scores and order."""

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

from .models import EOS, PAD, POLICIES, VOCABULARY, attached, config, llama, noisy_copy, pairs, prompt, slowly

ENDS = [EOS, 11, 17, 23, 30, 41]  # many, so that rows end often and inside drafts


@pytest.fixture(scope="module")
def model(target):
    return attached(target)


class Recorder(LogitsProcessor):
    """Notes every call, and lets the whole batch decide which token is out of the question."""

    def __init__(self, log):
        self.log = log

    def __call__(self, input_ids, scores):
        self.log.append(("processor", input_ids.clone(), scores.clone()))
        banned = torch.bincount(input_ids.flatten(), minlength=scores.shape[1]).argmax()
        return scores.index_fill(1, banned, float("-inf"))


class RecordingCriterion(StoppingCriteria):
    """Notes every call, and ends a row at a token that ends no other text."""

    def __init__(self, log, token):
        self.log, self.token = log, token

    def __call__(self, input_ids, scores, **kwargs):
        shown = () if scores is None else tuple(scores)
        self.log.append(("criterion", input_ids.clone(), *shown))
        return input_ids[:, -1] == self.token


def assert_same_calls(ours, plain):
    assert [name for name, *_ in ours] == [name for name, *_ in plain]
    for (_, text, *scores), (_, expected, *expected_scores) in zip(ours, plain):
        assert torch.equal(text, expected)
        assert len(scores) == len(expected_scores)
        for mine, theirs in zip(scores, expected_scores):
            torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)


def run(model, inputs, with_criterion=False, **kwargs):
    """What a model generates, and what was called on the way."""
    log = []
    criteria = [RecordingCriterion(log, token=5)] if with_criterion else []
    kwargs = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": ENDS, "pad_token_id": PAD, **kwargs}
    out = model.generate(**inputs, logits_processor=[Recorder(log)], stopping_criteria=criteria, **kwargs)
    return out, log


@pytest.mark.parametrize("seed", [0, *map(slowly, (1, 2))])
@pytest.mark.compat
@pytest.mark.parametrize("rows", [slowly(1), slowly(2), 4])
@pytest.mark.parametrize(
    ("policy", "with_criterion"),
    [
        *pairs(["vanilla", "specbranch"], [False, True]),
        *(slowly(policy, each) for policy in ("autoregressive", "pearl") for each in (False, True)),
    ],
)
def test_calls_are_those_of_plain_generate(seed, with_criterion, policy, rows, target, model, draft):
    inputs = prompt(rows, seed=seed)
    expected, plain = run(target, inputs, with_criterion)
    got, ours = run(model, inputs, with_criterion, assistant_model=draft, specbranch=config(policy))
    assert torch.equal(got, expected)
    assert_same_calls(ours, plain)


@pytest.mark.parametrize("rows", [slowly(1), 3])
def test_criteria_are_shown_the_scores_of_finished_rows(rows, target, model, draft):
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    for seed in range(3):
        inputs = prompt(rows, seed=seed)
        expected, plain = run(target, inputs, True, **asked)
        got, ours = run(model, inputs, True, assistant_model=draft, specbranch=config(), **asked)
        assert torch.equal(got.sequences, expected.sequences)
        assert_same_calls(ours, plain)
        for name in ("scores", "logits"):
            torch.testing.assert_close(torch.stack(got[name]), torch.stack(expected[name]), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("seed", [0, *map(slowly, (1, 2))])
@pytest.mark.parametrize(("policy", "rows"), pairs(POLICIES, [1, 3]))
def test_sampling_shows_each_prefix_of_its_text_once(seed, policy, rows, target, model, draft):
    inputs = prompt(rows, seed=seed)
    torch.manual_seed(seed)
    settings = {"do_sample": True, "top_k": 0, "temperature": 1.5}
    got, ours = run(model, inputs, assistant_model=draft, specbranch=config(policy), **settings)
    assert len(ours) == got.shape[1] - 7
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(got[:, 7:])], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = target(input_ids=got, attention_mask=mask, position_ids=positions).logits
    for length, (_, text, scores) in enumerate(ours, start=7):
        assert torch.equal(text, got[:, :length])
        torch.testing.assert_close(scores, logits[:, length - 1], atol=1e-3, rtol=1e-3)


class Grammar(LogitsProcessor):
    """Knows nothing to say about a finished text, and offers forks."""

    def __init__(self, start, calls=0):
        self.start, self.calls = start, calls

    def __call__(self, input_ids, scores):
        assert not set(input_ids[0, self.start :].tolist()) & set(ENDS), "the text has ended"
        assert input_ids.shape[1] == self.start + self.calls, "a call is missing"
        self.calls += 1
        allowed = torch.arange(scores.shape[1]) % 4 == self.calls % 4
        return scores.masked_fill(~allowed, float("-inf"))

    def fork(self):
        return type(self)(self.start, self.calls)

    def rollback(self, n):
        self.calls -= n


class LonelyGrammar(Grammar):
    fork = rollback = None


@pytest.mark.compat
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        *pairs(["vanilla", "specbranch"], [Grammar, LonelyGrammar]),
        *(slowly(policy, kind) for policy in ("autoregressive", "pearl") for kind in (Grammar, LonelyGrammar)),
    ],
)
def test_a_grammar_is_never_shown_a_finished_text(policy, kind, target, model, draft):
    kwargs = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": ENDS, "pad_token_id": PAD}
    for seed in range(3):
        inputs = prompt(seed=seed)
        expected = target.generate(**inputs, **kwargs, logits_processor=[kind(7)])
        settings = config(policy, epsilon=0.0)
        got = model.generate(**inputs, **kwargs, logits_processor=[kind(7)], assistant_model=draft, specbranch=settings)
        assert torch.equal(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_calls_are_those_of_plain_generate_for_many_seeds(policy):
    for seed in range(40):
        target = llama(seed=seed)
        draft, model = noisy_copy(target, noise=0.1 + 0.1 * (seed % 3), seed=seed), attached(target)
        rows = 1 + seed % 5
        inputs, with_criterion = prompt(rows, seed=seed), bool(seed % 2)
        torch.manual_seed(seed)
        ends = torch.randint(1, VOCABULARY, (8,)).tolist()
        kwargs = {"eos_token_id": ends, "max_new_tokens": 25, "repetition_penalty": 1.1}
        if seed % 3 == 0:
            kwargs |= {"do_sample": True, "top_k": 1}  # a draw without a choice
        if seed % 7 == 0:
            kwargs["eos_token_id"] = None
        expected, plain = run(target, inputs, with_criterion, **kwargs)
        settings = config(policy, gamma=1 + seed % 6, k=1 + seed % 4)
        got, ours = run(model, inputs, with_criterion, assistant_model=draft, specbranch=settings, **kwargs)
        assert torch.equal(got, expected), seed
        assert_same_calls(ours, plain)
