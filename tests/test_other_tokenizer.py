"""Drafts with another tokenizer: shared tokens, and text that is encoded again."""

import copy

import pytest
import torch

from hf_specbranch import specbranch
from hf_specbranch.decoding import draft_state, reencoded, shared_vocabulary
from hf_specbranch.decoding.lookup import PassTimes
from hf_specbranch.decoding.shared_vocabulary import MOST_PIECES
from hf_specbranch.vocabularies import Translation, Vocabulary, translation_for

from .models import assert_counts_add_up, attached, llama, prompt, slowly
from .sampling import SMALLEST_P
from .sources import DraftSourceTests, draft_is_worth, repetitive_pair
from .two_tokenizers import SENTENCES, letters, metaspace_tokenizer, pair, prompts, tokenizers, with_other_letters

GREEDY = {"max_new_tokens": 24, "do_sample": False}


class TestSharedVocabulary(DraftSourceTests):
    source = shared_vocabulary.NAME

    def arguments(self, draft):
        drafts = {"max_draft_length": 3, "confidence_threshold": 0.3, "draft_sampling": "sample"}
        return {**with_other_letters(draft), "specbranch": {"policy": "specbranch", "overlap": False, **drafts}}

    def sampling_p_value(self, samples=3_000):
        return super().sampling_p_value(samples)

    def test_tokens_that_were_not_drawn_from_q_are_noticed(self, monkeypatch):
        """Planted fault: the draft draws from a flatter distribution than it says."""
        honest = draft_state.draw
        monkeypatch.setattr(draft_state, "draw", lambda q, generator: honest(q**0.3, generator))
        assert self.sampling_p_value() < SMALLEST_P


class TestReencodedText(DraftSourceTests):
    source = reencoded.NAME

    def arguments(self, draft):
        settings = {"policy": "vanilla", "max_draft_length": 3, "draft_sampling": "greedy"}
        return {**with_other_letters(draft), "specbranch": settings}

    def sampling_p_value(self, samples=3_000):
        return super().sampling_p_value(samples)


@pytest.mark.parametrize("static", [slowly(False), True], ids=["eager", "static"])
def test_lookup_beside_shared_tokens(static, request, monkeypatch):
    if static:
        request.getfixturevalue("static_stages")
    monkeypatch.setattr(PassTimes, "seconds", lambda self, count: 1.0)
    draft_is_worth(2.0, monkeypatch)
    target, draft = repetitive_pair()
    settings = {"policy": "vanilla", "confidence_threshold": 0.1, "prompt_lookup_num_tokens": 4}
    model, asked = attached(target), {**prompt(2, length=12, vocabulary=12), "max_new_tokens": 40, "do_sample": False}
    out = model.generate(**asked, **with_other_letters(draft), specbranch=settings)
    assert torch.equal(out, target.generate(**asked))
    assert set(model.specbranch_stats.sources) == {"lookup", shared_vocabulary.NAME}


# ---- real tokenizers


def both(target_tokenizer, draft_tokenizer):
    return {"tokenizer": target_tokenizer, "assistant_tokenizer": draft_tokenizer}


@pytest.mark.compat
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("policy", "rows", "static"),
    [
        *(("auto", 4, True), ("pearl", 1, False), ("specbranch", 4, True)),
        *(slowly("auto", 1, False), slowly("pearl", 4, True), slowly("specbranch", 1, False)),
    ],
)
def test_greedy_text_is_that_of_plain_generate(policy, rows, static, request):
    if static:
        request.getfixturevalue("static_stages")
    target, draft, *two = pair()
    model = specbranch(copy.deepcopy(target), draft)
    asked = {**prompts(rows), **GREEDY}
    out = model.generate(**asked, **both(*two), specbranch={"policy": policy})
    assert torch.equal(out, target.generate(**asked))
    stats = model.specbranch_stats
    assert_counts_add_up(stats)
    name = reencoded.NAME if policy == "auto" else shared_vocabulary.NAME
    assert set(stats.sources) == {name} and stats.num_accepted_tokens > stats.new_tokens / 4


