"""Models whose parts are on several devices, or are brought there for each pass: exact, and captured where possible."""

import copy

import pytest
import torch
from accelerate import cpu_offload, dispatch_model

from hf_specbranch import specbranch

from .models import POLICIES, config, prompt

GREEDY = {"do_sample": False, "max_new_tokens": 16}
PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")


def split(model, devices):
    """A copy of the model with its parts on these devices, through accelerate's hooks."""
    places = dict(zip(PARTS, devices))
    main = next(device for device in devices if device not in ("cpu", "disk")) if set(devices) != {"cpu"} else "cpu"
    return dispatch_model(copy.deepcopy(model), places, main_device=main, force_hooks=True)


def offloaded(model, *parts):
    """A copy of the model with parts whose weights are in memory only while they are needed."""
    twin = copy.deepcopy(model)
    for part in parts:
        cpu_offload(twin.get_submodule(part), execution_device=torch.device("cpu"))
    return twin


def check(model, draft, policies=POLICIES, device="cpu"):
    inputs = {name: each.to(device) for name, each in prompt(2).items()}
    expected = specbranch(model).generate(**inputs, **GREEDY, specbranch=False)
    for policy in policies:
        arguments = {"assistant_model": draft, "specbranch": config(policy)}
        assert torch.equal(model.generate(**inputs, **GREEDY, **arguments), expected), policy
        assert model.specbranch_stats is not None
    return expected


def test_model_with_hooks_of_accelerate(target, draft):
    text = check(split(target, ["cpu"] * len(PARTS)), draft, ("vanilla", "specbranch"))
    assert torch.equal(text, target.generate(**prompt(2), **GREEDY))


@pytest.mark.parametrize("parts", [("model.layers.1", "lm_head"), ("model.layers.0.mlp",)])
def test_offloaded_layers(parts, target, draft):
    text = check(offloaded(target, *parts), draft, ("autoregressive", "specbranch"))
    assert torch.equal(text, target.generate(**prompt(2), **GREEDY))


def test_offloaded_draft(target, draft):
    check(copy.deepcopy(target), offloaded(draft, "model.layers.1"), ("specbranch",))


def test_offloaded_embeddings_are_left_to_transformers(target, draft, caplog):
    model = specbranch(offloaded(target, "model", "lm_head"))
    expected = target.generate(**prompt(2), **GREEDY)
    assert torch.equal(model.generate(**prompt(2), **GREEDY, assistant_model=draft), expected)
    assert "its embeddings are offloaded" in caplog.text and model.specbranch_stats is None


def test_weights_that_nobody_brings_are_refused(target):
    empty = copy.deepcopy(target)
    empty.model.layers[1].to("meta")
    with pytest.raises(ValueError, match="weights on the meta device"):
        specbranch(empty)


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [("cuda:0",) * 2 + ("cpu",) * 4, ("cuda:0",) * 4 + ("cpu",) * 2])
def test_gpu_with_layers_that_are_offloaded(devices, target, draft):
    """accelerate keeps what is placed on the CPU there, and copies it to the GPU for each pass."""
    model = split(target, list(devices))
    check(model, copy.deepcopy(draft).to("cuda:0"), device="cuda:0")
    assert model.specbranch_stats.runtime == "eager"
