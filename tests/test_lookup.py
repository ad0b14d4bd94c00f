"""Lookup drafts: found in the text and in a corpus, alone and beside a draft model."""

import copy
from dataclasses import replace
from itertools import chain
from math import inf
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import GenerationConfig

from hf_specbranch import LookupCorpus, SpecBranchConfig, load_demo_pair, specbranch
from hf_specbranch.corpus import FORMAT
from hf_specbranch.decoding import acceptance, call_costs, lookup, row_takeover, verifier
from hf_specbranch.decoding.lookup import Lookup, PassTimes
from hf_specbranch.decoding.lookup_match import find_in_corpus, find_in_text, find_in_text_reference, longer_of
from hf_specbranch.decoding.loop import NoDraft
from hf_specbranch.decoding.several_sources import REPETITION, LookupBesideDraft
from hf_specbranch.decoding.stepwise_drafter import StepwiseDrafter
from hf_specbranch.decoding.text_index import MatchConfidence, TextIndex, best_length
from hf_specbranch.planning.costs import StepCosts

from .kernels import DEVICE, on_kernels, where_triton_runs
from .models import attached, config, llama, prompt, slowly
from .sampling import QUICK_SAMPLES, SMALLEST_P
from .sources import DraftSourceTests, draft_is_worth, repetitive_pair

GREEDY = {"max_new_tokens": 40, "do_sample": False}


class TestLookup(DraftSourceTests):
    source = "lookup"

    @pytest.fixture(autouse=True)
    def always_proposes(self, monkeypatch):
        """A wider pass costs nothing, and a draft is worth little."""
        monkeypatch.setattr(PassTimes, "seconds", lambda self, count: 1.0)
        draft_is_worth(0.2, monkeypatch)

    def arguments(self, draft):
        return {"prompt_lookup_num_tokens": 4}

    def test_accepting_without_a_look_at_the_target_is_noticed(self, monkeypatch):
        """Planted fault: the first looked-up token is always accepted."""
        honest = acceptance.accept_choices

        def generous(choices, draft_tokens, length, branches, at):
            if draft_tokens.shape[1]:
                choices[:, 0] = torch.where(length > 0, draft_tokens[:, 0], choices[:, 0])
            return honest(choices, draft_tokens, length, branches, at)

        monkeypatch.setattr(verifier, "accept_choices", generous)
        assert self.sampling_p_value(samples=3_000) < SMALLEST_P
        target, draft = repetitive_pair()
        out, _, asked = self.generated(2, target, draft, do_sample=False)
        assert not torch.equal(out, target.generate(**asked))


def takes_turns(monkeypatch):
    """Let lookups and drafts take turns."""
    turns = chain.from_iterable(count * [1] + [0] for count in (0, 3, 15, *(3 * [2, 4, 6, 3, 5])))
    monkeypatch.setattr(LookupBesideDraft, "_looks_up", lambda self: self.lookup.choose() and 4 * next(turns))
    monkeypatch.setattr(MatchConfidence, "expected", lambda self, length, count: [0.0, *range(1, count + 1)])


