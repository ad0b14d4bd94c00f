"""Norms of heads that the product for q, k and v begins and attention finishes."""

import pytest
import torch

from hf_specbranch.kernels.attention import attend_in_splits
from hf_specbranch.kernels.attention_reference import attend_reference
from hf_specbranch.kernels.combine import Reader, combined
from hf_specbranch.kernels.gemv_rotary import Turn, rotary_fits, rotary_gemv
from hf_specbranch.kernels.linear import Plan
from hf_specbranch.kernels.norm import GEMMA, PLAIN, Norm, NormForm, norm_reference
from hf_specbranch.kernels.quantised import quantised_reference
from hf_specbranch.kernels.rotary import HeadNorm, Slots, rotary
from hf_specbranch.kernels.spans import SPANS

from .kernels import DEVICE, assert_close, randn, where_triton_runs
from .quantised import random_packed

PLANS = Plan(1, 0, 16, 2, 2), Plan(1, 0, 16, 2, 1)


@where_triton_runs
@pytest.mark.parametrize(("size", "heads", "shared", "form"), [(32, 4, 2, PLAIN), (64, 2, 2, GEMMA), (16, 6, 1, PLAIN)])
@pytest.mark.parametrize("length", [1, 100, 300])  # tokens of the text, the new one included
@pytest.mark.parametrize("splits", [1, 6])
def test_attention_finishes_norms(monkeypatch, size, heads, shared, form, length, splits):
    """Heads, and the new key in the cache, are what a kernel that normalises them gives. No other key changes."""
    torch.manual_seed(0)
    monkeypatch.setattr("hf_specbranch.kernels.attention.multiprocessors", lambda device: splits * shared // 2 or 1)
    columns = size * (heads + 2 * shared)
    packed, _ = random_packed("dense", columns, 256, 128, torch.float16, DEVICE)
    x, norm = randn(1, 1, 256, dtype=torch.float16), Norm(randn(256, dtype=torch.float16), 1e-6)
    weights = (randn(size, dtype=torch.float16) for _ in range(2))
    turn = Turn(*_angles(size), _cache(shared, size, length), size, norm=HeadNorm(*weights, 1e-6, form))
    before = turn.slots.keys.clone()
    plan = PLANS[length % 2]
    assert rotary_fits(x, turn)
    query, pending = rotary_gemv(x, packed, None, plan, norm, turn)
    assert pending is not None
    span = torch.tensor([[[[0, length, length - 1, length]]]], dtype=SPANS, device=DEVICE)
    given = turn.slots.keys, turn.slots.values, span, size**-0.5
    got = combined(attend_in_splits(query, *given, reader=Reader(combines=splits > 1), pending=pending))

    product = quantised_reference(norm_reference(x, norm).flatten(0, 1), packed, None)
    parts = product.view(1, 1, -1, size).transpose(1, 2).split([heads, shared, shared], 1)
    expected_slots = turn.slots._replace(keys=before.clone(), values=turn.slots.values.clone())
    expected_query, _ = rotary(*parts, turn.cos, turn.sin, turn.norm, expected_slots, dtype=torch.float16)
    given = expected_slots.keys, expected_slots.values, span, size**-0.5
    assert_close(got, attend_reference(expected_query, *given).flatten(2))
    assert_close(turn.slots.keys, expected_slots.keys)
    others = torch.arange(before.shape[2], device=DEVICE) != length - 1
    assert torch.equal(turn.slots.keys[:, :, others], before[:, :, others])


@where_triton_runs
def test_a_key_that_no_query_sees_is_finished_too():
    torch.manual_seed(0)
    packed, _ = random_packed("dense", 96, 256, 128, torch.float16, DEVICE)
    x, norm = randn(1, 1, 256, dtype=torch.float16), Norm(randn(256, dtype=torch.float16), 1e-6)
    heads = HeadNorm(randn(32, dtype=torch.float16), randn(32, dtype=torch.float16), 1e-6)
    turn = Turn(*_angles(32), _cache(1, 32, 290), 32, norm=heads)
    query, pending = rotary_gemv(x, packed, None, PLANS[0], norm, turn)
    spans = torch.tensor([[[[70, 100, 0, 0]]]], dtype=SPANS, device=DEVICE)
    attend_in_splits(query, turn.slots.keys, turn.slots.values, spans, 32**-0.5, pending=pending)
    wide = norm_reference(
        quantised_reference(norm_reference(x, norm).flatten(0, 1), packed, None)[:, 32:64], Norm(heads.key, 1e-6)
    )
    expected, _ = rotary(wide.view(1, 1, 1, 32), wide.view(1, 1, 1, 32), None, turn.cos, turn.sin, dtype=torch.float16)
    assert_close(turn.slots.keys[0, 0, 289], expected[0, 0, 0])


@where_triton_runs
def test_norms_that_are_not_left_to_attention():
    """Those of several tokens, LayerNorm, and heads whose sums of squares are no power of two."""
    x = randn(1, 1, 256, dtype=torch.float16)

    def turn(size, form=PLAIN):
        weights = (randn(size, dtype=torch.float16) for _ in range(2))
        return Turn(*_angles(size), _cache(1, size, 1), size, norm=HeadNorm(*weights, 1e-6, form))

    assert rotary_fits(x, turn(32)) and not rotary_fits(x, turn(96))
    assert not rotary_fits(x, turn(32, NormForm(centred=True)))
    assert not rotary_fits(x.expand(1, 2, -1), turn(32))


def _angles(size):
    angles = torch.rand(1, 1, size // 2, device=DEVICE).repeat(1, 1, 2) * 6
    return angles.cos(), angles.sin()


def _cache(shared, size, length):
    """Keys and values of a text, whose last token is new."""
    keys, values = randn(2, 1, shared, length + 9, size, dtype=torch.float16)
    return Slots(keys, values, torch.tensor([[length - 1]], device=DEVICE))
