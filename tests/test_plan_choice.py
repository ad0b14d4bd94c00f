"""Which plan is chosen, given costs and recordings of agreement; costs fitted to timings or predicted from sizes."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_specbranch import SpecBranchConfig
from hf_specbranch.planning.agreement import typical_agreement
from hf_specbranch.planning.calibrate import CostFactors
from hf_specbranch.planning.chooser import choose, pass_width, plans_within
from hf_specbranch.planning.costs import SegmentTiming, StepCosts
from hf_specbranch.planning.knowledge import Knowledge, Situation
from hf_specbranch.planning.simulate import predict
from hf_specbranch.planning.sizes import predicted_costs, size_of, sizes_of
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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("sizes", "length"),
    [
        pytest.param(("7b", "68m"), 8, id="7B/68M", marks=pytest.mark.slow),
        pytest.param(("33b", "1.3b"), 4, id="33B/1.3B", marks=pytest.mark.slow),
    ],
)
def test_vanilla_with_tree_leaves_is_predicted_best_on_one_gpu(sizes, length):
    """As measured on an H200; a slower draft gets shorter drafts."""
    costs = predicted_costs(*(size_of(of_size(name)) for name in sizes), captured=True)
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


def timing(costs, sent=8, steps=8, ahead=0, width=1, overlap=False, rounds=10):
    """Ten rounds at these costs."""
    draft = Totals(rounds * steps * costs.draft_step, rounds * steps, rounds * steps)
    verify = Totals(rounds * costs.pass_seconds(sent), rounds, rounds * (1 + sent))
    branch = Totals(
        rounds * ahead * (costs.draft_step + (width - 1) * costs.draft_branch), rounds * ahead, rounds * ahead * width
    )
    saved = costs.hidden * min(verify.seconds, branch.seconds) if overlap else 0.0
    seconds = draft.seconds + verify.seconds + branch.seconds - saved
    return SegmentTiming(rounds, 2 * rounds, seconds, overlap, draft, verify, branch)


def learned(predicted, actual, times=2, **more):
    """What segments with a draft and without one teach, one after the other."""
    factors = CostFactors()
    for _ in range(times):
        speed = factors.add(timing(actual, **more), predicted, None)
        factors.add(timing(actual, sent=0, steps=0), predicted, speed)
    return factors


@given(st.floats(0.001, 0.1), st.floats(0.0, 0.2), st.floats(0.01, 1), st.floats(0.2, 5))
@settings(max_examples=60, deadline=None)
def test_costs_are_learned_from_two_measurements(a_pass, token, step, off):
    """Whatever sizes predict: after two measurements that agree, they are believed."""
    actual = StepCosts(a_pass, a_pass * token, a_pass * step)
    predicted = StepCosts(off * a_pass, 0.02 * off * a_pass, 0.1 * a_pass)
    found = learned(predicted, actual).costs(predicted)
    for name in ("target_pass", "draft_step"):
        assert getattr(found, name) == pytest.approx(getattr(actual, name), rel=0.01)
    assert found.pass_seconds(8) == pytest.approx(actual.pass_seconds(8), rel=0.01)


def test_one_wild_timing_is_not_believed():
    costs = StepCosts(0.01, 2e-4, 1e-3)
    factors = learned(costs, costs, times=3)
    wild = replace(costs, draft_step=30 * costs.draft_step)
    speed = factors.add(timing(wild), costs, None)
    factors.add(timing(replace(costs, target_pass=0.2), sent=0, steps=0), costs, speed)
    found = factors.costs(costs)
    assert found.draft_step == pytest.approx(costs.draft_step, rel=0.05)
    assert found.pass_seconds(8) / found.target_pass == pytest.approx(
        costs.pass_seconds(8) / costs.target_pass, rel=0.05
    )


def test_first_measurement_replaces_the_prediction():
    """A plan that is seen to lose must not be kept because it was predicted to win."""
    predicted = StepCosts(0.01, 0.0, 1e-3)
    factors = learned(predicted, replace(predicted, draft_step=4e-3), times=1)
    assert factors.costs(predicted).draft_step == pytest.approx(4e-3)


def test_load_that_slows_everything_changes_no_ratio():
    costs, factors = StepCosts(0.01, 2e-4, 1e-3), CostFactors()
    for load in (1.0, 6.0, 2.0, 9.0):
        slow = StepCosts(load * 0.01, load * 2e-4, load * 1e-3)
        speed = factors.add(timing(slow), costs, None)
        factors.add(timing(slow, sent=0, steps=0), costs, speed)
    found = factors.costs(costs)
    assert found.speed_ratio == pytest.approx(costs.speed_ratio)
    assert found.pass_seconds(8) / found.target_pass == pytest.approx(costs.pass_seconds(8) / costs.target_pass)


@pytest.mark.parametrize("hidden", [0.0, 0.3, 1.0])
def test_hidden_fraction_is_learned_from_overlapped_segments(hidden):
    actual = StepCosts(0.01, 1e-4, 1e-3, 1e-4, hidden)
    predicted = replace(actual, hidden=0.4)
    factors = learned(predicted, actual)
    for _ in range(2):
        factors.add(timing(actual, steps=2, ahead=9, width=6, overlap=True), predicted, None)
    assert factors.costs(predicted).hidden == pytest.approx(hidden, abs=0.01)


def test_pass_time_is_interpolated_between_widths():
    costs = StepCosts(0.01, 0.001, passes=((0, 0.01), (4, 0.02), (8, 0.02)))
    assert [round(100 * costs.pass_seconds(sent), 2) for sent in (0, 2, 4, 8)] == [1.0, 1.5, 2.0, 2.0]
    assert costs.pass_seconds(12) > costs.pass_seconds(8)
    assert replace(costs, passes=costs.passes[1:]).pass_seconds(0) == costs.pass_seconds(4)  # nothing narrower is known


def test_predicted_costs_follow_model_size(target, draft):
    larger = copy.deepcopy(target)
    larger.lm_head = torch.nn.Linear(32, 4000)
    for captured in (False, True):
        costs = predicted_costs(*sizes_of(larger, draft), captured)
        assert costs.target_pass > predicted_costs(*sizes_of(target, draft), captured).target_pass > 0


def test_predicted_costs_of_batches_are_near_the_measured_ones():
    """A 7B target in half precision on an H200, 240 tokens of context."""
    sizes = size_of(of_size("7b")), size_of(of_size("68m"))
    for rows, measured in ((16, 4.42e-3), (32, 5.24e-3), (64, 7.29e-3)):
        assert predicted_costs(*sizes, True, rows, 240).target_pass == pytest.approx(measured, rel=0.1)


def test_predicted_costs_grow_with_the_context():
    sizes = size_of(of_size("7b")), size_of(of_size("68m"))
    short, long = (predicted_costs(*sizes, True, 1, context) for context in (0, 8192))
    read = 8192 * 2 * 32 * 4096 * 2 / 4.3e12  # keys and values of 32 layers, once
    assert long.target_pass - short.target_pass == pytest.approx(read)
    assert long.draft_step > short.draft_step


def mixture(per_token):
    """A mixture of the size of Qwen3-30B-A3B, on the meta device."""
    layer = dict(hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=per_token)
    config = Qwen3MoeConfig(**layer, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128)
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(config).to(torch.bfloat16)


def test_weights_of_nested_experts_count_once():
    """Some models keep the list of experts in a module that is called so itself."""
    model = mixture(8)
    before, mlp = size_of(model), model.model.layers[0].mlp
    outer = torch.nn.Module()
    outer.experts = mlp.experts
    mlp.experts = outer
    assert size_of(model) == before and before.experts > 0 and before.share < 1


def test_predicted_costs_of_a_mixture_count_touched_experts():
    expert = 3 * 2048 * 768 * 48 * 2  # bytes in all layers
    size, draft = size_of(mixture(8)), size_of(of_size("68m"))
    assert size.experts == 128 * expert and size.share == 8 / 128
    assert size.read_by(1) == pytest.approx(size.weights - 120 * expert)
    costs = predicted_costs(size, draft, captured=True)
    for sent in (0, 1, 7, 15, 63):
        touched = 128 * (1 - (1 - 8 / 128) ** (1 + sent))
        read = (size.weights - (128 - touched) * expert) / 4.3e12
        assert costs.pass_seconds(sent) == pytest.approx((read + 48 * 1.6e-5) * (1 + 0.005 * sent), rel=1e-3)
    dense = predicted_costs(size_of(mixture(128)), draft, captured=True)  # every token reads every expert
    assert costs.pass_seconds(7) / costs.target_pass > 2 > 1.1 > dense.pass_seconds(7) / dense.target_pass


def test_fewer_tokens_are_drafted_for_a_mixture():
    """Each further token in a pass touches further experts."""
    draft, texts = size_of(of_size("68m")), recordings("good")
    sizes = [size_of(mixture(per_token)) for per_token in (8, 128)]
    plans = [choose(every_plan(), texts, predicted_costs(size, draft, True), True).plan for size in sizes]
    assert pass_width(plans[0]) < pass_width(plans[1])


def test_fewer_tokens_are_drafted_as_rows_increase():
    """Each further token in a pass of many rows takes longer."""
    sizes, texts = (size_of(of_size("7b")), size_of(of_size("68m"))), recordings("good")
    plans = [choose(every_plan(), texts, predicted_costs(*sizes, True, rows, 240), True).plan for rows in (1, 32, 512)]
    assert pass_width(plans[0]) > pass_width(plans[1]) > pass_width(plans[2])


def test_capture_must_pay():
    """A plan whose stages are not captured is chosen only for a text that is long enough."""
    best = choose(every_plan(), [ALWAYS], CHEAP_DRAFT, True)
    slower = next(plan for plan in every_plan() if plan.policy == "vanilla" and plan.max_draft_length == 6)
    gain = 1 / predict([ALWAYS], slower, CHEAP_DRAFT, True).tokens_per_second - 1 / best.tokens_per_second
    for remaining, expected in ((0.05 / gain, slower), (1.0 / gain, best.plan)):
        wait = lambda plan: 0.0 if plan == slower else 0.2 / remaining  # noqa: B023, E731
        found = choose(every_plan(), [ALWAYS], CHEAP_DRAFT, True, slower, delay=wait)
        assert found.plan == expected


def test_typical_agreement_is_deterministic():
    for candidates in (2, 5, 9):
        text = typical_agreement(candidates)
        typical_agreement.cache_clear()
        assert typical_agreement(candidates) == text and text.candidates == len(text.chances[0]) == candidates
        assert 0.65 < text.rate < 0.75 < text.within(2) < 0.9


def test_other_threads_begin_with_what_is_known():
    """A batch of another size tells more than another number of threads; another runtime tells nothing."""
    known = Knowledge(factors={Situation(1, threads=2): CostFactors(speed=[3.0], draft=[2.0])})
    assert known.factors_in(Situation(1, threads=1)).draft == [2.0]
    known.factors[Situation(8, threads=4)] = CostFactors(draft=[4.0])
    assert known.factors_in(Situation(1, threads=4)).draft == [pytest.approx(4.0)]
    assert known.factors_in(Situation(1, "graph", True)).draft == []


def test_captured_drafts_with_long_steps_stop_early():
    """One length and one threshold take the place of all fixed lengths; drafting ahead stays as it is."""
    short, long = (plans_within(SpecBranchConfig(), captured=True, step=step) for step in (1e-4, 2e-4))
    assert not any(plan.stops_early for plan in short)
    stopping = [plan for plan in long if plan.policy == "vanilla"]
    assert [(plan.max_draft_length, plan.tree_leaves) for plan in stopping] == [(8, 0), (8, 6)]
    assert all(plan.stops_early for plan in stopping)
    ahead = [[plan for plan in plans if plan.policy == "specbranch"] for plans in (short, long)]
    assert ahead[0] == ahead[1] and len(long) == 1 + 2 + len(ahead[1])
    given = SpecBranchConfig(confidence_threshold=0.0, max_draft_length=3)
    assert plans_within(given, captured=True, step=1.0) == plans_within(given, captured=True)
    assert plans_within(SpecBranchConfig(), captured=False, step=1.0) == plans_within(
        SpecBranchConfig(), captured=False
    )