class TestLookupBesideADraft(TestLookup):
    def arguments(self, draft):
        settings = SpecBranchConfig(
            policy="vanilla", max_draft_length=3, prompt_lookup_num_tokens=4, confidence_threshold=0.2
        )
        return {"assistant_model": draft, "specbranch": settings}

    @pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
    def test_both_draft_and_the_model_reads_what_was_looked_up(self, static, request, monkeypatch):
        """The target itself as the draft: it agrees with every token as long as it has read the text before it."""
        if static:
            request.getfixturevalue("static_stages")
        draft_is_worth(1.0, monkeypatch)
        target, _ = repetitive_pair()
        out, stats, asked = self.generated(1, target, copy.deepcopy(target), do_sample=False)
        assert torch.equal(out, target.generate(**asked))
        counts = stats.sources["draft model"]
        assert stats.sources["lookup"]["rounds"] > 2 and counts["rounds"] > 2
        assert counts["accepted"] == counts["drafted"]

    @pytest.mark.parametrize("rows", [1, slowly(3)])
    @pytest.mark.parametrize("threshold", [0.02, 0.5], ids=["whole", "stepwise"])
    def test_a_captured_draft_catches_up(self, threshold, rows, static_stages, monkeypatch):
        """However many tokens were committed without it; the draft is the target itself, as above."""
        starts_early = self.draft_that_catches_up(threshold, rows, monkeypatch)
        assert starts_early == {threshold < 0.1}  # a host that waits for each step knows the text in which it looks

    @where_triton_runs
    def test_a_draft_begins_before_the_host_knows_the_result(self, request, monkeypatch):
        """If a lookup follows, its first step has read the text, and nothing of it is sent."""
        if DEVICE == "cpu":
            request.getfixturevalue("static_stages")
        begun, begin = [], StepwiseDrafter.begin
        monkeypatch.setattr(StepwiseDrafter, "begin", lambda self, *given: begun.append(1) or begin(self, *given))
        self.draft_that_catches_up(0.5, 1, monkeypatch, DEVICE)
        assert len(begun) > 5

    def draft_that_catches_up(self, threshold, rows, monkeypatch, device="cpu"):
        """Generate with lookups and drafts in turns; return in which rounds the next may start early."""
        takes_turns(monkeypatch)
        starts_early, propose = set(), LookupBesideDraft.propose

        def propose_and_note(self, *given):
            starts_early.add(self.same_every_round)
            return propose(self, *given)

        monkeypatch.setattr(LookupBesideDraft, "propose", propose_and_note)
        target, _ = repetitive_pair()
        target.to(device)
        settings = SpecBranchConfig(
            policy="vanilla", max_draft_length=3, prompt_lookup_num_tokens=4, confidence_threshold=threshold
        )
        inputs = {name: value.to(device) for name, value in prompt(rows, length=12, vocabulary=12).items()}
        asked = {**inputs, "max_new_tokens": 150, "do_sample": False}
        model = attached(target)
        out = model.generate(**asked, assistant_model=copy.deepcopy(target), specbranch=settings)
        assert torch.equal(out, target.generate(**asked))
        counts, looked_up = model.specbranch_stats.sources["draft model"], model.specbranch_stats.sources["lookup"]
        assert looked_up["rounds"] > 15 and counts["rounds"] > 5
        assert counts["accepted"] == counts["drafted"]
        return starts_early

    @pytest.mark.parametrize("threshold", [0.02, 0.5], ids=["whole", "stepwise"])
    def test_warm_up_captures_how_a_draft_catches_up(self, threshold, graph_runners, monkeypatch):
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)  # there is no GPU to wait for
        target, _ = repetitive_pair()
        model, draft = specbranch(copy.deepcopy(target)), copy.deepcopy(target)
        settings = SpecBranchConfig(
            policy="vanilla",
            max_draft_length=3,
            prompt_lookup_num_tokens=4,
            confidence_threshold=threshold,
            kernels=True,
        )
        warmed = dict(max_length=200, progress=False, specbranch=settings, assistant_model=draft)
        assert model.warm_up_specbranch(**warmed).graphs_captured > 5
        takes_turns(monkeypatch)
        asked = {**prompt(1, length=12, vocabulary=12), "max_new_tokens": 150, "do_sample": False}
        out = model.generate(**asked, assistant_model=draft, specbranch=settings)
        assert torch.equal(out, target.generate(**asked))
        assert model.specbranch_stats.sources["lookup"]["rounds"] > 15
        assert model.specbranch_stats.graphs_captured == 0

    @pytest.mark.parametrize("static", [slowly(False), True], ids=["eager", "static"])
    def test_looked_up_tokens_may_follow_a_tree_leaf(self, static, request, monkeypatch):
        """A leaf that became text was read in a scratch slot, and is read again whatever drafts next."""
        if static:
            request.getfixturevalue("static_stages")
        draft_is_worth(1.0, monkeypatch)
        target, draft = repetitive_pair()
        leaves = replace(self.arguments(draft)["specbranch"], tree_leaves=4, confidence_threshold=0.0)
        model, hits = attached(target), 0
        for seed in range(3):
            asked = {**prompt(2, 12, seed=seed, vocabulary=12), "max_new_tokens": 60, "do_sample": False}
            out = model.generate(**asked, assistant_model=draft, specbranch=leaves)
            assert torch.equal(out, target.generate(**asked))
            hits += model.specbranch_stats.tree_leaf_hits
        assert hits > 4 and model.specbranch_stats.sources["lookup"]["rounds"] > 2


def test_a_row_with_another_text_has_missed_none_of_it():
    """However long the text was when lookup took over, and whatever the row read before."""
    source = LookupBesideDraft.__new__(LookupBesideDraft)
    source.drafter = source.lookup = NoDraft.__new__(NoDraft)
    for left, expected in (([90, 70], [90, 8]), ([], [])):
        source.left = left
        row_takeover._take_draft(source, 1, range(8))
        assert source.left == expected


