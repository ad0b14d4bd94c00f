"""Mixtures of experts: routing and expert kernels equal their references, references equal transformers."""

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hf_specbranch.kernels.experts import Addend, Experts, Gate, apply_experts, apply_experts_reference, fits
from hf_specbranch.kernels.linear import Partials
from hf_specbranch.kernels.routing import list_touched, route, route_reference

from .kernels import assert_close, dtypes, on_kernels, partials_and_sum, randn, seeds

CLAMPED = Gate("clamped", interleaved=True, alpha=1.702, limit=1.5)


def assert_same_slots(got, expected):
    used = int(expected.used)
    assert got.used.tolist() == [used]
    assert torch.equal(got.experts[:used], expected.experts[:used])
    assert_close(got.shares[:used], expected.shares[:used])


@on_kernels
@given(dtypes, seeds, st.integers(1, 32), st.integers(2, 70), st.integers(1, 8), st.booleans(), st.integers(0, 2))
@example(torch.float32, 0, 1, 128, 8, True, 0)
@example(torch.float16, 1, 32, 8, 2, False, 1)
def test_kernel_routing(dtype, seed, rows, experts, choices, normalised, splits):
    torch.manual_seed(seed)
    choices = min(choices, experts)
    logits = expected_logits = (4 * randn(rows, experts)).round().to(dtype) / 2  # with equal ones
    if splits:
        logits, expected_logits = partials_and_sum((rows, experts), splits, dtype)
    got = route(logits, choices, normalised, dtype)
    expected = route_reference(expected_logits, choices, normalised, dtype)
    assert torch.equal(got.logits, expected_logits) and torch.equal(got.chosen, expected.chosen)
    assert_close(got.weights, expected.weights)
    assert_same_slots(got.touched, expected.touched)
    assert_same_slots(list_touched(expected.chosen, expected.weights, experts), expected.touched)


@on_kernels
@given(dtypes, seeds, st.integers(1, 32), st.sampled_from([(3, 1), (8, 2), (40, 4)]), st.sampled_from([16, 80]),
       st.sampled_from([48, 128]), st.sampled_from([Gate("silu"), Gate("gelu_tanh"), CLAMPED]),
       st.booleans(), st.booleans())  # fmt: skip
@example(torch.float32, 0, 1, (128, 8), 96, 256, Gate("silu"), False, False)
@example(torch.float32, 0, 5, (32, 4), 192, 64, CLAMPED, True, True)
@example(torch.float32, 0, 20, (64, 6), 64, 64, Gate("silu"), False, True)
def test_kernel_experts(dtype, seed, rows, numbers, size, depth, gate, transposed, biased):
    torch.manual_seed(seed)
    number, choices = numbers
    experts = random_experts(number, size, depth, gate, transposed, biased, dtype)
    x = randn(rows, depth, dtype=dtype)
    routing = route_reference(randn(rows, number), choices, True, torch.float32)
    addend = Addend(randn(rows, depth, dtype=dtype), randn(rows, 1, dtype=dtype) if transposed else None)
    for added in (None, addend):
        assert fits(x, experts, added)
        got = apply_experts(x, routing.touched, experts, added)
        wide = Experts(*(None if each is None else each.float() for each in experts[:4]), gate)
        more = added and Addend(*(None if each is None else each.float() for each in added))
        expected = apply_experts_reference(x.float(), routing.chosen, routing.weights, wide, more).to(dtype)
        assert isinstance(got, Partials) and got.shape == expected.shape and got.dtype == dtype
        error = (got.sum().float() - expected.float()).norm() / expected.float().norm()
        assert error <= (1e-5 if dtype == torch.float32 else 4e-3 if dtype == torch.float16 else 2e-2)


def random_experts(number, size, depth, gate, transposed, biased, dtype):
    first, second = randn(number, 2 * size, depth) / depth**0.5, randn(number, depth, size) / size**0.5
    if transposed:
        first, second = (weight.mT.contiguous().mT for weight in (first, second))
    biases = (randn(number, 2 * size), randn(number, depth)) if biased else (None, None)
    given = (first, second, *biases)
    return Experts(*(None if each is None else each.to(dtype) for each in given), gate)
