"""Norms and small products: kernels equal their references, references equal transformers, plans are autotuned.

Kernels run on a GPU, or on the CPU under Triton's interpreter, which one test here starts.
"""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.llama import modeling_llama as llama

from hf_specbranch.kernels import autotune
from hf_specbranch.kernels.activation import MlpActivation, activate, recognise_activation
from hf_specbranch.kernels.angles import angles
from hf_specbranch.kernels.attention import attend
from hf_specbranch.kernels.autotune import PlanCache, read_plans
from hf_specbranch.kernels.autotune_fused import autotune_fused
from hf_specbranch.kernels.backend import INTERPRETED
from hf_specbranch.kernels.gated import gated, gated_product, gated_reference, recognise
from hf_specbranch.kernels.gemv import GEMV_PLANS
from hf_specbranch.kernels.linear import (
    BLOCK,
    PLANS,
    Partials,
    Plan,
    activated_product,
    fits,
    linear,
    linear_reference,
    linear_split_k,
)
from hf_specbranch.kernels.norm import (
    FORMS,
    GEMMA,
    LAYER_NORM,
    PLAIN,
    WIDE,
    Norm,
    add_norm,
    add_norm_reference,
    norm_reference,
    rms_norm,
    rms_norm_reference,
)
from hf_specbranch.kernels.quantised import QUANTISED_PLANS
from hf_specbranch.kernels.rotary import Slots, rotary
from hf_specbranch.kernels.tile_plans import WARPS, WIDEST, needed
from hf_specbranch.kernels.width_norm import norm_widths, norm_widths_reference
from hf_specbranch.layers.packed_linear import PackedLinear
from hf_specbranch.layers.product import Tuned
from hf_specbranch.layers.quantised_formats import recognise_format

from .families import make
from .kernels import DEVICE, DTYPES, assert_close, dtypes, on_kernels, partials_and_sum, randn, seeds, where_triton_runs


