"""A rehearsal launches nothing and leaves no trace. What it builds is seen on a GPU only (test_gpu.py)."""

import sys
import threading
import time

import pytest
import torch
from torch import nn

from hf_specbranch.kernels import build_in_parallel, can_build_in_parallel, fuse, fused, parallel_build
from hf_specbranch.kernels.module_check import Call, agreeing
from hf_specbranch.kernels.parallel_build import DryRun, Kernel, build_in_background, is_dry_run, room
from hf_specbranch.model_state import state_of
from hf_specbranch.runtime.cuda_graph import GraphRunner
from hf_specbranch.runtime.eager import EagerRunner
from hf_specbranch.runtime.mask_probe import mask_maker_for

from .families import make
from .rehearsals import in_rehearsal

GPU = torch.device("cuda")  # only its name is looked at where no kernel is built


def test_a_kernel_is_launched_outside_a_rehearsal_and_met_inside():
    launched = []

    class Jitted:
        def __getitem__(self, grid):
            return lambda *args, **options: launched.append((grid, args, options))

    kernel = Kernel(Jitted())
    kernel[(2, 1)](3, BLOCK=4)
    with in_rehearsal() as found:
        kernel[(2, 1)](3, BLOCK=4)
        assert not room((2, 3), torch.long, torch.device("cpu")).any()
    assert launched == [((2, 1), (3,), {"BLOCK": 4})] and found.kernels == [kernel]


def test_arguments_that_triton_does_not_tell_apart_share_a_build():
    class Jitted:
        arg_names = ["x", "count", "width", "eps", "BLOCK"]

    kernel = Kernel(Jitted(), ["count"])
    x = torch.zeros(64)

    def kind(x=x, count=3, width=32, eps=1e-6, **options):
        return kernel.kind((x, count, width, eps), {"BLOCK": 8, **options})

    assert kind() == kind(x[4:], 1, 48, 1e-5) == kind(count=16)
    others = kind(x[1:]), kind(x.double()), kind(width=1), kind(width=33), kind(count=1 << 31), kind(BLOCK=16)
    assert len({kind(), *others}) == 7
    assert kind() != Kernel(Jitted(), ["count"]).kind((x, 3, 32, 1e-6), {"BLOCK": 8})


def test_what_noise_may_cause_is_not_heard_of_and_everything_else_is(monkeypatch):
    monkeypatch.setattr(parallel_build, "_cold", [True])

    def fail(error):
        raise error

    build_in_parallel(lambda: fail(IndexError("noise")), GPU)
    for error in (TimeoutError, KeyboardInterrupt):
        with pytest.raises(error):
            build_in_parallel(lambda error=error: fail(error()), GPU)
    assert not is_dry_run()
    monkeypatch.setattr(parallel_build, "_cold", [False])
    build_in_parallel(lambda: fail(KeyboardInterrupt()), GPU)  # kernels are on disk: there is no rehearsal


class Jitted:
    arg_names = ()


@pytest.fixture
def new_process(monkeypatch):
    """Nothing was built yet."""
    monkeypatch.setattr(parallel_build, "_cold", [])
    monkeypatch.setattr(parallel_build, "_aside", [])
    monkeypatch.setattr(parallel_build, "_set_up", threading.Event())


def until_told():
    """As a kernel is built that is not on disk: for longer than anyone waits to see whether it is."""
    while not parallel_build._cold:
        time.sleep(0.01)


@pytest.mark.parametrize("cold", [True, False])
def test_the_user_is_told_once_that_kernels_are_built(cold, new_process, monkeypatch, caplog):
    """And not where they are found on disk: then the rehearsal ends with the second."""
    met, kernels = [], [Kernel(Jitted()) for _ in range(4)]
    monkeypatch.setattr(parallel_build, "LONG", 0.05 if cold else 10)
    monkeypatch.setattr(DryRun, "_build", lambda _, kernel, *__: cold and kernel is kernels[1] and until_told())

    def stage():
        for kernel in kernels:
            met.append(kernel)
            kernel[(1,)]()

    for _ in range(2):
        build_in_parallel(stage, GPU)
    assert parallel_build._cold == [cold]
    assert [record.message for record in caplog.records if "builds its GPU kernels" in record.message] == (
        ["hf_specbranch builds its GPU kernels: some seconds, once on this machine"] if cold else []
    )
    assert len(met) == (8 if cold else 2)


def test_a_trial_does_not_take_the_end_of_a_rehearsal_for_a_failure(new_process, monkeypatch):
    setting_up, own, met = Kernel(Jitted()), Kernel(Jitted()), []
    monkeypatch.setattr(parallel_build, "LONG", 10)
    monkeypatch.setattr(DryRun, "_build", lambda *_: None)
    x, modules = torch.ones(1, 2), [nn.Linear(2, 2), nn.Linear(2, 2, bias=False)]

    def stand_in(x):
        met.append(own)
        own[(1,)]()
        return x

    def trial():
        setting_up[(1,)]()
        agreeing(dict.fromkeys(modules, stand_in), dict.fromkeys(modules, Call((x,), {}, x)))

    build_in_parallel(trial, GPU)
    assert met == [own]


