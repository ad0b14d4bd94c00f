"""`policy="auto"`: plans change in mid-text and the text does not; what is chosen follows costs and agreement."""

import copy
import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import lru_cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_specbranch import SpecBranchConfig, load_demo_pair, specbranch
from hf_specbranch.bench import NAMED_SHAPES
from hf_specbranch.decoding import assembly as assembly_module
from hf_specbranch.decoding.call import Call
from hf_specbranch.model_state import state_of
from hf_specbranch.planning import online
from hf_specbranch.planning.agreement import RecentTexts, typical_agreement
from hf_specbranch.planning.chooser import MAX_HIDDEN, MIN_PREDICTED_GAIN, choose, plans_within
from hf_specbranch.planning.costs import SegmentTiming, fit_segment_costs, predicted_costs
from hf_specbranch.planning.simulate import Agreement, StepCosts, predict, read_agreement, record_agreement, replay
from hf_specbranch.runtime.eager import EagerRunner
from hf_specbranch.runtime.static_buffers import StaticBuffers
from hf_specbranch.stats import Totals

from .models import assert_counts_add_up, attached, llama, noisy_copy, prompt
from .sampling import SMALLEST_P, draw, exact_distribution, p_value, sampling_pair

ALWAYS = Agreement((0.95,) * 97, (0,) * 97, 5, ((0.95, 0.02, 0.01, 0.01, 0.01),) * 97)
NEVER = Agreement((0.3,) * 97, (-1,) * 97, 5, ((0.3, 0.2, 0.1, 0.1, 0.1),) * 97)
PAPER = SpecBranchConfig().decided(captured=True)
CHEAP_DRAFT = StepCosts(0.004, 2e-5, 1e-4, 1e-6, hidden=0.8)


def every_plan():
    return plans_within(SpecBranchConfig(), captured=True)


@pytest.fixture
def at_random(monkeypatch):
    """Plans that change every few rounds, for no reason."""

    def segments(self):
        dice = random.Random(len(self.plans))
        while True:
            plan = dice.choice(self.plans)
            yield online.PlanSegment(plan, dice.randint(1, 3), dice.random() < 0.5)

    monkeypatch.setattr(online.Planner, "segments", segments)


class KeptBuffers(StaticBuffers):
    """Memory and stages that are used again by the next drafter with the same plan, as on a GPU.

    A replay is the stage as it was first met: what it has not read from memory is not renewed.
    """

    def run(self, key, stage, only_our_kernels=False):
        self.graphs.setdefault(key, stage)()


@pytest.fixture
def kept_desks(monkeypatch):
    """Stages of fixed shape."""

    def buffers(self, settings):
        buffers_by_settings = self.__dict__.setdefault("desks", {})
        return buffers_by_settings.setdefault(settings, KeptBuffers(self.device, None))

    monkeypatch.setattr(EagerRunner, "captures", True)
    monkeypatch.setattr(EagerRunner, "buffers", buffers)


@pytest.fixture
def in_turn(monkeypatch):
    """These plans, a round each."""

    def follow(*plans):
        def segments(self):
            for plan in itertools.cycle(plans):
                yield online.PlanSegment(plan, 1, False)

        monkeypatch.setattr(online.Planner, "segments", segments)
        monkeypatch.setattr(assembly_module, "plans_within", lambda *_: list(plans))

    return follow


# ---- exactness


@pytest.mark.compat
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("which", ["draft", "stranger"])
def test_plans_may_change_at_any_time_and_the_text_does_not(at_random, request, target, rows, which):
    small = request.getfixturevalue(which)
    inputs = prompt(rows)
    expected = target.generate(**inputs, max_new_tokens=60, do_sample=False)
    model = attached(target)
    assert torch.equal(model.generate(**inputs, max_new_tokens=60, do_sample=False, assistant_model=small), expected)
    stats = model.specbranch_stats
    assert len({segment["plan"] for segment in stats.plans}) > 3
    assert_counts_add_up(stats)


