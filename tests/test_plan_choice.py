"""Which plan is chosen, given costs and recordings of agreement; costs fitted to timings or predicted from sizes."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specbranch import SpecBranchConfig
from hf_specbranch.planning.agreement import typical_agreement
from hf_specbranch.planning.chooser import choose, plans_within
from hf_specbranch.planning.costs import SegmentTiming, StepCosts, fit_segment_costs, predicted_costs
from hf_specbranch.planning.simulate import predict
from hf_specbranch.runtime.overlap import Totals

from .plans import ALWAYS, CHEAP_DRAFT, NEVER, every_plan, of_size, recordings


def test_user_settings_are_kept():
    given = SpecBranchConfig(
        max_draft_length=3, confidence_threshold=0.7, max_rejection_branches=2, tree_leaves=1, max_branches=2
    )
    for plan in plans_within(given, captured=False):
        assert plan.max_draft_length == 3 and plan.confidence_threshold == 0.7 and plan.max_branches == 2
        foreseen = {"specbranch": (2, 1), "vanilla": (0, 1), "autoregressive": (0, 0)}
        assert (plan.max_rejection_branches, plan.tree_leaves) == foreseen[plan.policy]


def test_tree_leaves_fit_into_the_block():
    for length, most in ((4, 8), (8, 6), (13, 1), (14, 0), (15, 0), (40, 0)):
        plans = plans_within(SpecBranchConfig(max_draft_length=length), captured=True)
        assert max(plan.tree_leaves for plan in plans) == most
        assert all(plan.tree_leaves in (0, most) for plan in plans)


def test_draft_length_follows_agreement():
    assert choose(every_plan(), [ALWAYS], CHEAP_DRAFT, True).plan.max_draft_length == 12
    assert choose(every_plan(), [NEVER], CHEAP_DRAFT, True).plan.policy == "autoregressive"


def test_slow_draft_is_not_used():
    slow = StepCosts(0.004, 2e-5, 0.004, 1e-4, hidden=0.0)
    assert choose(every_plan(), [ALWAYS], slow, True).plan.policy == "autoregressive"


def test_overlap_is_chosen_where_it_hides_drafting():
    assert not choose(every_plan(), [ALWAYS], replace(CHEAP_DRAFT, hidden=0.0), True).plan.overlap
    two_gpus = StepCosts(0.004, 0.0, 4e-4, 0.0).on_gpus(2)
    chosen = choose(every_plan(), [ALWAYS], two_gpus, True).plan
    assert chosen.overlap and chosen.policy == "specbranch"


def test_plan_is_kept_unless_another_is_clearly_faster():
    plans = every_plan()
    best = choose(plans, [ALWAYS], CHEAP_DRAFT, True)
    for plan in plans:
        kept = choose(plans, [ALWAYS], CHEAP_DRAFT, True, current=plan)
        speed = predict([ALWAYS], plan, CHEAP_DRAFT, True).tokens_per_second
        assert (kept.plan == plan) == (best.tokens_per_second <= 1.03 * speed)


def test_measured_ratio_corrects_a_prediction():
    best = choose(every_plan(), [ALWAYS], CHEAP_DRAFT, True)
    other = choose(every_plan(), [ALWAYS], CHEAP_DRAFT, True, ratios={best.plan: 0.5})
    assert other.plan != best.plan


def test_two_gpus_beat_the_method_of_the_paper():
    """On the embedded pair's texts, with a device for each model: at least 1.1 times as fast."""
    found = recordings("good")
    paper = SpecBranchConfig(policy="specbranch", max_rejection_branches=0, tree_leaves=0)
    for ratio in (4, 10):
        costs = StepCosts(0.01, 5e-5, 0.01 / ratio, 5e-5).on_gpus(2)
        of_the_paper = max(
            predict(found, replace(paper, max_draft_length=length, confidence_threshold=epsilon), costs, True)
            for length in (2, 4, 8, 12)
            for epsilon in (0.0, 0.1, 0.4)
        )
        best = choose(every_plan(), found, costs, True)
        assert best.tokens_per_second >= 1.1 * of_the_paper.tokens_per_second, ratio


