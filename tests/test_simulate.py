"""The replay counts what the engine counts, and predictions add up the costs of its rounds."""

from collections import Counter
from dataclasses import replace
from functools import partial
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specbranch import SpecBranchConfig, load_demo_pair, specbranch
from hf_specbranch.bench.prompts import python_prompts
from hf_specbranch.planning.agreement import typical_agreement
from hf_specbranch.planning.simulate import (
    ABSENT,
    Agreement,
    Round,
    StepCosts,
    effective_config,
    load_agreements,
    predict,
    record_agreement,
    replay,
    save_agreements,
)

from .models import slowly

BRANCHING = partial(SpecBranchConfig, policy="specbranch")
SETTINGS = {
    "vanilla, fixed length": SpecBranchConfig(policy="vanilla", confidence_threshold=0.0, max_draft_length=5),
    "vanilla": SpecBranchConfig(policy="vanilla"),
    "pearl": SpecBranchConfig(policy="pearl", max_draft_length=4),
    "specbranch": BRANCHING(),
    "specbranch, rejection branches": BRANCHING(max_rejection_branches=6, confidence_threshold=0.1),
    "specbranch, many rejection branches": SpecBranchConfig(
        "specbranch", max_rejection_branches=12, confidence_threshold=0.0
    ),
    "vanilla, tree leaves": SpecBranchConfig(policy="vanilla", tree_leaves=6, confidence_threshold=0.0),
    "specbranch, tree leaves": BRANCHING(max_rejection_branches=6, tree_leaves=4, confidence_threshold=0.1),
    "specbranch, wide": BRANCHING(max_branches=8, max_draft_length=3, confidence_threshold=0.8),
}
QUICK = ("vanilla", "pearl", "specbranch", "specbranch, tree leaves")
NEW_TOKENS = 24


@pytest.fixture(scope="module", params=["good", pytest.param("weak", marks=pytest.mark.slow)])
def pair(request):
    target, draft, tokenizer = load_demo_pair(request.param)
    inputs = tokenizer(python_prompts()[1].prompt, return_tensors="pt")
    return specbranch(target), draft, inputs, record_agreement(target, draft, inputs, NEW_TOKENS)


@pytest.mark.parametrize("name", [name if name in QUICK else slowly(name) for name in SETTINGS])
def test_replay_counts_the_passes_and_steps_of_the_engine(name, pair):
    model, draft, inputs, agreement = pair
    model.generate(
        **inputs, assistant_model=draft, specbranch=SETTINGS[name], max_new_tokens=NEW_TOKENS, do_sample=False
    )
    stats, rounds = model.specbranch_stats, replay(agreement, SETTINGS[name])
    assert sum(each.committed for each in rounds) == NEW_TOKENS - 1 == stats.new_tokens - 1
    assert len(rounds) == pytest.approx(stats.target_forwards - 1, rel=0.05)
    steps = sum(each.steps_before + each.overlapped_steps for each in rounds)
    assert steps == pytest.approx(max(0, stats.draft_forwards - 1), rel=0.2)  # after a wrong token it is an estimate


def test_replay_counts_rejection_hits(pair):
    model, draft, inputs, agreement = pair
    settings = BRANCHING(max_rejection_branches=12, confidence_threshold=0.0, max_draft_length=6)
    model.generate(**inputs, assistant_model=draft, specbranch=settings, max_new_tokens=NEW_TOKENS, do_sample=False)
    stats = model.specbranch_stats
    waits = {
        count: sum(each.steps_before > 0 for each in replay(agreement, replace(settings, max_rejection_branches=count)))
        for count in (0, 12)
    }
    saved = waits[0] - waits[12]
    assert stats.rejection_hits > 0 and abs(saved - stats.rejection_hits) <= 2