@pytest.mark.parametrize("rows", [1, 3])
def test_stages_of_fixed_shape_follow_changing_plans_too(kept_desks, at_random, target, draft, rows):
    run = {**prompt(rows), "max_new_tokens": 60, "do_sample": False}
    model = attached(target)
    assert torch.equal(model.generate(**run, assistant_model=draft), target.generate(**run))
    stats = model.specbranch_stats
    assert not stats.slowed_by and len({segment["plan"] for segment in stats.plans}) > 3
    assert_counts_add_up(stats)


@pytest.mark.slow
def test_stages_of_fixed_shape_sample_from_the_target_when_plans_change(kept_desks, at_random):
    model, _ = sampling_pair()
    counts = draw(SpecBranchConfig(draft_sampling="sample"), samples=4_000)
    assert p_value(counts, exact_distribution(model)) > SMALLEST_P


def test_runners_up_that_were_right_are_read_before_another_plan_takes_over(in_turn, target):
    leaves = SpecBranchConfig("specbranch", 4, confidence_threshold=0.0, max_rejection_branches=0, tree_leaves=8)
    in_turn(leaves, replace(leaves, policy="autoregressive", tree_leaves=0))
    small, model, hits = noisy_copy(target, noise=0.4, seed=3), attached(target), 0
    for seed in range(4):
        run = {**prompt(seed=seed), "max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
        assert torch.equal(model.generate(**run, assistant_model=small), target.generate(**run))
        hits += model.specbranch_stats.tree_leaf_hits
    assert hits > 3


def test_a_cache_that_is_handed_back_holds_runners_up_in_their_places(target):
    """Whatever the last round did, a second turn on the same cache continues as plain generate() does."""
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
def test_sampling_stays_exact_when_plans_change(at_random, drafting):
    model, _ = sampling_pair()
    counts = draw(SpecBranchConfig(draft_sampling=drafting), samples=6_000)
    assert p_value(counts, exact_distribution(model)) > SMALLEST_P


def test_drafters_that_share_their_randomness_are_noticed(in_turn, monkeypatch):
    vanilla = SpecBranchConfig("vanilla", 1, confidence_threshold=0.0, max_rejection_branches=0, tree_leaves=0)
    in_turn(vanilla, replace(vanilla, max_draft_length=2))
    monkeypatch.setattr(Call, "seeds", lambda call: itertools.repeat(int(torch.randint(2**62, (1,)))))
    model, _ = sampling_pair()
    counts = draw(SpecBranchConfig(draft_sampling="sample"), samples=10_000)
    assert p_value(counts, exact_distribution(model)) < SMALLEST_P


def test_a_seed_gives_the_same_text_whatever_has_been_measured(target, draft):
    model, texts = attached(target), []
    for _ in range(3):
        torch.manual_seed(5)
        texts.append(model.generate(**prompt(), max_new_tokens=100, do_sample=True, assistant_model=draft))
        model.generate(**prompt(), max_new_tokens=100, do_sample=False, assistant_model=draft)  # measures
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


# ---- the choice


def test_what_the_user_has_set_stays():
    given = SpecBranchConfig(
        max_draft_length=3, confidence_threshold=0.7, max_rejection_branches=2, tree_leaves=1, max_branches=2
    )
    for plan in plans_within(given, captured=False):
        assert plan.max_draft_length == 3 and plan.confidence_threshold == 0.7 and plan.max_branches == 2
        foreseen = {"specbranch": (2, 1), "vanilla": (0, 1), "autoregressive": (0, 0)}
        assert (plan.max_rejection_branches, plan.tree_leaves) == foreseen[plan.policy]


def test_a_chain_that_fills_a_block_leaves_no_room_for_runners_up():
    for length, most in ((4, 8), (8, 6), (13, 1), (14, 0), (15, 0), (40, 0)):
        plans = plans_within(SpecBranchConfig(max_draft_length=length), captured=True)
        assert max(plan.tree_leaves for plan in plans) == most
        assert all(plan.tree_leaves in (0, most) for plan in plans)


def test_a_draft_that_is_always_right_drafts_much_and_one_that_never_is_nothing():
    assert choose(every_plan(), [ALWAYS], CHEAP_DRAFT, True).plan.max_draft_length == 12
    assert choose(every_plan(), [NEVER], CHEAP_DRAFT, True).plan.policy == "autoregressive"


def test_a_draft_as_slow_as_the_target_is_left_alone():
    slow = StepCosts(0.004, 2e-5, 0.004, 1e-4, hidden=0.0)
    assert choose(every_plan(), [ALWAYS], slow, True).plan.policy == "autoregressive"


def test_overlap_is_chosen_where_it_hides_something():
    assert not choose(every_plan(), [ALWAYS], replace(CHEAP_DRAFT, hidden=0.0), True).plan.overlap
    two_gpus = StepCosts(0.004, 0.0, 4e-4, 0.0).on_gpus(2)
    chosen = choose(every_plan(), [ALWAYS], two_gpus, True).plan
    assert chosen.overlap and chosen.policy == "specbranch"


def test_a_plan_is_kept_unless_another_is_clearly_better():
    plans = every_plan()
    best = choose(plans, [ALWAYS], CHEAP_DRAFT, True)
    for plan in plans:
        kept = choose(plans, [ALWAYS], CHEAP_DRAFT, True, current=plan)
        speed = predict([ALWAYS], plan, CHEAP_DRAFT, True).tokens_per_second
        assert (kept.plan == plan) == (best.tokens_per_second <= 1.03 * speed)


def test_experience_with_a_plan_corrects_its_prediction():
    best = choose(every_plan(), [ALWAYS], CHEAP_DRAFT, True)
    other = choose(every_plan(), [ALWAYS], CHEAP_DRAFT, True, ratios={best.plan: 0.5})
    assert other.plan != best.plan


@given(
    st.floats(0.001, 0.1), st.floats(0, 0.1), st.floats(0.01, 1), st.floats(0, 0.3), st.floats(0, 1), st.floats(0, 0.2)
)
@settings(max_examples=60, deadline=None)
def test_prices_explain_the_rounds_they_come_from(a_pass, token, step, branch, hidden, loop):
    """Costs made up, rounds priced by the formula, and the costs found again."""
    token, step, branch, loop = a_pass * token, a_pass * step, a_pass * step * branch, a_pass * loop

    def stretch(sent, steps, ahead, width, overlap):
        draft = Totals(10 * steps * step, 10 * steps, 10 * steps)
        verify = Totals(10 * (a_pass + sent * token), 10, 10 * (1 + sent))
        beside = Totals(10 * ahead * (step + (width - 1) * branch), 10 * ahead, 10 * ahead * width)
        saved = hidden * min(verify.seconds, beside.seconds) if overlap else 0.0
        seconds = 10 * loop + draft.seconds + verify.seconds + beside.seconds - saved
        return SegmentTiming(10, 20, seconds, overlap, draft, verify, beside)

    found = fit_segment_costs([stretch(8, 2, 9, 6, False), stretch(8, 2, 9, 6, True), stretch(0, 0, 0, 1, False)])
    expected = StepCosts(a_pass + loop, token, step, branch, hidden)
    for name in ("target_pass", "target_token", "draft_step", "draft_branch"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-6, abs=1e-9 + 1e-7 * a_pass)
    assert found.hidden == pytest.approx(hidden, abs=1e-3)


def test_passes_are_priced_between_the_widths_that_were_timed():
    timed = [
        SegmentTiming(4, 4, 0.04 * t, False, Totals(), Totals(0.04 * t, 4, 4 * q), Totals())
        for q, t in ((1, 1), (5, 2), (9, 1.9))
    ]
    costs = fit_segment_costs(timed)
    assert [round(100 * costs.pass_seconds(sent), 2) for sent in (0, 2, 4, 8)] == [1.0, 1.5, 2.0, 2.0]  # never faster
    assert costs.pass_seconds(12) > costs.pass_seconds(8)
    assert replace(costs, passes=costs.passes[1:]).pass_seconds(0) == costs.pass_seconds(4)  # nothing narrower is known


def test_a_surprise_is_thought_over_and_remembered():
    known, plans = online.Knowledge(), every_plan()
    planner = online.Planner(plans, True, "here", known, None, lambda: [NEVER], lambda: 10)
    segments, segment = until_chosen(planner, NEVER)
    assert segment.plan.policy == "autoregressive"
    planner.agreements = lambda: [ALWAYS] * 4
    segment = segments.send(priced(segment, ALWAYS))  # a plan without a draft is thought over
    assert segment.plan.max_draft_length == 12 and segment.plan.policy != "autoregressive"
    as_predicted = priced(segment, ALWAYS)
    assert segments.send(as_predicted).plan == segment.plan and known.choices[planner.situation].plan == segment.plan
    planner.agreements = lambda: [NEVER] * 4
    assert segments.send(priced(segment, NEVER)).plan.policy == "autoregressive"


def test_doing_without_a_draft_is_thought_over_ever_more_rarely():
    known, plans = online.Knowledge(), every_plan()
    thoughts = []
    for generation in range(40):
        ask = partial(lambda now: thoughts.append(now) or [NEVER], generation)
        planner = online.Planner(plans, True, "here", known, None, ask, lambda: 10)
        segments, segment = until_chosen(planner, NEVER)
        planner.end(segment, priced(segment, NEVER))
    assert sorted(set(thoughts)) == [*range(5), 8, 16, 32]  # the first choice, then after these


def test_each_of_the_last_texts_counts_once():
    """However often it was thought over, and though stages were captured in its last rounds."""
    known, plans, texts = online.Knowledge(), every_plan(), recordings("good")
    for text in texts[:3]:
        half = from_token(text, 0, 40)
        planner = online.Planner(plans, True, "here", known, None, partial(list, [half]), lambda: 10)
        _, segment = until_chosen(planner, text)
        planner.agreements = partial(list, [text])
        planner.end(segment, priced(segment, text)._replace(disturbed=True))
    assert known.texts.all() == texts[:3]
    assert sum(stretch.disturbed for stretch in planner.timings.values()) == 0


def test_texts_that_are_generated_at_once_are_told_apart():
    known, plans = online.Knowledge(), every_plan()
    in_flight = []
    for text in (ALWAYS, NEVER):
        planner = online.Planner(plans, True, "here", known, None, partial(list, [text]), lambda: 10)
        in_flight.append((planner, until_chosen(planner, text)[1], text))
    for planner, segment, text in in_flight:
        planner.end(segment, priced(segment, text))
    assert known.texts.all() == [ALWAYS, NEVER]


def test_only_the_last_texts_are_remembered_whoever_adds_to_them():
    texts = RecentTexts(limit=3)
    names = [texts.begin() for _ in range(40)]
    with ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(lambda name: texts.update(name, [name]), names))
    assert all(name in found and len(found) <= 3 for name, found in zip(names, seen))
    assert len(texts.all()) == 3


