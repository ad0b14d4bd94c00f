"""How passes over several tokens grow on a CPU is measured on a product, before the first text of a large model."""

import copy

import pytest
import torch

from hf_specbranch.model_state import state_of
from hf_specbranch.planning import product_time
from hf_specbranch.planning.costs import StepCosts
from hf_specbranch.planning.knowledge import knowledge_of
from hf_specbranch.planning.product_time import WIDTHS, first_factors
from hf_specbranch.planning.sizes import predicted_costs, size_of

from .families import make
from .models import attached, prompt

COSTS = StepCosts(0.01, passes=((0.0, 0.01), (8.0, 0.02)))


@pytest.fixture
def large(monkeypatch):
    """Every model counts as a large one."""
    monkeypatch.setattr(product_time, "LARGE", 0)


@pytest.fixture
def clock(monkeypatch):
    """A product of so many rows takes so many seconds, and a second more; the first one reads the weight from disk."""
    now, read, linear = [0.0], {}, torch.nn.functional.linear

    def timed(x, weight):
        now[0] += 1.0 + len(x)
        if id(weight) not in read:
            read[id(weight)] = weight
            now[0] += 100.0
        return linear(x, weight)

    monkeypatch.setattr(product_time.nn.functional, "linear", timed)
    monkeypatch.setattr(product_time.time, "perf_counter", lambda: now[0])


@pytest.mark.parametrize("rows", [1, 2])
def test_factors_are_measured_over_predicted(rows, large, clock, target):
    passes = first_factors(target, COSTS, rows).passes
    assert sorted(passes) == sorted(WIDTHS) and passes[1] == [1.0]
    seconds = {width: (1 + rows * width) / (1 + rows) for width in WIDTHS}
    for width in WIDTHS:
        assert passes[width] == [pytest.approx(seconds[width] / (1 + (width - 1) / 8))]


def test_small_models_are_not_measured(target):
    assert not first_factors(target, COSTS, rows=1).passes


def test_mixtures_are_not_measured(large):
    """Their passes grow with the experts that are read, and their largest linear layers are those of attention."""
    model = make("qwen2-moe")
    expected = predicted_costs(size_of(model), size_of(model), captured=False)
    assert expected.pass_seconds(8) > 2 * expected.pass_seconds(0) and not first_factors(model, expected, 1).passes


class Sharded(torch.Tensor):
    """A weight that is more than its numbers, as those of tensor parallel and of quantised layers are."""


def of_another_dtype(model):
    model.to(torch.bfloat16).__class__ = type("Other", (type(model),), {"dtype": torch.float32})


def of_another_class(model):
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight = torch.nn.Parameter(layer.weight.data.as_subclass(Sharded))


@pytest.mark.parametrize("change", [of_another_dtype, of_another_class])
def test_models_without_plain_layers_are_not_measured(change, large, target):
    change(other := copy.deepcopy(target))
    assert not first_factors(other, COSTS, rows=1).passes


@pytest.mark.parametrize("samples", [False, True])
def test_first_text_begins_with_them(samples, large, target, draft):
    model, small = attached(target), copy.deepcopy(draft)
    torch.manual_seed(0)
    out = model.generate(**prompt(), assistant_model=small, max_new_tokens=20, do_sample=samples)
    known = knowledge_of(model, small)
    assert any(set(WIDTHS) <= set(each.passes) for each in known.factors.values()) is not samples
    if not samples:
        assert torch.equal(out, target.generate(**prompt(), max_new_tokens=20, do_sample=False))
    assert state_of(model).pairs
