"""The KV cache stores the prefix once; branches add only their own tokens."""

import pytest
import torch
from transformers import DynamicCache

from hf_specbranch.runtime.eager import EagerRunner
from hf_specbranch.runtime.kv_cache import BUCKET, SlotCache

from .models import attached, config, llama, prompt, slowly


def keys(rows=1, heads=2, count=3, size=4, seed=0):
    torch.manual_seed(seed)
    return torch.rand((rows, heads, count, size))


@pytest.fixture
def slots_written(monkeypatch):
    """For every forward: (model, slots written [B, Q], visible slots [B, Q, S])."""
    written = []
    forward = EagerRunner.forward

    def observer(self, tokens, positions, slots, visible, *rest, **extra):
        written.append((self.model, slots.clone(), visible.clone()))
        return forward(self, tokens, positions, slots, visible, *rest, **extra)

    monkeypatch.setattr(EagerRunner, "forward", observer)
    return written


@pytest.mark.parametrize(("gamma", "k"), [(1, 1), (3, 3), slowly(4, 4), slowly(8, 6)])
def test_branches_add_at_most_k_times_gamma_slots(gamma, k, target, stranger, slots_written, monkeypatch):
    from hf_specbranch.decoding.drafter import Drafter

    points = []
    branch = Drafter.branch

    def observer(self, reached):
        first = len(slots_written)
        starts = branch(self, reached)
        used = [slots.flatten() for _, slots, _ in slots_written[first:]]
        if used:
            points.append(len({int(slot) for slot in torch.cat(used) if slot >= self.round.point[0]}))
        return starts

    monkeypatch.setattr(Drafter, "branch", observer)
    settings = config("specbranch", gamma=gamma, k=k, epsilon=0.9, overlap=False)
    model = attached(target)
    model.generate(**prompt(), max_new_tokens=40, do_sample=False, assistant_model=stranger, specbranch=settings)
    assert points and max(points) <= k * gamma
    if k > 1:
        assert max(points) > gamma  # it did fork


def test_branches_do_not_see_each_other(target, stranger, slots_written):
    settings = config("specbranch", gamma=3, k=4, epsilon=0.9, overlap=False)
    model = attached(target)
    model.generate(**prompt(), max_new_tokens=30, do_sample=False, assistant_model=stranger, specbranch=settings)
    packed = [(slots, visible) for runner, slots, visible in slots_written if runner is stranger and slots.shape[1] > 2]
    assert packed
    for slots, visible in packed:
        for query in range(slots.shape[1]):
            others = [int(slot) for j, slot in enumerate(slots[0]) if j != query and int(slot) != int(slots[0, query])]
            side_branches = [slot for slot in others if slot > int(slots[0, 0])]
            assert not visible[0, query, side_branches].any()


def test_prefix_is_stored_once(target, stranger, monkeypatch):
    from hf_specbranch.decoding.drafter import Drafter

    drafters, prefill = [], Drafter.prefill

    def observer(self, length):
        drafters.append(self)
        prefill(self, length)

    monkeypatch.setattr(Drafter, "prefill", observer)
    settings = config("specbranch", gamma=4, k=4, epsilon=0.9)
    attached(target).generate(
        **prompt(length=100), max_new_tokens=30, do_sample=False, assistant_model=stranger, specbranch=settings
    )
    layer = drafters[0].model.runner.cache.layers[0]
    assert layer.keys.shape[0] == 1  # one row, whatever the number of branches
    assert layer.keys.shape[2] == BUCKET  # 100 + 30 + 4 * 4 slots fit the first bucket


def test_move_reads_before_it_writes():
    cache = SlotCache()
    states = keys(count=6)
    cache.update(states, states, 0)
    cache.move(torch.tensor([[2, 3, 4]]), torch.tensor([[3, 4, 5]]))
    assert torch.equal(cache.layers[0].keys[:, :, 3:6], states[:, :, 2:5])