def test_drawn_texts_teach_nothing_and_do_not_count():
    known, plans = online.Knowledge(), every_plan()
    for _ in range(9):
        planner = online.Planner(plans, True, "here", known, CHEAP_DRAFT, lambda: [NEVER], lambda: 10)
        segment = next(planner.segments())
        planner.end(segment, priced(segment, NEVER))
    assert known == online.Knowledge(texts=known.texts) and known.texts.all() == []


def test_texts_may_differ_without_a_change_of_plan():
    """A round that takes what it should and gains somewhat less or more is no reason to think."""
    known, plans = online.Knowledge(), every_plan()
    planner = online.Planner(plans, True, "here", known, None, lambda: [ALWAYS], lambda: 10)
    segments, segment = until_chosen(planner, ALWAYS)
    planner.agreements = lambda: pytest.fail("it was thought over")
    took = priced(segment, ALWAYS)
    assert segments.send(took._replace(tokens=0.7 * took.tokens)).plan == segment.plan
    assert segments.send(took._replace(tokens=1.5 * took.tokens, seconds=0.9 * took.seconds)).plan == segment.plan
    planner.agreements = lambda: [ALWAYS]
    before = dict(known.ratios)
    segments.send(took._replace(seconds=1.5 * took.seconds))
    assert known.ratios != before


