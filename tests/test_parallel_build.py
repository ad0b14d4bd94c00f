"""A dry run launches nothing and has no side effects. What it builds is checked on a GPU (test_gpu.py)."""

import copy
import logging
import os
import signal
import sys
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

from hf_specbranch.kernels import build_in_parallel, parallel_build
from hf_specbranch.kernels.parallel_build import BuildState, Kernel, build_in_background, is_dry_run, room
from hf_specbranch.layers import can_build_in_parallel, fuse, fused
from hf_specbranch.layers.base import Call, Record
from hf_specbranch.layers.check import agreeing
from hf_specbranch.model_state import state_of
from hf_specbranch.runtime.cuda_graph import GraphRunner
from hf_specbranch.runtime.eager import EagerRunner
from hf_specbranch.runtime.mask_probe import mask_maker_for

from .dry_runs import recorded_dry_run
from .families import make
from .test_recurrent import plain_model

GPU = torch.device("cuda")  # nothing is launched, so its name suffices
PATIENCE = 10  # seconds until a test that waits in vain fails


class Jitted:
    """In place of what `triton.jit` returns.

    Args:
        build: called when the kernel is built.
        launch: called when it is launched.
    """

    arg_names = ()

    def __init__(self, build=lambda: None, launch=lambda: None):
        self.build, self.launch = build, launch

    def warmup(self, *args, grid, **options):
        self.build()

    def __getitem__(self, grid):
        return lambda *args, **options: self.launch()


def kernel(build=lambda: None, launch=lambda: None):
    return Kernel(Jitted(build, launch))


@pytest.fixture
def new_process(monkeypatch):
    """The state of a process in which nothing was built yet."""
    monkeypatch.setattr(parallel_build, "build_state", state := BuildState())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    yield state
    if state.background is not None:
        state.background.join(PATIENCE)


@pytest.fixture
def warned():
    """Set when the user is warned that kernels are built; `warned.messages` has every warning."""

    class Handler(logging.Handler):
        def emit(self, record):
            event.messages.append(record.getMessage())
            event.set()

    event = threading.Event()
    event.messages = []
    parallel_build.logger.addHandler(handler := Handler(logging.WARNING))
    yield event
    parallel_build.logger.removeHandler(handler)


def takes_long(warned):
    """How a kernel is built that is not on disk: it takes longer than anyone waits to find that out."""
    return lambda: warned.wait(PATIENCE) or pytest.fail("no warning came")


class WaitedFor(threading.Event):
    """An event that says when somebody waits for it."""

    def __init__(self):
        super().__init__()
        self.waiting = threading.Event()

    def wait(self, timeout=None):
        self.waiting.set()
        assert super().wait(PATIENCE)
        return True


def test_kernels_are_launched_outside_a_dry_run_and_recorded_inside():
    launched = []

    class Launched:
        def __getitem__(self, grid):
            return lambda *args, **options: launched.append((grid, args, options))

    launched_kernel = Kernel(Launched())
    launched_kernel[(2, 1)](3, BLOCK=4)
    with recorded_dry_run() as found:
        launched_kernel[(2, 1)](3, BLOCK=4)
        assert not room((2, 3), torch.long, torch.device("cpu")).any()
    assert launched == [((2, 1), (3,), {"BLOCK": 4})] and found.kernels == [launched_kernel]


def test_arguments_of_one_specialization_share_a_build():
    class Named(Jitted):
        arg_names = ["x", "count", "width", "eps", "BLOCK"]

    first, second = Kernel(Named(), ["count"]), Kernel(Named(), ["count"])
    x = torch.zeros(64)

    def specialization(x=x, count=3, width=32, eps=1e-6, kernel=first, **options):
        return kernel.specialization((x, count, width, eps), {"BLOCK": 8, **options})

    assert specialization() == specialization(x[4:], 1, 48, 1e-5) == specialization(count=16)
    others = (
        specialization(x[1:]),
        specialization(x.double()),
        specialization(width=1),
        specialization(width=33),
        specialization(count=1 << 31),
        specialization(BLOCK=16),
        specialization(kernel=second),
    )
    assert len({specialization(), *others}) == 8


def test_a_kernel_is_built_once_per_specialization(new_process):
    built = []
    once = kernel(lambda: built.append(1))
    build_in_parallel(lambda: [once[(1,)]() for _ in range(3)], GPU)
    assert built == [1]


def test_errors_that_noise_may_cause_are_ignored_and_others_raised(new_process):
    def fail(error):
        raise error

    new_process.on_disk = False
    build_in_parallel(lambda: fail(IndexError("noise")), GPU)
    for error in (TimeoutError, KeyboardInterrupt):
        with pytest.raises(error):
            build_in_parallel(lambda error=error: fail(error()), GPU)
    assert not is_dry_run()
    new_process.on_disk = True
    build_in_parallel(lambda: fail(KeyboardInterrupt()), GPU)  # no dry run


