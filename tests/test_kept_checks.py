"""Checks that a model has passed are kept on disk, for this model, this code and this machine alone."""

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_specbranch import kept_checks, specbranch
from hf_specbranch.runtime.mask_probe import mask_maker_for

from .graphs import another_attention, to_half_precision_and_back
from .models import config, llama, prompt


@pytest.fixture
def kept(target, monkeypatch, tmp_path):
    """A folder in which the checks of the target are kept; after that no model computes anything."""
    monkeypatch.setenv("HF_SPECBRANCH_CACHE", str(tmp_path))
    found = mask_maker_for(copy.deepcopy(target), "target")

    call = torch.nn.Module.__call__

    def fail(module, *args, **kwargs):
        if isinstance(module, LlamaForCausalLM):
            raise RuntimeError("a pass")
        return call(module, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "__call__", fail)  # the code of the model itself must stay as it is
    return found


def test_an_equal_model_is_not_checked_again(kept, target):
    again = mask_maker_for(copy.deepcopy(target), "target")
    assert (again.by_layer_type, again.optional) == (kept.by_layer_type, kept.optional)


def with_a_hook(model):
    model.model.layers[0].forward = model.model.layers[0].forward


def with_other_code(model):
    class Other(type(model.model.norm)):
        __module__ = "elsewhere"

    model.model.norm.__class__ = Other


def with_a_module_of_another_class(model):
    norm = model.model.norm
    model.model.norm = torch.nn.LayerNorm(len(norm.weight), norm.variance_epsilon, bias=False)
    model.model.norm.weight = norm.weight


@pytest.mark.parametrize(
    "change",
    [to_half_precision_and_back, another_attention, with_a_hook, with_other_code, with_a_module_of_another_class],
)
def test_a_changed_model_is_checked_again(change, kept, target):
    changed = copy.deepcopy(target)
    change(changed)
    with pytest.raises(ValueError, match="a pass"):
        mask_maker_for(changed, "target")


@pytest.mark.parametrize("other", [{"seed": 1}, {"seed": 0, "layers": 3}])
def test_another_model_is_checked(other, kept):
    with pytest.raises(ValueError, match="a pass"):
        mask_maker_for(llama(**other), "target")


def test_changed_files_of_the_package_end_all_checks(kept, target, monkeypatch):
    monkeypatch.setattr(kept_checks, "_our_files", lambda: "other")
    with pytest.raises(ValueError, match="a pass"):
        mask_maker_for(copy.deepcopy(target), "target")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"masks_optional": true}', '{"masks_by_layer_type": 3, "masks_optional": true}']
)
def test_damaged_files_are_ignored(content, target, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_SPECBRANCH_CACHE", str(tmp_path))
    found = mask_maker_for(copy.deepcopy(target), "target")
    (file,) = (tmp_path / "checks").glob("*.json")
    file.write_text(content)
    again = mask_maker_for(copy.deepcopy(target), "target")
    assert (again.by_layer_type, again.optional) == (found.by_layer_type, found.optional)


def test_texts_are_those_of_plain_generate(target, draft, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_SPECBRANCH_CACHE", str(tmp_path))
    expected = target.generate(**prompt(2), do_sample=False, max_new_tokens=12)
    for _ in range(2):
        model = specbranch(copy.deepcopy(target), copy.deepcopy(draft))
        out = model.generate(**prompt(2), do_sample=False, max_new_tokens=12, specbranch=config())
        assert torch.equal(out, expected)
