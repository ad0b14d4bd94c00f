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
from hf_specbranch.decoding import assembly as assembly_module
from hf_specbranch.decoding.call import Call
from hf_specbranch.model_state import state_of
from hf_specbranch.planning import online
from hf_specbranch.planning.agreement import Agreement, RecentTexts, typical_agreement
from hf_specbranch.planning.chooser import MAX_HIDDEN, MIN_PREDICTED_GAIN, choose
from hf_specbranch.planning.costs import SegmentTiming, StepCosts, predicted_costs
from hf_specbranch.planning.simulate import predict, replay
from hf_specbranch.runtime.eager import EagerRunner
from hf_specbranch.runtime.overlap import Totals
from hf_specbranch.runtime.static_buffers import StaticBuffers

from .models import assert_counts_add_up, attached, llama, noisy_copy, prompt
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
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("which", ["draft", "stranger"])
def test_text_does_not_depend_on_plans(random_plans, request, target, rows, which):
    small = request.getfixturevalue(which)
    inputs = prompt(rows)
    expected = target.generate(**inputs, max_new_tokens=60, do_sample=False)
    model = attached(target)
    assert torch.equal(model.generate(**inputs, max_new_tokens=60, do_sample=False, assistant_model=small), expected)
    stats = model.specbranch_stats
    assert len({segment["plan"] for segment in stats.plans}) > 3
    assert_counts_add_up(stats)


@pytest.mark.parametrize("rows", [1, 3])
def test_static_stages_follow_changing_plans(kept_buffers, random_plans, target, draft, rows):
    run = {**prompt(rows), "max_new_tokens": 60, "do_sample": False}
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


