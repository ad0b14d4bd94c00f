"""Fixtures and hooks. torch is imported where it is used: the process that only starts test processes needs none."""

import gc
import os
import signal
import traceback

import pytest

os.environ["HF_SPECBRANCH_CACHE"] = "off"  # no test depends on what an earlier one has learned
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell has started the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
# oneDNN takes five times as long for tiny products on some CPUs. These files run with it, as users do.
WITH_ONEDNN = {"test_greedy_exactness", "test_sampling_exactness", "test_precision", "test_generate_contract"}


def pytest_collection_modifyitems(items):
    import torch

    torch.set_num_threads(1)  # tiny models: threads cost more than they bring
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


def pytest_collection_finish():
    """Leave what is imported by now to the end of the process: to go through it takes most of a collection's time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    finally:
        if item.get_closest_marker("gpu"):
            stop_if_the_device_is_lost(item.nodeid)


def stop_if_the_device_is_lost(test):
    """After a device-side assert nothing runs in this process: later tests would fail, or the process would abort."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        failure = "".join(traceback.format_exception(error))[-8000:]  # that of the test comes first
        pytest.exit(
            f"{test} has lost the device: {str(error).splitlines()[0]}. Run this test with -s to see the assert, and "
            f"those after it in a new process.\n{failure}",
            returncode=1,
        )


@pytest.fixture(scope="session")
def target():
    from .models import llama

    return llama(seed=0)


@pytest.fixture(scope="session")
def draft(target):
    """A draft that agrees with the target often, not always."""
    from .models import noisy_copy

    return noisy_copy(target, noise=0.25, seed=1)


@pytest.fixture
def static_stages(monkeypatch):
    """Static shapes in all stages, as where they are captured; here the stages run eagerly."""
    from hf_specbranch.runtime.eager import EagerRunner
    from hf_specbranch.runtime.static_buffers import Buffers

    monkeypatch.setattr(EagerRunner, "captures", True)
    monkeypatch.setattr(EagerRunner, "buffers", lambda self, settings: Buffers(self.device, static_shapes=True))


@pytest.fixture
def graph_runners(monkeypatch):
    """Runners as on a GPU; see `graphs.run_graphs_on_cpu`."""
    from .graphs import run_graphs_on_cpu

    run_graphs_on_cpu(monkeypatch)


@pytest.fixture(scope="session")
def stranger():
    """A draft that hardly ever agrees."""
    from .models import llama

    return llama(seed=7)


@pytest.fixture(autouse=True, scope="module")
def tiny_products(request):
    import torch

    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = request.module.__name__.rpartition(".")[2] in WITH_ONEDNN
    yield
    torch.backends.mkldnn.enabled = before
