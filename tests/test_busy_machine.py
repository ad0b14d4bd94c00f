"""Fewer threads while other processes keep the cores busy, and all of them again afterwards."""

import pytest
import torch

from hf_specbranch import load_demo_pair, specbranch
from hf_specbranch.runtime import busy

CPU = torch.device("cpu")


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Sets what the scheduler says: seconds that this thread has run and has waited for a core, in all."""
    monkeypatch.setattr(busy, "SCHEDULE", tmp_path / "schedstat")
    monkeypatch.setattr(busy, "_judgement", busy._Judgement())
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield lambda ran, waited: busy.SCHEDULE.write_text(f"{int(1e9 * ran)} {int(1e9 * waited)} 5\n")
    torch.set_num_threads(before)


def threads_used(device=CPU):
    with busy.fewer_threads_if_busy(device):
        return torch.get_num_threads()


def test_half_of_the_threads_on_a_busy_machine(load):
    load(1.0, 0.05)
    assert threads_used() == 4
    load(2.0, 1.0)
    assert threads_used() == 2 and torch.get_num_threads() == 4
    assert threads_used(None) == 4 and threads_used(torch.device("cuda")) == 4


def test_all_threads_are_tried_again(load):
    load(1.0, 1.0)
    assert [threads_used() for _ in range(busy.CALLS)] == [2] * busy.CALLS
    load(2.0, 1.0)  # nothing had to wait
    assert threads_used() == 4
    load(3.0, 2.0)  # it was not long before it had to again
    assert [threads_used() for _ in range(2 * busy.CALLS)] == [2] * 2 * busy.CALLS


def test_threads_stay_few_while_they_have_to_wait(load):
    load(1.0, 1.0)
    for call in range(3 * busy.CALLS):
        with busy.fewer_threads_if_busy(CPU):
            assert torch.get_num_threads() == 2
            load(2.0 + call, 1.2 + 0.2 * call)  # less than with all threads, but still


@pytest.mark.parametrize("content", [None, "", "nonsense"])
def test_without_a_scheduler_nothing_changes(load, content):
    if content is not None:
        busy.SCHEDULE.write_text(content)
    assert threads_used() == 4


def test_threads_are_restored_after_an_error(load):
    load(1.0, 1.0)
    with pytest.raises(RuntimeError), busy.fewer_threads_if_busy(CPU):
        raise RuntimeError
    assert torch.get_num_threads() == 4


def test_generation_uses_fewer_threads(load):
    """Greedy ones; the text stays the same. A sampled text depends on its seed alone."""
    seen = []

    class Watch:
        def put(self, value):
            seen.append(torch.get_num_threads())

        def end(self):
            pass

    target, draft, tokenizer = load_demo_pair()
    inputs = tokenizer("def add(a, b):", return_tensors="pt")
    run = {**inputs, "max_new_tokens": 12}
    expected = target.generate(**run, do_sample=False)
    model = specbranch(target, draft)
    load(1.0, 1.0)
    assert torch.equal(model.generate(**run, do_sample=False, streamer=Watch()), expected)
    assert seen[-1] == 2 and torch.get_num_threads() == 4
    model.generate(**run, do_sample=True, streamer=Watch())
    assert seen[-1] == 4
