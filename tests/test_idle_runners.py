"""Runners of several batch sizes wait side by side for the next call, within one memory budget."""

import copy
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

from hf_specbranch import specbranch
from hf_specbranch.garbage_collection import no_garbage_collection
from hf_specbranch.layers.fuse import fuse
from hf_specbranch.layers.recognise import record_calls
from hf_specbranch.model_state import state_of
from hf_specbranch.runtime import cuda_graph, idle_runners
from hf_specbranch.runtime.mask_probe import mask_maker_for

from .graphs import Comparison, tokens
from .models import config, llama, noisy_copy, slowly

CPU = torch.device("cpu")


@pytest.fixture
def model(target, graph_runners):
    """A model of its own, and no idle runners of others."""
    idle_runners.free_all(CPU)
    return copy.deepcopy(target)


def take(model, rows):
    return cuda_graph.take(model, mask_maker_for(model, "target"), rows)


def used(model, rows):
    """Return a runner that has read a text, and given its memory to a stage."""
    runner = take(model, rows)
    ids = tokens(5, rows=rows)
    runner.prefill(ids, torch.arange(5).expand(rows, -1), None)
    runner.buffers("settings").tensor("numbers", (1000,))
    return runner


def kept(model):
    return state_of(model).idle_runners


def give_back(runner):
    cuda_graph.give_back(runner, budget=1.0)
    return runner


def test_batch_sizes_are_kept_side_by_side(model):
    runners = {rows: give_back(used(model, rows)) for rows in (1, 4, 2)}
    for rows in (4, 1, 2, 4):
        assert give_back(take(model, rows)) is runners[rows]
    assert len(kept(model)) == 3


def test_ways_to_run_layers_are_kept_apart(model):
    masks = mask_maker_for(model, "target")
    fused = give_back(cuda_graph.take(model, masks, 1, "fused"))
    plain = give_back(take(model, 1))
    assert fused is not plain and cuda_graph.take(model, masks, 1, "fused") is fused and take(model, 1) is plain


def test_bytes_are_those_of_cache_and_buffers(model):
    small, large = used(model, 1), used(model, 4)
    assert large.cache.num_bytes == 4 * small.cache.num_bytes > 0
    assert small.num_bytes == small.cache.num_bytes + 8000


def test_caches_go_before_graphs_and_the_oldest_first(model):
    first, second, third = (give_back(used(model, rows)) for rows in (1, 2, 3))
    give_back(take(model, 1))  # now it was used last
    everything = first.num_bytes + second.num_bytes + third.num_bytes
    idle_runners.keep_within(CPU, everything)
    assert all(runner.cache.num_bytes for runner in (first, second, third))
    idle_runners.keep_within(CPU, everything - 1)
    assert [bool(runner.cache.num_bytes) for runner in (second, third, first)] == [False, True, True]
    idle_runners.keep_within(CPU, first.num_bytes + 16000)
    assert [bool(runner.cache.num_bytes) for runner in (second, third, first)] == [False, False, True]
    assert len(kept(model)) == 3
    idle_runners.keep_within(CPU, 16000)
    assert not first.cache.num_bytes and sorted(map(id, kept(model))) == sorted(map(id, (first, third)))
    idle_runners.keep_within(CPU, 8000)
    assert kept(model) == [first]


def test_budget_is_shared_by_all_models(model):
    other = copy.deepcopy(model)
    first, second = give_back(used(other, 1)), give_back(used(model, 1))
    idle_runners.keep_within(CPU, first.num_bytes + second.num_bytes - 1)
    assert second.cache.num_bytes and not first.cache.num_bytes
    idle_runners.keep_within(CPU, 8000)
    assert kept(model) == [second] and not kept(other)


def test_nothing_is_kept_without_a_budget(model):
    runners = [weakref.ref(give_back(used(model, rows))) for rows in (1, 2)]
    idle_runners.keep_within(CPU, 0)
    assert not kept(model) and not any(runner() for runner in runners)


def test_released_cache_has_no_old_text(model):
    runner = give_back(used(model, 1))
    idle_runners.keep_within(CPU, 8000)
    assert take(model, 1) is runner and runner.cache.get_seq_length() == 0
    ids = tokens(5)
    logits = runner.prefill(ids, torch.arange(5)[None], None)
    torch.testing.assert_close(logits, model(ids).logits[:, -1])