def until_chosen(planner, agreement, costs=CHEAP_DRAFT):
    """The legs, once all is measured, and the first that follows a choice."""
    segments = planner.segments()
    segment = next(segments)
    while segment.predicted is None:
        segment = segments.send(priced(segment, agreement, costs))
    return segments, segment


def priced(segment, agreement, costs=CHEAP_DRAFT):
    """What a leg takes at these prices."""
    played = replay(agreement, segment.plan, captured=True)[: segment.rounds]
    parts = [costs.parts(each) for each in played]
    steps, beside = sum(each.steps_before for each in played), sum(each.overlapped_steps for each in played)
    draft = Totals(steps * costs.draft_step, steps, steps)
    verify = Totals(sum(t for t, _ in parts), len(played), sum(1 + each.sent for each in played))
    branch = Totals(sum(b for _, b in parts), beside, sum(each.overlapped_steps * each.width for each in played))
    tokens = sum(each.committed for each in played)
    return SegmentTiming(
        len(played), tokens, costs.seconds(played, segment.overlap), segment.overlap, draft, verify, branch
    )


def test_predicted_costs_follow_the_size_of_the_models(target, draft):
    larger = copy.deepcopy(target)
    larger.lm_head = torch.nn.Linear(32, 4000)
    for captured in (False, True):
        costs = predicted_costs(larger, draft, captured)
        assert costs.target_pass > predicted_costs(target, draft, captured).target_pass > 0


