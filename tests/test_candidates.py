"""A user's `CandidateGenerator` as a draft source."""

import copy

import pytest
import torch
from transformers.generation import CandidateGenerator, PromptLookupCandidateGenerator

from hf_specbranch import specbranch
from hf_specbranch.decoding import candidates

from .models import attached, prompt, slowly
from .sampling import SMALLEST_P, exact_distribution, p_value, sampling_pair
from .sources import DraftSourceTests, draw_with, repetitive_pair

GREEDY = {"max_new_tokens": 30, "do_sample": False}


class BigramCandidates(CandidateGenerator):
    """Proposes what a model says after the last token alone: its likeliest tokens, or draws with their logits."""

    def __init__(self, model, draws=False, count=3):
        vocabulary = model.config.vocab_size
        with torch.no_grad():
            self.table = model(torch.arange(vocabulary)[:, None]).logits[:, 0] / 2  # [V, V]
        self.q, self.draws, self.count = self.table.softmax(-1), draws, count
        self.generator = torch.Generator().manual_seed(0)
        self.noise = torch.rand(100_000, generator=self.generator).tolist()
        self.sums = self.q.cumsum(-1).tolist()

    def next(self, last):
        if not self.draws:
            return int(self.table[last].argmax())
        if not self.noise:
            self.noise = torch.rand(100_000, generator=self.generator).tolist()
        number = self.noise.pop()
        return next((token for token, total in enumerate(self.sums[last]) if number < total), len(self.sums) - 1)

    def get_candidates(self, input_ids, **kwargs):
        tokens = input_ids[0].tolist()
        given = len(tokens)
        for _ in range(self.count):
            tokens.append(self.next(tokens[-1]))
        logits = self.logits(tokens[given - 1 : -1]) if self.draws else None
        input_ids.zero_()  # it owns what it is given
        return torch.tensor([tokens]), logits

    def logits(self, last):
        return self.table[last][None]


class FlatterLogits(BigramCandidates):
    """Planted fault: the tokens are not drawn from the logits that come with them."""

    def logits(self, last):
        return super().logits(last) / 3


class TestCandidates(DraftSourceTests):
    source = "BigramCandidates"

    def arguments(self, draft):
        return {"assistant_model": BigramCandidates(draft)}

    def sampling_p_value(self, samples=3_000):
        return super().sampling_p_value(samples)


class SometimesLogits(BigramCandidates):
    """Some rows of a batch get candidates with logits, others without."""

    def logits(self, last):
        return super().logits(last) if len(self.noise) % 2 else None


@pytest.mark.parametrize(
    ("kind", "static"), [slowly(BigramCandidates, False), (SometimesLogits, True), (FlatterLogits, False)]
)
def test_drawn_candidates_leave_the_targets_distribution(kind, static, request):
    if static:
        request.getfixturevalue("static_stages")
    model, draft = sampling_pair()
    counts = draw_with(model, {"assistant_model": kind(draft, draws=True)}, samples=3_000)
    assert model.specbranch_stats.sources[kind.__name__]["drafted"] > 0
    found = p_value(counts, exact_distribution(model)) < SMALLEST_P
    assert found == (kind is FlatterLogits)


@pytest.mark.compat
def test_transformers_own_generator_is_attached_and_detached():
    target, _ = repetitive_pair()
    asked = {**prompt(2, length=12, vocabulary=12), **GREEDY}
    model = specbranch(copy.deepcopy(target), draft=PromptLookupCandidateGenerator(max_length=99))
    assert torch.equal(model.generate(**asked), target.generate(**asked))
    assert "PromptLookupCandidateGenerator: " in str(model.specbranch_stats)
    specbranch(model, draft="lookup")
    model.generate(**asked)
    assert set(model.specbranch_stats.sources) <= {"lookup"}