@on_kernels
@given(dtypes, seeds, st.integers(1, 5), st.integers(1, 300), st.sampled_from(FORMS), st.booleans())
@example(torch.float16, 0, 20, 700, PLAIN, True)  # many rows, and long ones: other numbers of warps
@example(torch.float16, 0, 1, 4608, PLAIN, True)
def test_kernel_norm(dtype, seed, rows, columns, form, added):
    torch.manual_seed(seed)
    x, weight = randn(rows, 2, columns, dtype=dtype), randn(columns, dtype=dtype)
    residual = randn(rows, 2, columns, dtype=dtype) if added else None
    got, expected = (norm(x, weight, 1e-6, residual, form) for norm in (rms_norm, rms_norm_reference))
    assert_close(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


@on_kernels
@given(dtypes, seeds, st.integers(1, 4), st.integers(1, 300), st.sampled_from(FORMS), st.sampled_from([1, 2]),
       st.booleans(), st.booleans(), st.booleans(), st.sampled_from([1.0, 0.22]))  # fmt: skip
@example(torch.float32, 0, 3, 100, PLAIN, 2, True, False, True, 1.0)  # GLM-4
@example(torch.float32, 0, 3, 100, WIDE, 1, True, False, False, 1.0)  # OLMo 2
@example(torch.float32, 0, 3, 100, LAYER_NORM, 2, False, True, True, 1.0)  # GPT-NeoX
@example(torch.float32, 0, 3, 100, LAYER_NORM, 1, True, True, True, 0.22)
def test_kernel_add_norm(dtype, seed, rows, columns, form, splits, with_first, with_also, with_norm, scale):
    torch.manual_seed(seed)

    def norm():
        bias = randn(columns, dtype=dtype) if form.centred else None
        return Norm(randn(columns, dtype=dtype), 1e-5, form, bias)

    parts = [partials_and_sum((rows, columns), splits, dtype) for _ in range(2)]
    x, also = (product if splits == 1 else partials for partials, product in parts)
    residual, outer, first = randn(rows, columns, dtype=dtype), norm() if with_norm else None, norm()
    got = add_norm(x, residual, outer, first if with_first else None, also if with_also else None, scale)
    expected = add_norm_reference(
        parts[0][1], residual, outer, first if with_first else None, parts[1][1] if with_also else None, scale
    )
    assert_close(got[1], expected[1])
    assert (got[0] is None) == (not with_norm)
    if with_norm:
        assert_close(got[0], expected[0])


@on_kernels
@given(dtypes, seeds, st.integers(1, 4), st.sampled_from([(64, 64), (96, 24), (7, 3)]), st.sampled_from(FORMS),
       st.sampled_from([1, 2, 4]))  # fmt: skip
def test_kernel_norm_widths(dtype, seed, rows, widths, form, splits):
    torch.manual_seed(seed)
    partials, product = partials_and_sum((rows, 2, widths[0] + 2 * widths[1]), splits, dtype)
    query, key = (Norm(randn(width, dtype=dtype), 1e-6, form) for width in widths)
    got = norm_widths(product if splits == 1 else partials, query, key)
    assert_close(got, norm_widths_reference(product, query, key))
    assert torch.equal(got[..., sum(widths) :], product[..., sum(widths) :])


@on_kernels
@given(st.sampled_from(DTYPES[1:]), seeds, st.integers(1, 32), st.integers(1, 90), st.sampled_from([128, 640]),
       st.booleans(), st.sampled_from(get_args(MlpActivation)), st.sampled_from([3, 4, 6]))  # fmt: skip
@example(torch.float16, 0, 20, 70, 256, True, "gelu", 3)
@example(torch.float16, 0, 3, 64, 128, False, "relu2", 3)
def test_kernel_activated_product(dtype, seed, rows, columns, depth, biased, activation, stages):
    torch.manual_seed(seed)
    x, weight = randn(rows, depth, dtype=dtype), 3 * randn(columns, depth, dtype=dtype) / depth**0.5
    bias = randn(columns, dtype=dtype) if biased else None
    expected = activate(linear_reference(x, weight, bias), activation)
    assert fits(x, weight, bias, Plan(1, stages))
    assert_close(activated_product(x, weight, bias, activation, Plan(1, stages)), expected)


@on_kernels
@given(dtypes, seeds, st.integers(1, 5), st.integers(1, 1500), st.sampled_from(["silu", "gelu_tanh"]))
def test_kernel_gated(dtype, seed, rows, size, activation):
    torch.manual_seed(seed)
    gate_up = 3 * randn(rows, 2 * size, dtype=dtype)
    assert_close(gated(gate_up, activation), gated_reference(gate_up, activation))


@on_kernels
@given(st.sampled_from(DTYPES[1:]), seeds, st.integers(1, 32), st.integers(1, 90), st.sampled_from([128, 640]),
       st.booleans(), st.sampled_from(["silu", "gelu_tanh"]), st.sampled_from([3, 4, 6]))  # fmt: skip
@example(torch.float16, 0, 20, 70, 256, True, "silu", 3)
@example(torch.float16, 1, 3, 64, 128, False, "gelu_tanh", 4)
def test_kernel_gated_product(dtype, seed, rows, size, depth, biased, activation, stages):
    torch.manual_seed(seed)
    x, weight = randn(rows, depth, dtype=dtype), 3 * randn(2 * size, depth, dtype=dtype) / depth**0.5
    bias = randn(2 * size, dtype=dtype) if biased else None
    expected = gated_reference(linear_reference(x, weight, bias), activation)
    assert fits(x, weight, bias, Plan(1, stages))
    assert_close(gated_product(x, weight, bias, activation, Plan(1, stages)), expected)


@on_kernels
@given(dtypes, seeds, st.integers(1, 5), st.integers(1, 300), st.sampled_from([2, 4]), st.sampled_from(FORMS))
def test_kernel_norm_sums_partials(dtype, seed, rows, columns, splits, form):
    torch.manual_seed(seed)
    (partials, total), residual = (
        partials_and_sum((rows, 2, columns), splits, dtype),
        randn(rows, 2, columns, dtype=dtype),
    )
    weight = randn(columns, dtype=dtype)
    for got, expected in zip(
        rms_norm(partials, weight, 1e-6, residual, form), rms_norm(total, weight, 1e-6, residual, form)
    ):
        assert torch.equal(got, expected)
    wide = weight.float()  # norms that were left in float32 read the sum
    for got, expected in zip(
        rms_norm(partials, wide, 1e-6, residual, form), rms_norm_reference(total, wide, 1e-6, residual, form)
    ):
        assert_close(got, expected)


@on_kernels
@given(st.sampled_from(DTYPES[1:]), seeds, st.integers(1, 32), st.integers(1, 90), st.sampled_from([1024, 1536]),
       st.booleans(), st.sampled_from(PLANS))  # fmt: skip
def test_kernel_linear(dtype, seed, rows, columns, depth, biased, plan):
    torch.manual_seed(seed)
    x, weight = randn(rows, depth, dtype=dtype), randn(columns, depth, dtype=dtype) / depth**0.5
    bias = randn(columns, dtype=dtype) if biased else None
    assert fits(x, weight, bias, plan)
    product, expected = linear_split_k(x, weight, bias, plan), linear_reference(x, weight, bias)
    if plan.splits > 1:
        assert isinstance(product, Partials) and product.shape == expected.shape and product.dtype == dtype
        product = product.sum()
    assert_close(product, expected)
    if plan.splits == 1:
        assert torch.equal(linear(x, weight, bias, plan), product)


@pytest.fixture
def guards(monkeypatch):
    """What kernels allocate meanwhile lies between guards; this looks at them."""
    held, new_empty = [], torch.Tensor.new_empty

    def empty(like, shape, dtype=None, device=None):
        if device is not None:  # the interpreter's own
            return new_empty(like, shape, dtype=dtype, device=device)
        size = math.prod(shape)
        arena = torch.full((size + 2 * 512,), 77, dtype=dtype or like.dtype, device=like.device)
        held.append((arena, size))
        return arena[512 : 512 + size].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", empty)
    monkeypatch.setattr(torch, "empty_like", lambda like: empty(like, like.shape))

    def intact():
        return bool(held) and all(
            (arena[:512] == 77).all() and (arena[512 + size :] == 77).all() for arena, size in held
        )

    return intact


@where_triton_runs
@pytest.mark.parametrize("queries", [1, 8, 9, 17])
def test_kernel_writes_stay_inside_their_tensors(guards, queries):
    dtype = torch.float16
    x = randn(queries, 1024, dtype=dtype)
    rms_norm(x[:, :100], randn(100, dtype=dtype), 1e-6, x[:, :100])
    gated(x[:, :74], "silu")
    for plan in PLANS:
        linear_split_k(x, randn(70, 1024, dtype=dtype), None, plan)
        gated_product(x, randn(70, 1024, dtype=dtype), None, "silu", plan)
    arena = torch.full((2, 1 + 2 * 33 + 1, 2, 64), 77.0, dtype=dtype, device=DEVICE)  # keys and values between guards
    query, key = randn(1, 4, queries, 64, dtype=dtype), randn(1, 2, queries, 64, dtype=dtype)
    cache = [whole[1:-1].permute(1, 0, 2)[None] for whole in arena]  # [1, 2, 66, 64], slots outermost in memory
    places = torch.randperm(66, device=DEVICE)[None, :queries]
    angles(torch.arange(queries, device=DEVICE)[None], torch.rand(24, device=DEVICE), 1.0, dtype)
    turned, _ = rotary(query, key, key, key[:, 0], key[:, 1], None, Slots(*cache, places))
    assert (arena[:, 0] == 77).all() and (arena[:, -1] == 77).all()
    for written in cache:
        assert (written != 77).any(-1).sum() == 2 * queries
    attend(turned, *cache, torch.rand((1, 1, queries, 66), device=DEVICE) > 0.5, 0.1)
    assert guards()


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this test starts the interpreter")
def test_kernels_equal_references_under_the_interpreter():
    pytest.importorskip("triton")
    layers = ("layer_replacement", "lora", "mixtures")
    names = ("kernel_products", "kernel_attention", "kernel_dequantise", "kernel_experts", *layers)
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in names]
    selected = "test_kernel_ or (test_fused_model_sums_partials and (llama or phi3))"
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *files, "-k", selected]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    assert ran.stdout.startswith("...........")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "module, form", [(llama.LlamaRMSNorm, PLAIN), (gemma2.Gemma2RMSNorm, GEMMA), (gpt_oss.GptOssRMSNorm, WIDE)]
)
def test_norm_equals_transformers(module, form, dtype):
    norm = module(48, eps=1e-5).to(dtype)
    nn.init.normal_(norm.weight)
    x, residual = torch.randn(2, 5, 48, dtype=dtype), torch.randn(2, 5, 48, dtype=dtype)
    assert torch.equal(rms_norm_reference(x, norm.weight, 1e-5, form=form)[0], norm(x))
    out, total = rms_norm_reference(x, norm.weight, 1e-5, residual, form)
    assert torch.equal(total, residual + x) and torch.equal(out, norm(residual + x))


