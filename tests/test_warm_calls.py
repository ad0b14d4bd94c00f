"""What the host does in a call whose stages are captured: little, and no more for a deeper model."""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import StoppingCriteriaList

from hf_specbranch import specbranch
from hf_specbranch.decoding import call, draft_model, loop
from hf_specbranch.decoding.assembly import Assembly
from hf_specbranch.decoding.drafter import Drafter
from hf_specbranch.decoding.target import Target
from hf_specbranch.model_state import every_module
from hf_specbranch.runtime import cuda_graph
from hf_specbranch.runtime.cuda_graph import GraphRunner
from hf_specbranch.runtime.static_buffers import StaticBuffers

from .graphs import EagerGraphs, run_graphs_on_cpu, tokens
from .models import config, llama, noisy_copy, slowly


class NoReplay(EagerGraphs):
    """A replay does nothing, so that only the host's own work is counted."""

    def run_and_record(self, stage, generators=()):
        stage()
        return [SimpleNamespace(replay=lambda: None)]


class Operations(TorchDispatchMode):
    """Counts the operations of torch, and those that wait for the device."""

    def __init__(self):
        super().__init__()
        self.count = self.waits = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += 1
        self.waits += operation in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        return operation(*args, **(kwargs or {}))


@pytest.fixture
def captured(monkeypatch):
    forward = GraphRunner.forward
    run_graphs_on_cpu(monkeypatch)
    monkeypatch.setattr(cuda_graph, "GraphMemory", NoReplay)
    monkeypatch.setattr(GraphRunner, "forward", forward)


def warm_call(policy, layers):
    """A call for two tokens, after two others."""
    target = llama(seed=0, layers=layers)
    own = {"assistant_model": noisy_copy(target, 0.2, 1)} if policy != "autoregressive" else {}
    model, settings = specbranch(target), config(policy, kernels=True, runtime="graph")
    ids = tokens(9)

    def call():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, specbranch=settings, **own)

    call(), call()
    return call


def python_calls(call):
    """How many Python functions a call enters."""
    count = 0

    def enter(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(("policy", "models"), [slowly("autoregressive", 1), ("vanilla", 2)])
def test_work_of_the_host_hardly_grows_with_the_layers(captured, policy, models):
    shallow, deep = (python_calls(warm_call(policy, layers)) for layers in (2, 10))
    assert deep - shallow < 8 * models * 60  # to examine the modules of a layer takes several hundred


@pytest.mark.parametrize(("policy", "operations"), [("autoregressive", 120), ("vanilla", 190)])
def test_few_operations_and_waits(captured, policy, operations):
    call, seen = warm_call(policy, layers=4), Operations()
    with seen:
        call()
    assert seen.count < operations and seen.waits <= 6, (seen.count, seen.waits)


@pytest.mark.parametrize(("rows", "expected"), [(1, ["first token, draft", *["draft, first token"] * 2]), (2, None)])
def test_draft_reads_the_prompt_while_the_host_waits(rows, expected, graph_runners, monkeypatch):
    """Not in the first call, which captures; nor in a batch, where the device is asked which tokens are padding."""
    target = llama(seed=0)
    model, draft, settings = specbranch(copy.deepcopy(target)), noisy_copy(target, 0.2, 1), config("vanilla")
    order, prefill, finish = [], Drafter.prefill, loop.finish_round

    def noting(name, function):
        return lambda *args: (order.append(name), function(*args))[1]

    monkeypatch.setattr(Drafter, "prefill", noting("draft", prefill))
    monkeypatch.setattr(loop, "finish_round", noting("first token", finish))
    found = []
    for seed in range(3):
        order.clear()
        ids = tokens(9, seed=seed).repeat(rows, 1)
        asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
        out = model.generate(ids, **asked, assistant_model=draft, specbranch=settings)
        assert torch.equal(out, target.generate(ids, **asked))
        found.append(", ".join(order[:2]))
    assert found == (expected or ["first token, draft"] * 3)
    order.clear()
    model.generate(tokens(9), max_new_tokens=1, do_sample=False, assistant_model=draft, specbranch=settings)
    assert order == ["first token"]  # there is nothing to draft


def test_draft_has_read_the_prompt_when_its_parts_are_made(graph_runners, monkeypatch):
    """It reads every token once, and drafts what it drafts where it reads later."""
    target, read, accepted = llama(seed=0), [], []
    draft, settings = noisy_copy(target, 0.2, 1), config("vanilla", kernels=True)
    prefill, make = draft_model.prefill, Assembly.with_drafter
    asked = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}

    def reading(runner, tokens, positions, first, start=0, **others):
        read.append((start, tokens.shape[1]))
        return prefill(runner, tokens, positions, first, start, **others)

    monkeypatch.setattr(draft_model, "prefill", reading)
    monkeypatch.setattr(Assembly, "with_drafter", lambda *args: (read.append("parts"), make(*args))[1])
    texts = [tokens(9, seed=0), tokens(9, seed=1), torch.cat([tokens(9, seed=1), tokens(4, seed=2)], dim=1)]
    for early in (True, False):
        model = specbranch(copy.deepcopy(target))
        if not early:
            monkeypatch.setattr(Assembly, "read_ahead", lambda *_: None)
        for ids in texts:
            read.clear()
            asked["attention_mask"] = torch.ones_like(ids)
            out = model.generate(ids, **asked, assistant_model=draft, specbranch=settings)
            assert torch.equal(out, target.generate(ids, **asked))
            accepted.append(model.specbranch_stats.num_accepted_tokens)
        assert read == ([(9, 13), "parts"] if early else ["parts", (9, 13)])
    assert accepted[:3] == accepted[3:] and accepted[0] > 0


