"""Dequantised weights: the kernel equals the reference bit by bit, in one launch per weight."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn import functional

from hf_specbranch.kernels import autotune
from hf_specbranch.kernels.autotune import DEQUANTISE, PlanCache, read_plans
from hf_specbranch.kernels.backend import INTERPRETED
from hf_specbranch.kernels.dequantise import _dequantise_kernel, dequantised, fits
from hf_specbranch.kernels.packed import dequantise
from hf_specbranch.layers.packed_linear import PackedLinear
from hf_specbranch.layers.product import Tuned
from hf_specbranch.layers.quantised import QuantisedProduct, tensors_to_join
from hf_specbranch.layers.quantised_formats import recognise_format
from hf_specbranch.layers.storage import join

from .dry_runs import recorded_dry_run
from .kernels import DEVICE, dtypes, on_kernels, randn, seeds, where_triton_runs
from .quantised import KINDS, WordsLinear, groups_of, random_packed


@on_kernels
@given(st.sampled_from(KINDS), dtypes, dtypes, seeds, st.integers(1, 27), st.integers(1, 5), st.integers(0, 3))
@example("float8", torch.float32, torch.float16, 0, 19, 3, 0)
@example("int8", torch.float16, torch.float16, 0, 1, 1, 1)
@example("symmetric", torch.float16, torch.float32, 0, 9, 2, 3)
@example("asymmetric", torch.float16, torch.float16, 0, 9, 3, 1)
@example("gptq", torch.float32, torch.float16, 0, 17, 2, 2)
@example("shift", torch.float16, torch.float32, 0, 9, 2, 0)
@example("shift", torch.float32, torch.float32, 1, 3, 3, 2)
@example("mxfp4", torch.float32, torch.float16, 0, 9, 2, 0)
@example("nf4", torch.float32, torch.float32, 0, 9, 2, 1)
def test_kernel_dequantise(kind, scales, dtype, seed, words, blocks, size):
    torch.manual_seed(seed)
    rows, depth = 8 * words, 128 * blocks
    sizes = groups_of(kind, depth)
    packed, _ = random_packed(kind, rows, depth, sizes[size % len(sizes)], scales, DEVICE)
    assert fits(packed, dtype)
    assert torch.equal(dequantised(packed, dtype), dequantise(packed).to(dtype))


@where_triton_runs
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_dequantise_strided_views(kind):
    """An odd number of rows, and columns that other columns surround."""
    torch.manual_seed(0)
    whole, dense = random_packed(kind, 136, 512, 128, torch.float16, DEVICE)
    narrow = 128 if whole.shape == whole.data.shape else 128 // 8
    view = whole._replace(data=whole.data[:71, narrow : 3 * narrow], scale=whole.scale[:71, 1:3])
    if whole.zero is not None:
        view = view._replace(zero=whole.zero[:, 1:3])
    assert view.shape == (71, 256) and not view.data.is_contiguous() and fits(view, torch.float32)
    expected = dense[:71, 128:384].to(DEVICE)
    assert torch.equal(dequantised(view, torch.float32), dequantise(view))
    torch.testing.assert_close(dequantised(view, torch.float32), expected)


@where_triton_runs
def test_kernel_dequantises_every_float8_number():
    """Subnormal numbers too; NaN on a GPU only, since the interpreter has none."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn).view(2, 128).to(DEVICE)
    packed = random_packed("float8", 2, 128, 128, torch.float32, DEVICE)[0]._replace(data=codes)
    got, expected = dequantised(packed, torch.float32), dequantise(packed)
    assert expected.isnan().sum() == 2 and torch.equal(got[~expected.isnan()], expected[~expected.isnan()])
    assert INTERPRETED or torch.equal(got.isnan(), expected.isnan())


def test_dequantised_without_the_kernel():
    packed, _ = random_packed("int8", 8, 192, 64)  # blocks of 64: the kernel takes multiples of 128
    assert not fits(packed, torch.bfloat16)
    assert torch.equal(dequantised(packed, torch.bfloat16), dequantise(packed).to(torch.bfloat16))


