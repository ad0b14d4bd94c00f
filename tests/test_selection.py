"""Which runner a model gets, and when its captured graphs are discarded."""

import copy
import gc
import threading
import warnings
import weakref

import pytest
import torch

from hf_specbranch import specbranch
from hf_specbranch.runtime import capture_trial, cuda_graph, idle_runners, mask_probe, selection, self_check
from hf_specbranch.runtime.cuda_graph import round_up
from hf_specbranch.runtime.eager import EagerRunner
from hf_specbranch.runtime.fingerprint import fingerprint
from hf_specbranch.runtime.mask_probe import mask_maker_for
from hf_specbranch.runtime.selection import _has_foreign_hooks, why_not_captured

from .models import attached, config, prompt


def test_graphs_are_refused_on_the_cpu(target, draft):
    with pytest.raises(ValueError, match="runtime='graph' cannot run the target LlamaForCausalLM: it is not on a CUDA"):
        attached(target).generate(
            **prompt(), max_new_tokens=3, assistant_model=draft, specbranch=config(runtime="graph")
        )


def test_cpu_models_run_eagerly(target):
    assert why_not_captured(target) == "it is not on a CUDA device"


def test_only_foreign_hooks_prevent_capture(target):
    model = copy.deepcopy(target)
    model(input_ids=torch.tensor([[3, 4]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())  # transformers' own, which stay
    assert not any(_has_foreign_hooks(module) for module in model.modules())
    model.model.layers[0].register_forward_hook(lambda *_: None)
    assert any(_has_foreign_hooks(module) for module in model.modules())


@pytest.mark.parametrize(
    ("runtime", "kernels", "half", "single"),
    [
        ("graph", "auto", "fused", "plain"),
        ("graph", False, "plain", "plain"),
        ("graph", True, "fused", "fused"),
    ],
)
def test_kernels_setting_chooses_layers(runtime, kernels, half, single, target, monkeypatch):
    """As if there were a GPU; nothing is captured."""
    monkeypatch.setattr(selection, "why_not_captured", lambda model: "")
    monkeypatch.setattr(capture_trial, "why_it_syncs", lambda *_: "")
    for dtype, layers in ((torch.bfloat16, half), (torch.float32, single)):
        model = copy.deepcopy(target).to(dtype)
        with selection.runner_for(model, "target", 1, 8, runtime, kernels) as runner:
            assert runner.layers == layers and runner.runtime == runtime
        idle_runners.drop(model)


@pytest.mark.parametrize(("slots", "size"), [(1, 256), (256, 256), (257, 512), (1024, 1024), (1025, 2048)])
def test_sizes_are_powers_of_two(slots, size):
    assert round_up(slots) == size


def test_fingerprint_covers_what_a_graph_bakes_in(target):
    model = copy.deepcopy(target)
    before = fingerprint(model)
    assert fingerprint(model) == before
    with torch.no_grad():
        model.lm_head.weight.mul_(2)  # in place: a replay reads the new values
    assert fingerprint(model) == before
    model.train()
    assert fingerprint(model) != before
    model.eval()
    assert fingerprint(model) == before
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()  # holds no weights
    assert fingerprint(model) != before
    before = fingerprint(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    assert fingerprint(model) != before


def test_fingerprint_covers_attention_and_modes(target):
    model = copy.deepcopy(target)
    before = fingerprint(model)
    model.set_attn_implementation("eager")
    assert fingerprint(model) != before
    model.set_attn_implementation("sdpa")
    assert fingerprint(model) == before
    with torch.inference_mode():
        assert fingerprint(model) != before


def test_runner_is_reused(target):
    model = copy.deepcopy(target)
    masks = mask_maker_for(model, "target")
    first = cuda_graph.take(model, masks, rows=1)
    first.prefill(prompt()["input_ids"], torch.arange(7)[None], None)
    cuda_graph.give_back(first, budget=1.0)
    again = cuda_graph.take(model, masks, rows=1)
    assert again is first and again.model is model
    assert again.cache.get_seq_length() == 0  # nothing of the last text is visible
    cuda_graph.give_back(again, budget=1.0)
    assert cuda_graph.take(model, masks, rows=2) is not first


def test_runner_of_a_changed_model_is_not_reused(target):
    model = copy.deepcopy(target)
    masks = mask_maker_for(model, "target")
    runner = cuda_graph.take(model, masks, rows=1)
    cuda_graph.give_back(runner, budget=1.0)
    model.to(torch.float64)
    assert cuda_graph.take(model, mask_maker_for(model, "target"), rows=1) is not runner


def test_idle_runner_is_freed_with_the_model_or_on_detach(target):
    for with_model in (True, False):
        model = copy.deepcopy(target)
        runner = cuda_graph.take(model, mask_maker_for(model, "target"), rows=1)
        cuda_graph.give_back(runner, budget=1.0)
        kept = weakref.ref(runner)
        del runner
        gc.collect()
        assert kept() is not None
        if with_model:
            del model
            gc.collect()
        else:
            attached_model = specbranch(model)
            attached_model.detach_specbranch()
        gc.collect()
        assert kept() is None


@pytest.mark.parametrize(("syncs", "modes"), [("never", 1), ("once", 3), ("always", 3)])
def test_sync_on_first_use_is_allowed(syncs, modes, target, monkeypatch, caplog):
    """Initialisation on first use may sync. A model that syncs every time is not captured."""
    model, masks = copy.deepcopy(target), mask_maker_for(target, "target")
    tried, mode, done = [], ["default"], []

    def forward(*_):
        tried.append(mode[-1])
        if syncs == "always" or (syncs == "once" and not done):
            if mode[-1] == "warn":
                other = threading.Thread(target=warnings.warn, args=("another thread's synchronizing operation",))
                other.start()
                other.join()
                warnings.warn("called a synchronizing CUDA operation\nsomewhere", stacklevel=1)
            else:
                done.append(True)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode.append)
    monkeypatch.setattr(EagerRunner, "forward", forward)
    reason = capture_trial.why_it_syncs(model, masks)
    assert tried == ["warn", "default", "warn"][:modes] and mode[-1] == "default"
    assert bool(reason) == (syncs == "always") == ("runs eagerly" in caplog.text)
    assert capture_trial.why_it_syncs(model, masks) == reason and len(tried) == modes


@pytest.mark.parametrize("raises", [False, True])
def test_reason_names_the_module_that_waits(raises, target, monkeypatch):
    model, masks = copy.deepcopy(target), mask_maker_for(target, "target")
    mlp = model.model.layers[1].mlp

    class Waiting(type(mlp)):
        def forward(self, *args):
            if raises:
                raise RuntimeError("not permitted\nwhile a stream captures")
            warnings.warn("called a synchronizing CUDA operation\nsomewhere", stacklevel=1)
            return super().forward(*args)

    mlp.__class__ = Waiting
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    reason = "not permitted" if raises else "called a synchronizing CUDA operation"
    assert capture_trial.why_it_syncs(model, masks) == f"its forward cannot be captured ({reason} in Waiting)"


@pytest.mark.parametrize("check", ["ordinary pass", "mask probe", "self check", "capture"])
def test_lack_of_memory_says_nothing_about_a_model(check, target, monkeypatch):
    """It is raised, so that the call frees memory and begins again, and not kept: a later check may have enough."""
    model, failed = copy.deepcopy(target), []

    def fails(*_, **__):
        failed.append(1)
        raise torch.OutOfMemoryError("planted")

    def run():
        if check == "capture":
            return capture_trial.why_it_syncs(model, mask_maker_for(target, "target"))
        if check == "self check":
            return cuda_graph.layers_for(model, mask_maker_for(model, "target"), 1)
        return mask_maker_for(model, "target")

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    mask_maker_for(target, "target")
    where = {"ordinary pass": type(model), "self check": self_check}.get(check, EagerRunner)
    with monkeypatch.context() as patch:
        patch.setattr(where, "compare" if check == "self check" else "forward", fails)
        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            run()
    assert failed
    run()


def test_call_without_settings_is_plain_while_memory_lacks(target, monkeypatch):
    model, asked = attached(copy.deepcopy(target)), {**prompt(), "max_new_tokens": 4, "do_sample": False}
    with monkeypatch.context() as patch:
        patch.setattr(mask_probe, "ordinary_runs", out_of_memory)
        out = model.generate(**asked)
        assert model.specbranch_stats is None
    assert torch.equal(model.generate(**asked), out) and model.specbranch_stats is not None


def out_of_memory(*_):
    raise torch.OutOfMemoryError("planted")