@pytest.mark.parametrize(("sizes", "length"), [(("7b", "68m"), 8), (("33b", "1.3b"), 4)], ids=["7B/68M", "33B/1.3B"])
def test_vanilla_with_tree_leaves_is_predicted_best_on_one_gpu(sizes, length):
    """As measured on an H200; a slower draft gets shorter drafts."""
    costs = predicted_costs(*map(of_size, sizes), captured=True)
    assert 0.0 < costs.hidden < 0.5 and costs.waiting > 0
    texts = [*recordings("good"), *recordings("good", temperature=0.8)]
    chosen = [choose(every_plan(), [text], costs, True).plan for text in texts]
    assert {plan.policy for plan in chosen} == {"vanilla"}
    assert (
        sum(plan.tree_leaves > 0 for plan in chosen) >= len(texts) - 1
    )  # but on a text that the draft predicts perfectly
    for text, plan in zip(texts, chosen):
        promised = predict([text], plan, costs, True).tokens_per_second
        leafy = [predict([text], each, costs, True).tokens_per_second for each in every_plan() if each.tree_leaves]
        assert max(leafy) > 0.99 * promised
    first = choose(every_plan(), [typical_agreement(5)], costs, True).plan
    assert (first.policy, first.max_draft_length) == ("vanilla", length) and first.tree_leaves > 0


# ---- costs and recordings


@given(
    st.floats(0.001, 0.1), st.floats(0, 0.1), st.floats(0.01, 1), st.floats(0, 0.3), st.floats(0, 1), st.floats(0, 0.2)
)
@settings(max_examples=60, deadline=None)
def test_fitted_costs_explain_their_rounds(a_pass, token, step, branch, hidden, loop):
    """Time rounds at made-up costs by the formula, and recover the costs."""
    token, step, branch, loop = a_pass * token, a_pass * step, a_pass * step * branch, a_pass * loop

    def timing(sent, steps, ahead, width, overlap):
        draft = Totals(10 * steps * step, 10 * steps, 10 * steps)
        verify = Totals(10 * (a_pass + sent * token), 10, 10 * (1 + sent))
        branching = Totals(10 * ahead * (step + (width - 1) * branch), 10 * ahead, 10 * ahead * width)
        saved = hidden * min(verify.seconds, branching.seconds) if overlap else 0.0
        seconds = 10 * loop + draft.seconds + verify.seconds + branching.seconds - saved
        return SegmentTiming(10, 20, seconds, overlap, draft, verify, branching)

    found = fit_segment_costs([timing(8, 2, 9, 6, False), timing(8, 2, 9, 6, True), timing(0, 0, 0, 1, False)])
    expected = StepCosts(a_pass + loop, token, step, branch, hidden)
    for name in ("target_pass", "target_token", "draft_step", "draft_branch"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-6, abs=1e-9 + 1e-7 * a_pass)
    assert found.hidden == pytest.approx(hidden, abs=1e-3)


def test_pass_time_is_interpolated_between_widths():
    timed = [
        SegmentTiming(4, 4, 0.04 * t, False, Totals(), Totals(0.04 * t, 4, 4 * q), Totals())
        for q, t in ((1, 1), (5, 2), (9, 1.9))
    ]
    costs = fit_segment_costs(timed)
    assert [round(100 * costs.pass_seconds(sent), 2) for sent in (0, 2, 4, 8)] == [1.0, 1.5, 2.0, 2.0]  # never faster
    assert costs.pass_seconds(12) > costs.pass_seconds(8)
    assert replace(costs, passes=costs.passes[1:]).pass_seconds(0) == costs.pass_seconds(4)  # nothing narrower is known


def test_predicted_costs_follow_model_size(target, draft):
    larger = copy.deepcopy(target)
    larger.lm_head = torch.nn.Linear(32, 4000)
    for captured in (False, True):
        costs = predicted_costs(larger, draft, captured)
        assert costs.target_pass > predicted_costs(target, draft, captured).target_pass > 0


def test_typical_agreement_is_deterministic():
    for candidates in (2, 5, 9):
        text = typical_agreement(candidates)
        typical_agreement.cache_clear()
        assert typical_agreement(candidates) == text and text.candidates == len(text.chances[0]) == candidates
        assert 0.65 < text.rate < 0.75 < text.within(2) < 0.9
