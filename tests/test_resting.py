"""Where plain decoding is known to be best, `policy="auto"` leaves the draft alone, and tries it again now and then."""

import pytest
import torch

from hf_specbranch import SpecBranchConfig
from hf_specbranch.decoding.hooks import ConfidenceStop
from hf_specbranch.model_state import state_of
from hf_specbranch.planning.chooser import choose
from hf_specbranch.planning.knowledge import EVALUATE_ALWAYS, MOST_TRYING, Knowledge, Situation
from hf_specbranch.runtime.eager import EagerRunner

from .models import attached, llama, prompt, slowly
from .plans import CHEAP_DRAFT, NEVER, every_plan

LEARNING = EVALUATE_ALWAYS + 1  # calls, after each of which the choice is evaluated


def run(seed=0, **more):
    return {**prompt(seed=seed), "max_new_tokens": 24, "do_sample": False, "eos_token_id": None, **more}


@pytest.fixture
def rested(target, monkeypatch):
    """A model that knows that its draft never agrees, and what its calls do with the draft from now on."""
    model, draft = attached(target), llama(seed=7)
    for seed in range(LEARNING):
        model.generate(**run(seed), assistant_model=draft)
    (known,) = state_of(model).pairs[draft].values()
    known.evaluation_seconds = 1e9  # too expensive to try the draft again
    touched, create = [], EagerRunner.__init__

    def note(runner, model, *more):
        touched.extend(["runner"] * (model is draft))
        create(runner, model, *more)

    monkeypatch.setattr(EagerRunner, "__init__", note)
    draft.register_forward_pre_hook(lambda *_: touched.append("forward"))
    return model, draft, known, touched


def test_draft_is_left_alone_where_it_does_not_pay(rested, target):
    model, draft, known, touched = rested
    for seed in range(20, 24):
        out = model.generate(**run(seed), assistant_model=draft)
        assert torch.equal(out, target.generate(**run(seed)))
        stats = model.specbranch_stats
        assert stats.policy == "auto" and [each["plan"].split(",")[0] for each in stats.plans] == ["autoregressive"]
        assert sum(each["tokens"] for each in stats.plans) == stats.new_tokens - 1 == 23
        assert stats.draft_forwards == stats.draft_positions == 0
    assert not touched and known.generations == LEARNING + 4 and known.unplanned_seconds > 0


def test_draft_is_tried_again_once_that_is_cheap(rested):
    model, draft, known, touched = rested
    known.evaluation_seconds, (key,) = 0.0, known.choices
    known.next_evaluation[key] = known.generations
    model.generate(**run(30), assistant_model=draft)
    assert "forward" in touched and known.next_evaluation[key] > known.generations
    touched.clear()
    model.generate(**run(31), assistant_model=draft)
    assert not touched


@pytest.mark.parametrize(
    "more",
    [
        {"do_sample": True},
        slowly({"speculation_hooks": [ConfidenceStop(0.0)]}),
        {"specbranch": SpecBranchConfig("vanilla")},
    ],
)
def test_other_calls_still_draft(rested, more):
    """Sampled texts depend on no measurement; hooks and named policies are followed."""
    model, draft, _, touched = rested
    model.generate(**run(25, **more), assistant_model=draft)
    assert touched


def test_trying_takes_a_bounded_fraction_of_the_time():
    """However short texts are, and however long an evaluation takes."""
    settings, situation = SpecBranchConfig(), Situation(1, "graph", True)
    plain = choose(every_plan(), [NEVER], CHEAP_DRAFT, True)
    known = Knowledge(choices={(settings, situation): plain}, generations=LEARNING, evaluation_seconds=0.025)
    trials = 0
    for _ in range(2_000):
        if known.resting_choice(settings, 1, 0) is None:
            trials += 1
            known.schedule_evaluation((settings, situation), drafts=False)
            known.unplanned_seconds = 0.0
        known.end_rest(settings, 1, tokens=11, seconds=0.015)
    assert 4 < trials < MOST_TRYING * 2_000 * 0.015 / 0.025 + 1
    assert known.resting_choice(settings, 2, 0) is None  # nothing is known about two rows


def test_resting_calls_replay_what_the_planner_has_captured(graph_runners, target):
    model, draft, captured = attached(target), llama(seed=7), []
    for seed in range(LEARNING + 3):
        out = model.generate(**run(seed), assistant_model=draft)
        assert torch.equal(out, target.generate(**run(seed)))
        captured.append(model.specbranch_stats.graphs_captured)
        (known,) = state_of(model).pairs[draft].values()
        known.evaluation_seconds = 1e9
    assert captured[0] > 0 == sum(captured[LEARNING:])
    assert model.specbranch_stats.runtime == "graph" and len(model.specbranch_stats.plans) == 1


@pytest.mark.gpu
def test_resting_calls_are_as_fast_as_plain_decoding():
    target, draft = llama(seed=0, layers=12), llama(seed=7, layers=12)
    model, small = attached(target).cuda(), draft.cuda()
    inputs = {name: value.cuda() for name, value in prompt().items()}
    seconds = {"auto": [], "autoregressive": []}
    for _ in range(24):
        for policy, taken in seconds.items():
            settings = SpecBranchConfig(policy, prompt_lookup_num_tokens=15)
            generated = dict(max_new_tokens=64, do_sample=False, eos_token_id=None)
            model.generate(**inputs, **generated, assistant_model=small, specbranch=settings)
            taken.append(model.specbranch_stats.total_seconds)
    auto, plain = (sorted(taken[8:])[8] for taken in seconds.values())
    assert auto < 1.05 * plain, seconds