@pytest.mark.parametrize("cold", [True, False])
def test_what_is_built_aside_sets_triton_up_and_a_models_first_kernel_tells(cold, new_process, monkeypatch):
    """What every model needs may be on disk and what this one needs not."""
    monkeypatch.setattr(parallel_build, "LONG", 0.05 if cold else 10)
    order, may_build = [], threading.Event()
    setting_up, own, another = (Kernel(Jitted()) for _ in range(3))

    def build(_, kernel, *__):
        assert may_build.wait(10)
        if cold and kernel is own:
            until_told()
        order.append(kernel)

    def aside():
        assert is_dry_run()
        setting_up[(1,)]()

    def stage():
        order.append("begun")
        for kernel in (own, another):
            kernel[(1,)]()

    monkeypatch.setattr(DryRun, "_build", build)
    for _ in range(2):  # the second is one too many
        build_in_background(aside, GPU)
    assert not is_dry_run()  # here: that is a matter of each thread
    threading.Timer(0.05, may_build.set).start()
    build_in_parallel(stage, GPU)
    assert order[:2] == [setting_up, "begun"]
    assert set(order[2:]) == ({own, another} if cold else {own}) and parallel_build._cold == [cold]


def test_a_further_model_may_need_kernels_that_are_not_on_disk(new_process, monkeypatch):
    setting_up, own, another = (Kernel(Jitted()) for _ in range(3))
    monkeypatch.setattr(DryRun, "_build", lambda _, kernel, *__: kernel is another and until_told())

    def told(kernels, new_model, long):
        monkeypatch.setattr(parallel_build, "LONG", long)
        build_in_parallel(lambda: [kernel[(1,)]() for kernel in kernels], GPU, new_model)
        return list(parallel_build._cold)

    assert told([setting_up, own], new_model=True, long=10) == [False]
    assert told([another], new_model=False, long=0.05) == [False]
    assert told([another], new_model=True, long=0.05) == [True]
    assert told([own], new_model=True, long=10) == [True]  # once some are missing, every stage may meet them


def test_a_launch_waits_until_triton_is_set_up_aside_even_if_that_fails(new_process):
    order, may_end = [], threading.Event()

    class Launched:
        def __getitem__(self, grid):
            return lambda: order.append("launched")

    def aside():
        assert may_end.wait(10)
        order.append("ended")
        raise ValueError("that nothing was built for")

    build_in_background(aside, GPU)
    threading.Timer(0.05, may_end.set).start()
    Kernel(Launched())[(1,)]()
    assert order == ["ended", "launched"]


def test_where_no_thread_can_be_started_nothing_waits_for_it(new_process, monkeypatch):
    launched = []

    class Launched:
        def __getitem__(self, grid):
            return lambda: launched.append(grid)

    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    build_in_background(lambda: None, GPU)
    Kernel(Launched())[(1,)]()
    assert launched == [(1,)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-sliding"])
def test_a_pass_in_a_rehearsal_leaves_the_cache_alone(family):
    model = make(family)
    fuse(model)
    assert can_build_in_parallel(model)
    runner = EagerRunner(model, mask_maker_for(model, "target"))
    tokens, slots = torch.arange(1, 6)[None], torch.arange(5)[None]
    with torch.no_grad():
        runner.reserve(1, 16)
        runner.prefill(tokens, slots + 3, None)
        runner.slot_positions[:, :5] = slots + 3
        kept = [(layer.keys.clone(), layer.values.clone()) for layer in runner.cache.layers]
        positions = runner.slot_positions.clone()
        noise = torch.zeros((1, 2), dtype=torch.long)
        with fused(model), in_rehearsal():
            runner.forward_uncaptured(noise, noise, noise, torch.ones((1, 2, 8), dtype=torch.bool))
    for layer, (keys, values) in zip(runner.cache.layers, kept):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
    assert torch.equal(runner.slot_positions, positions)


@pytest.mark.parametrize("family, whole", [("llama", True), ("gemma2", True), ("gpt2", False)])
def test_passes_rehearsed_with_the_trial_leave_the_model_and_its_cache_alone(family, whole, monkeypatch):
    model, seen = make(family), []
    fuse(model)
    runner = GraphRunner(model, mask_maker_for(model, "target"), "fused")
    runner.reserve(1, 64)

    def passes():
        seen.append(state_of(model).kernel_recipe)
        runner._some_passes()

    def rehearse_here(stage, _, new_model):
        assert new_model
        with in_rehearsal():
            stage()

    monkeypatch.setattr(sys.modules[can_build_in_parallel.__module__], "build_in_parallel", rehearse_here)
    with torch.no_grad():
        assert can_build_in_parallel(model, passes) is whole
        assert len(seen) == 1 and state_of(model).kernel_recipe is not seen[0]  # what a rehearsal finds out is noise
        assert not runner.cache.layers  # and so is what it writes
        can_build_in_parallel(model, passes)
        assert len(seen) == 1  # what is known is not rehearsed again
        tokens, slots = torch.arange(1, 6)[None], torch.arange(5)[None]
        torch.testing.assert_close(runner.prefill(tokens, slots, None), model(tokens).logits[:, -1])
        kept = [(layer.keys.clone(), layer.values.clone()) for layer in runner.cache.layers]
        runner._some_passes()  # leaves a cache in use alone
        for layer, (keys, values) in zip(runner.cache.layers, kept, strict=True):
            assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


def test_models_that_run_code_of_their_own_or_are_watched_are_not_rehearsed():
    model = make("llama")
    with torch.autocast("cpu", torch.bfloat16):
        assert not can_build_in_parallel(model) and state_of(model).kernel_recipe is None
    assert can_build_in_parallel(model)
    assert not state_of(model).kernel_recipe.shared.weights  # held no longer than needed
    hook = model.lm_head.register_forward_hook(lambda *_: None)
    assert not can_build_in_parallel(model)
    hook.remove()
    assert can_build_in_parallel(model)


def test_nothing_is_found_out_about_a_model_in_a_rehearsal():
    model = make("llama")
    with in_rehearsal(), pytest.raises(RuntimeError, match="rehearsal"), fused(model):
        pass
    assert state_of(model).kernel_recipe is None
