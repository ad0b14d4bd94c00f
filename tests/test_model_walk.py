"""`model_state.py` finds the modules, parameters and buffers that torch finds."""

import pytest
from torch import nn

from hf_specbranch.model_state import every_buffer, every_module, every_parameter, walked_once

from .families import make


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral"])
def test_finds_what_torch_finds(family):
    model = make(family)
    assert every_module(model) == list(model.modules())
    assert {id(each) for each in every_parameter(model)} == {id(each) for each in model.parameters()}
    assert {id(each) for each in every_buffer(model)} == {id(each) for each in model.buffers()}


def test_shared_and_empty_modules():
    shared = nn.Linear(2, 2, bias=False)
    model = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared))
    model.register_module("empty", None)
    model.register_buffer("nothing", None)
    assert every_module(model) == list(model.modules())
    assert every_parameter(model) == [shared.weight] and every_buffer(model) == []


def test_a_call_goes_through_a_model_once():
    model = nn.Sequential(nn.ReLU())
    with walked_once():
        first = every_module(model)
        with walked_once():  # a call within a call
            assert every_module(model) is first
    model.append(nn.ReLU())
    assert len(every_module(model)) == 3 and every_module(model) is not every_module(model)
    with walked_once():
        assert len(every_module(model)) == 3