def test_replay_counts_leaf_continuations(pair):
    model, draft, inputs, agreement = pair
    settings = SpecBranchConfig(
        "specbranch", max_rejection_branches=0, tree_leaves=12, confidence_threshold=0.0, max_draft_length=4
    )
    model.generate(**inputs, assistant_model=draft, specbranch=settings, max_new_tokens=NEW_TOKENS, do_sample=False)
    stats = model.specbranch_stats
    assert stats.tree_leaf_hits > 0
    assert len(replay(agreement, settings)) == pytest.approx(stats.target_forwards - 1, abs=1)
    assert len(replay(agreement, settings)) < len(replay(agreement, replace(settings, tree_leaves=0)))


def test_captured_stages_run_all_steps_and_commit_the_same():
    unsure = Agreement((0.9, 0.05) * 20, (0, 1) * 20, candidates=4, chances=((0.9, 0.1, 0, 0), (0.05,) * 4) * 20)
    settings = SpecBranchConfig(
        "specbranch", max_draft_length=4, max_branches=3, max_rejection_branches=0, confidence_threshold=0.08
    )
    eager, captured = (replay(unsure, settings, captured) for captured in (False, True))
    assert [each.committed for each in captured] == [each.committed for each in eager]
    assert {each[0:1] + each[3:] for each in captured} == {(4, 5, 3)}  # sent, overlapped steps, width
    assert {each.steps_before for each in captured} <= {0, 4}


def test_captured_drafts_that_stop_early_send_the_uncertain_token_and_take_no_further_step():
    unsure = Agreement((0.9, 0.9, 0.3) * 8, (0, 0, 0) * 8, candidates=4, chances=((0.9, 0.1, 0, 0),) * 24)
    settings = SpecBranchConfig("vanilla", max_draft_length=8, confidence_threshold=0.5, tree_leaves=0)
    rounds = replay(unsure, settings, captured=True)
    # The first round begins at the second token: 0.9 and 0.3 are drafted, and the target adds one.
    assert [(each.sent, each.committed, each.steps_before) for each in rounds[:2]] == [(8, 3, 2), (8, 3, 2)]
    whole = replay(unsure, replace(settings, confidence_threshold=0.05), captured=True)
    assert {each.steps_before for each in whole} == {8}
    # Before a branch point the token is not sent, although its step has run.
    ahead = replay(unsure, replace(settings, policy="specbranch"), captured=True)
    assert (ahead[0].committed, ahead[0].steps_before) == (2, 2)


@pytest.mark.parametrize("policy", ["autoregressive", "vanilla"])
def test_captured_lookups_propose_as_many_tokens_as_they_may(policy):
    """Elsewhere a lookup takes what pays, which is fewer."""
    copied = replace(perfect(46), lookups=(14,) * 46)
    settings = SpecBranchConfig(policy, max_draft_length=4, prompt_lookup_num_tokens=14, tree_leaves=0)
    committed = [replay(copied, settings, captured)[0].committed for captured in (True, False)]
    assert committed == [15, 8]


def test_captured_drafts_that_stop_by_cost():
    """They take a step as long as the product of their confidences, here 0.9 each, is above what it costs in tokens."""
    sure = Agreement((0.9,) * 61, (0,) * 61, candidates=4, chances=((0.9, 0.1, 0, 0),) * 61)
    settings = SpecBranchConfig("vanilla", max_draft_length=8, confidence_threshold="cost", tree_leaves=0)
    for least_chance, steps in ((0.0, 8), (0.7, 4), (0.85, 2), (1.0, 1)):
        rounds = replay(sure, settings, captured=True, least_chance=least_chance)
        assert (rounds[0].steps_before, rounds[0].committed) == (steps, steps + 1)
    eager = replay(sure, settings, least_chance=0.85)
    assert eager == replay(sure, replace(settings, confidence_threshold=0.6))


