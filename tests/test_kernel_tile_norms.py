"""Gate and up of a normalised sum by tiles: the kernel equals its reference, and stores the sum."""

import pytest
import torch

from hf_specbranch.kernels.linear import Plan
from hf_specbranch.kernels.norm import GEMMA, LAYER_NORM, PLAIN, Norm
from hf_specbranch.kernels.packed import dense
from hf_specbranch.kernels.tile_norms import NormedSum, fits, gated_of_sum, gated_of_sum_reference, takes_sum

from .kernels import DEVICE, assert_close, randn, where_triton_runs
from .quantised import random_packed

ONE, STEPS, LEFT_OVER = Plan(1, 0, 16, 2, 2), Plan(1, 0, 16, 1, 2), Plan(1, 0, 16, 2, 1)


def normed_sum(width, form, residual=1.0, added=1.0, dtype=torch.float16):
    terms = ((randn(1, 1, width) * scale).to(dtype) for scale in (residual, added))
    norms = (Norm(randn(width).to(dtype), eps, form) for eps in (1e-6, 1e-5))
    return NormedSum(*terms, *norms)


def in_float32(x):
    first, norm = (each._replace(weight=each.weight.float()) for each in (x.first, x.norm))
    return NormedSum(x.residual.float(), x.added.float(), first, norm)


@where_triton_runs
@pytest.mark.parametrize(
    ("form", "plan", "residual", "added", "gate"),
    [
        (GEMMA, ONE, 1.0, 1.0, "gelu_tanh"),
        (GEMMA, STEPS, 300.0, 1e-3, "gelu_tanh"),
        (PLAIN, LEFT_OVER, 1.0, 1e3, "silu"),
        (PLAIN, ONE, 1e-3, 30.0, "silu"),
        (GEMMA, LEFT_OVER._replace(registers=168), 3000.0, 300.0, "silu"),
    ],
)
def test_product_normalises_a_sum(form, plan, residual, added, gate):
    """Residual and output of attention differ by orders of magnitude; the last tile is not full."""
    torch.manual_seed(0)
    x, weight, bias = normed_sum(384, form, residual, added), randn(72, 384, dtype=torch.float16) / 16, randn(72).half()
    assert fits(x, dense(weight), plan)
    got, total = gated_of_sum(x, dense(weight), bias, plan, gate)
    expected, _ = gated_of_sum_reference(in_float32(x), weight.float(), bias.float(), gate)
    assert_close(got, expected.half())
    assert got.shape == (1, 1, 36)
    torch.testing.assert_close(total, x.reference()[1], rtol=1e-3, atol=0)


@where_triton_runs
def test_a_sum_of_zero_is_normalised():
    x = normed_sum(256, PLAIN)
    x.residual.copy_(-x._replace(residual=torch.zeros_like(x.residual)).reference()[1])
    out, total = gated_of_sum(x, dense(randn(16, 256, dtype=torch.float16)), None, ONE, "silu")
    assert out.isfinite().all() and total.abs().max() <= 2e-3 * x.residual.abs().max()


@where_triton_runs
def test_sums_that_the_product_leaves_to_a_norm():
    """Of several rows, for programs that take tile after tile, for packed weights, and between norms of other kinds."""
    x, weight = normed_sum(256, PLAIN), dense(randn(16, 256, dtype=torch.float16))
    packed, _ = random_packed("float8", 16, 256, 128, torch.float16, DEVICE)
    assert takes_sum(x.residual, weight, ONE) and fits(x, weight, ONE)
    assert not takes_sum(x.residual.expand(1, 2, 256), weight, ONE)
    assert not takes_sum(x.residual, weight, ONE._replace(stages=2))
    assert not takes_sum(x.residual, weight, ONE._replace(spans=0))
    assert not takes_sum(x.residual, packed, ONE)
    for norm in (x.norm._replace(form=GEMMA), x.norm._replace(weight=x.norm.weight.float())):
        assert not fits(x._replace(norm=norm), weight, ONE)
    assert not fits(normed_sum(256, LAYER_NORM), weight, ONE)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [PLAIN, GEMMA])
@pytest.mark.parametrize("added", [1e-2, 1.0, 1e2])
def test_error_of_a_normed_sum(form, added):
    """Against the exact product at most 1.1 times the error of a norm, rounded, and a product."""
    torch.manual_seed(0)
    x = normed_sum(2560, form, added=added, dtype=torch.bfloat16)
    weight = torch.randn(4096, 2560, device="cuda", dtype=torch.bfloat16) / 50
    exact, _ = gated_of_sum_reference(in_float32(x), weight.float(), None, "silu")
    usual, total = gated_of_sum_reference(x, weight, None, "silu")
    for warps, spans in ((4, 2), (8, 1), (8, 3), (16, 1), (16, 2)):
        got, sum_of_both = gated_of_sum(x, dense(weight), None, Plan(1, 0, 16, warps, spans), "silu")
        assert (got.float() - exact).norm() <= 1.1 * (usual.float() - exact).norm()
        torch.testing.assert_close(sum_of_both, total, rtol=1e-2, atol=0)
