"""A batch whose size is not captured runs on the stages of a larger one, and nothing that a caller sees shows it."""

import copy
import math

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria

from hf_specbranch import SpeculationHook, specbranch
from hf_specbranch.decoding import row_padding
from hf_specbranch.decoding.lookup import PassTimes
from hf_specbranch.model_state import state_of
from hf_specbranch.runtime import idle_runners
from hf_specbranch.runtime.eager import EagerRunner

from .models import EOS, PAD, assert_counts_add_up, config, noisy_copy, prompt
from .sources import draft_is_worth, repetitive_pair

CPU = torch.device("cpu")
COUNTS = (
    "new_tokens", "row_passes", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "rollback_tokens",
    "wasted_branch_tokens", "branch_points", "branch_hits", "rejection_points", "rejection_hits", "tree_leaves",
    "tree_leaf_hits", "acceptance_histogram", "target_forwards", "draft_forwards",
)  # fmt: skip


class Calls:
    """Batches of any size, whose rows are padded and end early, with a plain model and its twin under SpecBranch."""

    def __init__(self, target):
        idle_runners.free_all(CPU)
        self.plain, self.model = copy.deepcopy(target), specbranch(copy.deepcopy(target))
        self.draft = noisy_copy(target, 0.25, 1)

    @property
    def stats(self):
        return self.model.specbranch_stats

    def arguments(self, rows, seed=0, **more):
        ends = {"eos_token_id": [EOS, *range(10, 13)], "pad_token_id": PAD}
        return {**prompt(rows, length=9, seed=seed), **ends, "max_new_tokens": 8, "do_sample": False, **more}

    def run(self, arguments, policy="vanilla", **settings):
        own = config(policy, kernels=True, **settings)
        return self.model.generate(**arguments, assistant_model=self.draft, specbranch=own)

    def compare(self, rows, policy="vanilla", seed=0, settings=None, **more):
        """Generate with both; return the rows that were added."""
        arguments = self.arguments(rows, seed, **more)
        got = self.run(arguments, policy, **(settings or {}))
        expected = self.plain.generate(**arguments)
        assert torch.equal(got, expected), (got, expected)
        assert_counts_add_up(self.stats)
        assert self.stats.new_tokens <= expected.numel() and self.stats.runtime == "graph"
        return self.stats.padding_rows


@pytest.fixture
def calls(target, graph_runners, monkeypatch):
    """However slow the machine is, padding never costs so much that a size is captured."""
    monkeypatch.setattr(row_padding, "CAPTURE_SECONDS", math.inf)
    return Calls(target)


def slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("policy", ["specbranch", *slow("autoregressive", "vanilla", "pearl", "auto")])
def test_smaller_batches_run_on_the_stages_of_a_larger_one(policy, calls):
    settings = {"tree_leaves": 3, "max_rejection_branches": 4} if policy == "specbranch" else {}
    assert calls.compare(8, policy, settings=settings) == 0 and calls.stats.graphs_captured
    for seed, rows in enumerate((7, 4, 8)):
        assert calls.compare(rows, policy, seed, settings) == 8 - rows
        # Other rounds than those before may come, or another plan.
        assert calls.stats.graphs_captured == 0 or policy not in ("autoregressive", "vanilla")
    assert {runner.purpose[0] for runner in state_of(calls.model).idle_runners} == {8}


@pytest.mark.parametrize("policy", ["autoregressive", "vanilla"])
def test_lookup_follows_no_padding_rows(policy, graph_runners, monkeypatch):
    """Alone, and beside a draft model."""
    monkeypatch.setattr(row_padding, "CAPTURE_SECONDS", math.inf)
    monkeypatch.setattr(PassTimes, "seconds", lambda self, count: 1.0)  # a wider pass costs nothing
    draft_is_worth(0.2, monkeypatch)
    calls = Calls(repetitive_pair()[0])
    for rows, padding in ((4, 0), (3, 1)):
        ids = prompt(rows, length=9, vocabulary=10)["input_ids"]
        own = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "eos_token_id": None, "max_new_tokens": 24}
        assert calls.compare(rows, policy, settings={"prompt_lookup_num_tokens": 3}, **own) == padding
        assert calls.stats.sources["lookup"]["rounds"] > 0


@pytest.mark.parametrize("policy", ["specbranch", *slow("autoregressive", "vanilla")])
def test_statistics_do_not_count_padding_rows(policy, calls):
    settings = {"max_rejection_branches": 4} if policy == "specbranch" else {"tree_leaves": 2}
    counts = []
    for sizes in ((5,), (8, 5)):
        idle_runners.free_all(CPU)
        padding = [calls.compare(rows, policy, seed=3, settings=settings) for rows in sizes]
        counts.append({name: getattr(calls.stats, name) for name in COUNTS})
    assert padding == [0, 3] and counts[0] == counts[1]


def test_next_larger_size_is_taken_up_to_twice_the_rows(calls):
    for rows in (3, 8, 20):
        assert calls.compare(rows, max_new_tokens=3) == 0
    assert [calls.compare(rows, max_new_tokens=3) for rows in (1, 2, 4, 6, 10)] == [0, 1, 4, 2, 10]
    assert calls.compare(9, max_new_tokens=3) == 0  # 20 are more than twice as many


def test_a_size_of_its_own_is_preferred(calls):
    assert calls.compare(3) == 0 and calls.compare(4) == 0 and calls.compare(3) == 0
    assert calls.stats.graphs_captured == 0


def test_size_that_comes_often_is_captured_in_the_end(calls, monkeypatch):
    """Once padding has cost as much as a capture."""
    calls.compare(4)
    assert calls.compare(3) == 1
    cost = state_of(calls.model).padding_seconds[3]
    assert 0 < cost < calls.stats.total_seconds
    monkeypatch.setattr(row_padding, "CAPTURE_SECONDS", cost)
    assert calls.compare(3) == 0 and calls.stats.graphs_captured
    assert calls.compare(2) == 1 and calls.stats.graphs_captured == 0  # now on the stages of 3 rows


