"""Greedy output is plain `generate()`'s, token for token, whatever is drafted and however."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .models import POLICIES, assert_counts_add_up, attached, config, llama, noisy_copy, prompt, slowly


@functools.cache
def pair(kind, seed):
    """(plain target, attached target, draft)."""
    target = llama(seed=seed)
    drafts = {
        "equal": lambda: target,
        "close": lambda: noisy_copy(target, noise=0.1, seed=seed + 1),
        "near": lambda: noisy_copy(target, noise=0.3, seed=seed + 1),
        "stranger": lambda: llama(seed=seed + 100, hidden=16, layers=1),
    }
    return target, attached(target), drafts[kind]()


CASES = {
    "kind": st.sampled_from(["equal", "close", "near", "stranger"]),
    "model_seed": st.integers(0, 2),
    "prompt_seed": st.integers(0, 50),
    "rows": st.integers(1, 4),
    "length": st.integers(1, 12),
    "policy": st.sampled_from(POLICIES),
    "overlap": st.booleans(),
    "gamma": st.integers(1, 8),
    "k": st.integers(1, 6),
    "outcomes": st.sampled_from([0, 0, 1, 4, 9]),
    "tree_leaves": st.sampled_from([0, 0, 1, 3, 8]),
    "epsilon": st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]),
}


def check(case):
    target, model, draft = pair(case["kind"], case["model_seed"])
    inputs = prompt(case["rows"], case["length"], case["prompt_seed"])
    more = {"overlap": case["overlap"], "max_rejection_branches": case["outcomes"], "tree_leaves": case["tree_leaves"]}
    settings = config(case["policy"], case["gamma"], case["k"], case["epsilon"], **more)
    expected = target.generate(**inputs, do_sample=False, max_new_tokens=case["new_tokens"])
    got = model.generate(
        **inputs, do_sample=False, max_new_tokens=case["new_tokens"], assistant_model=draft, specbranch=settings
    )
    assert torch.equal(got, expected)
    stats = model.specbranch_stats
    assert_counts_add_up(stats)
    assert stats.new_tokens == sum(new_tokens_of(row) for row in expected[:, inputs["input_ids"].shape[1] :])


def new_tokens_of(row, eos=2):
    """A row's tokens up to its end-of-sequence token."""
    ends = (row == eos).nonzero()
    return int(ends[0]) + 1 if len(ends) else len(row)


@settings(max_examples=32, deadline=None, derandomize=True)
@given(st.fixed_dictionaries({**CASES, "new_tokens": st.integers(1, 24)}))
def test_output_equals_plain_generate(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(st.fixed_dictionaries({**CASES, "new_tokens": st.integers(1, 40)}))
def test_output_equals_plain_generate_in_many_cases(case):
    check(case)


@pytest.mark.parametrize("policy", [*map(slowly, ("autoregressive", "vanilla", "pearl")), "specbranch"])
def test_both_loops_do_the_same_work(policy, target, draft):
    model, inputs = attached(target), prompt(2)
    runs = []
    for overlap in (False, True):
        settings = config(policy, overlap=overlap)
        out = model.generate(**inputs, max_new_tokens=40, do_sample=False, assistant_model=draft, specbranch=settings)
        counts = model.specbranch_stats
        runs.append((out.tolist(), counts.num_draft_tokens, counts.num_accepted_tokens, counts.target_forwards))
    assert runs[0] == runs[1]


def test_a_draft_equal_to_the_target_is_always_right(target):
    model = attached(target)
    out = model.generate(
        **prompt(), max_new_tokens=33, min_new_tokens=33, do_sample=False, assistant_model=target,
        specbranch=config("vanilla", gamma=4, epsilon=0.0),
    )  # fmt: skip
    stats = model.specbranch_stats
    assert out.shape[1] == 7 + 33
    assert stats.rollback_tokens == 0
    assert stats.target_forwards == 1 + -(-32 // 5)  # the prompt, then five tokens a pass


def test_a_surviving_branch_is_not_drafted_again(target):
    """With a perfect draft every round's chain was drafted beside the round before."""
    model = attached(target)
    settings = config("specbranch", gamma=4, k=1, epsilon=0.0)
    model.generate(
        **prompt(), max_new_tokens=60, min_new_tokens=60, do_sample=False, assistant_model=target, specbranch=settings
    )
    stats = model.specbranch_stats
    assert stats.rollback_tokens <= 4 and stats.branch_hit_rate == 1.0
    assert stats.num_draft_tokens <= 60 + 2 * 4
