"""Products of a few rows without tensor cores: kernels equal references."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hf_specbranch.kernels.gated import gated_reference
from hf_specbranch.kernels.gemv import GEMV_PLANS, MOST_ROWS, fits, gemv, kernel_takes, takes_norm
from hf_specbranch.kernels.gemv_rotary import Turn, rotary_fits, rotary_gemv
from hf_specbranch.kernels.linear import PLANS
from hf_specbranch.kernels.norm import GEMMA, PLAIN, Norm, norm_reference
from hf_specbranch.kernels.packed import Packed
from hf_specbranch.kernels.quantised import quantised_reference
from hf_specbranch.kernels.rotary import Slots, rotary
from hf_specbranch.layers.quantised import Operands, candidate_plans

from .kernels import DEVICE, DTYPES, assert_close, dtypes, on_kernels, randn, seeds
from .quantised import KINDS, groups_of, random_packed

rows = st.integers(1, MOST_ROWS)
plans = st.sampled_from(GEMV_PLANS)


@on_kernels
@given(st.sampled_from(KINDS), dtypes, seeds, rows, st.integers(1, 9), st.booleans(), plans, st.integers(0, 3))
@example("float8", torch.float16, 0, 3, 9, True, GEMV_PLANS[1], 0)
@example("int8", torch.float16, 0, 1, 9, False, GEMV_PLANS[0], 1)
@example("asymmetric", torch.float32, 0, 2, 3, True, GEMV_PLANS[1], 1)
@example("shift", torch.float32, 0, 2, 9, True, GEMV_PLANS[2], 2)
@example("symmetric", torch.float16, 0, 4, 9, False, GEMV_PLANS[3], 3)
def test_kernel_quantised_gemv(kind, dtype, seed, rows, words, biased, plan, size):
    torch.manual_seed(seed)
    depth = 1024
    sizes = groups_of(kind, depth)
    packed, _ = random_packed(kind, 8 * words, depth, sizes[size % len(sizes)], dtype, DEVICE)
    x, bias = randn(rows, depth, dtype=dtype), randn(8 * words, dtype=dtype) if biased else None
    if not kernel_takes(packed):
        assert kind in ("gptq", "mxfp4", "nf4") or packed.group < 32
        return
    assert fits(x, packed, bias, plan)
    assert_close(gemv(x, packed, bias, plan), quantised_reference(x, packed, bias))


@on_kernels
@given(st.sampled_from(["float8", "int8", "symmetric"]), rows, st.sampled_from(["silu", "gelu_tanh"]), plans)
def test_kernel_gated_gemv(kind, rows, activation, plan):
    torch.manual_seed(0)
    packed, _ = random_packed(kind, 48, 1024, 128, torch.float32, DEVICE)
    x = randn(rows, 1024)
    expected = gated_reference(quantised_reference(x, packed, None), activation)
    assert_close(gemv(x, packed, None, plan, activation), expected)


@on_kernels
@given(st.sampled_from(["float8", "int8", "symmetric"]), rows, st.sampled_from([PLAIN, GEMMA]), plans, st.booleans())
@example("float8", 1, PLAIN, GEMV_PLANS[0], False)
@example("int8", 4, GEMMA, GEMV_PLANS[2], True)
def test_kernel_gemv_normalises_and_adds(kind, rows, form, plan, gated):
    """Rows differ by orders of magnitude, as residuals do; each has a factor of its own."""
    torch.manual_seed(0)
    packed, _ = random_packed(kind, 48, 896, 128, torch.float32, DEVICE)
    x = randn(rows, 896) * 10.0 ** torch.arange(-1, rows - 1, device=DEVICE)[:, None]
    norm, residual = Norm(randn(896), 1e-6, form), randn(rows, 24 if gated else 48)
    expected = quantised_reference(norm_reference(x, norm), packed, None)
    if gated:
        expected = gated_reference(expected, "silu")
    got = gemv(x, packed, None, plan, "silu" if gated else None, norm, residual)
    assert_close(got, residual + expected)


@on_kernels
@given(st.sampled_from([("float8", 1040, 1040), ("int8", 4112, 4112), ("symmetric", 1056, 32)]), rows, dtypes, plans)
@example(("float8", 1040, 1040), 1, DTYPES[-1], GEMV_PLANS[0])
@example(("symmetric", 1056, 32), 2, DTYPES[-1], GEMV_PLANS[4])
@example(("int8", 4112, 4112), 3, DTYPES[-1], GEMV_PLANS[3])
def test_kernel_gemv_of_rows_that_are_no_multiple_of_64_bytes(weight, rows, dtype, plan):
    """The compiler knows less of where such rows begin, and each thread must load four words all the same."""
    kind, depth, group = weight
    torch.manual_seed(0)
    packed, _ = random_packed(kind, 48, depth, group, dtype, DEVICE)
    x, norm = randn(rows, depth, dtype=dtype), Norm(randn(depth, dtype=dtype), 1e-6, PLAIN)
    assert fits(x, packed, None, plan)
    assert_close(gemv(x, packed, None, plan), quantised_reference(x, packed, None))
    if dtype == torch.float32:  # others are rounded after the norm by the reference, and not by the kernel
        expected = gated_reference(quantised_reference(norm_reference(x, norm), packed, None), "silu")
        assert_close(gemv(x, packed, None, plan, "silu", norm), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["float8", "int8", "symmetric", "asymmetric", "shift"])
@pytest.mark.parametrize("gated", [False, True])
def test_error_of_normalised_gemv(kind, gated):
    """As `test_error_of_quantised_gemv`, with a norm, gates and a residual, and few programs or many."""
    torch.manual_seed(0)
    for columns, depth, plan in ((512, 896, GEMV_PLANS[0]), (8192, 896, GEMV_PLANS[5]), (1024, 4096, GEMV_PLANS[3])):
        packed, dense = random_packed(kind, columns, depth, 128, torch.bfloat16, "cuda")
        dense, norm = dense.cuda(), Norm(torch.rand(depth, device="cuda", dtype=torch.bfloat16) + 0.5, 1e-6)
        for rows in range(1, MOST_ROWS + 1):
            x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16) * 3
            width = columns // 2 if gated else columns
            residual = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
            wide = norm_reference(x.double(), Norm(norm.weight.double(), 1e-6)) @ dense.double().T
            usual = norm_reference(x, norm) @ dense.to(torch.bfloat16).T
            if gated:
                wide = torch.nn.functional.silu(wide[:, :width]) * wide[:, width:]
                usual = gated_reference(usual, "silu")
            got = gemv(x, packed, None, plan, "silu" if gated else None, norm, residual)
            errors = [(each.double() - wide - residual.double()).norm() for each in (got, residual + usual)]
            assert errors[0] <= 1.1 * errors[1], (columns, depth, rows, errors)


@on_kernels
@given(st.integers(1, 2), st.integers(1, 2), st.sampled_from([torch.float32, torch.float16]), plans, st.booleans())
@example(1, 1, torch.float32, GEMV_PLANS[0], True)
@example(2, 2, torch.float16, GEMV_PLANS[3], False)
@example(1, 3, torch.float32, GEMV_PLANS[2], False)
def test_kernel_gemv_rotates_and_writes_to_the_cache(batch, tokens, dtype, plan, biased):
    torch.manual_seed(0)
    size, heads, shared = 24, 3, 2  # a strip may hold dimensions of two heads
    packed, _ = random_packed("int8", size * (heads + 2 * shared), 256, 128, torch.float32, DEVICE)
    x, norm = randn(batch, tokens, 256, dtype=dtype), Norm(randn(256, dtype=dtype), 1e-6)
    bias = randn(size * (heads + 2 * shared), dtype=dtype) if biased else None
    angles = torch.rand(1, tokens, size // 2, device=DEVICE).repeat(1, 1, 2) * 6
    places = torch.tensor([[7, 2, 5], [0, 9, 4]], device=DEVICE)[:batch, :tokens]
    caches = [Slots(*torch.zeros(2, batch, shared, 10, size, device=DEVICE, dtype=dtype), places) for _ in range(2)]
    turn = Turn(angles.cos(), angles.sin(), caches[0], size)
    assert fits(x, packed, bias, plan) and rotary_fits(x, turn)
    got, pending = rotary_gemv(x, packed, bias, plan, norm, turn)
    assert pending is None
    product = quantised_reference(norm_reference(x, norm).flatten(0, 1), packed, bias)
    parts = product.view(batch, tokens, -1, size).transpose(1, 2).split([heads, shared, shared], 1)
    expected, _ = rotary(*parts, turn.cos, turn.sin, slots=caches[1], dtype=dtype)
    for ours, reference in ((got, expected), *zip(caches[0][:2], caches[1][:2])):
        assert_close(ours, reference)


@on_kernels
@given(plans)
def test_gemv_refuses_what_it_cannot_compute(plan):
    packed, _ = random_packed("int8", 16, 256, 128, torch.float32, DEVICE)
    assert fits(randn(1, 256), packed, None, plan)
    assert not fits(randn(5, 256), packed, None, plan)
    assert not fits(randn(1, 256), packed, None, PLANS[0])
    assert not fits(randn(1, 256), packed._replace(data=packed.data.T.contiguous().T), None, plan)
    assert not fits(randn(1, 257)[:, 1:], packed, None, plan)  # loads of 16 bytes
    assert not fits(randn(2, 257)[:, :256], packed, None, plan)
    assert takes_norm(Norm(randn(256), 1e-6)) and not takes_norm(Norm(randn(257)[1:], 1e-6))


@on_kernels
@given(plans)
def test_quantised_products_of_few_rows_may_be_gemv(plan):
    packed, _ = random_packed("int8", 16, 256, 128, torch.float32, DEVICE)
    joined, separate = Operands([packed], [None]), Operands([packed, packed], [None, None])
    assert set(GEMV_PLANS) <= set(candidate_plans(randn(1, 256), [joined], "whole"))
    for x, operands in ((randn(MOST_ROWS + 1, 256), joined), (randn(1, 256), separate)):
        assert not set(GEMV_PLANS) & set(candidate_plans(x, [operands], "whole"))
    x = randn(1, 256)
    assert_close(joined.product(x, plan), quantised_reference(x, packed, None))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["float8", "int8", "symmetric", "asymmetric", "shift"])
def test_error_of_quantised_gemv(kind):
    """Our error against the float32 product is at most 1.1 times that of bfloat16 weights and a bfloat16 product."""
    torch.manual_seed(0)
    for group in groups_of(kind, 4096):
        packed, dense = random_packed(kind, 512, 4096, group, torch.bfloat16, "cuda")
        if not kernel_takes(packed):
            continue
        dense, x = dense.cuda(), torch.randn(4, 4096, device="cuda", dtype=torch.bfloat16)
        exact = x.double() @ dense.double().T
        errors = [
            (each.double() - exact).norm()
            for each in (gemv(x, packed, None, GEMV_PLANS[1]), x @ dense.to(torch.bfloat16).T)
        ]
        assert errors[0] <= 1.1 * errors[1], (group, errors)


@on_kernels
@given(plans)
def test_gemv_reads_every_float8_number(plan):
    """By shifts, or as the device converts them: each finite number is in a row of its own, and the result is exact."""
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers[numbers & 0x7F == 0x7F] = 0  # not a number
    data = torch.zeros((256, 512), dtype=torch.uint8)
    data[torch.arange(256), torch.arange(256) * 37 % 512] = numbers
    packed = Packed(data.view(torch.float8_e4m3fn).to(DEVICE), torch.ones((256, 4), device=DEVICE), "float8", 128)
    got = gemv(torch.ones((1, 512), device=DEVICE), packed, None, plan)
    assert torch.equal(got[0].cpu(), numbers.view(torch.float8_e4m3fn).float())
