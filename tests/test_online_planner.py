"""`policy="auto"` during a generation: plans change within a text, the text does not, and choices follow timings."""

import copy
import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import DynamicCache

from hf_specbranch import SpecBranchConfig, load_demo_pair, specbranch
from hf_specbranch.config import BLOCK_SIZE
from hf_specbranch.decoding import assembly as assembly_module
from hf_specbranch.decoding import lookup as lookup_module
from hf_specbranch.decoding.call import Call
from hf_specbranch.model_state import state_of
from hf_specbranch.planning import online
from hf_specbranch.planning.agreement import RecentTexts, typical_agreement
from hf_specbranch.planning.chooser import MIN_GAIN, MIN_PREDICTED_GAIN, choose, pass_width, plans_within
from hf_specbranch.planning.costs import SegmentTiming, StepCosts
from hf_specbranch.planning.knowledge import Knowledge, Situation
from hf_specbranch.planning.simulate import predict, replay
from hf_specbranch.planning.sizes import predicted_costs, size_of
from hf_specbranch.planning.text_choices import CERTAIN_GAIN
from hf_specbranch.runtime.eager import EagerRunner
from hf_specbranch.runtime.overlap import Totals
from hf_specbranch.runtime.static_buffers import StaticBuffers

from .models import assert_counts_add_up, attached, llama, noisy_copy, prompt, slowly
from .plans import ALWAYS, CHEAP_DRAFT, NEVER, PAPER, every_plan, from_token, of_size, recordings
from .sampling import SMALLEST_P, draw, exact_distribution, p_value, sampling_pair


@pytest.fixture
def random_plans(monkeypatch):
    """Plans change at random, every few rounds."""

    def segments(self):
        dice = random.Random(len(self.plans))
        while True:
            plan = dice.choice(self.plans)
            yield online.PlanSegment(plan, dice.randint(1, 3), dice.random() < 0.5)

    monkeypatch.setattr(online.Planner, "segments", segments)


class KeptBuffers(StaticBuffers):
    """Buffers and stages that the next drafter with the same plan uses again, as on a GPU.

    A replay runs the stage as it was first captured: it sees new values only in the buffers.
    """

    def run(self, key, stage, only_our_kernels=False):
        self.graphs.setdefault(key, stage)()


@pytest.fixture
def kept_buffers(monkeypatch):
    """Run stages of static shape, whose buffers are kept for each plan."""

    def buffers(self, settings):
        buffers_by_settings = self.__dict__.setdefault("buffers_by_settings", {})
        return buffers_by_settings.setdefault(settings, KeptBuffers(self.device, None))

    monkeypatch.setattr(EagerRunner, "captures", True)
    monkeypatch.setattr(EagerRunner, "buffers", buffers)


@pytest.fixture
def alternate_plans(monkeypatch):
    """Follow these plans in turn, for one round each."""

    def follow(*plans):
        def segments(self):
            for plan in itertools.cycle(plans):
                yield online.PlanSegment(plan, 1, False)

        monkeypatch.setattr(online.Planner, "segments", segments)
        monkeypatch.setattr(assembly_module, "plans_within", lambda *_: list(plans))

    return follow


# ---- exactness


@pytest.mark.compat
@pytest.mark.matrix
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("which", ["draft", slowly("stranger")])
def test_text_does_not_depend_on_plans(random_plans, request, target, rows, which):
    small = request.getfixturevalue(which)
    inputs = prompt(rows)
    expected = target.generate(**inputs, max_new_tokens=40, do_sample=False)
    model = attached(target)
    assert torch.equal(model.generate(**inputs, max_new_tokens=40, do_sample=False, assistant_model=small), expected)
    stats = model.specbranch_stats
    assert len({segment["plan"] for segment in stats.plans}) > 3
    assert_counts_add_up(stats)


@pytest.mark.parametrize("rows", [slowly(1), 3])
def test_static_stages_follow_changing_plans(kept_buffers, random_plans, target, draft, rows):
    run = {**prompt(rows), "max_new_tokens": 40, "do_sample": False}
    model = attached(target)
    assert torch.equal(model.generate(**run, assistant_model=draft), target.generate(**run))
    stats = model.specbranch_stats
    assert not stats.slowed_by and len({segment["plan"] for segment in stats.plans}) > 3
    assert_counts_add_up(stats)


@pytest.mark.slow
def test_static_stages_sample_exactly_when_plans_change(kept_buffers, random_plans):
    model, _ = sampling_pair()
    counts = draw(SpecBranchConfig(draft_sampling="sample"), samples=4_000)
    assert p_value(counts, exact_distribution(model)) > SMALLEST_P