def test_a_row_with_another_text_finds_matches_of_the_same_length():
    text = SimpleNamespace(new=[[]], ids=torch.tensor([[3, 4]]), prompt_length=2, row_tokens=lambda: [3, 4])
    lookup = Lookup(text, None, (4,), 12, None, PassTimes(lambda count: 1.0, measures=False), shortest=2)
    row_takeover._take_lookup(lookup, 0, [7, 8, 7])
    assert lookup.rows[0].index.match(4).length == 0  # it ends with one token that occurred before


@pytest.mark.parametrize(("threshold", "first"), [(0.02, 4 - 2 * 3), (0.5, 3 - 2 * 2), ("cost", 3 - 2 * 2)])
def test_what_a_draft_is_worth_before_any_was_made(threshold, first, static_stages, monkeypatch):
    """Half of a whole draft of eight, three quarters of one that stops half-way, less what the text makes meanwhile."""
    monkeypatch.setattr(call_costs, "predicted_costs", lambda *_: StepCosts(1.0, draft_step=0.25))
    worths, begin = [], LookupBesideDraft.prefill

    def prefill(self, length):
        worths.append(self._draft_worth(self.worth.speed()))
        begin(self, length)

    monkeypatch.setattr(LookupBesideDraft, "prefill", prefill)
    target, draft = repetitive_pair()
    settings = config("vanilla", gamma=8, epsilon=threshold, prompt_lookup_num_tokens=4)
    asked = {**prompt(length=12, vocabulary=12), "max_new_tokens": 20, "do_sample": False}
    out = attached(target).generate(**asked, assistant_model=draft, specbranch=settings)
    assert torch.equal(out, target.generate(**asked))
    assert worths == [pytest.approx(first + REPETITION)]


@pytest.mark.parametrize("step", [0.01, 2.0])
def test_a_draft_whose_steps_cost_more_than_they_bring_gives_way(step, target, draft, graph_runners, monkeypatch):
    """To a lookup, once that is captured, even if no match is likely."""
    monkeypatch.setattr(call_costs, "predicted_costs", lambda *_: StepCosts(1.0, draft_step=step))
    settings = config("vanilla", gamma=4, epsilon="cost", prompt_lookup_num_tokens=4, kernels=True)
    once = prompt(length=12)
    asked = {name: torch.cat([value, value], dim=1) for name, value in once.items()} | GREEDY
    model = attached(target)
    model.generate(**asked, assistant_model=draft, specbranch=settings)  # captures the lookup
    monkeypatch.setattr(MatchConfidence, "expected", lambda self, length, count: [0.0] * (count + 1))
    out = model.generate(**asked, assistant_model=draft, specbranch=settings)
    assert torch.equal(out, target.generate(**asked))
    sources = model.specbranch_stats.sources
    if step < 1:
        assert list(sources) == ["draft model"]
    else:
        assert sources["draft model"]["rounds"] == 1  # the first, before the host has read the prompt


def test_a_seed_keeps_its_text_once_the_lookup_is_captured(target, draft, graph_runners, monkeypatch):
    """Also where a lookup takes the place of a draft that costs more than it brings."""
    monkeypatch.setattr(call_costs, "predicted_costs", lambda *_: StepCosts(1.0, draft_step=2.0))
    settings = config("vanilla", gamma=4, epsilon="cost", prompt_lookup_num_tokens=4, kernels=True)
    model, texts = attached(target), []
    for _ in range(3):
        torch.manual_seed(3)
        out = model.generate(
            **prompt(length=12), max_new_tokens=40, do_sample=True, assistant_model=draft, specbranch=settings
        )
        texts.append((out.tolist(), model.specbranch_stats.sources))
    assert texts[0] == texts[1] == texts[2]
    assert texts[0][1]["lookup"]["rounds"] > 10


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_match_that_goes_on_is_followed_for_two_blocks(device, request, monkeypatch):
    """In captured stages over one row, once a pass over so many tokens is captured."""
    if device == "cpu":
        request.getfixturevalue("graph_runners")
    target = llama(seed=3, vocabulary=12, hidden=16, layers=2, sharpness=2.0, eos=None).to(device)
    model, longest = specbranch(copy.deepcopy(target)), []
    ids = prompt(length=12, vocabulary=12)["input_ids"].to(device)
    asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 200, "do_sample": False}
    expected = target.generate(ids, **asked)
    for most, enough in (("auto", inf), (15, 0.0), ("auto", inf), ("auto", 0.0), ("auto", inf)):
        monkeypatch.setattr(lookup, "CAPTURE_SECONDS", enough)
        own = SpecBranchConfig(prompt_lookup_num_tokens=most, kernels=True, runtime="graph")
        assert torch.equal(model.generate(ids, **asked, specbranch=own), expected)
        longest.append(len(model.specbranch_stats.acceptance_histogram) - 1)
    assert longest == [-1, 15, 15, 31, 31]