def test_slots_are_outermost_in_memory():
    """So that more slots are more memory at the end."""
    cache = SlotCache()
    cache.update(keys(rows=3), keys(rows=3), 0)
    layer = cache.layers[0]
    for states in (layer.keys, layer.values):
        assert states.shape == (3, 2, BUCKET, 4) and states.permute(2, 0, 1, 3).is_contiguous()


def test_growing_keeps_entries():
    cache = SlotCache()
    for layer in range(2):
        cache.update(keys(count=5, seed=layer), keys(count=5, seed=layer + 2), layer)
    cache.reserve(BUCKET + 1)
    for index, layer in enumerate(cache.layers):
        assert layer.keys.shape[2] == layer.values.shape[2] == cache.address.capacity == 2 * BUCKET
        assert torch.equal(layer.keys[:, :, :5], keys(count=5, seed=index))
        assert torch.equal(layer.values[:, :, :5], keys(count=5, seed=index + 2))
        assert not layer.keys[:, :, 5:].any() and not layer.values[:, :, 5:].any()


@pytest.mark.parametrize("limit", [None, 16 * BUCKET])
def test_reserve_tells_whether_memory_has_moved(limit):
    """On a CPU it moves whenever it grows, whatever the limit."""
    cache = SlotCache(limit)
    assert not cache.reserve(2 * BUCKET)  # there was none
    cache.update(keys(), keys(), 0)
    before = cache.layers[0].keys.data_ptr()
    assert not cache.reserve(2 * BUCKET) and cache.layers[0].keys.data_ptr() == before
    assert cache.reserve(2 * BUCKET + 1) and cache.layers[0].keys.data_ptr() != before
    assert not cache.reserve(2 * BUCKET + 1)


def test_released_memory_can_be_reserved_again():
    cache = SlotCache()
    cache.update(keys(), keys(), 0)
    size = 4 * keys(count=BUCKET).numel()
    assert cache.num_bytes == 2 * size
    cache.release()
    assert cache.num_bytes == 0 and cache.get_seq_length() == 0 and not cache
    assert cache.reserve(10)  # the old memory is gone
    cache.update(keys(seed=1), keys(seed=2), 0)
    assert cache.num_bytes == 2 * size
    assert torch.equal(cache.layers[0].keys[:, :, :3], keys(seed=1))
    assert not cache.layers[0].keys[:, :, 3:].any()


def test_appending_beyond_the_reserved_slots_is_an_error():
    cache = SlotCache()
    with pytest.raises(IndexError, match=f"slots up to {BUCKET + 1} are written, but {BUCKET} are reserved"):
        cache.update(keys(count=BUCKET + 1), keys(count=BUCKET + 1), 0)


@pytest.mark.parametrize("rows", [1, 3])
def test_entries_survive_load_write_grow_and_store(rows):
    """`load`, writes by slot, `move` and `store` agree with a list of entries, before and after growing."""
    past, cache = DynamicCache(), SlotCache()
    past.update(keys(rows, count=6), keys(rows, count=6, seed=1), 0)
    cache.load(past)
    cache.address.point_at(torch.tensor([[9, 6]]).repeat(rows, 1), 10)
    shown = cache.update(keys(rows, count=2, seed=2), keys(rows, count=2, seed=3), 0)
    assert shown[0].shape == (rows, 2, 10, 4)
    cache.reserve(BUCKET + 1)
    cache.move(torch.tensor([[9]]).repeat(rows, 1), torch.tensor([[7]]).repeat(rows, 1))
    cache.store(past, 6, 8)
    expected = [torch.cat([keys(rows, count=6, seed=s), keys(rows, count=2, seed=s + 2).flip(2)], 2) for s in (0, 1)]
    assert torch.equal(past.layers[0].keys, expected[0]) and torch.equal(past.layers[0].values, expected[1])


def test_text_longer_than_a_bucket():
    target = llama(seed=0, max_position_embeddings=1024)
    draft = llama(seed=0, max_position_embeddings=1024)
    inputs = prompt(2, length=BUCKET - 10)
    kwargs = {**inputs, "max_new_tokens": 60, "do_sample": False}
    assert torch.equal(attached(target).generate(**kwargs, assistant_model=draft), target.generate(**kwargs))
