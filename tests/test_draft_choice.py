"""Which form of its draft a call takes: by sizes at first, then by measured steps and by texts that both have read."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specbranch import SpecBranchConfig, load_demo_pair, specbranch
from hf_specbranch.bench import grow
from hf_specbranch.model_state import state_of
from hf_specbranch.planning import StepCosts, draft_choice
from hf_specbranch.planning.agreement import ABSENT, typical_agreement
from hf_specbranch.planning.calibrate import CostFactors
from hf_specbranch.planning.chooser import plans_within
from hf_specbranch.planning.draft_choice import (
    FIRST_COMPARISON,
    DraftForm,
    compare_drafts,
    copy_gain,
    copy_of,
    estimated_gain,
    form_by_sizes,
    is_slower,
    named_form,
)  # fmt: skip
from hf_specbranch.planning.knowledge import Knowledge, Situation, knowledge_of
from hf_specbranch.planning.online import Planner
from hf_specbranch.planning.sizes import predicted_costs, size_of
from hf_specbranch.planning.step_time import step_gain
from hf_specbranch.runtime.selection import runner_for

from .graphs import Comparison, tokens
from .models import config, llama, noisy_copy


@pytest.fixture(scope="module")
def pair():
    """A target, and a draft whose layers can be packed."""
    target = llama(seed=0, hidden=128)
    return target, noisy_copy(target, noise=0.2, seed=1)


def planner(costs):
    plans = plans_within(SpecBranchConfig(), captured=True)
    known, situation = Knowledge(), Situation(captured=True, runtime="graph")
    known.factors[situation] = CostFactors(speed=[1.0], draft=[1.0])
    return Planner(plans, SpecBranchConfig(), situation, known, lambda context: costs, lambda: [], lambda: 100)


def test_copy_is_judged_by_speed_and_acceptance():
    good = typical_agreement(5)
    bad = replace(good, rank=tuple(ABSENT if place % 2 else rank for place, rank in enumerate(good.rank)))
    cheap, full = (StepCosts(target_pass=4e-3, draft_step=step) for step in (4e-4, 8e-4))
    assert copy_gain(planner(cheap), ([good], [good]), step_gain=2.0) > 1.1
    assert copy_gain(planner(full), ([good], [good]), step_gain=1.0) == pytest.approx(1)
    assert copy_gain(planner(cheap), ([bad], [good]), step_gain=2.0) < 1


@pytest.mark.parametrize(
    ("step_gain", "spoiled", "stays"), [(2.0, False, True), (1.03, False, False), (2.0, True, False)]
)
def test_copy_that_does_not_pay_is_given_up(pair, step_gain, spoiled, stays):
    """Steps must be 5% faster, and so must texts: after some of them the draft itself reads the same text."""
    target, draft, form = pair[0], copy.deepcopy(pair[1]), DraftForm("int8")
    twin, good, timed = copy_of(draft, form), typical_agreement(5), []
    bad = replace(good, rank=(ABSENT,) * len(good.rank))
    planned = planner(StepCosts(target_pass=4e-3, draft_step=4e-4))

    def compare():
        read = lambda model: [bad if spoiled and model is twin else good]  # noqa: E731
        compare_drafts(planned, target, twin, read, lambda: timed.append(1) or step_gain)
        return is_slower(form, knowledge_of(target, draft))

    planned.known.generations = FIRST_COMPARISON // 2
    assert not compare() and not timed  # the pair may be on trial
    planned.known.generations = FIRST_COMPARISON
    assert compare() is not stays and (form in state_of(draft).copies) is stays
    planned.known.generations = 4 * FIRST_COMPARISON
    assert compare() is not stays and len(timed) == 1
    kept = Knowledge()
    kept.update(knowledge_of(target, draft).to_dict())
    assert is_slower(form, kept) is not stays


def test_copy_is_not_given_up_for_one_text(pair):
    """The copy misses every fourth token, which makes its texts 3% slower: a second such text is needed."""
    target, draft, form = pair[0], copy.deepcopy(pair[1]), DraftForm("int8")
    twin, good = copy_of(draft, form), typical_agreement(5)
    bad = replace(good, rank=tuple(rank if place % 4 else ABSENT for place, rank in enumerate(good.rank)))
    planned = planner(StepCosts(target_pass=4e-3, draft_step=4e-4))
    assert 0.95 < copy_gain(planned, ([bad], [good]), step_gain=1.3) < 0.98
    for factor in (1, 4):
        assert not is_slower(form, knowledge_of(target, draft))
        planned.known.generations = factor * FIRST_COMPARISON
        compare_drafts(planned, target, twin, lambda model: [bad if model is twin else good], lambda: 1.3)
    assert is_slower(form, knowledge_of(target, draft))


def test_gain_of_a_copy_is_estimated_from_its_own_steps(pair):
    """On a machine twice as slow as predicted, whose copy takes so long too; with waits; and with slow kernels."""
    target, draft = pair[0], copy.deepcopy(pair[1])
    twin, planned = copy_of(draft, DraftForm("int8")), planner(StepCosts(target_pass=4e-3, draft_step=4e-4))
    alone = predicted_costs(size_of(target), size_of(draft), True, 1, planned.context()).draft_step
    factors = planned.known.factors[planned.situation]
    for step, waits in ((1.0, 0.0), (1.25, 2e-4), (3.0, 4e-4)):
        factors.speed, factors.draft = [2.0], [step]
        assert estimated_gain(planned, target, twin) == pytest.approx((2 * alone + waits) / (step * 8e-4))
    assert estimated_gain(planned, target, draft) is None  # no copy


class OnGpu(LlamaForCausalLM):
    """A model that has sizes and a device, but no memory."""

    device = torch.device("cuda")


# Those of Qwen2.5-0.5B.
LARGE = {
    "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
    "num_hidden_layers": 24, "vocab_size": 151_936, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "rows", "settings", "expected"),
    [
        (LARGE, 1, {}, DraftForm("float8", 65_536)),
        (LARGE, 4, {"draft_shortlist": None}, DraftForm("float8")),
        (LARGE, 1, {"draft_weights": "int8"}, DraftForm("int8", 65_536)),
        (LARGE, 1, {"draft_weights": None, "draft_shortlist": None}, DraftForm()),
        (LARGE, 1, {"runtime": "eager"}, DraftForm()),
        (LARGE, 8, {}, DraftForm()),  # other kernels, less bound by bytes
        (LARGE, None, {}, DraftForm()),  # a running batch
        ({**LARGE, "vocab_size": 32_000}, 1, {}, DraftForm("float8")),
        ({**LARGE, "num_hidden_layers": 2, "vocab_size": 32_000}, 1, {}, DraftForm()),  # bound by launches
        ({**LARGE, "hidden_size": 840}, 1, {}, DraftForm()),  # few layers can be packed
    ],
)  # fmt: skip
def test_form_follows_from_sizes(sizes, rows, settings, expected):
    with torch.device("meta"):
        draft = OnGpu(LlamaConfig(**sizes)).to(torch.bfloat16)
    config = SpecBranchConfig(**settings)
    assert form_by_sizes(config, draft, named_form(config), rows) == expected


def test_steps_of_both_are_timed(graph_runners, pair):
    draft = copy.deepcopy(pair[1])
    settings = config("vanilla", draft_weights="int8", runtime="graph", kernels=True)
    twin = copy_of(draft, DraftForm("int8"))
    with runner_for(twin, "draft", 1, 64, "graph", True) as runner:
        assert 0.05 < step_gain(runner, draft, settings, rows=1, used=64) < 20
        assert step_gain(runner, draft, settings, rows=1, used=1 << 20) is None  # there is no slot that is not used


def test_texts_do_not_depend_on_the_comparison(graph_runners, pair, monkeypatch):
    """The copy is compared after the second call, in the memory that the next call reuses."""
    monkeypatch.setattr(draft_choice, "FIRST_COMPARISON", 2)
    target, draft = pair[0], copy.deepcopy(pair[1])
    compare, counts = Comparison(target, copy_of(draft, DraftForm("int8")), runtime="graph"), []
    for seed in range(3):
        compare(tokens(9, seed=seed), {"policy": "auto"})
        counts.append(len(knowledge_of(compare.model, draft).step_gains))
    assert counts == [0, 1, 1] and compare.stats.draft_weights == "int8"


@pytest.mark.gpu
def test_copy_is_chosen_on_a_gpu():
    """A draft of 2 GB: a copy drafts by default, until the draft itself would be faster; warm calls capture nothing."""
    target, draft, tokenizer = load_demo_pair()
    target = specbranch(grow(target, "7b", torch.bfloat16, "cuda"), grow(draft, "1b", torch.bfloat16, "cuda"))
    inputs = tokenizer("def add(a, b):", return_tensors="pt").to("cuda")
    target.warm_up_specbranch(max_length=256, progress=False)
    (gain,) = knowledge_of(target, target._specbranch_memory.draft).step_gains.values()
    expected = "float8" if gain >= 1.05 else ""
    for _ in range(3):
        target.generate(**inputs, max_new_tokens=48, do_sample=False)
        stats = target.specbranch_stats
        assert stats.runtime == "graph" and not stats.slowed_by and stats.graphs_captured == 0
        assert stats.draft_weights == expected or not stats.draft_forwards
    target.generate(**inputs, max_new_tokens=8, do_sample=True)
    assert target.specbranch_stats.draft_weights == "float8"  # by sizes alone
    target.generate(**inputs, max_new_tokens=8, do_sample=False, specbranch=SpecBranchConfig(draft_weights=None))
    assert target.specbranch_stats.draft_weights == ""