def test_accepted_leaves_are_read_before_the_plan_changes(alternate_plans, target):
    leaves = SpecBranchConfig("specbranch", 4, confidence_threshold=0.0, max_rejection_branches=0, tree_leaves=8)
    alternate_plans(leaves, replace(leaves, policy="autoregressive", tree_leaves=0))
    small, model, hits = noisy_copy(target, noise=0.4, seed=3), attached(target), 0
    for seed in range(4):
        run = {**prompt(seed=seed), "max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
        assert torch.equal(model.generate(**run, assistant_model=small), target.generate(**run))
        hits += model.specbranch_stats.tree_leaf_hits
    assert hits > 3


def test_returned_cache_holds_accepted_leaves(target):
    """Whatever the last round did, the cache holds the keys that plain generate() leaves in it."""
    config = SpecBranchConfig(policy="specbranch", max_draft_length=4, confidence_threshold=0.0, tree_leaves=8)
    small, hits = noisy_copy(target, noise=0.4, seed=3), 0
    model = attached(target)
    for count in range(2, 26):
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
    assert hits > 20


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
    counts = draw(SpecBranchConfig(draft_sampling="sample"), samples=10_000)
    assert p_value(counts, exact_distribution(model)) < SMALLEST_P


def test_sampled_text_does_not_depend_on_measurements(target, draft):
    model, texts = attached(target), []
    for _ in range(3):
        torch.manual_seed(5)
        texts.append(model.generate(**prompt(), max_new_tokens=100, do_sample=True, assistant_model=draft))
        model.generate(**prompt(), max_new_tokens=100, do_sample=False, assistant_model=draft)  # measures
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


# ---- what a planner does with timings, in simulated time


def until_chosen(planner, agreement, costs=CHEAP_DRAFT):
    """Return the segments and the first of them that follows a choice, once all is measured."""
    segments = planner.segments()
    segment = next(segments)
    while segment.predicted is None:
        segment = segments.send(timing_of(segment, agreement, costs))
    return segments, segment


def timing_of(segment, agreement, costs=CHEAP_DRAFT):
    """Return the timing of a segment at these costs."""
    played = replay(agreement, segment.plan, captured=True)[: segment.rounds]
    parts = [costs.parts(each) for each in played]
    steps, overlapped = sum(each.steps_before for each in played), sum(each.overlapped_steps for each in played)
    draft = Totals(steps * costs.draft_step, steps, steps)
    verify = Totals(sum(t for t, _ in parts), len(played), sum(1 + each.sent for each in played))
    branch = Totals(sum(b for _, b in parts), overlapped, sum(each.overlapped_steps * each.width for each in played))
    tokens = sum(each.committed for each in played)
    return SegmentTiming(
        len(played), tokens, costs.seconds(played, segment.overlap), segment.overlap, draft, verify, branch
    )


def seconds_of_a_text(text, costs, known):
    """Return the seconds that the planner's segments take on this text at these costs."""
    done, seconds = 0, 0.0
    plans = [SpecBranchConfig().decided(captured=True), *every_plan()]
    most, seen = max(costs.hidden, MAX_HIDDEN), lambda: [from_token(text, 0, done)] if done > 15 else []
    planner = online.Planner(plans, True, "here", known, None, seen, lambda: 10, most)
    segments = planner.segments()
    segment = next(segments)
    while True:
        timing = timing_of(segment, from_token(text, done), costs)
        done, seconds = done + int(timing.tokens), seconds + timing.seconds
        if done + 2 > len(text.rank):
            planner.end(segment, timing)
            return seconds
        segment = segments.send(timing)


def test_wrong_prediction_is_re_evaluated():
    known, plans = online.Knowledge(), every_plan()
    planner = online.Planner(plans, True, "here", known, None, lambda: [NEVER], lambda: 10)
    segments, segment = until_chosen(planner, NEVER)
    assert segment.plan.policy == "autoregressive"
    planner.agreements = lambda: [ALWAYS] * 4
    segment = segments.send(timing_of(segment, ALWAYS))  # a plan without a draft is re-evaluated
    assert segment.plan.max_draft_length == 12 and segment.plan.policy != "autoregressive"
    as_predicted = timing_of(segment, ALWAYS)
    assert segments.send(as_predicted).plan == segment.plan and known.choices[planner.situation].plan == segment.plan
    planner.agreements = lambda: [NEVER] * 4
    assert segments.send(timing_of(segment, NEVER)).plan.policy == "autoregressive"


def test_small_deviations_are_not_re_evaluated():
    """A round that takes the predicted time and commits somewhat fewer or more tokens is as expected."""
    known, plans = online.Knowledge(), every_plan()
    planner = online.Planner(plans, True, "here", known, None, lambda: [ALWAYS], lambda: 10)
    segments, segment = until_chosen(planner, ALWAYS)
    planner.agreements = lambda: pytest.fail("it was re-evaluated")
    timing = timing_of(segment, ALWAYS)
    assert segments.send(timing._replace(tokens=0.7 * timing.tokens)).plan == segment.plan
    assert segments.send(timing._replace(tokens=1.5 * timing.tokens, seconds=0.9 * timing.seconds)).plan == segment.plan
    planner.agreements = lambda: [ALWAYS]
    before = dict(known.ratios)
    segments.send(timing._replace(seconds=1.5 * timing.seconds))
    assert known.ratios != before


def test_autoregressive_choice_is_re_evaluated_ever_more_rarely():
    known, plans = online.Knowledge(), every_plan()
    evaluations = []
    for generation in range(40):
        record = partial(lambda now: evaluations.append(now) or [NEVER], generation)
        planner = online.Planner(plans, True, "here", known, None, record, lambda: 10)
        segments, segment = until_chosen(planner, NEVER)
        planner.end(segment, timing_of(segment, NEVER))
    assert sorted(set(evaluations)) == [*range(5), 8, 16, 32]  # the first choice, then after these


def test_plan_is_chosen_by_the_end_of_the_first_text():
    """If all was measured by then, the next text begins with it."""
    costs, known = StepCosts(0.0042, 1e-5, 8.5e-5, 3e-6, hidden=0.6, waiting=3e-4), online.Knowledge()
    first, second = recordings("good")[:2]
    long = Agreement(first.confidence * 2, first.rank * 2, 5, first.chances * 2)
    seconds_of_a_text(long, costs, known)
    assert len(known.choices) == 1 and known.generations == 1
    assert seconds_of_a_text(second, costs, known) < seconds_of_a_text(second, costs, online.Knowledge())


@pytest.mark.parametrize("which", ["good", pytest.param("weak", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "costs",
    [
        StepCosts(0.0042, 1e-5, 8.5e-5, 3e-6, hidden=0.6, waiting=3e-4),  # near those of 7B and 68M on an H200
        StepCosts(0.0178, 5e-5, 1.3e-3, 3e-5, hidden=0.5, waiting=3e-4),  # 33B and 1.3B
        StepCosts(0.004, 1e-5, 4e-4, 1e-5, hidden=1.0),  # two GPUs
    ],
    ids=["7B/68M", "33B/1.3B", "two GPUs"],
)
def test_known_pair_is_close_to_the_best_plan(costs, which):
    """In simulated time, at constant costs: within 5% of the best plan over the same texts."""
    texts, known = recordings(which), online.Knowledge()
    for text in texts * 2:
        seconds_of_a_text(text, costs, known)
    taken = sum(seconds_of_a_text(text, costs, known) for text in texts)
    best = min(sum(costs.seconds(replay(text, plan, True), plan.overlap) for text in texts) for plan in every_plan())
    assert taken <= 1.05 * best


def test_context_that_doubles_within_a_segment_is_measured_again():
    plans = [SpecBranchConfig().decided(captured=True), *every_plan()]
    planner = online.Planner(plans, True, "here", online.Knowledge(), None, lambda: [ALWAYS], lambda: 10)
    two_gpus = StepCosts(0.004, 0.0, 4e-4, 0.0, hidden=1.0)
    segments, segment = until_chosen(planner, ALWAYS, two_gpus)
    assert segment.overlap
    planner.context = lambda: 5000
    segment = segments.send(timing_of(segment, NEVER, two_gpus))  # off its prediction, but costs are not known here
    assert segment.predicted is None and segment.rounds == online.WARM_UP_ROUNDS


@pytest.mark.parametrize(("hidden", "step", "tried"), [(0.4, 8.5e-5, False), (1.0, 4e-4, True)], ids=["one GPU", "two"])
def test_overlap_is_timed_only_where_it_may_pay(hidden, step, tried):
    plans = [SpecBranchConfig().decided(captured=True), *every_plan()]
    text = recordings("good")[0]
    most = 1.0 if tried else MAX_HIDDEN
    planner = online.Planner(plans, True, "here", online.Knowledge(), None, lambda: [text], lambda: 10, most)
    costs = StepCosts(0.0041, 1e-5, step, 3e-6, hidden=hidden)
    _, segment = until_chosen(planner, text, costs)
    assert any(overlap for _, overlap in planner.timings) == tried == segment.overlap


def test_sampled_text_starts_with_the_typical_plan():
    costs, plans = predicted_costs(of_size("7b"), of_size("68m"), captured=True), [PAPER, *every_plan()]
    planner = online.Planner(plans, True, "here", online.Knowledge(), costs, list, lambda: 10)
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
        assert then == first if best <= MIN_PREDICTED_GAIN * now else promised == best
    assert then.policy == "autoregressive"  # the last draft was never right


def test_sampled_texts_teach_nothing():
    known, plans = online.Knowledge(), every_plan()
    for _ in range(9):
        planner = online.Planner(plans, True, "here", known, CHEAP_DRAFT, lambda: [NEVER], lambda: 10)
        segment = next(planner.segments())
        planner.end(segment, timing_of(segment, NEVER))
    assert known == online.Knowledge(texts=known.texts) and known.texts.all() == []


# ---- recent texts


def test_each_recent_text_counts_once():
    """However often it was re-evaluated, and although stages were captured in its last rounds."""
    known, plans, texts = online.Knowledge(), every_plan(), recordings("good")
    for text in texts[:3]:
        half = from_token(text, 0, 40)
        planner = online.Planner(plans, True, "here", known, None, partial(list, [half]), lambda: 10)
        _, segment = until_chosen(planner, text)
        planner.agreements = partial(list, [text])
        planner.end(segment, timing_of(segment, text)._replace(disturbed=True))
    assert known.texts.all() == texts[:3]
    assert sum(timing.disturbed for timing in planner.timings.values()) == 0


def test_concurrent_texts_are_kept_apart():
    known, plans = online.Knowledge(), every_plan()
    in_flight = []
    for text in (ALWAYS, NEVER):
        planner = online.Planner(plans, True, "here", known, None, partial(list, [text]), lambda: 10)
        in_flight.append((planner, until_chosen(planner, text)[1], text))
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


def test_costs_are_measured_again_when_the_context_doubles(monkeypatch, target, draft):
    monkeypatch.setattr(online, "MIN_CONTEXT", 64)
    model = attached(target)

    def explored(length, new):
        inputs = prompt(length=length)
        model.generate(**inputs, max_new_tokens=new, do_sample=False, eos_token_id=None, assistant_model=draft)
        return sum(segment["predicted_tokens_per_second"] is None for segment in model.specbranch_stats.plans)

    # Three plans, two segments each, of which the second is timed; after the fourth generation one of them again.
    # Overlapped drafting is timed too if these timings say that it may pay.
    monkeypatch.setattr(online, "overlap_may_pay", lambda *_: False)
    assert [explored(7, 100) for _ in range(5)] == [6, 0, 0, 0, 2]
    monkeypatch.setattr(online, "overlap_may_pay", lambda *_: True)
    assert explored(130, 100) == 10
    model.detach_specbranch()
    assert not state_of(model).pairs


def test_fixed_policies_are_not_planned(target, draft):
    model = attached(target)
    for policy in ("vanilla", "specbranch", "autoregressive"):
        config = SpecBranchConfig(policy=policy)
        model.generate(**prompt(), max_new_tokens=30, do_sample=False, assistant_model=draft, specbranch=config)
        assert model.specbranch_stats.plans == [] and model.specbranch_stats.policy == policy


def test_sampling_is_planned_for_any_number_of_branches(target, draft):
    model = attached(target)
    for branches in (1, 9):
        config = SpecBranchConfig(max_branches=branches)
        model.generate(**prompt(), max_new_tokens=60, do_sample=True, assistant_model=draft, specbranch=config)
        assert model.specbranch_stats.plans


def test_later_calls_may_use_more_branches():
    """Recordings of earlier texts have too few candidates then, and are left out."""
    target = llama(seed=0)
    model, draft = attached(target), noisy_copy(target, noise=0.05, seed=1)
    for branches in (2, 6):
        for seed in range(3):
            settings = SpecBranchConfig(policy="auto", max_branches=branches)
            arguments = dict(**prompt(1, seed=seed), max_new_tokens=90, do_sample=False, eos_token_id=None)
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