def of_size(name, vocabulary=32000):
    """A model that has nothing but its size."""
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**asdict(NAMED_SHAPES[name]), vocab_size=vocabulary)).to(torch.bfloat16)


@pytest.mark.parametrize(("sizes", "length"), [(("7b", "68m"), 8), (("33b", "1.3b"), 4)], ids=["7B/68M", "33B/1.3B"])
def test_by_size_alone_plain_speculation_with_runners_up_is_best_on_one_gpu(sizes, length):
    """As measured on an H200; lengths in proportion to what a step of the draft takes."""
    costs = predicted_costs(*map(of_size, sizes), captured=True)
    assert 0.0 < costs.hidden < 0.5 and costs.waiting > 0
    texts = [*recordings("good"), *recordings("good", temperature=0.8)]
    chosen = [choose(every_plan(), [text], costs, True).plan for text in texts]
    assert {plan.policy for plan in chosen} == {"vanilla"}
    assert sum(plan.tree_leaves > 0 for plan in chosen) >= len(texts) - 1  # a text that the draft knows by heart
    for text, plan in zip(texts, chosen):
        promised = predict([text], plan, costs, True).tokens_per_second
        leafy = [predict([text], each, costs, True).tokens_per_second for each in every_plan() if each.tree_leaves]
        assert max(leafy) > 0.99 * promised
    first = choose(every_plan(), [typical_agreement(5)], costs, True).plan
    assert (first.policy, first.max_draft_length) == ("vanilla", length) and first.tree_leaves > 0


def test_a_sampled_text_begins_with_what_suits_an_ordinary_draft_and_changes_only_for_much_more():
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


def test_an_typical_agreement_is_always_the_same_and_has_as_many_candidates_as_are_looked_at():
    for candidates in (2, 5, 9):
        text = typical_agreement(candidates)
        typical_agreement.cache_clear()
        assert typical_agreement(candidates) == text and text.candidates == len(text.chances[0]) == candidates
        assert 0.65 < text.rate < 0.75 < text.within(2) < 0.9