class Recorded(BigramCandidates):
    def __init__(self, model):
        super().__init__(model)
        self.updates = []

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        self.updates.append((input_ids.clone(), scores.clone(), num_matches))


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
def test_the_generator_hears_what_became_of_its_candidates(static, request):
    if static:
        request.getfixturevalue("static_stages")
    target, draft = repetitive_pair()
    generator, asked = Recorded(draft), {**prompt(vocabulary=12), **GREEDY, "repetition_penalty": 1.2}
    out = attached(target).generate(**asked, assistant_model=generator)
    assert torch.equal(out, target.generate(**asked))
    assert 1 + sum(matches + 1 for *_, matches in generator.updates) == GREEDY["max_new_tokens"]
    assert torch.equal(generator.updates[-1][0], out)
    for ids, scores, matches in generator.updates:
        assert torch.equal(scores[0, : matches + 1].argmax(-1), ids[0, -matches - 1 :])
    assert any(matches for *_, matches in generator.updates)


WRONG = {
    "no tuple": (lambda ids, new: torch.cat([ids, new], 1), "expected .candidate_input_ids, candidate_logits."),
    "no tensor": (lambda ids, new: ([1, 2], None), r"\[1, 2\]: expected token ids"),
    "floats": (lambda ids, new: (torch.cat([ids, new], 1).float(), None), "torch.float32 of shape"),
    "one dimension": (lambda ids, new: (torch.cat([ids, new], 1)[0], None), r"expected token ids of shape \(1, len"),
    "two rows": (lambda ids, new: (torch.cat([ids, new], 1).repeat(2, 1), None), "expected token ids of shape"),
    "new tokens alone": (lambda ids, new: (new, None), "do not begin with the 7 tokens"),
    "another text": (lambda ids, new: (torch.cat([ids + 1, new], 1), None), "do not begin with"),
    "a token too high": (lambda ids, new: (torch.cat([ids, new + 48], 1), None), "token 51: the target has .* to 47"),
    "a negative token": (lambda ids, new: (torch.cat([ids, new - 9], 1), None), "token -6"),
    "other logits": (lambda ids, new: (torch.cat([ids, new], 1), torch.zeros(1, 2, 9)), r"expected \(1, 2, 48\)"),
    "NaN": (lambda ids, new: (torch.cat([ids, new], 1), torch.full((1, 2, 48), torch.nan)), "probability under its"),
}


class Faulty(CandidateGenerator):
    def __init__(self, answer):
        self.answer = answer

    def get_candidates(self, input_ids, **kwargs):
        return self.answer(input_ids, torch.tensor([[3, 4]]))


@pytest.mark.parametrize("fault", WRONG)
def test_faulty_generators_are_named(fault, target):
    answer, words = WRONG[fault]
    model = attached(target)
    with pytest.raises(ValueError, match=f"Faulty.get_candidates returned .*{words}"):
        model.generate(**prompt(length=6), max_new_tokens=9, assistant_model=Faulty(answer), do_sample=True)


@pytest.mark.parametrize("answer", [lambda ids, new: (ids, None), lambda ids, new: (ids, torch.zeros(1, 0, 48))])
def test_without_candidates_the_target_decodes_alone(answer, target):
    model, asked = attached(target), {**prompt(2), **GREEDY}
    assert torch.equal(model.generate(**asked, assistant_model=Faulty(answer)), target.generate(**asked))
    assert not model.specbranch_stats.sources


def test_more_candidates_than_there_is_room_for(target):
    model, asked = attached(target), {**prompt(), **GREEDY}
    many = Faulty(lambda ids, new: (torch.cat([ids, new.repeat(1, 99)], 1), None))
    assert torch.equal(model.generate(**asked, assistant_model=many), target.generate(**asked))
    assert len(model.specbranch_stats.acceptance_histogram) <= candidates.MOST + 1


def test_what_a_generator_cannot_do_is_said(target, draft):
    generator, model = BigramCandidates(draft), attached(target)
    with pytest.raises(ValueError, match='which a CandidateGenerator cannot do: choose "auto" or "vanilla"'):
        model.generate(**prompt(), assistant_model=generator, specbranch={"policy": "pearl"})
    with pytest.raises(ValueError, match="BigramCandidates drafts alone"):
        specbranch(model, draft=[generator, "lookup"])
    with pytest.raises(ValueError, match="transformers' own decoding takes no BigramCandidates"):
        model.generate(**prompt(), assistant_model=generator, specbranch=False)
    generator.requires_model_outputs = True
    with pytest.raises(ValueError, match="BigramCandidates requires the target's outputs"):
        specbranch(model, draft=generator)