def test_free_all_says_whether_there_were_any(model):
    assert not idle_runners.free_all(CPU)
    other = copy.deepcopy(model)
    give_back(used(model, 1)), give_back(used(other, 2))
    assert not idle_runners.free_all(torch.device("meta"))
    assert idle_runners.free_all(CPU) and not kept(model) and not kept(other)


def test_runner_in_use_is_never_freed(model):
    runner = used(model, 1)
    idle_runners.keep_within(CPU, 0)
    idle_runners.free_all(CPU)
    assert runner.cache.num_bytes and runner.model is model


def test_two_threads_take_different_runners(model):
    give_back(used(model, 1))
    mask_maker_for(model, "target")
    together, taken = threading.Barrier(2), []

    def work():
        together.wait()
        runner = take(model, 1)
        taken.append(runner)
        together.wait()
        give_back(runner)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken[0] is not taken[1] and len(kept(model)) == 2


def test_second_time_captures_nothing(model):
    """Batch sizes that were seen before keep their stages, unless there is no budget."""
    compare = Comparison(model, noisy_copy(model, 0.25, 1), new_tokens=6, policy="vanilla")
    captured = []
    for rows in (1, 2, 5, 2, 1, 5):
        compare(tokens(12, rows=rows))
        captured.append(compare.stats.graphs_captured > 0)
    assert captured == [True] * 3 + [False] * 3
    idle_runners.keep_within(CPU, 0)
    compare(tokens(12))
    assert compare.stats.graphs_captured > 0


@pytest.mark.parametrize("targets", [slowly(1), 2])
def test_threads_that_share_models(targets, model):
    """Two threads generate with one model, or with two that share a draft, from a cold start."""
    draft = noisy_copy(model, 0.25, 1)
    plain = [model, llama(seed=5)][:targets]
    models = [specbranch(copy.deepcopy(each)) for each in plain]
    kwargs = {"max_new_tokens": 16, "do_sample": False}
    jobs = [(seed % targets, tokens(6 + 3 * seed, seed=seed)) for seed in range(4)]
    expected = [plain[which].generate(ids, **kwargs) for which, ids in jobs]

    def work(job):
        which, ids = job
        return models[which].generate(ids, **kwargs, assistant_model=draft, specbranch=config(kernels=True))

    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(work, jobs))
    assert all(torch.equal(text, wanted) for text, wanted in zip(texts, expected, strict=True))
    assert all(each.specbranch_stats.runtime == "graph" for each in models)


@pytest.mark.parametrize("step", [fuse, lambda model: mask_maker_for(model, "target")], ids=["join weights", "probe"])
def test_no_step_changes_or_compares_a_model_that_runs(step, model):
    """A weight that moves during another thread's pass ends the process, or fails the probe, which compares bits."""
    with ThreadPoolExecutor(1) as pool:
        with state_of(model).kernel_lock:
            other = pool.submit(step, model)
            assert not wait([other], timeout=0.5).done
        other.result()


def test_check_waits_until_another_thread_has_examined_the_model(model):
    """Hooks that record the calls of one thread must not see the passes that another thread compares."""
    masks, seen = mask_maker_for(model, "target"), []
    fuse(model)
    with ThreadPoolExecutor(1) as pool:
        with state_of(model).kernel_lock:
            hook = model.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
            other = pool.submit(cuda_graph.layers_for, model, masks, 1)
            assert not wait([other], timeout=0.5).done and not seen
            hook.remove()
        assert other.result() == "fused"


def test_calls_of_another_thread_are_not_recorded(model):
    """They name a cache whose slots belong to another pass."""

    def other_pass(*_):
        before.remove()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(torch.no_grad()(model), tokens(40)).result()

    before = model.model.layers[0].register_forward_pre_hook(other_pass)
    calls = record_calls(model)
    assert calls[model.model.layers[0]].args[0].shape[1] == calls[model.model.norm].args[0].shape[1] == 16


def test_no_garbage_is_collected_during_a_capture():
    """To destroy a graph that is garbage ends the capture of another."""
    assert gc.isenabled()
    with no_garbage_collection(), ThreadPoolExecutor(1) as pool:
        with no_garbage_collection():
            assert not pool.submit(gc.isenabled).result()
        assert not gc.isenabled()
    assert gc.isenabled()