def test_sampling_with_many_branches_or_one_is_planned_too(target, draft):
    model = attached(target)
    for branches in (1, 9):
        config = SpecBranchConfig(max_branches=branches)
        model.generate(**prompt(), max_new_tokens=60, do_sample=True, assistant_model=draft, specbranch=config)
        assert model.specbranch_stats.plans


@lru_cache
def recordings(which, temperature=0.0):
    """What the embedded drafts make of some of the target's texts."""
    target, draft, tokenizer = load_demo_pair(which)
    texts = ("def add(a, b):", "class Stack:\n", "def is_prime(n):\n", "import json\n\ndef read(path):\n")
    all_inputs = [tokenizer(text, return_tensors="pt") for text in texts]
    if not temperature:
        return [record_agreement(target, draft, inputs, 80, 5) for inputs in all_inputs]
    torch.manual_seed(0)
    drawn = dict(do_sample=True, temperature=temperature, top_k=0, max_new_tokens=80)
    lengths = [inputs["input_ids"].shape[1] for inputs in all_inputs]
    written = [target.generate(**inputs, **drawn) for inputs in all_inputs]
    return [read_agreement(draft, text, before, 5, temperature) for text, before in zip(written, lengths)]


def from_token(agreement, first, last=None):
    some = slice(first, last)
    return Agreement(agreement.confidence[some], agreement.rank[some], 5, agreement.chances[some])


def seconds_of_a_text(text, costs, known):
    """What the planner's legs on this text would take at these prices."""
    done, seconds = 0, 0.0
    plans = [SpecBranchConfig().decided(captured=True), *every_plan()]
    most, seen = max(costs.hidden, MAX_HIDDEN), lambda: [from_token(text, 0, done)] if done > 15 else []
    planner = online.Planner(plans, True, "here", known, None, seen, lambda: 10, most)
    segments = planner.segments()
    segment = next(segments)
    while True:
        took = priced(segment, from_token(text, done), costs)
        done, seconds = done + int(took.tokens), seconds + took.seconds
        if done + 2 > len(text.rank):
            planner.end(segment, took)
            return seconds
        segment = segments.send(took)


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
def test_once_it_knows_a_pair_it_is_close_to_the_best_plan(costs, which):
    """In made-up time, at prices that do not scatter: within a twentieth of the best over the same texts."""
    texts, known = recordings(which), online.Knowledge()
    for text in texts * 2:
        seconds_of_a_text(text, costs, known)
    taken = sum(seconds_of_a_text(text, costs, known) for text in texts)
    best = min(sum(costs.seconds(replay(text, plan, True), plan.overlap) for text in texts) for plan in every_plan())
    assert taken <= 1.05 * best


def test_a_plan_is_chosen_by_the_end_of_the_first_text():
    """If all was measured meanwhile: the next text begins with it."""
    costs, known = StepCosts(0.0042, 1e-5, 8.5e-5, 3e-6, hidden=0.6, waiting=3e-4), online.Knowledge()
    first, second = recordings("good")[:2]
    long = Agreement(first.confidence * 2, first.rank * 2, 5, first.chances * 2)
    seconds_of_a_text(long, costs, known)
    assert len(known.choices) == 1 and known.generations == 1
    assert seconds_of_a_text(second, costs, known) < seconds_of_a_text(second, costs, online.Knowledge())


def test_on_two_gpus_it_beats_the_method_of_the_paper():
    """The embedded pair's texts, priced with a device for each model: at least 1.1 times as fast."""
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


# ---- in a generation


def test_legs_add_up_and_say_what_was_predicted(target, draft):
    model = attached(target)
    for _ in range(2):
        model.generate(**prompt(), max_new_tokens=200, do_sample=False, eos_token_id=None, assistant_model=draft)
    stats = model.specbranch_stats
    assert stats.policy == "auto"
    assert (
        sum(segment["tokens"] for segment in stats.plans) == stats.new_tokens - 1
    )  # the first comes from the prompt's pass
    assert stats.plans[-1]["predicted_tokens_per_second"] > 0
    assert "plans" in stats.to_dict()


