"""Fewer threads while other processes need the cores, and all of them again afterwards."""

import copy
import os
import time

import pytest
import torch

from hf_specbranch import SpecBranchConfig, specbranch
from hf_specbranch.runtime import overlap
from hf_specbranch.runtime.overlap import CpuThreads

from .models import prompt, slowly

CPU = torch.device("cpu")
QUIET, BUSY = 1, 64  # tasks that run


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Sets how many tasks run on a machine with four cores, all of which torch uses."""
    monkeypatch.setattr(overlap, "LOAD", str(tmp_path / "loadavg"))
    monkeypatch.setattr(overlap, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(overlap, "cpu_threads", CpuThreads())
    monkeypatch.setattr("hf_specbranch.decoding.engine.cpu_threads", overlap.cpu_threads)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield lambda running: (tmp_path / "loadavg").write_text(f"0.50 0.40 0.30 {running}/900 12345\n")
    torch.set_num_threads(before)


def threads_used(device=CPU):
    with overlap.cpu_threads.limited(device):
        return torch.get_num_threads()


def test_one_thread_on_a_busy_machine(load):
    load(BUSY)
    assert threads_used() == 1 and torch.get_num_threads() == 4
    assert threads_used(None) == 4 and threads_used(torch.device("cuda")) == 4


def test_threads_follow_the_number_of_free_cores(load, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    for others, expected in [(900, 4), (980, 4), (1020, 1)]:  # torch's own threads may be counted too
        monkeypatch.setattr(overlap, "cpu_threads", CpuThreads())
        load(others)
        assert threads_used() == expected, others


def test_a_busy_machine_is_noticed_during_a_call(load):
    threads = overlap.cpu_threads
    load(QUIET)
    with threads.limited(CPU):
        assert torch.get_num_threads() == 4
        load(BUSY)
        assert list(threads.watch(range(9))) == [0]  # costs are others from here on
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 4


def test_all_threads_are_used_again_once_the_machine_stays_quiet(load):
    threads = overlap.cpu_threads
    load(BUSY)
    assert threads_used() == 1
    load(QUIET)
    with threads.limited(CPU):  # the first of several looks
        assert torch.get_num_threads() == 1
        assert len(list(threads.watch(range(9)))) == overlap.QUIET_CHECKS - 1
        assert torch.get_num_threads() == 4
    assert threads_used() == 4


def test_a_short_moment_of_quiet_changes_nothing(load):
    threads = overlap.cpu_threads
    load(BUSY)
    with threads.limited(CPU):
        for round in threads.watch(range(12)):
            load(BUSY if round % 3 == 0 else QUIET)
            assert torch.get_num_threads() == 1


def test_an_old_look_is_forgotten(load, monkeypatch):
    load(BUSY)
    assert threads_used() == 1
    load(QUIET)
    assert threads_used() == 1
    monkeypatch.setattr(overlap, "FORGET_SECONDS", 0.0)
    assert threads_used() == 4


@pytest.mark.parametrize("content", [None, "", "nonsense", "1 2 3"])
def test_nothing_changes_where_the_load_is_unknown(load, tmp_path, content):
    if content is not None:
        (tmp_path / "loadavg").write_text(content)
    assert threads_used() == 4


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_threads_are_restored_after_an_error(load, error):
    load(BUSY)
    with pytest.raises(error), overlap.cpu_threads.limited(CPU):
        raise error
    assert torch.get_num_threads() == 4


def test_a_call_within_a_call_leaves_the_threads_of_the_outer_one(load):
    threads = overlap.cpu_threads
    load(QUIET)
    with threads.limited(CPU):
        load(BUSY)
        assert threads_used() == 1 and torch.get_num_threads() == 4
        assert list(threads.watch(range(9))) == [0] and torch.get_num_threads() == 1
        assert threads_used(None) == 1 and torch.get_num_threads() == 1
    assert torch.get_num_threads() == 4


def test_a_look_takes_little_time(load):
    load(QUIET)
    start = time.perf_counter()
    for _ in range(20):
        overlap.tasks_running()
    assert (time.perf_counter() - start) / 20 < 2e-3  # about 0.03 ms; the machine may be busy now


@pytest.mark.parametrize("policy", ["auto", "vanilla", slowly("specbranch")])
def test_generation_uses_fewer_threads(load, policy, target, draft):
    """Greedy ones do, from the moment when the machine is busy; the text stays the same.

    Products of tiny models run in one thread, however many there are: threads would wait for a core here.
    """
    seen = []

    class Watch:
        def put(self, value):
            seen.append(torch.get_num_threads())
            load(BUSY if len(seen) > 8 else QUIET)

        def end(self):
            pass

    run = {**prompt(), "max_new_tokens": 24, "eos_token_id": None}
    ours = {**run, "specbranch": SpecBranchConfig(policy)}
    expected = target.generate(**run, do_sample=False)
    model = specbranch(copy.deepcopy(target), draft)
    load(QUIET)
    assert torch.equal(model.generate(**ours, do_sample=False, streamer=Watch()), expected)
    assert seen[1] == 4 and seen[-1] == 1 and torch.get_num_threads() == 4
    seen.clear()
    model.generate(**ours, do_sample=True, streamer=Watch())  # a sampled text depends on its seed alone
    assert set(seen) == {4}
