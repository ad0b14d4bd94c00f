"""Statistics that add up, settings that round-trip."""

import dataclasses
import json
import re
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specbranch import SpecBranchConfig, SpecBranchStats
from hf_specbranch.runtime.overlap import Overlap

from .models import POLICIES, assert_counts_add_up, attached, config, prompt, slowly

CONFIGS = st.builds(
    SpecBranchConfig,
    policy=st.sampled_from(POLICIES),
    max_draft_length=st.one_of(st.just("auto"), st.integers(1, 64)),
    confidence_threshold=st.one_of(st.sampled_from(["auto", "cost"]), st.floats(0, 1)),
    max_branches=st.integers(1, 32),
    length_head=st.one_of(st.none(), st.just("org/head")),
    overlap=st.booleans(),
    draft_sampling=st.sampled_from(["auto", "greedy", "sample"]),
    memory_budget=st.floats(0, 1),
    prefix_reuse=st.booleans(),
)


@given(CONFIGS)
def test_settings_round_trip_through_json(settings):
    assert SpecBranchConfig.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


def test_settings_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SpecBranchConfig().policy = "pearl"


OLD_SETTINGS = {"max_outcomes": "max_rejection_branches", "runners_up": "tree_leaves"}
OLD_STATISTICS = {
    "outcome_points": "rejection_points",
    "outcome_hits": "rejection_hits",
    "outcome_hit_rate": "rejection_hit_rate",
    "runners_up": "tree_leaves",
    "runner_up_hits": "tree_leaf_hits",
}


@pytest.mark.parametrize(("old", "new"), OLD_SETTINGS.items())
def test_old_names_of_settings_are_accepted(old, new):
    for make in (lambda: SpecBranchConfig(**{old: 3}), lambda: SpecBranchConfig.from_dict({old: 3})):
        with pytest.warns(FutureWarning, match=f"SpecBranchConfig.{old} is now called {new}"):
            settings = make()
        assert settings == SpecBranchConfig(**{new: 3}) and new in settings.to_dict() and old not in settings.to_dict()
    with pytest.warns(FutureWarning, match=f"is now called {new}"):
        assert getattr(settings, old) == 3


@pytest.mark.parametrize(("old", "new"), OLD_SETTINGS.items())
def test_both_names_of_a_setting_are_refused(old, new):
    with pytest.raises(ValueError, match=f"given both {old} and {new}"):
        SpecBranchConfig(**{old: 3, new: 4})


@pytest.mark.parametrize(("old", "new"), OLD_STATISTICS.items())
def test_old_names_of_statistics_are_read(old, new):
    stats = SpecBranchStats(rejection_points=4, rejection_hits=2, tree_leaves=6, tree_leaf_hits=1)
    with pytest.warns(FutureWarning, match=f"SpecBranchStats.{old} is now called {new}"):
        assert getattr(stats, old) == getattr(stats, new)
    with pytest.raises(AttributeError, match="no attribute 'leaves'"):
        stats.leaves  # noqa: B018


def test_runtime_compile_warns_and_runs_as_auto():
    with pytest.warns(FutureWarning, match='runtime="compile" is gone'):
        settings = SpecBranchConfig(runtime="compile")
    assert settings.runtime == "auto" and SpecBranchConfig.from_dict(settings.to_dict()) == settings


def test_a_head_object_cannot_be_written_down():
    with pytest.raises(ValueError, match="is an object and cannot be written to JSON"):
        SpecBranchConfig(length_head=lambda survivor: survivor.length).to_dict()


def test_a_head_may_be_a_path():
    assert SpecBranchConfig(length_head=Path("folder") / "head").to_dict()["length_head"] == str(Path("folder/head"))


def test_statistics_cover_every_named_figure(target, draft):
    model = attached(target)
    out = model.generate(
        **prompt(2), max_new_tokens=30, do_sample=False, assistant_model=draft, return_dict_in_generate=True
    )
    assert out.stats is model.specbranch_stats
    names = (
        "new_tokens target_forwards draft_forwards num_drafts num_draft_tokens num_accepted_tokens "
        "mean_acceptance_length draft_acceptance_rate acceptance_histogram rollback_tokens rollback_rate "
        "branch_points branch_hits branch_hit_rate wasted_branch_tokens hidden_fraction time_to_first_token "
        "tokens_per_second"
    )
    figures = out.stats.to_dict()
    assert set(names.split()) <= set(figures)
    json.dumps(figures)
    assert 0 < figures["time_to_first_token"] <= figures["total_seconds"]
    assert 0 <= figures["hidden_fraction"] <= 1


