"""Models whose parts are on several devices, or are brought there for each pass: exact, and captured where possible."""

import copy

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hf_specbranch import specbranch

from .cpu_graphs import CpuGraphs
from .graphs import run_graphs_on_cpu
from .models import POLICIES, config, prompt, slowly

GREEDY = {"do_sample": False, "max_new_tokens": 16}
PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")


def split(model, devices):
    """A copy of the model with its parts on these devices, through accelerate's hooks."""
    places = dict(zip(PARTS, devices))
    main = next(device for device in devices if device not in ("cpu", "disk")) if set(devices) != {"cpu"} else "cpu"
    return dispatch_model(copy.deepcopy(model), places, main_device=main, force_hooks=True)


def place(module, device=None, comes_back=False):
    """Let a module run on a device, with a hook that brings its inputs there, and its output back."""
    hook = AlignDevicesHook(device, io_same_device=comes_back, place_submodules=device is not None)
    add_hook_to_module(module, hook, append=True)


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


@pytest.mark.parametrize("parts", [("model.layers.1", "lm_head"), slowly(("model.layers.0.mlp",))])
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


@pytest.fixture
def recorded(monkeypatch):
    """Runners as on a GPU, whose graphs replay operations and no Python code."""
    run_graphs_on_cpu(monkeypatch, CpuGraphs)


@pytest.fixture
def layers_run(monkeypatch):
    """The decoder layers whose Python code has run, in order."""
    run, forward = [], LlamaDecoderLayer.forward

    def noted(self, *args, **kwargs):
        run.append(self.self_attn.layer_idx)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", noted)
    return run


@pytest.mark.parametrize("rows", [slowly(1), 3])
@pytest.mark.parametrize(
    ("parts", "outside"),
    [((), []), (("model.layers.1", "lm_head"), [1]), (("model.layers.0.mlp",), []), (("model.layers",), [0, 1])],
)
def test_stages_are_captured_around_what_is_offloaded(parts, outside, rows, target, draft, recorded, layers_run):
    """A replay runs the code of modules that are offloaded, and of no others."""
    model, settings = specbranch(offloaded(target, *parts)), config("vanilla", kernels=False)
    for seed in (0, 1, 0):
        inputs = prompt(rows, seed=seed)
        expected = target.generate(**inputs, **GREEDY)
        layers_run.clear()
        assert torch.equal(model.generate(**inputs, **GREEDY, assistant_model=draft, specbranch=settings), expected)
    stats, prompts = model.specbranch_stats, [0, 1] * 2  # read by both models
    assert stats.runtime == "graph" and stats.graphs_captured == 0
    assert sorted(layers_run) == sorted(prompts + outside * (stats.target_forwards - 1))


def test_texts_of_other_settings_between(target, draft, recorded):
    """Layers between graphs write to the slots of their own pass, whatever ran last."""
    model = specbranch(offloaded(target, "model.layers.1"))
    policies = [config(policy, kernels=False) for policy in ("vanilla", "specbranch", "vanilla")]
    for number, settings in enumerate(policies):
        inputs = prompt(1 + number % 2, length=5 + number)
        expected = target.generate(**inputs, **GREEDY)
        assert torch.equal(model.generate(**inputs, **GREEDY, assistant_model=draft, specbranch=settings), expected)
        assert model.specbranch_stats.runtime == "graph"


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [("cuda:0",) * 2 + ("cpu",) * 4, ("cuda:0",) * 4 + ("cpu",) * 2])
def test_gpu_with_layers_that_are_offloaded(devices, target, draft):
    """accelerate keeps what is placed on the CPU there, and copies it to the GPU for each pass."""
    model = split(target, list(devices))
    check(model, copy.deepcopy(draft).to("cuda:0"), device="cuda:0")
    assert model.specbranch_stats.runtime == "graph"


@pytest.mark.gpu
def test_gpu_with_hooks_on_one_device(target, draft):
    model = split(target, ["cuda:0"] * len(PARTS))
    check(model, copy.deepcopy(draft).to("cuda:0"), device="cuda:0")
    assert model.specbranch_stats.runtime == "graph"


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["model.layers.0", "model.layers.1", "model.layers.1.mlp", "lm_head"])
def test_gpu_with_a_part_that_runs_on_the_cpu(part, target, draft):
    """Tensors go to another device and back, between graphs."""
    model = copy.deepcopy(target).to("cuda:0")
    for name in PARTS:
        place(model.get_submodule(name), "cuda:0")
    place(model.get_submodule(part), "cpu", comes_back=part.endswith("mlp"))
    place(model, comes_back=True)
    check(model, copy.deepcopy(draft).to("cuda:0"), device="cuda:0")
    assert model.specbranch_stats.runtime == "graph"


@pytest.mark.gpu
def test_gpu_with_a_draft_that_is_split_runs_it_eagerly(target, draft):
    draft = copy.deepcopy(draft).to("cuda:0")
    for name in PARTS:
        place(draft.get_submodule(name), "cpu" if name == "model.layers.1" else "cuda:0")
    model = copy.deepcopy(target).to("cuda:0")
    check(model, draft, device="cuda:0")
    assert "its layers are on several devices" in model.specbranch_stats.slowed_by


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(target, draft):
    model = split(target, ["cuda:0", "cuda:0", "cuda:1", "cuda:1", "cuda:0", "cuda:1"])
    check(model, copy.deepcopy(draft).to("cuda:0"), device="cuda:0")
    assert model.specbranch_stats.runtime == "graph"