@pytest.mark.parametrize(("leaves", "lengths"), [(0, (15, 31)), (6, (14, 30))])
def test_looked_up_tokens_fill_blocks(leaves, lengths):
    own = SpecBranchConfig("vanilla", tree_leaves=leaves, prompt_lookup_num_tokens=lengths[-1])
    assert own.captured_lookups == lengths
    assert replace(own, prompt_lookup_num_tokens=4).captured_lookups == (4,)


class TestLookupBesideBranches(TestLookup):
    """Rows of a batch have drafts pending, so lookup takes part with one row only."""

    new_tokens = 40  # fewer do not repeat enough

    def arguments(self, draft):
        settings = SpecBranchConfig(
            policy="specbranch", max_draft_length=2, prompt_lookup_num_tokens=4, confidence_threshold=0.5
        )
        return {"assistant_model": draft, "specbranch": settings}

    @pytest.mark.parametrize("stages", ["eager", "static"])
    def test_greedy_text_is_that_of_plain_generate(self, stages, request):
        super().test_greedy_text_is_that_of_plain_generate(stages, 1, request)

    def sampling_p_value(self, samples=QUICK_SAMPLES):
        pytest.skip("one row at a time takes too long")

    def test_accepting_without_a_look_at_the_target_is_noticed(self):
        pytest.skip("the same verifier as above")


# ---- matches


@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=24),
    others=st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=3),
    longest=st.integers(1, 5),
    padding=st.integers(0, 3),
)
def test_host_and_device_find_the_same(text, others, longest, padding):
    corpus = LookupCorpus(others)
    index = TextIndex(longest, corpus)
    index.extend(text)
    expected = index.match(4)
    ids = torch.tensor([[9] * padding + text + [7, 7, 7]])
    asked = ids, torch.tensor([padding + len(text)]), torch.tensor([[padding]]), longest, 4
    found = longer_of(find_in_text(*asked), find_in_corpus(*asked, corpus.on(ids.device)))
    assert int(found.matched) == expected.length
    if expected.length:
        assert found.tokens[0, : int(found.length)].tolist() == expected.tokens


@on_kernels
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=3),
    st.integers(1, 12),
    st.integers(1, 9),
    st.integers(0, 3000),
)
def test_kernel_finds_the_same(texts, longest, count, filler):
    """The filler, without repetitions of three tokens, takes the text over several blocks."""
    texts = [text + [10 + token for token in range(filler)] + text for text in texts]
    size = max(map(len, texts)) + 3
    ids = torch.tensor([[9] * (size - 3 - len(text)) + text + [7, 7, 7] for text in texts], device=DEVICE)
    length = torch.full((len(texts),), size - 3, device=DEVICE)
    first = torch.tensor([[size - 3 - len(text)] for text in texts], device=DEVICE)
    found, expected = (find(ids, length, first, longest, count) for find in (find_in_text, find_in_text_reference))
    assert torch.equal(found.matched, expected.matched) and torch.equal(found.length, expected.length)
    some = expected.length > 0
    assert torch.equal(found.tokens[some], expected.tokens[some])


def test_the_longest_match_wins_then_the_latest():
    index = TextIndex()
    index.extend([1, 2, 3, 4, 9, 2, 3, 5, 8, 2, 3, 6, 1, 2, 3])
    assert index.match(1) == (3, [4])
    index = TextIndex()
    index.extend([2, 3, 5, 8, 2, 3, 6, 1, 2, 3])
    assert index.match(1) == (2, [6])


def test_a_periodic_text_is_continued():
    index = TextIndex()
    index.extend([4, 5, 6] * 3)
    assert index.match(7).tokens == [4, 5, 6, 4, 5, 6, 4]