def test_stages_with_other_processors_are_not_taken(calls):
    """They would have to be captured for the larger size too."""
    calls.compare(4)
    assert calls.compare(3, repetition_penalty=1.3) == 0
    calls.compare(4, repetition_penalty=1.3, seed=1)
    assert calls.compare(2, repetition_penalty=1.3, seed=1) == 1  # the 3 rows above
    assert calls.compare(2, seed=2) == 2


def test_stages_with_other_layers_are_not_taken(calls):
    calls.compare(4)
    arguments = calls.arguments(3)
    own = config("vanilla", kernels=False)
    calls.model.generate(**arguments, assistant_model=calls.draft, specbranch=own)
    assert calls.stats.padding_rows == 0


def test_draft_whose_size_is_not_captured(calls):
    calls.compare(4)
    idle_runners.drop(calls.draft)
    assert calls.compare(3) == 0


@pytest.mark.parametrize("mask", [*slow("right"), "middle"])
def test_padding_that_spans_cannot_say(mask, calls):
    calls.compare(4)
    arguments = calls.arguments(3)
    hidden = slice(7, 9) if mask == "right" else slice(3, 5)
    arguments["attention_mask"][1:, hidden] = 0
    assert torch.equal(calls.run(arguments), calls.plain.generate(**arguments))


def test_cache_that_is_returned_has_the_rows_of_the_call(calls):
    calls.compare(4)
    arguments = calls.arguments(3, return_dict_in_generate=True)
    got, expected = calls.run(arguments), calls.plain.generate(**arguments)
    assert calls.stats.padding_rows == 1 and torch.equal(got.sequences, expected.sequences)
    for one, other in zip(got.past_key_values.layers, expected.past_key_values.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys, atol=1e-4, rtol=1e-4)


# ---- calls that would show it


class OneToken(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.index_fill(1, torch.tensor([5]), 9.0)


class Never(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Streamer:
    def __init__(self):
        self.shapes = []

    def put(self, value):
        self.shapes.append(tuple(value.shape))

    def end(self): ...


class Hook(SpeculationHook):
    settings = ()


VISIBLE = {
    "sampled": lambda calls: {"do_sample": True},
    "processor": lambda calls: {"logits_processor": [OneToken()]},
    "criterion": lambda calls: {"stopping_criteria": [Never()]},
    "stop time": lambda calls: {"max_time": 100.0},
    "streamer": lambda calls: {"streamer": Streamer()},
    "hook": lambda calls: {"speculation_hooks": [Hook()]},
    "scores": lambda calls: {"return_dict_in_generate": True, "output_scores": True},
    "hidden states": lambda calls: {"return_dict_in_generate": True, "output_hidden_states": True},
    "cache": lambda calls: {"past_key_values": filled_cache(calls)},
}


def filled_cache(calls):
    cache, ids = DynamicCache(config=calls.plain.config), calls.arguments(3)["input_ids"][:, :4]
    with torch.no_grad():
        calls.plain(ids, past_key_values=cache, use_cache=True)
    return cache


@pytest.mark.parametrize(
    "kind",
    ["sampled", "streamer", *slow(*sorted(VISIBLE.keys() - {"sampled", "streamer"}))],
)
def test_calls_that_would_show_padding_rows_have_none(kind, calls):
    for more in [{}, {"do_sample": True}][: 1 + (kind == "sampled")]:
        calls.run(calls.arguments(4, **more))
    arguments = calls.arguments(3, **VISIBLE[kind](calls))
    if kind == "cache":
        arguments["attention_mask"][:] = 1
    calls.run(arguments)
    assert calls.stats is not None and calls.stats.padding_rows == 0
    if kind == "streamer":
        assert set(arguments["streamer"].shapes) <= {(3, 9), (3,)}


def test_seeded_texts_do_not_depend_on_what_was_captured(calls):
    texts = []
    for others in ((), (4, 8)):
        idle_runners.free_all(CPU)
        for rows in others:
            calls.run(calls.arguments(rows, do_sample=True))
        torch.manual_seed(0)
        texts.append(calls.run(calls.arguments(3, do_sample=True)))
    assert torch.equal(*texts)


# ---- memory, warm-up


@pytest.mark.parametrize("after", [*slow(0), 20])
def test_memory_for_padding_rows_is_not_required(after, calls, monkeypatch):
    """It runs out for 4 rows, at once or in the middle of the text, but suffices for 3."""
    calls.compare(4, "vanilla")
    reserve, counted = EagerRunner.reserve, []

    def fail(self, rows, slots):
        counted.append(rows)
        if rows == 4 and len(counted) > after:
            raise torch.OutOfMemoryError("planted")
        return reserve(self, rows, slots)

    monkeypatch.setattr(EagerRunner, "reserve", fail)
    assert calls.compare(3, eos_token_id=EOS, max_new_tokens=12) == 0
    assert counted.count(4) > after and counted.count(3)


def test_warm_up_serves_the_sizes_in_between(calls, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)  # there is no GPU to wait for
    own = config("vanilla", kernels=True)
    done = calls.model.warm_up_specbranch(
        batch_sizes=(1, 4, 8), max_length=64, assistant_model=calls.draft, progress=False, specbranch=own
    )
    assert done.graphs_captured
    for rows in range(1, 9):
        assert calls.compare(rows, seed=rows, max_new_tokens=5) == {2: 2, 3: 1, 5: 3, 6: 2, 7: 1}.get(rows, 0)
        assert calls.stats.graphs_captured == 0, rows