def test_sampled_calls_draw_shared_tokens():
    target, draft, *two = pair()
    model = specbranch(target, draft, tokenizer=two[0], assistant_tokenizer=two[1])
    model.generate(**prompts(2), max_new_tokens=12, do_sample=True)
    assert set(model.specbranch_stats.sources) == {shared_vocabulary.NAME}


@pytest.mark.parametrize("policy", ["auto", slowly("pearl")])
def test_a_wrong_translation_costs_acceptance_alone(policy, monkeypatch):
    """Planted fault: tokens are translated into their neighbours. The text stays, and the statistics show it."""
    target, draft, *two = pair()
    asked, rates = {**prompts(4), **GREEDY, **both(*two), "assistant_model": draft}, []
    asked |= {"specbranch": {"policy": policy}}
    expected = target.generate(**prompts(4), **GREEDY)
    for wrong in (False, True):
        model = attached(target)
        if wrong:
            translation = translation_for(model, draft, *two)
            words = [token for token in translation.to_draft if len(translation.target.data[token] or b"") > 1]
            shifted = {ours: translation.to_draft[other] for ours, other in zip(words, words[1:] + words[:1])}
            translation.to_draft |= shifted
            for ours, theirs in shifted.items():
                translation.draft.data[theirs] = translation.target.data[ours]
        assert torch.equal(model.generate(**asked), expected)
        rates.append(model.specbranch_stats.draft_acceptance_rate)
    assert rates[1] < rates[0] / 2


class Watched:
    """Shows what a draft source has proposed."""

    def __init__(self, part, check):
        self.part, self.check = part, check

    def __getattr__(self, name):
        return getattr(self.part, name)

    def propose(self, feedback, reached):
        proposed = self.part.propose(feedback, reached)
        self.check(self.part, proposed)
        return proposed


def random_draft():
    return llama(seed=4, vocabulary=len(tokenizers()[1]), eos=None, sharpness=2.0)


@pytest.mark.parametrize(("policy", "rows"), [("vanilla", 1), ("specbranch", 3)])
def test_q_is_that_of_a_draft_which_has_read_the_text_token_by_token(policy, rows):
    """Tokens that the draft does not have are read as several, in every row at other places."""
    target, draft, (ours, theirs) = llama(seed=1, vocabulary=330, eos=None, sharpness=0.5), random_draft(), tokenizers()
    translation = Translation(Vocabulary(ours, 330), Vocabulary(theirs, len(theirs)))
    pairs = sorted(translation.to_draft.items())
    shared, by_draft = (list(each) for each in zip(*pairs))
    seen = {"tokens": 0, "pieces": 0}

    def check(part, proposed):
        text = part.text
        for row in range(rows):
            real = part.attention[row].tolist()
            committed = text.ids[row, : text.lengths[row]].tolist()
            begin = text.prompt_length - 1
            prompt = [token for token, is_real in zip(committed[:begin], real) if is_real]
            pieces = [translation.pieces(token)[-MOST_PIECES:] for token in committed[begin:]]
            read = translation.prompt(prompt) + sum(pieces, [])
            seen["pieces"] += sum(len(each) > 1 for each in pieces)
            for index in range(int(proposed.length[row])):
                q = proposed.q[row, index]
                logits = draft(torch.tensor([read])).logits[0, -1, by_draft]
                torch.testing.assert_close(q[shared], logits.softmax(-1), rtol=2e-3, atol=1e-5)
                read.append(translation.to_draft[int(proposed.tokens[row, index])])
                seen["tokens"] += 1

    model, settings = attached(target), {"policy": policy, "max_draft_length": 3, "confidence_threshold": 0.0}
    torch.manual_seed(3)
    model.generate(
        **prompts(rows), max_new_tokens=16, do_sample=True, top_k=0, assistant_model=draft, **both(ours, theirs),
        specbranch={**settings, "draft_sampling": "sample"},
        speculation_observer=lambda parts: parts._replace(drafter=Watched(parts.drafter, check)),
    )  # fmt: skip
    assert seen["tokens"] > 10 and seen["pieces"] > 10