@pytest.mark.parametrize("family, name", [("llama", "silu"), ("gemma", "gelu_tanh")])
def test_gated_activation_equals_transformers(family, name):
    mlp = make(family).to(torch.bfloat16).model.layers[0].mlp
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    assert recognise(mlp.act_fn) == name
    both = torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], dim=-1)
    assert torch.equal(mlp.down_proj(gated_reference(both, name)), mlp(x))


@pytest.mark.parametrize("name", get_args(MlpActivation))
def test_activations_are_recognised(name):
    assert recognise_activation(lambda x: activate(x, name)) == name
    assert recognise_activation(nn.ELU()) is None


def test_other_activations_are_not_recognised():
    assert recognise(nn.ReLU()) is None and recognise(nn.GELU()) is None


def test_plans_are_kept_on_disk_and_broken_files_ignored(tmp_path):
    names = [f"gpu|torch|triton|{name}" for name in "abcd"]
    shipped = tmp_path / "shipped.json"
    shipped.write_text('{"gpu|c": [2, 3]}')

    def cache(most=4096):
        return PlanCache(tmp_path / "new" / "products.json", shipped, most)

    cache().store(names[0], PLANS[0])
    cache().store(names[1], None)
    known = [(True, PLANS[0]), (True, None), (True, Plan(2, 3)), (False, None)]
    one_in_memory = cache(most=1)
    for _ in range(2):
        assert [cache().find(name) for name in names] == [one_in_memory.find(name) for name in names] == known
    for broken in ("{", '{"a": [64, 128, 2, 4, 6]}'):  # the second: from an older version
        cache().file.write_text(broken)
        assert cache().find(names[0]) == (False, None)
        assert one_in_memory.find(names[2])[0] and not one_in_memory.find(names[0])[0]  # it kept the last alone
    assert autotune.autotune([torch.randn(8, 8)], 1, "whole") is None