def test_confidence_follows_what_was_right():
    confidence = MatchConfidence()
    for right in [True] * 20:
        confidence.observe(2, right)
        confidence.observe(3, False)
    assert confidence.chance(2) > 0.7 and confidence.chance(3) < 0.2
    cost = {0: 1.0, 4: 1.6}.__getitem__
    assert best_length([confidence.expected(6, 4)], cost, (4,)) == 4
    assert best_length([confidence.expected(3, 4)], cost, (4,)) == 0


def followed(text):
    """A lookup whose prompt is one token, and that has followed a text."""
    ids = SimpleNamespace(new=[text], ids=torch.tensor([[0]]), prompt_length=1, row_tokens=lambda: [0])
    lookup = Lookup(ids, None, (4,), 12, None, PassTimes(lambda count: 1.0, measures=False))
    lookup.follow()
    return lookup


def test_runs_in_the_text_decide_how_far_a_match_is_trusted():
    """Where a match is right once but not twice, long matches bring little; where a text repeats itself, they do."""
    copied = [5, 6, 7, 8, 9] * 8
    apart = [token for n in range(20) for token in (5, 6, 100 + n)]  # 6 follows on 5, and then something new
    lookups = [followed(text) for text in (copied, apart)]
    long, short = (lookup.confidence.expected(12, 4) for lookup in lookups)
    assert long[1] >= short[1] > 0.9 and long[4] > 3.5 and short[4] < 2.6
    assert followed([5, 6, 7]).confidence.in_runs.seen == MatchConfidence().in_runs.seen  # no match was right


# ---- a corpus


def test_a_corpus_is_saved_and_loaded(tmp_path):
    corpus = LookupCorpus([[5, 6, 7, 8, 9, 10], [1, 2, 3]])
    corpus.save(tmp_path / "corpus.safetensors")
    loaded = LookupCorpus.load(tmp_path / "corpus.safetensors")
    assert len(loaded) == len(corpus) == 9
    assert loaded.match([0, 6, 7, 8], 5) == corpus.match([0, 6, 7, 8], 5) == (3, [9, 10])
    assert loaded.match([8, 9, 10], 5).length == 0  # nothing follows, and sequences are apart
    with pytest.raises(ValueError, match="nowhere.*no such file"):
        LookupCorpus.load(tmp_path / "nowhere")
    (tmp_path / "text").write_text("no corpus")
    with pytest.raises(ValueError, match="corpus .*text"):
        LookupCorpus.load(tmp_path / "text")
    save_file({"tokens": torch.tensor([5, 6, 7])}, tmp_path / "other", metadata={"format": FORMAT})
    with pytest.raises(ValueError, match=r"LookupCorpus.save\(\) wrote"):
        LookupCorpus.load(tmp_path / "other")


@pytest.mark.parametrize("sequence", [[1, -1], [2**31], [1.5], [True], ["a"], "text", 5, None, torch.tensor(5)])
def test_a_corpus_has_sequences_of_token_ids(sequence):
    with pytest.raises(ValueError, match="a sequence of the corpus"):
        LookupCorpus([[1, 2], sequence])


def test_a_corpus_of_another_tokenizer_is_refused_before_any_work():
    target, _ = repetitive_pair()
    own, other = LookupCorpus([[3, 11]]), LookupCorpus([[3, 4, 5], [6, 12]])
    with pytest.raises(ValueError, match="the corpus has the token 12, and the target has tokens 0 to 11"):
        specbranch(target, corpus=other)
    assert not hasattr(target, "specbranch_stats")
    model = specbranch(target, corpus=own)
    model.resize_token_embeddings(8)
    with pytest.raises(ValueError, match="the corpus has the token 11, and the target has tokens 0 to 7"):
        model.generate(**prompt(vocabulary=8), **GREEDY)


@pytest.mark.parametrize("static", [slowly(False), True], ids=["eager", "static"])
def test_an_earlier_answer_makes_the_next_one_faster(static, tmp_path, request):
    if static:
        request.getfixturevalue("static_stages")
    target, _, tokenizer = load_demo_pair()
    inputs = tokenizer("def area(width, height):", return_tensors="pt")
    model = specbranch(target)
    first = model.generate(**inputs, **GREEDY)
    alone = model.specbranch_stats.target_forwards
    LookupCorpus(first.tolist()).save(tmp_path / "answers")
    model = specbranch(target, draft="lookup", corpus=tmp_path / "answers")
    assert torch.equal(model.generate(**inputs, **GREEDY), first)
    assert model.specbranch_stats.target_forwards < alone / 2


