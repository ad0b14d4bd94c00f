"""Hooks decide how far to draft, how wide to fork and how much to keep; never what comes out."""

import pytest
import torch

from hf_specbranch import SpeculationHook
from hf_specbranch.decoding.hooks import (
    ConfidenceStop,
    DraftState,
    HookList,
    LengthHeadHook,
    Survivor,
    TopKBranches,
)
from hf_specbranch.runtime.overlap import shared_time

from .models import attached, config, prompt


def state(*confidence):
    rows = len(confidence)
    return DraftState(torch.zeros((rows, 4)), torch.ones(rows, dtype=torch.long), None, torch.tensor(confidence))


def survivor(*confidence):
    table = torch.tensor(confidence)
    rows, length = table.shape
    return Survivor(torch.zeros((rows, length)), torch.full((rows,), length), table, torch.zeros(rows), None)


def test_confidence_stops_drafting_and_cuts_survivors():
    hook = ConfidenceStop(0.5)
    assert hook.stop(state(0.4, 0.5, 0.6)).tolist() == [True, False, False]
    assert hook.keep(survivor([0.9, 0.4, 0.9], [0.9, 0.9, 0.9], [0.1, 0.9, 0.9])).tolist() == [1, 3, 0]


@pytest.mark.parametrize(("confidence", "width"), [(1.0, 1), (0.8, 1), (0.6, 2), (0.3, 4), (0.0, 6)])
def test_the_less_sure_the_wider(confidence, width):
    assert TopKBranches(6).fork(state(confidence)).tolist() == [width]


@pytest.mark.parametrize(("prediction", "kept"), [(0, 0), (1, 1), (2, 3)])
def test_head_overrules_confidence_unless_it_predicts_some(prediction, kept):
    head = LengthHeadHook(lambda survivor: torch.full_like(survivor.length, prediction))
    hooks = HookList([head, ConfidenceStop(0.5)])
    assert hooks.keep(survivor([0.9, 0.4, 0.9])).tolist() == [kept]


@pytest.mark.parametrize("value", [True, False])
def test_old_name_of_fresh_drafts_warns(value):
    class Keeper(SpeculationHook):
        fresh_lines = value

        def keep(self, survivor):
            return torch.zeros_like(survivor.length)

    with pytest.warns(FutureWarning, match="Keeper.fresh_lines is now called fresh_drafts"):
        hooks = HookList([Keeper()])
    fresh = survivor([0.9, 0.4])._replace(fresh=torch.tensor([True]))
    assert hooks.fresh_drafts is value and hooks.keep(fresh).tolist() == [0 if value else 2]


def test_the_first_opinion_counts():
    class Two(SpeculationHook):
        def fork(self, state):
            return torch.full_like(state.length, 2)

    assert HookList([Two(), TopKBranches(6)]).fork(state(0.0)).tolist() == [2]
    assert HookList([SpeculationHook()]).fork(state(0.0)).tolist() == [1]


def run(target, draft, **kwargs):
    model = attached(target)
    inputs = prompt(2)
    expected = target.generate(**inputs, max_new_tokens=30, do_sample=False)
    got = model.generate(**inputs, max_new_tokens=30, do_sample=False, assistant_model=draft, **kwargs)
    assert torch.equal(got, expected)
    return model.specbranch_stats


def test_a_users_hook_decides_without_touching_the_loop(target, draft):
    class NeverFork(SpeculationHook):
        def fork(self, state):
            return torch.ones_like(state.length)

    forked = run(target, draft, specbranch=config(epsilon=1.0))
    alone = run(target, draft, specbranch=config(epsilon=1.0), speculation_hooks=[NeverFork()])
    assert alone.wasted_branch_tokens < forked.wasted_branch_tokens


def test_a_length_head_may_be_any_callable(target, draft):
    seen = []

    def keep_all(survivor):
        seen.append(survivor)
        return torch.full_like(survivor.length, 2)

    cautious = run(target, draft, specbranch=config(epsilon=0.9))
    bold = run(target, draft, specbranch=config(epsilon=0.9), length_head=keep_all)
    assert seen and bold.target_forwards < cautious.target_forwards


def test_a_head_may_be_remembered_on_the_model(target, draft):
    from hf_specbranch import specbranch

    calls = []

    def head(survivor):
        calls.append(1)
        return torch.ones_like(survivor.length)

    model = specbranch(attached(target), draft=draft, head=head)
    model.generate(**prompt(), max_new_tokens=20, do_sample=False)
    assert calls


def test_features_are_those_of_the_last_verified_position(target, draft):
    class Reader(SpeculationHook):
        feature_layers = (1, 2)

        def __init__(self):
            self.seen = []

        def keep(self, survivor):
            self.seen.append((survivor.committed.clone(), survivor.features.clone()))
            return None

    reader, inputs = Reader(), prompt()
    model = attached(target)
    out = model.generate(
        **inputs, max_new_tokens=30, do_sample=False, assistant_model=draft, speculation_hooks=[reader],
        specbranch=config(epsilon=0.2),
    )  # fmt: skip
    with torch.no_grad():
        states = target(out, output_hidden_states=True).hidden_states
    whole = torch.stack([states[1], states[2]], dim=2)[0]  # [L, 2, H]
    assert reader.seen
    for committed, features in reader.seen:
        distance = (whole - features).abs().amax(dim=(1, 2))
        column = int(distance.argmin())
        assert distance[column] < 1e-3
        assert out[0, column + 1] == committed[0]  # the token chosen there is the one just committed


def test_shared_time_is_the_time_both_are_under_way():
    assert shared_time([(0, 2), (5, 9)], [(1, 6), (8, 12)]) == 1 + 1 + 1
    assert shared_time([], [(0, 1)]) == 0.0