def test_an_expensive_draft_that_stops_by_cost_is_predicted_to_draft_less():
    settings = SpecBranchConfig("vanilla", max_draft_length=8, confidence_threshold="cost", tree_leaves=0)
    texts = [typical_agreement(4)]
    steps, speeds = [], []
    for step in (1e-5, 1e-3, 3e-3):
        costs = StepCosts(target_pass=0.01, draft_step=step)
        found = predict(texts, settings, costs, captured=True)
        steps.append(found.draft_steps_per_pass)
        speeds.append(found.speedup)
        for fixed in (0.2, 0.6):
            other = predict(texts, replace(settings, confidence_threshold=fixed), costs, captured=True)
            assert found.speedup > 0.97 * other.speedup
    assert steps == sorted(steps, reverse=True) and speeds == sorted(speeds, reverse=True)
    assert steps[0] > 5 and steps[2] < 3


def test_effective_config_of_auto():
    auto = SpecBranchConfig()
    numbers = [
        (found.max_draft_length, found.confidence_threshold, found.max_rejection_branches)
        for found in (
            effective_config(auto),
            effective_config(auto, captured=True),
            effective_config(auto, captured=True, cheap=False),
        )
    ]
    assert numbers == [(8, 0.4, 0), (8, 0.02, 12), (4, 0.02, 4)]
    assert effective_config(SpecBranchConfig(policy="pearl"), captured=True).max_rejection_branches == 0


def test_recordings_round_trip_through_files(pair, tmp_path):
    save_agreements([pair[3]], tmp_path / "recording.json")
    assert load_agreements(tmp_path / "recording.json") == [pair[3]]
    (tmp_path / "other.json").write_text('{"policy": "pearl"}')
    with pytest.raises(ValueError, match="other.json: no recording of agreement"):
        load_agreements(tmp_path / "other.json")


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_rejection_rank_equals_sorting_all_likely_rejections(data):
    """A draft of fixed length ends at its first wrong token, or one token later if a tree leaf holds the right one."""
    length, leaves = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    chance = st.sampled_from((0.0, 0.1, 0.2, 0.3, 0.6))
    chances = [tuple(sorted(data.draw(st.tuples(*[chance] * 4)), reverse=True)) for _ in range(length + 3)]
    rank = data.draw(st.integers(1, 3))
    wrong = data.draw(st.integers(1, length))
    ranks = [0] * wrong + [rank] + [0] * (length + 2 - wrong)
    text = Agreement(tuple(each[0] for each in chances), tuple(ranks), 4, tuple(chances))
    rejections = sorted(
        (prod(each[0] for each in chances[1 : 1 + place]) * chances[1 + place][other], place, other)
        for place in range(length)
        for other in (1, 2, 3)
    )
    place, *_ = (nth for nth, (*_, at, other) in enumerate(reversed(rejections)) if (at, other) == (wrong - 1, rank))
    saved = place < leaves and rejections[-1 - place][0] > 0
    plan = SpecBranchConfig("vanilla", length, confidence_threshold=0.0, tree_leaves=leaves)
    assert replay(text, plan)[0].committed == wrong + saved


def test_costs_of_counted_rounds():
    rounds = [Round(4, 5, 1, 5, 3), Round(4, 2, 0, 5, 3), Round(4, 5, 1, 5, 3)]
    assert COSTS.seconds(Counter(rounds)) == pytest.approx(COSTS.seconds(rounds))
    assert COSTS.seconds(rounds) == pytest.approx(sum(COSTS.seconds([each]) for each in rounds))


def test_recording_gives_the_agreement_rate(pair):
    model, draft, inputs, agreement = pair
    text = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, specbranch=False)
    before = inputs["input_ids"].shape[1]
    guesses = draft(text).logits[0, before - 1 : -1].argmax(-1)
    right = (guesses == text[0, before:]).float().mean().item()
    assert agreement.rate == pytest.approx(right)
    assert agreement.rate <= agreement.within(4) <= agreement.within(8) <= 1
    assert Agreement.from_dict(agreement.to_dict()) == agreement