def test_texts_are_tokenized():
    _, _, tokenizer = load_demo_pair()
    corpus = LookupCorpus.from_texts(["return the area of a circle", "import os"], tokenizer)
    tokens = tokenizer("return the area of a circle", add_special_tokens=False)["input_ids"]
    assert corpus.match(tokens[:4], 2).tokens == tokens[4:6]


# ---- how it is chosen


def test_prompts_that_repeat_themselves_take_fewer_passes():
    target, _, tokenizer = load_demo_pair()
    lines = (f"    '{name}': {number},\n" for number, name in enumerate("abcdefgh"))
    inputs = tokenizer("".join(lines), return_tensors="pt")
    model = specbranch(target)
    out = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    assert torch.equal(out, model.generate(**inputs, max_new_tokens=48, do_sample=False, specbranch=False))
    model.generate(**inputs, max_new_tokens=48, do_sample=False)
    assert model.specbranch_stats.mean_acceptance_length > 1.5


@pytest.mark.compat
@pytest.mark.parametrize("where", ["argument", "config"])
def test_lookup_as_transformers_spells_it(where, target, draft):
    asked = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 2}
    model = specbranch(copy.deepcopy(target), draft=draft)
    if where == "config":
        asked = {"generation_config": GenerationConfig(**GREEDY, **asked, pad_token_id=0)}
    else:
        asked |= GREEDY
    out = model.generate(**prompt(2), **asked)  # transformers' own takes one row
    assert torch.equal(out, target.generate(**prompt(2), **GREEDY))
    assert set(model.specbranch_stats.sources) <= {"lookup"} and model.specbranch_stats.draft_forwards == 0


def test_without_lookup_there_is_none():
    target, _ = repetitive_pair()
    model = attached(target)
    model.generate(**prompt(vocabulary=12), **GREEDY, specbranch={"prompt_lookup_num_tokens": 0})
    assert not model.specbranch_stats.sources


def test_statistics_are_readable():
    target, draft = repetitive_pair()
    model = specbranch(copy.deepcopy(target), draft=[draft, "lookup"], policy="vanilla", max_draft_length=3)
    model.generate(**prompt(vocabulary=12), **GREEDY)
    lines = str(model.specbranch_stats).splitlines()
    assert lines[0].startswith("40 tokens, ") and lines[0].endswith("policy vanilla")
    assert any(line.startswith("lookup: ") and "% of the text; " in line for line in lines)
    accepted = sum(counts["accepted"] for counts in model.specbranch_stats.sources.values())
    assert accepted == model.specbranch_stats.num_accepted_tokens


def test_drafts_may_be_named(tmp_path):
    target, draft = repetitive_pair()
    draft.half().save_pretrained(tmp_path)
    model = specbranch(copy.deepcopy(target), draft=[str(tmp_path), "lookup"], policy="vanilla")
    own = model._specbranch_memory.draft
    assert own.dtype == target.dtype and not own.training
    out = model.generate(**prompt(vocabulary=12), **GREEDY)
    assert torch.equal(out, target.generate(**prompt(vocabulary=12), **GREEDY))
    assert model.specbranch_stats.policy == "vanilla"
    specbranch(model, draft="lookup", policy="auto")
    model.generate(**prompt(vocabulary=12), **GREEDY)
    assert model.specbranch_stats.draft_forwards == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"draft": ["lookup", 3, 4]}, "one draft model at most"),
        ({"policy": "fast"}, "policy='fast'"),
        ({"corpus": "/nowhere/corpus"}, "no such file"),
        ({"corpus": "/"}, "corpus /: "),
        ({"max_matching_ngram_size": 0}, "max_matching_ngram_size=0"),
        ({"prompt_lookup_num_tokens": -1}, "prompt_lookup_num_tokens=-1"),
        ({"gamma": 3}, "unknown SpecBranchConfig settings"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_attached(arguments, words, target):
    model = copy.deepcopy(target)
    with pytest.raises(ValueError, match=words):
        specbranch(model, **arguments)
    assert type(model) is type(target)


def test_an_error_names_several_models_by_their_classes(target, draft):
    with pytest.raises(ValueError, match=r"draft=\[LlamaForCausalLM, 'lookup', LlamaForCausalLM\]: expected one"):
        specbranch(copy.deepcopy(target), draft=[draft, "lookup", draft])
