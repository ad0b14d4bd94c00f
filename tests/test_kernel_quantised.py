"""Products with quantised weights: references equal the weights that were packed, kernels equal references."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hf_specbranch.kernels.gated import gated_reference
from hf_specbranch.kernels.linear import Partials, Plan
from hf_specbranch.kernels.packed import dequantise
from hf_specbranch.kernels.quantised import (
    QUANTISED_PLANS,
    fits,
    quantised_gated,
    quantised_linear,
    quantised_reference,
)

from .kernels import DEVICE, assert_close, dtypes, on_kernels, randn, seeds
from .quantised import KINDS, groups_of, random_packed


@pytest.mark.parametrize("kind", KINDS)
def test_dequantised_weights(kind):
    for group in groups_of(kind, 256):
        packed, dense = random_packed(kind, 136, 256, group)
        assert packed.shape == dense.shape
        torch.testing.assert_close(dequantise(packed), dense)


@on_kernels
@given(st.sampled_from(KINDS), dtypes, seeds, st.integers(1, 32), st.integers(1, 18), st.booleans(),
       st.sampled_from(QUANTISED_PLANS), st.integers(0, 3))  # fmt: skip
@example("float8", torch.float16, 0, 3, 17, True, Plan(2, 4, 64), 0)
@example("int8", torch.float16, 0, 1, 9, False, Plan(1, 4, 64), 1)
@example("gptq", torch.float16, 0, 5, 9, True, Plan(4, 4, 128), 2)
@example("asymmetric", torch.float32, 0, 20, 3, True, Plan(1, 4, 64), 1)
@example("shift", torch.float32, 0, 2, 9, True, Plan(8, 4, 32), 2)
@example("symmetric", torch.float16, 0, 7, 9, False, Plan(1, 8, 64), 3)
@example("mxfp4", torch.float32, 0, 7, 9, False, Plan(1, 4, 32), 0)
@example("nf4", torch.float16, 0, 9, 9, False, Plan(1, 4, 64), 1)
@example("shift", torch.float32, 0, 20, 9, True, Plan(1, 4, 32), 3)
def test_kernel_quantised(kind, dtype, seed, rows, words, biased, plan, size):
    torch.manual_seed(seed)
    depth = 1024
    sizes = groups_of(kind, depth)
    packed, _ = random_packed(kind, 8 * words, depth, sizes[size % len(sizes)], dtype, DEVICE)
    x, bias = randn(rows, depth, dtype=dtype), randn(8 * words, dtype=dtype) if biased else None
    assert fits(x, packed, bias, plan)
    other, _ = random_packed("symmetric", 24, depth, 128, dtype, DEVICE)  # two products side by side
    product = quantised_linear(x, [packed, other], [bias, None], plan)
    expected = torch.cat([quantised_reference(x, packed, bias), quantised_reference(x, other, None)], dim=-1)
    if plan.splits > 1:
        assert isinstance(product, Partials) and product.shape == expected.shape
        product = product.sum()
    assert_close(product, expected)


@on_kernels
@given(
    st.sampled_from(KINDS),
    dtypes,
    st.integers(1, 32),
    st.integers(1, 18),
    st.booleans(),
    st.sampled_from([32, 64, 128]),
)
@example("float8", torch.float16, 3, 16, True, 64)
@example("gptq", torch.float16, 20, 9, False, 128)
def test_kernel_quantised_gated(kind, dtype, rows, words, biased, strip):
    torch.manual_seed(rows)
    packed, _ = random_packed(kind, 16 * words, 512, 128, dtype, DEVICE)
    x, bias = randn(rows, 512, dtype=dtype), randn(16 * words, dtype=dtype) if biased else None
    for activation in ("silu", "gelu_tanh"):
        expected = gated_reference(quantised_reference(x, packed, bias), activation)
        assert_close(quantised_gated(x, packed, bias, activation, Plan(1, 4, strip)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_error_of_quantised_products(kind):
    """Our error against the float32 product is at most 1.1 times that of bfloat16 weights and a bfloat16 product."""
    torch.manual_seed(0)
    for group in groups_of(kind, 4096):
        packed, dense = random_packed(kind, 512, 4096, group, torch.bfloat16, "cuda")
        dense, x = dense.cuda(), torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
        exact = x.double() @ dense.double().T
        got = quantised_linear(x, [packed], [None], Plan(1, 4, 64))
        plain = x @ dense.to(torch.bfloat16).T
        errors = [(each.double() - exact).norm() for each in (got, plain)]
        assert errors[0] <= 1.1 * errors[1], (group, errors)