def perfect(tokens=41, confidence=0.9):
    return Agreement((confidence,) * tokens, (0,) * tokens, candidates=4)


def hopeless(tokens=41, confidence=0.9):
    return Agreement((confidence,) * tokens, (ABSENT,) * tokens, candidates=4)


COSTS = StepCosts(target_pass=0.010, target_token=0.0, draft_step=0.001, draft_branch=0.0005)


def test_autoregressive_decoding_takes_one_pass_per_token():
    prediction = predict([perfect()], SpecBranchConfig(policy="autoregressive"), COSTS)
    assert (
        prediction.tokens_per_second == pytest.approx(100)
        and prediction.speedup == pytest.approx(1)
        and prediction.tokens_per_pass == 1
    )


def test_perfect_draft_commits_all_and_the_bonus_token():
    prediction = predict([perfect()], SpecBranchConfig(policy="vanilla", max_draft_length=4), COSTS)
    assert prediction.tokens_per_pass == 5 and prediction.speedup == pytest.approx(5 * 10 / 14)


def test_hopeless_draft_is_predicted_slower():
    for policy in ("vanilla", "pearl", "specbranch"):
        prediction = predict([hopeless()], SpecBranchConfig(policy=policy, max_draft_length=4), COSTS)
        assert prediction.speedup < 1 and prediction.tokens_per_pass == 1


def test_overlap_hides_drafting_up_to_the_pass():
    rounds = [Round(sent=4, committed=5, steps_before=1, overlapped_steps=5, width=3)]
    serial, overlapped = COSTS.seconds(rounds), COSTS.on_gpus(2).seconds(rounds)
    assert serial == pytest.approx(0.001 + 0.010 + 5 * 0.002) and overlapped == pytest.approx(0.001 + 0.010)
    assert COSTS.on_gpus(3).seconds(rounds) == pytest.approx(overlapped) and COSTS.on_gpus(1) == COSTS


def test_prediction_follows_the_overlap_setting():
    two = COSTS.on_gpus(2)
    ahead = [predict([perfect()], SpecBranchConfig(overlap=overlap), two).speedup for overlap in (True, False)]
    assert ahead[0] > ahead[1]


def test_faster_draft_is_never_slower():
    speeds = [predict([perfect()], SpecBranchConfig(), COSTS.at_ratio(c)).speedup for c in (2, 5, 20, 100)]
    assert speeds == sorted(speeds) and COSTS.at_ratio(5).speed_ratio == pytest.approx(5)


def test_branches_save_waiting_for_a_new_draft():
    unsure_at_times = Agreement((0.9, 0.9, 0.3) * 14, (0, 0, 1) * 14, candidates=4)
    waits = {}
    for k in (1, 4):
        settings = BRANCHING(max_branches=k, confidence_threshold=0.5)
        waits[k] = sum(each.steps_before for each in replay(unsure_at_times, settings))
    assert waits[4] < waits[1] / 5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Agreement((0.1,), (), 4), "1 confidences and 0 ranks"),
        (lambda: StepCosts(target_pass=0), "expected a target_pass above 0"),
        (lambda: StepCosts(target_pass=1, hidden=2), "hidden=2: expected a number from 0 to 1"),
        (
            lambda: replay(perfect(), BRANCHING(max_branches=9)),
            "max_branches=9, but 4 candidates were recorded",
        ),
        (
            lambda: replay(perfect(), BRANCHING(max_rejection_branches=2)),
            "max_rejection_branches=2 and tree_leaves=0, but the rec",
        ),
        (lambda: Agreement((0.1, 0.2), (0, 0), 4, ((0.1,),)), "chances at 1 of 2 tokens"),
        (lambda: predict([perfect(1)], SpecBranchConfig(), COSTS), "record at least two new tokens"),
        (lambda: COSTS.at_ratio(0), "ratio=0"),
    ],
)
def test_invalid_values_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()