def test_drafts_are_what_the_draft_says_after_the_text_in_its_own_tokens():
    target, draft, *two = pair()
    checked = []

    def check(part, proposed):
        for text in part.rows:
            for at in range(text.base + text.right, len(text.tokens)):
                likeliest = draft(torch.tensor([text.tokens[:at]])).logits[0, -1].argmax()
                assert int(likeliest) == text.tokens[at]
                checked.append(at)
            assert part.translation.draft.bytes_of(text.tokens[text.base :])[: len(text.text)] == text.text

    attached(target).generate(
        **prompts(3), **GREEDY, assistant_model=draft, **both(*two),
        speculation_observer=lambda parts: parts._replace(drafter=Watched(parts.drafter, check)),
    )  # fmt: skip
    assert len(checked) > 10


def test_tokens_are_compared_by_their_bytes():
    ours, theirs = (Vocabulary(each, len(each)) for each in tokenizers())
    translation = Translation(ours, theirs)
    for text in SENTENCES:
        tokens = ours.tokenizer(text)["input_ids"]
        assert ours.bytes_of(tokens) == text.encode() and ours.encode(text.encode()) == tokens
        assert translation.prompt(tokens) == theirs.tokenizer(text)["input_ids"]
        assert theirs.bytes_of(sum(map(translation.pieces, tokens), [])) == text.encode()
    assert ours.pieces("世".encode()[:2]) and ours.encode("世".encode()[:2]) == []
    assert translation.to_draft[ours.end] == theirs.end and ours.special["<pad>"] in translation.to_draft
    assert 0.5 < translation.sharing.of_target < 1.0


def test_tokenizers_that_put_a_space_before_a_text():
    vocabulary = Vocabulary(metaspace_tokenizer(), 400)
    assert vocabulary.adds_space and vocabulary.begin == [1]
    for text in ("ick", " quick", "dog sleeps", "\n", "Ω", ", and"):
        tokens = vocabulary.encode(text.encode())
        assert vocabulary.bytes_of(tokens) == text.encode(), text


# ---- how they are chosen


@pytest.mark.compat
@pytest.mark.matrix
def test_a_draft_with_another_tokenizer_is_named_by_its_folder(tmp_path):
    target, draft, *two = pair()
    for role, model, tokenizer in zip(("target", "draft"), (target, draft), two):
        model.save_pretrained(tmp_path / role)
        tokenizer.save_pretrained(tmp_path / role)
    model = attached(target)
    model.name_or_path = str(tmp_path / "target")
    specbranch(model, draft=str(tmp_path / "draft"))
    assert torch.equal(model.generate(**prompts(2), **GREEDY), target.generate(**prompts(2), **GREEDY))
    assert set(model.specbranch_stats.sources) == {reencoded.NAME}
    model.name_or_path = ""
    with pytest.raises(ValueError, match="vocabulary sizes differ .*: pass the target's tokenizer= and the draft's"):
        specbranch(model, draft=str(tmp_path / "draft"))  # the target's tokenizer is nowhere


def test_tokenizers_belong_to_the_draft_they_came_with():
    target, draft, *two = pair()
    both_tokenizers = {"tokenizer": two[0], "assistant_tokenizer": two[1]}
    model = specbranch(copy.deepcopy(target), draft, **both_tokenizers, policy="vanilla")
    model.generate(**prompts(1), **GREEDY, assistant_model=copy.deepcopy(target))
    assert set(model.specbranch_stats.sources) == {"draft model"}


def test_what_is_missing_is_named():
    target, draft, *two = pair()
    with pytest.raises(ValueError, match="one tokenizer was given: pass assistant_tokenizer=, the draft's"):
        specbranch(target, draft, tokenizer=two[0])
    with pytest.raises(ValueError, match="have no token in common"):
        other = letters(["aaaaaaaa", "bbbbbbbb"])
        specbranch(target).generate(**prompts(1), assistant_model=draft, tokenizer=two[0], assistant_tokenizer=other)
