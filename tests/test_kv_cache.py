"""The KV cache stores the prefix once; branches add only their own tokens."""

import pytest
import torch

from hf_specbranch.runtime.eager import EagerRunner
from hf_specbranch.runtime.kv_cache import BUCKET, SlotCache

from .models import attached, config, llama, prompt


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


@pytest.mark.parametrize(("gamma", "k"), [(1, 1), (3, 3), (4, 4), (8, 6)])
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


def test_growing_keeps_entries():
    cache = SlotCache()
    states = keys(count=5)
    cache.update(states, states, 0)
    cache.reserve(BUCKET + 1)
    assert cache.layers[0].keys.shape[2] == 2 * BUCKET
    assert torch.equal(cache.layers[0].keys[:, :, :5], states)


def test_text_longer_than_a_bucket():
    target = llama(seed=0, max_position_embeddings=1024)
    draft = llama(seed=0, max_position_embeddings=1024)
    inputs = prompt(2, length=BUCKET - 10)
    kwargs = {**inputs, "max_new_tokens": 60, "do_sample": False}
    assert torch.equal(attached(target).generate(**kwargs, assistant_model=draft), target.generate(**kwargs))