def packed_layers(kind, dtype):
    """Return three layers with one input, as q, k and v, whose tensors are joined."""
    torch.manual_seed(0)
    layers = [PackedLinear(randn(rows, 256, dtype=dtype), randn(rows, dtype=dtype), kind) for rows in (128, 64, 64)]
    for group in tensors_to_join(layers):
        join(group)
    return layers


def many_rows(layers, x):
    return QuantisedProduct(layers, [recognise_format(layer) for layer in layers], Tuned())(x)


@where_triton_runs
@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_kernel_dequantises_packed_layers(kind):
    dtype = torch.float16 if DEVICE == "cpu" else torch.bfloat16
    layers, x = packed_layers(kind, dtype), randn(48, 256, dtype=dtype)
    weights = [dequantise(recognise_format(layer)(layer)).to(dtype) for layer in layers]
    expected = [functional.linear(x, weight, layer.bias) for weight, layer in zip(weights, layers)]
    assert all(torch.equal(layer(x), each) for layer, each in zip(layers, expected))
    torch.testing.assert_close(many_rows(layers, x), torch.cat(expected, -1), rtol=2e-2, atol=2e-2)
    with recorded_dry_run() as builder:
        many_rows(layers, x)
    assert builder.kernels == [_dequantise_kernel]  # one launch for all layers


def launches(work):
    """Return how often the kernel is launched on CUDA."""
    from torch.profiler import ProfilerActivity, profile

    work()  # built before
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    return sum(event.count for event in profiler.key_averages() if "_dequantise_kernel" in event.key)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_launch_dequantises_a_weight(dtype):
    torch.manual_seed(0)
    for kind in KINDS:
        for group in groups_of(kind, 1024):
            packed, _ = random_packed(kind, 1000, 1024, group, torch.bfloat16, "cuda")
            assert torch.equal(dequantised(packed, dtype), dequantise(packed).to(dtype)), (kind, group)
            assert launches(lambda packed=packed: dequantised(packed, dtype)) == 1
    layers, x = packed_layers("float8", dtype), randn(48, 256, dtype=dtype)
    assert launches(lambda: many_rows(layers, x)) == 1  # q, k and v are one product
    assert launches(lambda: layers[0](x)) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_layers_share_the_memory_of_dequantised_weights(captured):
    layers = [PackedLinear(randn(4096, 4096, dtype=torch.bfloat16), None, "float8") for _ in range(6)]
    x, graph = randn(64, 4096, dtype=torch.bfloat16), torch.cuda.CUDAGraph()

    def work():
        states = x
        for layer in layers:
            states = layer(states)
        return states

    with torch.no_grad():
        expected = work()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        if captured:
            with torch.cuda.graph(graph):
                got = work()
            graph.replay()
        else:
            got = work()
        assert torch.equal(got, expected)
    # A dequantised weight, states, and a workspace for the products of another stream: of six weights, less than three.
    assert torch.cuda.memory_reserved() - before < 3 * 2 * 4096**2


class SlowLinear(WordsLinear):
    """Takes longer than to dequantise the weight. `WordsLinear` keeps the dense weight and takes less."""

    def forward(self, x):
        for _ in range(20):
            super().forward(x)
        return super().forward(x)


@pytest.mark.gpu
@pytest.mark.parametrize("kind, plan", [(SlowLinear, DEQUANTISE), (WordsLinear, None)])
def test_other_layers_are_dequantised_where_that_is_faster(kind, plan, tmp_path, monkeypatch):
    monkeypatch.setattr(autotune, "plans", cache := PlanCache(tmp_path / "products.json", tmp_path / "none.json"))
    layer, x = kind(torch.randn(1024, 1024) / 32).to("cuda"), randn(64, 1024, dtype=torch.bfloat16)
    expected = x.float() @ layer.dense().float().cuda().T
    torch.testing.assert_close(many_rows([layer], x).float(), expected, atol=3e-2, rtol=3e-2)
    assert list(read_plans(cache.file).values()) == [plan]