def test_plans_with_leaves_share_a_captured_pass(kept_buffers, alternate_plans, target, draft, monkeypatch):
    keys, run = [], KeptBuffers.run
    monkeypatch.setattr(
        KeptBuffers, "run", lambda self, key, stage, *_, **__: (keys.append(key), run(self, key, stage))
    )
    leaves = SpecBranchConfig("vanilla", 3, confidence_threshold=0.0, max_rejection_branches=0, tree_leaves=8)
    alternate_plans(leaves, replace(leaves, max_draft_length=5, tree_leaves=4), replace(leaves, tree_leaves=2))
    arguments = {**prompt(), "max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    model = attached(target)
    assert torch.equal(model.generate(**arguments, assistant_model=draft), target.generate(**arguments))
    passes = {key[1:3] for key in keys if key[0] == "verify" and len(key) == 4}
    assert passes == {(BLOCK_SIZE, True)}
    assert len({key for key in keys if key[0] == "verify inputs"}) >= 3


@pytest.mark.parametrize("rows", [1, 3])
def test_lookup_with_and_without_leaves(kept_buffers, alternate_plans, target, rows, monkeypatch):
    """The same tokens are verified in passes that keep their results in different memory."""
    monkeypatch.setattr(lookup_module.Lookup, "choose", lambda self: (self.follow(), self.most)[1])
    monkeypatch.setattr(lookup_module.Lookup, "expected", lambda self, count: float("inf") if count else 0.0)
    leaves = SpecBranchConfig("vanilla", 4, 0.0, max_rejection_branches=0, tree_leaves=6, prompt_lookup_num_tokens=3)
    alternate_plans(leaves, replace(leaves, policy="autoregressive", tree_leaves=0))
    small, model, found = noisy_copy(target, noise=0.4, seed=3), attached(target), 0
    for seed in range(3):
        ids = prompt(rows, seed=seed, length=9)["input_ids"].repeat(1, 3)
        run = {"input_ids": ids, "max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
        assert torch.equal(model.generate(**run, assistant_model=small), target.generate(**run))
        found += model.specbranch_stats.sources.get("lookup", {"accepted": 0})["accepted"]
    assert found > 10


@pytest.mark.parametrize("rows", [1, 3])
def test_accepted_leaves_are_read_in_the_pass_of_their_plan(kept_buffers, alternate_plans, target, rows, monkeypatch):
    """No pass has to be captured for a plan that takes over."""
    keys, run = [], KeptBuffers.run
    monkeypatch.setattr(
        KeptBuffers, "run", lambda self, key, stage, *_, **__: (keys.append(key), run(self, key, stage))
    )
    leaves = SpecBranchConfig("vanilla", 4, 0.0, max_rejection_branches=0, tree_leaves=6, prompt_lookup_num_tokens=0)
    alternate_plans(leaves, replace(leaves, policy="autoregressive", tree_leaves=0))
    small, model = noisy_copy(target, noise=0.4, seed=3), attached(target)
    for seed in range(2):
        arguments = {**prompt(rows, seed=seed), "max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
        assert torch.equal(model.generate(**arguments, assistant_model=small), target.generate(**arguments))
    assert any(key[0] == "verify inputs" and key[2:5] == (True, 0, 0) for key in keys)  # a leaf alone
    width = BLOCK_SIZE if rows == 1 else pass_width(leaves)
    assert {key[1:3] for key in keys if key[0] == "verify" and len(key) == 4} == {(width, True), (1, False)}


def test_accepted_leaves_are_read_before_the_plan_changes(alternate_plans, target):
    leaves = SpecBranchConfig("specbranch", 4, confidence_threshold=0.0, max_rejection_branches=0, tree_leaves=8)
    alternate_plans(leaves, replace(leaves, policy="autoregressive", tree_leaves=0))
    small, model, hits = noisy_copy(target, noise=0.4, seed=3), attached(target), 0
    for seed in range(2):
        run = {**prompt(seed=seed), "max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
        assert torch.equal(model.generate(**run, assistant_model=small), target.generate(**run))
        hits += model.specbranch_stats.tree_leaf_hits
    assert hits > 1


def test_returned_cache_holds_accepted_leaves(target):
    """Whatever the last round did, the cache holds the keys that plain generate() leaves in it."""
    config = SpecBranchConfig(policy="specbranch", max_draft_length=4, confidence_threshold=0.0, tree_leaves=8)
    small, hits = noisy_copy(target, noise=0.4, seed=3), 0
    model = attached(target)
    for count in range(2, 26, 2):
        caches, texts = [DynamicCache(config=target.config) for _ in range(2)], []
        for one, cache, more in ((target, caches[0], {}), (model, caches[1], {"specbranch": config})):
            small_one = {"assistant_model": small} if more else {}
            first = one.generate(
                **prompt(), past_key_values=cache, max_new_tokens=count, do_sample=False, eos_token_id=None,
                **small_one, **more,
            )  # fmt: skip
            hits += more != {} and model.specbranch_stats.tree_leaf_hits
            texts.append(first)
        assert torch.equal(*texts)
        keys = [torch.stack([layer.keys for layer in cache.layers]) for cache in caches]
        assert torch.allclose(*keys, atol=1e-4), count
    assert hits > 10


@pytest.mark.parametrize("drafting", [pytest.param("greedy", marks=pytest.mark.slow), "sample"])
def test_sampling_is_exact_when_plans_change(random_plans, drafting):
    model, _ = sampling_pair()
    counts = draw(SpecBranchConfig(draft_sampling=drafting), samples=6_000)
    assert p_value(counts, exact_distribution(model)) > SMALLEST_P


def test_drafters_with_shared_seeds_are_detected(alternate_plans, monkeypatch):
    vanilla = SpecBranchConfig("vanilla", 1, confidence_threshold=0.0, max_rejection_branches=0, tree_leaves=0)
    alternate_plans(vanilla, replace(vanilla, max_draft_length=2))
    monkeypatch.setattr(Call, "seeds", lambda call: itertools.repeat(int(torch.randint(2**62, (1,)))))
    model, _ = sampling_pair()
    counts = draw(SpecBranchConfig(draft_sampling="sample"), samples=6_000)
    assert p_value(counts, exact_distribution(model)) < SMALLEST_P


def test_sampled_text_does_not_depend_on_measurements(target, draft):
    model, texts = attached(target), []
    for _ in range(3):
        torch.manual_seed(5)
        texts.append(model.generate(**prompt(), max_new_tokens=100, do_sample=True, assistant_model=draft))
        model.generate(**prompt(), max_new_tokens=100, do_sample=False, assistant_model=draft)  # measures
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


# ---- what a planner does with timings, in simulated time


def planner_for(text, known=None, costs=CHEAP_DRAFT, predicted=None, captured=True, plans=None, rows=1, **more):
    """A planner in simulated time. What sizes predict are the actual costs, unless others are given."""
    plans = plans or [SpecBranchConfig().decided(captured), *plans_within(SpecBranchConfig(), captured)]
    predicted = predicted or (lambda context: costs)
    situation = Situation(rows, "graph" if captured else "eager", captured)
    seen = text if callable(text) else lambda: [text]
    known, context = Knowledge() if known is None else known, more.pop("context", lambda: 10)
    return online.Planner(plans, SpecBranchConfig(), situation, known, predicted, seen, context, **more)


def timing_of(segment, agreement, costs=CHEAP_DRAFT, captured=True):
    """Return the timing of a segment at these costs."""
    played = replay(agreement, segment.plan, captured)[: segment.rounds]
    parts = [costs.parts(each) for each in played]
    steps, overlapped = sum(each.steps_before for each in played), sum(each.overlapped_steps for each in played)
    draft = Totals(steps * costs.draft_step, steps, steps)
    verify = Totals(sum(t for t, _ in parts), len(played), sum(1 + each.sent for each in played))
    branch = Totals(sum(b for _, b in parts), overlapped, sum(each.overlapped_steps * each.width for each in played))
    tokens = sum(each.committed for each in played)
    return SegmentTiming(
        len(played), tokens, costs.seconds(played, segment.overlap), segment.overlap, draft, verify, branch
    )


def plan_text(text, known, costs, predicted=None, captured=True, rows=1, noise=None, **more):
    """Let the planner generate a text in simulated time; return its segments and the seconds they take.

    Args:
        noise: returns a factor on the time of each segment, as of a busy machine.
    """
    done, seconds, followed = 0, 0.0, []
    seen = lambda: [from_token(text, 0, done)] if done > 15 else []  # noqa: E731
    left = lambda: len(text.rank) - done  # noqa: E731
    planner = planner_for(seen, known, costs, predicted, captured, rows=rows, remaining=left, **more)
    segments = planner.segments()
    segment = next(segments)
    while True:
        timing = timing_of(segment, from_token(text, done), costs, captured)
        if noise is not None:
            factor = noise()
            work = [each._replace(seconds=factor * each.seconds) for each in timing[4:7]]
            timing = timing._replace(seconds=factor * timing.seconds, draft=work[0], verify=work[1], branch=work[2])
        followed.append(segment)
        done, seconds = done + int(timing.tokens), seconds + timing.seconds
        if done + 2 > len(text.rank):
            planner.end(segment, timing)
            return followed, seconds
        segment = segments.send(timing)


def next_segment(planner, text, costs=CHEAP_DRAFT):
    """Return the segments and the second of them."""
    segments = planner.segments()
    segment = next(segments)
    return segments, segments.send(timing_of(segment, text, costs))


def of_mixture(touched, draft_step):
    """Costs of a mixture whose passes over 8 tokens take `touched` times those over one."""
    points = tuple((float(sent), 0.003 * (1 + (touched - 1) * min(1, sent / 7))) for sent in (0, 1, 3, 7, 15))
    return StepCosts(0.003, 0.0, draft_step, 1e-5, hidden=0.4, passes=points, waiting=3e-4)


@pytest.mark.parametrize("predicted, actual, drafts", [(8.0, 1.05, True), (1.3, 8.0, False)])
def test_wide_passes_of_a_mixture_are_tried(predicted, actual, drafts):
    """How many experts the tokens of a text share is not known before, also in captured stages."""
    costs, expected, known = of_mixture(actual, 2e-3), of_mixture(predicted, 2e-3), Knowledge()
    for text in recordings("good")[:3]:
        followed, _ = plan_text(text, known, costs, lambda context: expected)
    assert (followed[-1].plan.policy != "autoregressive") is drafts
    assert known.factors and all(factors.passes for factors in known.factors.values())


def growing(by):
    """Costs of a CPU on which each further token of a pass takes `by` times the pass over one token."""
    points = tuple((float(sent), 0.2 * (1 + by * sent)) for sent in (0, 2, 4, 8))
    return StepCosts(0.2, 0.2 * by, 0.06, 0.0, passes=points)


@pytest.mark.parametrize("by, tried", [(0.9, False), (0.5, True)])
def test_draft_that_cannot_pay_is_not_tried(by, tried):
    """Not even if the target accepted all of its tokens."""
    known, followed = Knowledge(), []
    for text in [NEVER] * 20:  # `CHECK_EVERY` of them among these
        followed += plan_text(text, known, growing(by), captured=False)[0]
    assert any(segment.plan.policy != "autoregressive" for segment in followed) is tried


@pytest.mark.parametrize("slow_draft, passes", [(60, 0.1), (1, 1.2)])
def test_draft_is_tried_again_after_a_bad_measurement(slow_draft, passes):
    """In the first text its steps took far too long, or the products that were timed before it."""
    known, good = Knowledge(), replace(growing(0.1), draft_step=0.004)
    first = replace(good, draft_step=slow_draft * good.draft_step)
    predicted = replace(growing(passes), draft_step=0.004)
    for costs in [first] + 80 * [good]:
        followed, _ = plan_text(ALWAYS, known, costs, lambda context: predicted, captured=False)
    assert followed[-1].plan.policy != "autoregressive"


def test_first_text_begins_with_the_predicted_plan():
    """Nothing is measured for its own sake, and nothing but the plan changes when the text is known."""
    costs, text = StepCosts(0.0042, 2e-5, 8.5e-5, 3e-6, hidden=0.4, waiting=3e-4), recordings("good")[0]
    followed, _ = plan_text(text, None, costs)
    assert followed[0].plan == choose(every_plan(), [typical_agreement(5)], costs, True).plan
    assert all(segment.predicted is not None for segment in followed)


def test_wrong_prediction_is_re_evaluated():
    known = Knowledge()
    planner = planner_for(NEVER, known)
    segments, segment = next_segment(planner, NEVER)
    assert segment.plan.policy == "autoregressive"
    planner.agreements = lambda: [ALWAYS] * 4
    known.next_evaluation.clear()
    segment = segments.send(timing_of(segment, ALWAYS))  # a plan without a draft is re-evaluated
    assert segment.plan.max_draft_length == 12 and segment.plan.policy != "autoregressive"
    as_predicted = timing_of(segment, ALWAYS)
    assert segments.send(as_predicted).plan == segment.plan and known.choices[planner.key].plan == segment.plan
    planner.agreements = lambda: [NEVER] * 4
    known.evaluation_seconds = 0.0  # however busy the machine is
    assert segments.send(timing_of(segment, NEVER)).plan.policy == "autoregressive"


def test_small_deviations_are_not_re_evaluated():
    """A round that takes the predicted time and commits somewhat fewer or more tokens is as expected."""
    known = Knowledge()
    planner = planner_for(ALWAYS, known)
    segments, segment = next_segment(planner, ALWAYS)
    planner.agreements = lambda: pytest.fail("it was re-evaluated")
    timing = timing_of(segment, ALWAYS)
    assert segments.send(timing._replace(tokens=0.7 * timing.tokens)).plan == segment.plan
    assert segments.send(timing._replace(tokens=1.5 * timing.tokens, seconds=0.9 * timing.seconds)).plan == segment.plan
    planner.agreements = lambda: [ALWAYS]
    before, known.evaluation_seconds = dict(known.ratios), 0.0  # however busy the machine is
    segments.send(timing._replace(seconds=1.5 * timing.seconds))
    assert known.ratios != before


def planned_text():
    known = Knowledge()
    planner = planner_for(ALWAYS, known)
    segments, segment = next_segment(planner, ALWAYS)
    return known, planner, segments, segment, timing_of(segment, ALWAYS)


def test_planning_takes_little_of_the_time():
    """Texts that differ from the prediction, one after the other, are evaluated only as often as that is cheap."""
    known, planner, segments, segment, timing = planned_text()
    off = timing._replace(tokens=0.3 * timing.tokens)
    planner.agreements = lambda: pytest.fail("it was re-evaluated")
    known.evaluation_seconds, known.unplanned_seconds = timing.seconds, 0.0
    assert segments.send(off).plan == segment.plan
    planner.agreements = lambda: [ALWAYS]
    known.unplanned_seconds, known.ratios = 1.01 * timing.seconds / online.MOST_PLANNING, {}
    segments.send(off)
    assert known.ratios and known.unplanned_seconds == 0 < known.evaluation_seconds


def test_texts_that_only_differ_are_evaluated_ever_more_rarely():
    """Each evaluation that confirms the choice puts off the next one; one that changes it does not."""
    known, planner, segments, segment, timing = planned_text()
    off = timing._replace(tokens=0.3 * timing.tokens)

    def is_evaluated_after(times):
        known.evaluation_seconds, known.ratios = timing.seconds, {}
        known.unplanned_seconds = times * timing.seconds / online.MOST_PLANNING
        segments.send(off)
        return bool(known.ratios)

    known.confirmed.clear()
    for times in range(1, 5):
        assert not is_evaluated_after(times - 0.1) and is_evaluated_after(times)
    known.confirmed[planner.key] = 50
    assert not is_evaluated_after(4.9) and is_evaluated_after(5)
    planner.agreements = lambda: [NEVER] * 4
    assert is_evaluated_after(5) and not known.confirmed[planner.key]


def test_one_poor_text_after_good_ones_is_not_evaluated():
    """Recordings of nothing but texts like that would speak against the draft. Several of them are evaluated."""
    known, evaluated = Knowledge(), []

    def generate(off):
        planner = planner_for(lambda: evaluated.append(1) or [ALWAYS], known)
        segment = next(planner.segments())
        timing = timing_of(segment, ALWAYS)
        evaluated.clear()
        planner.end(segment, timing._replace(tokens=off * timing.tokens))
        known.generations, known.unplanned_seconds, known.next_evaluation[planner.key] = 100, 1e9, 1000
        return bool(evaluated)

    assert generate(1.0)  # the first text of a pair
    assert generate(0.4)  # nothing else to judge it by
    assert not any(generate(off) for off in (1.0, 1.1, 0.9, 1.0, 0.4, 1.0))
    assert [generate(0.4) for _ in range(4)] == [False, False, True, True]


def test_a_pause_of_the_host_does_not_rule_out_a_plan():
    """A plan that is not followed is not measured again, so what speaks against it is forgotten."""
    known, (plan, other) = Knowledge(), every_plan()[:2]
    known.update_ratio(plan, 0.1)
    assert known.ratios == {plan: 0.8}
    for _ in range(5):
        known.update_ratio(plan, 0.9)
    assert 0.87 < known.ratios[plan] < 0.9
    for _ in range(6):
        known.update_ratio(other, 1.0)
    assert 0.97 < known.ratios[plan] < 1 == known.ratios[other]


def test_two_settings_are_evaluated_in_turns():
    """Each has its own schedule: calls that draft do not put off the evaluation of those that do not."""
    known, other = Knowledge(), replace(SpecBranchConfig(), prompt_lookup_num_tokens=0)
    keys = [(settings, Situation(1, "graph", True)) for settings in (SpecBranchConfig(), other)]
    known.generations = 20
    known.schedule_evaluation(keys[0], drafts=False)
    known.schedule_evaluation(keys[1], drafts=True)
    known.generations = 26
    assert [known.evaluation_is_due(key) for key in keys] == [True, False]
    eager = (keys[0][0], Situation(1, "eager", False))  # one call, and never again
    known.choices = dict.fromkeys([keys[0], eager], online.Choice(SpecBranchConfig("autoregressive"), 100.0, 1.0))
    known.schedule_evaluation(keys[0], drafts=False)
    assert not known.evaluation_is_due(keys[0]) and not known.evaluation_is_due(eager)


def test_autoregressive_choice_is_re_evaluated_ever_more_rarely():
    known, evaluations = Knowledge(), []
    for generation in range(40):
        record = partial(lambda now: evaluations.append(now) or [NEVER], generation)
        planner = planner_for(record, known)
        segment = next(planner.segments())
        planner.end(segment, timing_of(segment, NEVER))
        known.evaluation_seconds = 0.0  # however busy the machine is
    assert sorted(set(evaluations)) == [0, 1, 2, 3, 4, 6, 8, 11, 14, 18, 23, 29, 37]


@pytest.mark.parametrize("which", ["good", pytest.param("weak", marks=pytest.mark.slow)])
@pytest.mark.parametrize("off", [1.0, 2.5], ids=["predicted", "mispredicted"])
@pytest.mark.parametrize(
    "costs",
    [
        StepCosts(0.0042, 1e-5, 8.5e-5, 3e-6, hidden=0.6, waiting=3e-4),  # near those of 7B and 68M on an H200
        StepCosts(0.0178, 5e-5, 1.3e-3, 3e-5, hidden=0.5, waiting=3e-4),  # 33B and 1.3B
        StepCosts(0.004, 1e-5, 4e-4, 1e-5, hidden=1.0),  # two GPUs
    ],
    ids=["7B/68M", "33B/1.3B", "two GPUs"],
)
def test_known_pair_is_close_to_the_best_plan(costs, off, which):
    """In simulated time, at constant costs: within 5% of the best plan over the same texts."""
    texts, known = recordings(which), Knowledge()
    predicted = StepCosts(
        off * costs.target_pass, costs.target_token, costs.draft_step, costs.draft_branch, costs.hidden
    )
    for text in texts * 2:
        plan_text(text, known, costs, lambda context: predicted)
    taken = sum(plan_text(text, known, costs, lambda context: predicted)[1] for text in texts)
    best = min(sum(costs.seconds(replay(text, plan, True), plan.overlap) for text in texts) for plan in every_plan())
    assert taken <= 1.05 * best


# A target whose wide passes are expensive, as of a large model on a CPU.
WIDE_IS_SLOW = StepCosts(0.4, 0.5, 0.05)


def test_plan_that_loses_is_left():
    """Passes of several tokens take much longer than predicted: one comparison with plain decoding shows it."""
    text, known = recordings("good")[0], Knowledge()
    predicted = replace(WIDE_IS_SLOW, target_token=0.01)
    for generation in range(3):
        followed, seconds = plan_text(text, known, WIDE_IS_SLOW, lambda context: predicted, captured=False)
        plain = (len(text.rank) - 1) * WIDE_IS_SLOW.target_pass
        if generation:
            assert seconds < 1.1 * plain
    assert known.choices and {choice.plan.policy for choice in known.choices.values()} == {"autoregressive"}


def test_draft_is_kept_while_its_texts_are_faster_than_plain_decoding():
    """Recordings of a few poor texts say that it does not pay, measurements of the last texts that it does."""
    planner = planner_for(NEVER)
    drafted = next(plan for plan in planner.plans if plan.policy == "vanilla")
    plain = choose([planner.other(drafted)], [NEVER], CHEAP_DRAFT, True)
    known, key, seconds = planner.known, planner.key, 1 / plain.tokens_per_second
    assert planner.kept(plain, drafted) == plain  # nothing was measured
    for _ in range(4):
        known.add_drafted(key, 100.0, 80 * seconds)
    assert planner.kept(plain, drafted).plan == drafted
    for _ in range(16):
        known.add_drafted(key, 100.0, 120 * seconds)
    assert planner.kept(plain, drafted) == plain
    assert known.drafted_speed(key) is None  # a later trial is judged by itself


def test_poor_recordings_do_not_end_drafts_that_pay():
    known, costs, policies = Knowledge(), StepCosts(0.004, 1e-3, 1e-4, 1e-6), []
    for _ in range(8):
        plan_text(ALWAYS, known, costs)
    for _ in range(8):  # as if only poor texts had been recorded
        known.texts.update(known.texts.begin(), [NEVER])
    (key,) = known.choices
    known.next_evaluation[key], known.unplanned_seconds = 0, 1e9
    plan_text(ALWAYS, known, costs)
    assert known.choices[key].plan.policy != "autoregressive"
    for _ in range(24):
        followed, _ = plan_text(NEVER, known, costs)
        policies.append(followed[-1].plan.policy)
    assert policies[-1] == known.choices[key].plan.policy == "autoregressive"


@pytest.mark.parametrize("seed", [0, *map(slowly, range(1, 4))])
def test_load_does_not_mislead(seed):
    """Segments take one to eight times as long, at random: the plan stays the one of a quiet machine."""
    costs, known, dice = StepCosts(0.0066, 3e-4, 1e-3), Knowledge(), random.Random(seed)
    texts = recordings("good")
    for text in texts * 3:
        plan_text(text, known, costs, captured=False, noise=lambda: dice.choice((1, 1, 2, 4, 8)))
    best = choose(plans_within(SpecBranchConfig(), False), texts, costs, False)
    (choice,) = known.choices.values()
    assert predict(texts, choice.plan, costs).tokens_per_second > 0.9 * best.tokens_per_second


def test_plain_decoding_is_compared_in_few_rounds():
    """Where stages are not captured, or a draft gains little; no more than eight tokens of a text."""
    text = recordings("good")[0]
    known, costs = Knowledge(), StepCosts(0.0066, 3e-4, 1e-3)
    checks = []
    for _ in range(6):
        followed, _ = plan_text(text, known, costs, captured=False)
        checks.append(sum(segment.rounds for segment in followed if segment.predicted is None))
    assert checks[0] == 4 and checks[1] in (0, 4) and not any(checks[2:])
    assert all(segment.predicted is not None for segment in plan_text(text, Knowledge(), CHEAP_DRAFT)[0])


@pytest.mark.parametrize("token, compared", [(6e-4, True), (1e-4, False)])
def test_plain_decoding_is_compared_once_in_texts_that_repeat_themselves(token, compared):
    """Passes over looked-up tokens say nothing about a pass over one token, but that makes up for no large gain."""
    text = replace(recordings("good")[0], lookups=(2,) * len(recordings("good")[0].rank))
    known, costs, checks = Knowledge(), StepCosts(0.005, token, 1e-4), []
    for _ in range(6):
        followed, _ = plan_text(text, known, costs, rows=8)
        checks.append(sum(segment.rounds for segment in followed if segment.predicted is None))
    assert checks[0] == (4 if compared else 0) and not any(checks[2:])


def test_a_large_gain_is_not_looked_into_again_and_again():
    """Nor at all, once the last segments are known to be as fast."""
    text, known = recordings("good")[0], Knowledge()
    for rounds in 2 * [[online.CHECKED_ROUNDS, 2 * online.CHECKED_ROUNDS]] + 2 * [[online.PLANNED_ROUNDS]]:
        followed, _ = plan_text(text, known, CHEAP_DRAFT, rows=4)
        assert [segment.rounds for segment in followed] == rounds
        assert followed[-1].plan.policy != "autoregressive"


def test_context_that_grows_is_not_measured_again():
    """Costs are known to grow with the keys and values that a pass reads."""
    sizes = size_of(of_size("7b")), size_of(of_size("68m"))
    predicted = lambda context: predicted_costs(*sizes, True, 1, context)  # noqa: E731
    text, known = recordings("good")[0], Knowledge()
    for length in (500, 600):
        plan_text(text, known, predicted(length), predicted, context=partial(int, length))
    before = copy.deepcopy(known.factors)
    for length in (1_000, 4_000, 16_000):
        actual = replace(predicted(length), target_pass=1.1 * predicted(length).target_pass)
        followed, _ = plan_text(text, known, actual, predicted, context=partial(int, length))
        assert len({segment.plan for segment in followed}) == 1 and followed[0].predicted is not None
        assert followed[0].predicted == pytest.approx(
            predict(known.texts.all(), followed[0].plan, actual, True).tokens_per_second, rel=0.2
        )
    assert len(known.factors) == len(before) == 1


def test_neighbouring_batch_size_is_the_first_guess():
    actual = lambda rows: StepCosts(0.004 + 0.001 * rows, 1e-4 * rows, 2e-3)  # noqa: E731
    text, known = recordings("good")[0], Knowledge()
    predicted = lambda context: StepCosts(0.005, 1e-4, 1e-4)  # noqa: E731
    for _ in range(3):
        plan_text(text, known, actual(1), predicted, captured=False)
    here, there = (known.factors_in(Situation(rows, "eager", False)) for rows in (1, 2))
    assert there.draft and there.costs(predicted(0)).draft_step > 3 * predicted(0).draft_step
    assert known.factors_in(Situation(1, "graph", True)).draft == [] and here is not there


def test_many_rows_are_compared_with_plain_decoding():
    """Beyond a block of tokens wider passes may take longer than sizes predict."""
    text, known = recordings("good")[0], Knowledge()
    predicted = StepCosts(0.007, 1e-4, 5e-4)
    actual = replace(predicted, target_token=0.01)
    for _ in range(2):
        plan_text(text, known, actual, lambda context: predicted, rows=64)
    assert {choice.plan.policy for choice in known.choices.values()} == {"autoregressive"}


# ---- captures


def test_first_text_captures_plain_decoding_too():
    """In a batch a draft may be compared with it later: only the first text of that size has to wait for captures."""
    captured = set()
    planner = planner_for(ALWAYS, rows=4, remaining=lambda: 200, is_captured=captured.__contains__)
    segments = planner.segments()
    first = next(segments)
    captured.add(first.plan)
    assert first.plan.policy != "autoregressive"
    plain = segments.send(timing_of(first, ALWAYS)._replace(disturbed=True, capturing=0.5))
    assert plain.plan.policy == "autoregressive" and plain.rounds == 1
    captured.add(plain.plan)
    second = segments.send(timing_of(plain, ALWAYS)._replace(disturbed=True, capturing=0.1))
    assert second.plan == first.plan
    check = segments.send(timing_of(second, NEVER))
    assert check == plain._replace(rounds=online.CHECK_ROUNDS)


@pytest.mark.parametrize(("step", "gain"), [(0.4, "small"), (0.1, "large")])
def test_small_gain_is_not_worth_a_capture(step, gain):
    """However often texts would have been a little faster: predictions are not that certain."""
    costs = replace(CHEAP_DRAFT, draft_step=step * CHEAP_DRAFT.target_pass, target_token=0.0)
    vanilla = [plan for plan in every_plan() if plan.policy == "vanilla" and not plan.tree_leaves]
    shorter, longer = (plan for plan in vanilla if plan.max_draft_length in (6, 8))
    speeds = [predict([ALWAYS], plan, costs, True).tokens_per_second for plan in (shorter, longer)]
    assert MIN_GAIN < speeds[1] / speeds[0] < (CERTAIN_GAIN if gain == "small" else 1.2)
    known, captured = Knowledge(), {shorter}
    for _ in range(30):
        followed, _ = plan_text(ALWAYS, known, costs, plans=[shorter, longer], is_captured=captured.__contains__)
        captured.update(segment.plan for segment in followed)
    assert captured == ({shorter} if gain == "small" else {shorter, longer})


def test_plans_that_are_captured_are_preferred():
    costs = CHEAP_DRAFT
    captured = next(plan for plan in every_plan() if plan.policy == "vanilla" and plan.max_draft_length == 6)
    followed, _ = plan_text(ALWAYS, None, costs, is_captured=lambda plan: plan == captured)
    assert {segment.plan for segment in followed} == {captured}
    long = planner_for(ALWAYS, is_captured=lambda plan: plan == captured, remaining=lambda: 100_000)
    assert next(long.segments()).plan != captured


@pytest.mark.parametrize("length", [10, 11, 13])
def test_a_plan_from_elsewhere_is_followed_until_another_is_clearly_better(length):
    """A choice that was kept by another version, say, while nothing is captured."""
    text, best = recordings("good")[0], choose(every_plan(), [ALWAYS], CHEAP_DRAFT, True).plan
    stranger = replace(best, max_draft_length=length, tree_leaves=0)
    assert stranger not in every_plan()
    planner = planner_for(text, is_captured=lambda plan: False, remaining=lambda: 10_000)
    assert planner.best_choice([text], CHEAP_DRAFT, stranger).plan == stranger


def test_plan_that_would_pay_in_the_long_run_is_captured():
    """One short text after the other: in the end the better plan has been worth its capture."""
    known, captured = Knowledge(), set()
    captured.add(next(plan for plan in every_plan() if plan.policy == "vanilla" and plan.max_draft_length == 2))
    best = choose(every_plan(), [ALWAYS], CHEAP_DRAFT, True).plan
    seen = []
    for _ in range(40):
        followed, _ = plan_text(ALWAYS, known, CHEAP_DRAFT, is_captured=captured.__contains__)
        captured.update(segment.plan for segment in followed)
        seen.append(followed[-1].plan)
        known.next_evaluation.clear()
    assert seen[0] != best and seen[-1].max_draft_length == best.max_draft_length and len(captured) <= 3


def test_expensive_draft_begins_later_in_a_sampled_text():
    """Short texts do not earn back that it reads them."""
    large, small = size_of(of_size("1.3b")), size_of(of_size("68m"))
    starts = []
    for target, draft in ((size_of(of_size("7b")), small), (size_of(of_size("7b")), large), (large, small)):
        costs = predicted_costs(target, draft, captured=True)
        plans = plans_within(SpecBranchConfig(), True, costs.draft_step)
        segment = next(planner_for(list, costs=costs, plans=plans, measures=False).segments())
        starts.append(segment.rounds if segment.plan.policy == "autoregressive" else 0)
    assert starts[0] == starts[2] == 0 and 4 <= starts[1] <= 32


def test_sampled_text_starts_with_the_typical_plan():
    costs = predicted_costs(size_of(of_size("7b")), size_of(of_size("68m")), captured=True)
    plans = [PAPER, *every_plan()]
    planner = planner_for(list, costs=costs, plans=plans, measures=False)
    segments = planner.segments()
    first = next(segments).plan
    assert first == choose(plans, [typical_agreement(5)], costs, True).plan != PAPER
    for text in (*recordings("good"), ALWAYS, NEVER):
        planner.agreements = partial(list, [text])
        segments = planner.segments()
        next(segments)
        then = segments.send(None).plan
        promised, now = (predict([text], plan, costs, True).tokens_per_second for plan in (then, first))
        best = choose(plans, [text], costs, True).tokens_per_second
        assert then == first if MIN_PREDICTED_GAIN * now >= best else promised == best
    assert then.policy == "autoregressive"  # the last draft was never right


def test_sampled_texts_teach_nothing():
    known = Knowledge()
    for _ in range(9):
        planner = planner_for(NEVER, known, measures=False)
        segment = next(planner.segments())
        planner.end(segment, timing_of(segment, NEVER))
    assert known == Knowledge(texts=known.texts) and known.texts.all() == []


# ---- recent texts


def test_each_recent_text_counts_once():
    """However often it was re-evaluated, and although stages were captured in its last rounds."""
    known, texts = Knowledge(), recordings("good")
    for text in texts[:3]:
        planner = planner_for(from_token(text, 0, 40), known)
        _, segment = next_segment(planner, text)
        planner.agreements = partial(list, [text])
        learned = copy.deepcopy(planner.factors)
        planner.end(segment, timing_of(segment, text)._replace(disturbed=True))
    assert known.texts.all() == texts[:3]
    assert planner.factors == learned


def test_concurrent_texts_are_kept_apart():
    known, in_flight = Knowledge(), []
    for text in (ALWAYS, NEVER):
        known.next_evaluation.clear()
        planner = planner_for(text, known)
        in_flight.append((planner, next_segment(planner, text)[1], text))
    for planner, segment, text in in_flight:
        planner.end(segment, timing_of(segment, text))
    assert known.texts.all() == [ALWAYS, NEVER]


def test_recent_texts_are_bounded_across_threads():
    texts = RecentTexts(limit=3)
    names = [texts.begin() for _ in range(40)]
    with ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(lambda name: texts.update(name, [name]), names))
    assert all(name in found and len(found) <= 3 for name, found in zip(names, seen))
    assert len(texts.all()) == 3


# ---- in a generation


def test_segments_add_up_and_state_predictions(target, draft):
    model = attached(target)
    for _ in range(2):
        model.generate(**prompt(), max_new_tokens=200, do_sample=False, eos_token_id=None, assistant_model=draft)
    stats = model.specbranch_stats
    assert stats.policy == "auto"
    # The first token comes from the prefill.
    assert sum(segment["tokens"] for segment in stats.plans) == stats.new_tokens - 1
    assert stats.plans[-1]["predicted_tokens_per_second"] > 0
    assert "plans" in stats.to_dict()


def test_checks_are_rare_in_a_generation(target, draft):
    model = attached(target)

    def checked(length, new):
        inputs = prompt(length=length)
        model.generate(**inputs, max_new_tokens=new, do_sample=False, eos_token_id=None, assistant_model=draft)
        plans = model.specbranch_stats.plans
        return sum(segment["rounds"] for segment in plans if segment["predicted_tokens_per_second"] is None)

    assert max(checked(7, 100) for _ in range(3)) <= 2 * online.CHECK_ROUNDS
    assert checked(130, 100) <= online.CHECK_ROUNDS  # a longer context is no new situation
    model.detach_specbranch()
    assert not state_of(model).pairs


def test_fixed_policies_are_not_planned(target, draft):
    model = attached(target)
    for policy in ("vanilla", "specbranch", "autoregressive"):
        config = SpecBranchConfig(policy=policy)
        model.generate(**prompt(), max_new_tokens=12, do_sample=False, assistant_model=draft, specbranch=config)
        assert model.specbranch_stats.plans == [] and model.specbranch_stats.policy == policy


def test_sampling_is_planned_for_any_number_of_branches(target, draft):
    model = attached(target)
    for branches in (1, 9):
        config = SpecBranchConfig(max_branches=branches)
        model.generate(**prompt(), max_new_tokens=60, do_sample=True, assistant_model=draft, specbranch=config)
        assert model.specbranch_stats.plans


def test_later_calls_may_use_more_branches(static_stages):
    """Recordings of earlier texts have too few candidates then, and are left out. Plans of static stages branch."""
    target = llama(seed=0)
    model, draft = attached(target), noisy_copy(target, noise=0.05, seed=1)
    for branches in (2, 6):
        settings = SpecBranchConfig(policy="auto", max_branches=branches)
        arguments = dict(**prompt(1), max_new_tokens=60, do_sample=False, eos_token_id=None)
        got = model.generate(**arguments, assistant_model=draft, specbranch=settings)
        assert torch.equal(got, target.generate(**arguments))


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3])
def test_captured_stages_follow_changing_plans(random_plans, target, draft, rows):
    plain, small = copy.deepcopy(target).cuda(), copy.deepcopy(draft).cuda()
    model = attached(target).cuda()
    for seed in range(4):
        inputs = {name: value.cuda() for name, value in prompt(rows, length=6 + seed, seed=seed).items()}
        run = {**inputs, "max_new_tokens": 60, "do_sample": False}
        assert torch.equal(model.generate(**run, assistant_model=small), plain.generate(**run))
        assert_counts_add_up(model.specbranch_stats)
        assert model.specbranch_stats.runtime == "graph" and not model.specbranch_stats.slowed_by


@pytest.mark.gpu
@pytest.mark.parametrize("which", ["good", "weak"])
def test_choice_on_a_gpu_is_close_to_the_best(which):
    """The embedded pair in float32: after the first texts, within 10% of the best of three policies."""
    target, small, tokenizer = load_demo_pair(which, device="cuda")
    model = specbranch(target, small)
    inputs = tokenizer("def is_prime(n):\n", return_tensors="pt").to("cuda")
    run = {**inputs, "max_new_tokens": 256, "do_sample": False, "eos_token_id": None}
    expected, speeds = model.generate(**run, specbranch=False), {}
    for policy in ("autoregressive", "vanilla", "specbranch", "auto"):
        for _ in range(4):
            out = model.generate(**run, specbranch=SpecBranchConfig(policy))
            speeds[policy] = max(speeds.get(policy, 0.0), model.specbranch_stats.tokens_per_second)
            assert torch.equal(out, expected)
    assert speeds["auto"] > 0.9 * max(speeds.values()), (speeds, model.specbranch_stats.plans)