def test_shipped_plans_fit():
    assert autotune.plans.shipped
    for name, plan in autotune.plans.shipped.items():
        gpu, kept, rows, shape, kind = name.split("|")
        dtype, _, form = kept.partition(" ")
        columns, depth = map(int, shape.split("x"))
        assert gpu and dtype == "bfloat16" and columns > 0 and kind in get_args(autotune.Kind)
        if form:  # a copy of a draft, dense layers, or a published format
            four_bits, eight_bits = "offset-k-g128x1-none-bfloat16", "float8-k-g128x128-none-float32"
            copied = f"float8-k-g{depth}x1-none-bfloat16"
            assert form in ("dense", copied, four_bits, eight_bits) and rows in ("1 rows", "4 rows", "8 rows")
            pays = min(columns, depth) <= WIDEST or form in ("dense", four_bits)
            by_tiles = plan.spans > 0 and plan.warps in WARPS and pays
            assert by_tiles or (form != "dense" and plan._replace(next=0) in (*GEMV_PLANS, *QUANTISED_PLANS))
            assert not (by_tiles and plan.stages) or plan.spans >= needed(depth, plan.warps)  # these keep all of x
        else:
            assert rows in ("16", "32") and kind in ("split-k", "whole", "gated")
            assert plan is None or plan in PLANS
        assert plan is None or (depth % BLOCK == 0 and depth // BLOCK >= plan.splits)
        assert plan is None or kind == "split-k" or plan.splits == 1


def test_shipped_plans_are_those_of_copies():
    """The keys of quantised plans name the format that a copy of a draft has."""
    layer = PackedLinear(torch.randn(1152, 896, dtype=torch.bfloat16), None, "float8")
    name = recognise_format(layer)(layer).name
    assert f"NVIDIA H200|bfloat16 {name}|1 rows|1152x896|normed" in autotune.plans.shipped


@pytest.fixture
def no_plans(tmp_path, monkeypatch):
    """No product was autotuned yet."""
    monkeypatch.setattr(autotune, "plans", cache := PlanCache(tmp_path / "products.json", tmp_path / "no.json"))
    return cache


@pytest.mark.gpu
def test_product_is_autotuned_once(no_plans, monkeypatch):
    weights = [torch.randn((4096, 4096), device="cuda", dtype=torch.bfloat16) for _ in range(10)]
    plan = autotune.autotune(weights, 9, "split-k")
    assert list(read_plans(no_plans.file).values()) == [plan]
    monkeypatch.setattr(autotune, "plans", PlanCache(no_plans.file, no_plans.shipped_file))
    monkeypatch.setattr(autotune, "_fastest", None)  # not measured again
    assert autotune.autotune(weights, 3, "split-k") == plan


@pytest.mark.gpu
def test_gated_product_is_autotuned(no_plans):
    weights = [torch.randn((6144, 768), device="cuda", dtype=torch.bfloat16) for _ in range(10)]
    plan = autotune.autotune(weights, 9, "gated")
    assert plan is None or plan.splits == 1
    before, name = read_plans(no_plans.file)  # the product that follows is first: both are measured together
    assert before.endswith("768x3072|split-k") and name.endswith("6144x768|gated")


@pytest.mark.gpu
def test_products_of_one_row_are_autotuned_with_what_is_fused(no_plans):
    weights = [torch.randn((1152, 896), device="cuda", dtype=torch.bfloat16) for _ in range(10)]
    plan = autotune_fused(weights[0], 1, "normed", lambda: weights)
    assert plan is not None and list(read_plans(no_plans.file).values()) == [plan]
    assert autotune_fused(weights[0], 1, "normed", lambda: pytest.fail("measured again")) == plan
    assert Tuned().fused(weights[0].new_ones((1, 1, 896)), weights[0], "normed") == plan
    assert Tuned().fused(weights[0].new_ones((1, 2, 896)), weights[0], "normed") is None  # no plan is shipped
    wide = torch.randn((WIDEST + 128, WIDEST + 128), device="cuda", dtype=torch.bfloat16)
    assert autotune_fused(wide, 1, "normed", lambda: pytest.fail("measured")) is None


def test_substitute_down_weights_cost_no_memory():
    weight = torch.randn(24, 5)
    down = autotune._down(weight)
    assert down.shape == (5, 12) and down.is_contiguous() and down.data_ptr() == weight.data_ptr()
    x = torch.randn(2, 5)
    norm = autotune.unit_norm(x)
    expected = gated_reference(norm_reference(x, norm) @ weight.T, "silu") @ down.T
    torch.testing.assert_close(autotune._product("gated", None, x, norm, weight, None), expected)