def test_no_dry_run_without_a_gpu(new_process):
    build_in_parallel(lambda: pytest.fail("a dry run on the CPU"), torch.device("cpu"))


@pytest.mark.parametrize("on_disk", [False, True])
def test_user_is_warned_once_that_kernels_are_built(on_disk, new_process, warned, monkeypatch):
    """Where kernels are on disk there is no warning, and the dry run ends with the second."""
    monkeypatch.setattr(parallel_build, "LONG_BUILD", PATIENCE if on_disk else 0)
    launches = []
    kernels = [kernel(), kernel() if on_disk else kernel(takes_long(warned)), kernel(), kernel()]

    def stage():
        for each in kernels:
            launches.append(each)
            each[(1,)]()

    for _ in range(2):
        build_in_parallel(stage, GPU)
    assert new_process.on_disk is on_disk
    assert warned.messages == (
        [] if on_disk else ["hf_specbranch builds its GPU kernels: some seconds, once on this machine"]
    )
    assert len(launches) == (2 if on_disk else 8)


def test_a_kernel_that_fails_to_build_is_not_on_disk(new_process, warned):
    def fail():
        raise RuntimeError("no compiler")

    build_in_parallel(lambda: [each[(1,)]() for each in (kernel(), kernel(fail), kernel())], GPU)
    assert new_process.on_disk is False and len(warned.messages) == 1


def test_module_check_does_not_take_the_end_of_a_dry_run_for_a_failure(new_process, monkeypatch):
    monkeypatch.setattr(parallel_build, "LONG_BUILD", PATIENCE)
    initial, own, launches = kernel(), kernel(), []
    x, modules = torch.ones(1, 2), [nn.Linear(2, 2), nn.Linear(2, 2, bias=False)]

    def replacement(x):
        launches.append(own)
        own[(1,)]()
        return x

    def check():
        initial[(1,)]()
        agreeing(dict.fromkeys(modules, replacement), dict.fromkeys(modules, Call(lambda: Record((x,), {}, x))))

    build_in_parallel(check, GPU)
    assert launches == [own]


@pytest.mark.parametrize("on_disk", [False, True])
def test_background_build_initialises_triton_and_the_models_first_kernel_decides(
    on_disk, new_process, warned, monkeypatch
):
    """Kernels that every model needs may be on disk where those of this model are not."""
    monkeypatch.setattr(parallel_build, "LONG_BUILD", PATIENCE if on_disk else 0)
    new_process.triton_ready = WaitedFor()
    order = []

    def initialise():
        assert new_process.triton_ready.waiting.wait(PATIENCE)
        order.append("initialised")

    def own():
        if not on_disk:
            takes_long(warned)()
        order.append("own")

    initial, first, second = kernel(initialise), kernel(own), kernel(lambda: order.append("another"))

    def in_background():
        assert is_dry_run()
        initial[(1,)]()

    def stage():
        order.append("begun")
        for each in (first, second):
            each[(1,)]()

    for _ in range(2):  # the second call does nothing
        build_in_background(in_background, GPU)
    assert not is_dry_run()  # in this thread
    build_in_parallel(stage, GPU)
    assert order[:2] == ["initialised", "begun"] and new_process.on_disk is on_disk
    assert sorted(order[2:]) == (["own"] if on_disk else ["another", "own"])


def test_another_model_may_need_kernels_that_are_not_on_disk(new_process, warned, monkeypatch):
    initial, own, missing = kernel(), kernel(), kernel(takes_long(warned))

    def on_disk_after(kernels, new_model, long_build):
        monkeypatch.setattr(parallel_build, "LONG_BUILD", long_build)
        build_in_parallel(lambda: [each[(1,)]() for each in kernels], GPU, new_model)
        return new_process.on_disk

    assert on_disk_after([initial, own], new_model=True, long_build=PATIENCE) is True
    assert on_disk_after([missing], new_model=False, long_build=0) is True  # skipped
    assert on_disk_after([missing], new_model=True, long_build=0) is False
    assert on_disk_after([own], new_model=True, long_build=PATIENCE) is False  # every stage may need missing ones


