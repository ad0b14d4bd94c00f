"""What `runtime/module_walk.py` finds is what torch finds."""

import pytest
from torch import nn

from hf_specbranch.runtime.model_walk import every_buffer, every_module, every_parameter

from .families import make


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral"])
def test_a_model_is_gone_through_as_torch_does(family):
    model = make(family)
    assert every_module(model) == list(model.modules())
    assert {id(each) for each in every_parameter(model)} == {id(each) for each in model.parameters()}
    assert {id(each) for each in every_buffer(model)} == {id(each) for each in model.buffers()}


def test_what_is_shared_is_met_once_and_what_is_left_empty_not_at_all():
    shared = nn.Linear(2, 2, bias=False)
    model = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared))
    model.register_module("empty", None)
    model.register_buffer("nothing", None)
    assert every_module(model) == list(model.modules())
    assert every_parameter(model) == [shared.weight] and every_buffer(model) == []