def test_counts_follow_the_definitions(target):
    """A perfect draft of fixed length: every figure can be said in advance."""
    model = attached(target)
    model.generate(
        **prompt(), max_new_tokens=1 + 5 * 6, min_new_tokens=31, do_sample=False, assistant_model=target,
        specbranch=config("vanilla", gamma=5, epsilon=0.0),
    )  # fmt: skip
    stats = model.specbranch_stats
    assert (stats.new_tokens, stats.target_forwards) == (31, 6)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (5, 25, 25)
    assert stats.acceptance_histogram == [0, 0, 0, 0, 0, 5]
    assert stats.mean_acceptance_length == 31 / 6
    assert (stats.rollback_rate, stats.draft_acceptance_rate) == (0.0, 1.0)


def test_a_stranger_is_rolled_back(target, stranger):
    model = attached(target)
    model.generate(**prompt(), max_new_tokens=30, do_sample=False, assistant_model=stranger, specbranch=config("pearl"))
    stats = model.specbranch_stats
    assert_counts_add_up(stats)
    assert stats.rollback_rate > 0.8 and stats.wasted_branch_tokens == 0


def test_pearl_counts_what_it_drafted_ahead_as_rolled_back_and_specbranch_as_wasted(target, stranger):
    model, runs = attached(target), {}
    for policy in ("pearl", "specbranch"):
        model.generate(
            **prompt(), max_new_tokens=30, do_sample=False, assistant_model=stranger,
            specbranch=config(policy, epsilon=1.0, k=1),
        )  # fmt: skip
        runs[policy] = model.specbranch_stats
    assert runs["pearl"].rollback_tokens > 0 and runs["pearl"].wasted_branch_tokens == 0
    assert runs["specbranch"].rollback_tokens == 0 and runs["specbranch"].wasted_branch_tokens > 0


def test_captures_are_not_decoding():
    stats = SpecBranchStats(total_seconds=3.0, capture_seconds=2.5)
    assert stats.decoding_seconds == 0.5 == stats.to_dict()["decoding_seconds"]


def test_no_division_by_zero():
    figures = SpecBranchStats().to_dict()
    assert figures["rollback_rate"] == figures["tokens_per_second"] == 0.0


@pytest.mark.parametrize("policy", [slowly("vanilla"), "specbranch"])
def test_draft_seconds_are_the_time_spent_drafting(target, draft, policy):
    """On one CPU nothing is hidden: both models want the same cores."""
    model = attached(target)
    began, spent = [], []
    hooks = [
        draft.register_forward_pre_hook(lambda *_: began.append(time.perf_counter())),
        draft.register_forward_hook(lambda *_: spent.append(time.perf_counter() - began[-1])),
    ]
    settings = config(policy, overlap=policy == "specbranch")
    model.generate(**prompt(), max_new_tokens=40, do_sample=False, assistant_model=draft, specbranch=settings)
    for hook in hooks:
        hook.remove()
    stats = model.specbranch_stats
    assert sum(spent[2:]) <= stats.draft_seconds <= stats.total_seconds  # the first ones read the prompt
    assert stats.hidden_seconds == stats.hidden_fraction == 0 and "hidden" not in str(stats)


def test_drafting_during_a_pass_on_another_device_is_hidden():
    stats = SpecBranchStats()
    with Overlap(torch.device("cpu"), torch.device("meta"), stats) as overlap:
        result = overlap.start(time.sleep, 0.02)
        with overlap.working("branch"):
            time.sleep(0.01)
        result()
        with overlap.working("draft"):
            time.sleep(0.01)
        overlap.take()
    assert 0.005 < stats.hidden_seconds < 0.015 < stats.draft_seconds and "drafting hidden: " in str(stats)


def test_generation_leaves_gradient_mode_alone(target, draft):
    attached(target).generate(**prompt(), max_new_tokens=4, do_sample=False, assistant_model=draft)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vanilla", None, """there is no such file; for the policy pass {"policy": "vanilla"}"""),
        ("no.json", None, "there is no such file"),
        ("bad.json", "{", "Expecting property name"),
        ("list.json", "[1]", "expected a JSON object"),
        ("other.json", '{"gamma": 3}', "unknown SpecBranchConfig settings ['gamma']"),
    ],
)
def test_a_file_of_settings_that_is_none_is_named(name, content, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(f"settings {name}: {message}")):
        SpecBranchConfig.from_json_file(name)