def test_draft_reads_a_long_prompt_once_its_parts_are_made(graph_runners, monkeypatch):
    """Then the first token does not wait for a device that both models fill."""
    target, order, prefill, make = llama(seed=0), [], draft_model.prefill, Assembly.with_drafter
    monkeypatch.setattr(draft_model, "prefill", lambda *args: (order.append("read"), prefill(*args))[1])
    monkeypatch.setattr(Assembly, "with_drafter", lambda *args: (order.append("parts"), make(*args))[1])
    monkeypatch.setattr(draft_model, "MOST_AHEAD", 8)
    model, draft, settings = specbranch(target), noisy_copy(target, 0.2, 1), config("vanilla", kernels=True)
    found = []
    for seed, length in enumerate((8, 8, 9)):  # the first call captures
        order.clear()
        model.generate(tokens(length, seed), max_new_tokens=4, assistant_model=draft, specbranch=settings)
        found.append(order[0])
    assert found == ["parts", "read", "parts"]


@pytest.mark.parametrize("policy", ["autoregressive", "vanilla"])
def test_end_tokens_are_read_before_the_device_is_busy(policy, graph_runners, monkeypatch):
    """They are on the device. The drafter asks for them while the device reads the prompt, which it would wait for."""
    target, start, known = llama(seed=0), Target.start_prefill, []
    monkeypatch.setattr(
        Target, "start_prefill", lambda self: (known.append("eos" in vars(self.text.stopper)), start(self))[1]
    )
    asked = {"max_new_tokens": 4, "assistant_model": noisy_copy(target, 0.2, 1), "specbranch": config(policy)}
    specbranch(target).generate(tokens(9), **asked)
    assert known == [True]


def test_buffers_are_zeroed_at_once():
    buffers = StaticBuffers(torch.device("cpu"), EagerGraphs("cpu"))
    kept = buffers.keep("kept", torch.ones(2))
    for _ in range(2):
        made = [buffers.tensor(f"{i}", (i,), (torch.long, torch.float32)[i % 2]).fill_(7) for i in range(20)]
    seen = Operations()
    with seen:
        buffers.begin()
        again = [buffers.tensor(f"{i}", (i,), (torch.long, torch.float32)[i % 2]) for i in range(20)]
    assert seen.count == 2 and not any(each.any() for each in again) and kept.all()
    assert [each.data_ptr() for each in again] == [each.data_ptr() for each in made]
    again[3].fill_(7)
    assert not buffers.tensor("3", (3,), torch.float32).any()  # asked for a second time


def test_a_call_goes_through_a_model_once():
    target, seen = llama(seed=0), []

    def look(ids, scores, **kwargs):
        seen.append(every_module(target) is every_module(target))
        return torch.zeros(len(ids), dtype=torch.bool)

    specbranch(target).generate(tokens(5), max_new_tokens=2, stopping_criteria=StoppingCriteriaList([look]))
    assert seen and all(seen) and every_module(target) is not every_module(target)


def test_settings_of_processors_are_read_once(graph_runners, monkeypatch):
    """Some are on the device, which reads the prompt when they would be asked for again."""
    target, read, signature = llama(seed=0), [], call.signature
    monkeypatch.setattr(call, "signature", lambda processor: (read.append(processor), signature(processor))[1])
    asked = {"max_new_tokens": 8, "min_new_tokens": 4, "do_sample": False, "specbranch": config("vanilla")}
    specbranch(target).generate(tokens(5), **asked, assistant_model=noisy_copy(target, 0.2, 1))
    assert len(read) == len({id(each) for each in read}) > 0