def test_a_launch_waits_for_the_background_build_even_if_that_fails(new_process):
    new_process.triton_ready = WaitedFor()
    order = []

    def in_background():
        assert new_process.triton_ready.waiting.wait(PATIENCE)
        order.append("failed")
        raise ValueError("before any kernel was built")

    build_in_background(in_background, GPU)
    kernel(launch=lambda: order.append("launched"))[(1,)]()
    assert order == ["failed", "launched"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_process_does_not_wait_for_the_background_build(new_process):
    """It has no such thread."""
    ready = threading.Event()
    new_process.start_background(ready.wait)
    if not (child := os.fork()):
        signal.alarm(PATIENCE)
        try:
            new_process.wait_for_triton()
        finally:
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    ready.set()
    assert not status


def test_without_a_background_thread_nothing_waits_for_it(new_process, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    build_in_background(lambda: None, GPU)
    launched = []
    kernel(launch=lambda: launched.append(1))[(1,)]()
    assert launched == [1] and new_process.background is None


def contents(cache):
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]


def assert_holds(cache, expected):
    for layer, (keys, values) in zip(cache.layers, expected, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-sliding"])
def test_a_pass_in_a_dry_run_does_not_change_the_cache(family):
    model = make(family)
    fuse(model)
    assert can_build_in_parallel(model)
    runner = EagerRunner(model, mask_maker_for(model, "target"))
    tokens, slots = torch.arange(1, 6)[None], torch.arange(5)[None]
    with torch.no_grad():
        runner.reserve(1, 16)
        runner.prefill(tokens, slots + 3, None)
        runner.place(slots + 3)
        kept, positions = contents(runner.cache), runner.slot_positions.clone()
        noise = torch.zeros((1, 2), dtype=torch.long)
        with fused(model), recorded_dry_run():
            runner.forward_uncaptured(noise, noise, noise, torch.ones((1, 2, 8), dtype=torch.bool))
    assert_holds(runner.cache, kept)
    assert torch.equal(runner.slot_positions, positions)


@pytest.mark.parametrize("name", [None, "falcon_h1"])
def test_stages_of_recurrent_models_get_no_dry_run(name):
    """A dry run would begin at a slot without a state, and change states, also if all attention is replaced."""
    model = make("llama") if name is None else copy.deepcopy(plain_model(name))
    fuse(model)
    assert can_build_in_parallel(model)  # of the modules, which run without a cache
    runner = GraphRunner(model, mask_maker_for(model, "target"), "fused")
    runner.device = GPU
    assert runner.builds_in_parallel == (name is None)


def test_attention_is_registered_before_a_model_is_examined(monkeypatch):
    """Whatever runs first in a process."""
    kept = {name: each for name, each in AttentionInterface._global_mapping.items() if "specbranch" not in name}
    monkeypatch.setattr(AttentionInterface, "_global_mapping", kept)
    model = make("gpt2")
    assert not can_build_in_parallel(model)
    with fused(model):
        assert model.config._attn_implementation == "specbranch_uncapped"


@pytest.mark.parametrize("family, whole", [("llama", True), ("gemma2", True), ("gpt2", False)])
def test_passes_in_the_dry_run_of_the_check_have_no_side_effects(family, whole, monkeypatch):
    model, recipes = make(family), []
    fuse(model)
    runner = GraphRunner(model, mask_maker_for(model, "target"), "fused")
    runner.reserve(1, 64)

    def passes():
        recipes.append(state_of(model).kernel_recipe)
        runner._sample_passes()

    def dry_run_here(stage, _, new_model):
        assert new_model
        with recorded_dry_run():
            stage()

    monkeypatch.setattr(sys.modules[can_build_in_parallel.__module__], "build_in_parallel", dry_run_here)
    with torch.no_grad():
        assert can_build_in_parallel(model, passes) is whole
        assert len(recipes) == whole  # the model's own attention may read memory that is only reserved
        assert state_of(model).kernel_recipe not in recipes  # what a dry run finds is noise
        assert not runner.cache.layers  # and so is what it writes
        can_build_in_parallel(model, passes)
        assert len(recipes) == whole  # a known model needs no dry run
        tokens, slots = torch.arange(1, 6)[None], torch.arange(5)[None]
        torch.testing.assert_close(runner.prefill(tokens, slots, None), model(tokens).logits[:, -1])
        kept = contents(runner.cache)
        runner._sample_passes()  # leaves a cache in use alone
        assert_holds(runner.cache, kept)


def test_an_interrupted_dry_run_leaves_no_recipe(monkeypatch):
    model = make("llama")

    def interrupted(stage, *_, **__):
        with recorded_dry_run():
            stage()
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules[can_build_in_parallel.__module__], "build_in_parallel", interrupted)
    with pytest.raises(KeyboardInterrupt):
        can_build_in_parallel(model)
    assert state_of(model).kernel_recipe is None


def test_models_with_hooks_or_autocast_get_no_dry_run():
    model = make("llama")
    with torch.autocast("cpu", torch.bfloat16):
        assert not can_build_in_parallel(model) and state_of(model).kernel_recipe is None
    assert can_build_in_parallel(model)
    assert not state_of(model).kernel_recipe.tuned.find_weights()  # held no longer than needed
    hook = model.lm_head.register_forward_hook(lambda *_: None)
    assert not can_build_in_parallel(model)
    hook.remove()
    assert can_build_in_parallel(model)


def test_a_model_is_not_examined_in_a_dry_run():
    model = make("llama")
    with recorded_dry_run(), pytest.raises(RuntimeError, match="dry run"), fused(model):
        pass
    assert state_of(model).kernel_recipe is None