def test_costs_are_measured_for_a_pair_and_again_when_the_context_has_doubled(monkeypatch, target, draft):
    monkeypatch.setattr(online, "MIN_CONTEXT", 64)
    model = attached(target)

    def explored(length, new):
        inputs = prompt(length=length)
        model.generate(**inputs, max_new_tokens=new, do_sample=False, eos_token_id=None, assistant_model=draft)
        return sum(segment["predicted_tokens_per_second"] is None for segment in model.specbranch_stats.plans)

    # Three plans, two legs each, of which the second is timed; after the fourth generation one again. Drafting beside
    # the target is timed too if these times say that it could pay.
    monkeypatch.setattr(online, "overlap_may_pay", lambda *_: False)
    assert [explored(7, 100) for _ in range(5)] == [6, 0, 0, 0, 2]
    monkeypatch.setattr(online, "overlap_may_pay", lambda *_: True)
    assert explored(130, 100) == 10
    model.detach_specbranch()
    assert not state_of(model).pairs


def test_a_context_that_doubles_in_mid_leg_is_measured_anew():
    plans = [SpecBranchConfig().decided(captured=True), *every_plan()]
    planner = online.Planner(plans, True, "here", online.Knowledge(), None, lambda: [ALWAYS], lambda: 10)
    two_gpus = StepCosts(0.004, 0.0, 4e-4, 0.0, hidden=1.0)
    segments, segment = until_chosen(planner, ALWAYS, two_gpus)
    assert segment.overlap
    planner.context = lambda: 5000
    segment = segments.send(priced(segment, NEVER, two_gpus))  # a surprise, but nothing is known of what costs are now
    assert segment.predicted is None and segment.rounds == online.WARM_UP_ROUNDS


@pytest.mark.parametrize(("hidden", "step", "tried"), [(0.4, 8.5e-5, False), (1.0, 4e-4, True)], ids=["one GPU", "two"])
def test_drafting_beside_the_target_is_timed_only_where_it_could_pay(hidden, step, tried):
    plans = [SpecBranchConfig().decided(captured=True), *every_plan()]
    text = recordings("good")[0]
    most = 1.0 if tried else MAX_HIDDEN
    planner = online.Planner(plans, True, "here", online.Knowledge(), None, lambda: [text], lambda: 10, most)
    costs = StepCosts(0.0041, 1e-5, step, 3e-6, hidden=hidden)
    _, segment = until_chosen(planner, text, costs)
    assert any(overlap for _, overlap in planner.timings) == tried == segment.overlap


def test_settled_policies_are_not_planned(target, draft):
    model = attached(target)
    for policy in ("vanilla", "specbranch", "autoregressive"):
        config = SpecBranchConfig(policy=policy)
        model.generate(**prompt(), max_new_tokens=30, do_sample=False, assistant_model=draft, specbranch=config)
        assert model.specbranch_stats.plans == [] and model.specbranch_stats.policy == policy


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3])
def test_captured_stages_follow_changing_plans(at_random, target, draft, rows):
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
def test_what_is_chosen_on_a_gpu_is_close_to_the_best(which):
    """The embedded pair in float32: after the first texts, as fast as the best of three policies, within a tenth."""
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


def test_calls_may_ask_for_more_branches_than_earlier_ones():
    """What earlier texts have recorded does not suffice then, and is left out."""
    target = llama(seed=0)
    model, draft = attached(target), noisy_copy(target, noise=0.05, seed=1)
    for branches in (2, 6):
        for seed in range(3):
            settings = SpecBranchConfig(policy="auto", max_branches=branches)
            arguments = dict(**prompt(1, seed=seed), max_new_tokens=90, do_sample=False, eos_token_id=None)
            got = model.generate(**arguments, assistant_model=draft, specbranch=settings)
            assert torch.equal(got, target.generate(**arguments))
