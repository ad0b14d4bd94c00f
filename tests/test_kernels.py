"""Kernels compute what their references compute, references what transformers computes, and a fused model is the model.

Kernels run on a GPU, or on the CPU under Triton's interpreter (`TRITON_INTERPRET=1`), which one test here starts.
"""

import copy
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.llama import modeling_llama as llama
from transformers.models.phi3 import modeling_phi3 as phi3

from hf_specbranch import load_demo_pair
from hf_specbranch.bench import grow
from hf_specbranch.kernels import attention_interface, autotune, fuse, fused, register
from hf_specbranch.kernels import linear as products
from hf_specbranch.kernels.angles import angles, angles_reference
from hf_specbranch.kernels.attention import attend, attend_reference
from hf_specbranch.kernels.attention_interface import original_attention, override_attention
from hf_specbranch.kernels.autotune import PlanCache, read_plans
from hf_specbranch.kernels.backend import INTERPRETED
from hf_specbranch.kernels.forwards import AttentionForward, LayerForward, MlpForward, Shared, split_graph
from hf_specbranch.kernels.gated import gated, gated_product, gated_reference, recognise
from hf_specbranch.kernels.linear import BLOCK, PLANS, Partials, Plan, fits, linear, linear_reference, linear_split_k
from hf_specbranch.kernels.norm import FORMS, GEMMA, PLAIN, WIDE, rms_norm, rms_norm_reference
from hf_specbranch.kernels.rotary import HeadNorm, Slots, rotary, rotary_reference
from hf_specbranch.kernels.storage import joined
from hf_specbranch.runtime.kv_cache import SlotCache

from .families import FAMILIES, make
from .models import attached

DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
# The interpreter truncates where bfloat16 should be rounded, so bfloat16 is tried on a GPU only.
DTYPES = (torch.float32, torch.float16) if DEVICE == "cpu" else (torch.float32, torch.float16, torch.bfloat16)
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # about two units in the last place
LLAMA_LIKE = [
    "llama", "llama-eager", "mistral-sliding", "qwen2", "qwen2-sliding", "qwen3", "gemma", "gemma2", "gemma3", "phi3",
]  # fmt: skip


def on_kernels(test):
    """Runs where Triton does; drawn examples are few where it is slow."""
    few = settings(
        max_examples=6 if INTERPRETED else 8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
    )
    return few(test) if INTERPRETED else pytest.mark.gpu(few(test))


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def assert_close(got, expected):
    assert got.isfinite().all()
    rounding = ROUNDING[expected.dtype]
    torch.testing.assert_close(got, expected, rtol=rounding, atol=rounding)


dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 99)


# Kernels against references


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


def partials_and_sum(shape, splits, dtype):
    """A product that was split, and what it is."""
    parts = Partials(randn(splits, math.prod(shape[:-1]), shape[-1]), torch.Size(shape), dtype)
    total = parts.terms[0]
    for term in parts.terms[1:]:
        total = total + term
    return parts, total.to(dtype).view(shape)


@on_kernels
@given(dtypes, seeds, st.integers(1, 5), st.integers(1, 300), st.sampled_from([2, 4]), st.sampled_from(FORMS))
def test_kernel_norm_adds_parts(dtype, seed, rows, columns, splits, form):
    torch.manual_seed(seed)
    (parts, total), residual = partials_and_sum((rows, 2, columns), splits, dtype), randn(rows, 2, columns, dtype=dtype)
    weight = randn(columns, dtype=dtype)
    for got, expected in zip(
        rms_norm(parts, weight, 1e-6, residual, form), rms_norm(total, weight, 1e-6, residual, form)
    ):
        assert torch.equal(got, expected)
    wide = weight.float()  # norms that were left in float32 read the sum
    for got, expected in zip(
        rms_norm(parts, wide, 1e-6, residual, form), rms_norm_reference(total, wide, 1e-6, residual, form)
    ):
        assert_close(got, expected)


@on_kernels
@given(dtypes, seeds, st.integers(1, 2), st.integers(1, 5), st.sampled_from([(16, 16), (80, 32)]),
       st.sampled_from([2, 8]), st.sampled_from([None, PLAIN, GEMMA, WIDE]), st.booleans())  # fmt: skip
def test_kernel_rotary_adds_parts(dtype, seed, rows, tokens, sizes, splits, form, odd):
    torch.manual_seed(seed)
    size, turned = sizes
    parts, total = partials_and_sum((rows, tokens, 6 * size), splits, dtype)
    angle = randn(1, tokens, turned)
    cos, sin = angle.cos().to(dtype), angle.sin().to(torch.float64 if odd else dtype)  # which the kernel cannot take
    norm = None if form is None else HeadNorm(randn(size, dtype=dtype), randn(size, dtype=dtype), 1e-6, form)
    places = torch.arange(tokens, device=DEVICE).flip(0).expand(rows, -1)
    results = []
    for product in (parts.terms.view(splits, rows, tokens, 6, size), total.view(rows, tokens, 6, size)):
        cache = [torch.zeros((rows, 2, 9, size), dtype=dtype, device=DEVICE) for _ in range(2)]
        heads = product.transpose(-2, -3).split([2, 2, 2], dim=-3)
        query, none = rotary(*heads, cos, sin, norm, Slots(*cache, places))
        assert none is None
        results.append((query, *cache, *rotary(heads[0], heads[1], None, cos, sin, norm)))
    for got, expected in zip(*results, strict=True):
        if odd:
            assert_close(got.to(dtype), expected.to(dtype))
        else:
            assert torch.equal(got, expected)


@on_kernels
@given(dtypes, st.integers(1, 3), st.integers(1, 40), st.sampled_from([4, 12, 64]), st.integers(0, 32000))
def test_kernel_angles(dtype, rows, tokens, half, first):
    positions = first + torch.arange(rows * tokens, device=DEVICE).view(rows, tokens)
    frequencies = 10000.0 ** -(torch.arange(half, device=DEVICE) / half)
    given_ = (positions, frequencies, 1.1, dtype)
    for got, expected in zip(angles(*given_), angles_reference(*given_), strict=True):
        assert_close(got, expected)


@on_kernels
@given(dtypes, seeds, st.integers(1, 2), st.sampled_from([(4, 2), (3, 3), (8, 1)]), st.integers(1, 5),
       st.sampled_from([(16, 16), (24, 24), (80, 32)]), st.sampled_from([None, *FORMS]), st.booleans())  # fmt: skip
def test_kernel_rotary(dtype, seed, rows, heads, tokens, sizes, form, scattered):
    torch.manual_seed(seed)
    (queries, keys), (size, turned) = heads, sizes
    every = randn(rows, tokens, (queries + 2 * keys), size, dtype=dtype).transpose(1, 2)  # one product, as views
    query, key, value = every.split([queries, keys, keys], dim=1)
    angle = randn(1, tokens, turned)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    norm = None if form is None else HeadNorm(randn(size, dtype=dtype), randn(size, dtype=dtype), 1e-6, form)
    wanted_query, wanted_key = query, key
    if norm is not None:
        wanted_query, _ = rms_norm_reference(query, norm.query, norm.eps, form=form)
        wanted_key, _ = rms_norm_reference(key, norm.key, norm.eps, form=form)
    wanted_query, wanted_key = rotary_reference(wanted_query, cos, sin), rotary_reference(wanted_key, cos, sin)
    if not scattered:
        got = rotary(query, key, None, cos, sin, norm)
        assert_close(got[0], wanted_query)
        assert_close(got[1], wanted_key)
        return
    cache = [torch.zeros((rows, keys, 9, size), dtype=dtype, device=DEVICE) for _ in range(2)]
    places = torch.stack([torch.randperm(9, device=DEVICE)[:tokens] for _ in range(rows)])
    got, none = rotary(query, key, value, cos, sin, norm, Slots(*cache, places))
    assert none is None
    assert_close(got, wanted_query)
    index = places[:, None, :, None].expand(-1, keys, -1, size)
    assert_close(cache[0].gather(2, index), wanted_key)
    assert torch.equal(cache[1].gather(2, index), value)
    assert cache[0].count_nonzero() == cache[0].gather(2, index).count_nonzero()  # and nowhere else


@on_kernels
@given(dtypes, seeds, st.integers(1, 3), st.sampled_from([(2, 2), (4, 2), (6, 1)]), st.integers(1, 64),
       st.integers(1, 400), st.sampled_from([64, 80, 128, 256]), st.sampled_from(["none", "bool", "added"]),
       st.floats(0.02, 1), st.sampled_from([None, 5.0]), st.booleans())  # fmt: skip
def test_kernel_attention(dtype, seed, rows, heads, queries, slots, size, kind, density, softcap, with_sinks):
    if INTERPRETED:
        rows, queries, slots, size = 1 + rows % 2, 1 + queries % 12, min(slots, 150), min(size, 80)
    torch.manual_seed(seed)
    query = randn(rows, heads[0], queries, size, dtype=dtype)
    key, value = (randn(rows, heads[1], slots + 7, size, dtype=dtype)[:, :, :slots] for _ in range(2))
    mask = torch.rand((rows, 1, queries, slots), device=DEVICE) < density
    mask[:, :, :, slots // 3 : slots // 3 + 70] = False  # whole blocks that nobody sees
    mask[0, :, queries // 2] = False  # and a query that sees nothing
    if kind == "none":
        mask = None
    elif kind == "added":
        mask = torch.zeros(mask.shape, dtype=dtype, device=DEVICE).masked_fill(~mask, torch.finfo(dtype).min)
    sinks = randn(heads[0], dtype=dtype) if with_sinks else None
    given_ = (query, key, value, mask, size**-0.5, softcap, sinks)
    assert_close(attend(*given_), attend_reference(*given_))


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


@pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="kernels run on a GPU")
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
    cache = [whole[1:-1].reshape(1, 2, 66, 64) for whole in arena]
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
    chosen = "test_kernel_ or (adds_up and (llama or phi3))"
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", __file__, "-k", chosen]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    assert ran.stdout.startswith("...........")


# References against transformers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "module, form", [(llama.LlamaRMSNorm, PLAIN), (gemma2.Gemma2RMSNorm, GEMMA), (gpt_oss.GptOssRMSNorm, WIDE)]
)
def test_norm_is_that_of_transformers_to_the_bit(module, form, dtype):
    norm = module(48, eps=1e-5).to(dtype)
    nn.init.normal_(norm.weight)
    x, residual = torch.randn(2, 5, 48, dtype=dtype), torch.randn(2, 5, 48, dtype=dtype)
    assert torch.equal(rms_norm_reference(x, norm.weight, 1e-5, form=form)[0], norm(x))
    out, total = rms_norm_reference(x, norm.weight, 1e-5, residual, form)
    assert torch.equal(total, residual + x) and torch.equal(out, norm(residual + x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("module, turned", [(llama, 32), (phi3, 24)])
def test_rotary_is_that_of_transformers_to_the_bit(module, turned, dtype):
    query, key = torch.randn(2, 4, 5, 32, dtype=dtype), torch.randn(2, 2, 5, 32, dtype=dtype)
    angle = torch.randn(2, 5, turned)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    expected = module.apply_rotary_pos_emb(query, key, cos, sin)
    got, turned_key = rotary(query, key, None, cos, sin)
    assert torch.equal(got, expected[0]) and torch.equal(turned_key, expected[1])


@pytest.mark.parametrize("family, name", [("llama", "silu"), ("gemma", "gelu_tanh")])
def test_gated_activation_is_that_of_transformers_to_the_bit(family, name):
    mlp = make(family).to(torch.bfloat16).model.layers[0].mlp
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    assert recognise(mlp.act_fn) == name
    both = torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], dim=-1)
    assert torch.equal(mlp.down_proj(gated_reference(both, name)), mlp(x))


def test_other_activations_are_not_taken_for_known_ones():
    assert recognise(nn.ReLU()) is None and recognise(nn.GELU()) is None


@pytest.mark.parametrize("family, softcap, with_sinks", [("gemma2", 2.0, False), ("gpt-oss", None, True)])
def test_attention_is_that_of_transformers(family, softcap, with_sinks):
    module = make(family).model.layers[0].self_attn
    query = torch.randn(2, 4, 3, 8)
    key, value = torch.randn(2, 2, 11, 8), torch.randn(2, 2, 11, 8)
    mask = torch.rand(2, 1, 3, 11) > 0.4
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    eager = (gpt_oss if with_sinks else gemma2).eager_attention_forward
    extra = {} if with_sinks else {"softcap": softcap}
    expected, _ = eager(module, query, key, value, added, scaling=0.3, **extra)
    sinks = module.sinks if with_sinks else None
    for given_mask in (mask, added):
        torch.testing.assert_close(attend_reference(query, key, value, given_mask, 0.3, softcap, sinks), expected)


# A fused model


def overriding(model):
    """The attention of a model is ours, as far as its config says."""
    register()
    return override_attention(model.config, attention_interface.UNCAPPED)


def logits_over_branches(model, context=None, device="cpu"):
    """Two branches behind a prompt, in scattered slots of one cache."""
    prompt = torch.tensor([[5, 9, 3, 17]], device=device)
    places = torch.tensor([[9, 7, 11]], device=device)
    seen = torch.zeros((1, 1, 3, 12), dtype=torch.bool, device=device)
    seen[..., :4] = True
    for query, slot in ((0, 9), (1, 9), (1, 7), (2, 11)):
        seen[0, 0, query, slot] = True
    if model.config._attn_implementation == "eager":
        seen = torch.zeros(seen.shape, dtype=model.dtype, device=device).masked_fill(
            ~seen, torch.finfo(model.dtype).min
        )
    cache = SlotCache()
    with torch.no_grad():
        model(prompt, past_key_values=cache, use_cache=True)
        cache.address.point_at(places, 12)
        tokens, positions = torch.tensor([[6, 7, 8]], device=device), torch.tensor([[4, 5, 4]], device=device)
        call = dict(input_ids=tokens, attention_mask=seen, position_ids=positions, past_key_values=cache)
        if context is None:
            return model(**call).logits
        with context(model):
            return model(**call).logits


@pytest.mark.compat
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_model_computes_the_same(family):
    model = make(family)
    expected = logits_over_branches(model)
    fuse(model)
    assert torch.equal(logits_over_branches(model), expected)  # outside: its own code on the same numbers
    torch.testing.assert_close(logits_over_branches(model, fused), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(logits_over_branches(model), expected)


@pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="kernels run on a GPU")
@pytest.mark.parametrize("family", [*LLAMA_LIKE, "qwen2-moe"])
def test_a_fused_model_adds_up_split_products(family, monkeypatch):
    """Those of a mixture's experts too, which are read by nobody who can add."""
    model = make(family).to(DEVICE, torch.float16)
    fuse(model)
    expected, asked = logits_over_branches(model, fused, DEVICE), []

    def split(shared, x, weight, kind):
        asked.append((shared.sums_partials, kind))
        plan = Plan(splits=2 if kind == "split-k" else 1, stages=2)
        assert fits(x, weight, None, plan)
        return plan

    monkeypatch.setattr(products, "BLOCK", 16)  # these models are small
    monkeypatch.setattr(Shared, "_plan", split)
    torch.testing.assert_close(logits_over_branches(model, fused, DEVICE), expected, atol=2e-2, rtol=2e-2)
    assert any(adds for adds, _ in asked) == (family not in ("gemma2", "gemma3"))  # whose norms stand before the sum
    assert {"split-k", "gated"} <= {kind for _, kind in asked}


@pytest.mark.compat
@pytest.mark.parametrize("family", LLAMA_LIKE)
def test_models_built_like_llama_are_recognised_whole(family):
    model = make(family)
    fuse(model)
    with fused(model):
        kinds = [type(module.forward) for module in model.modules()]
    for kind in (AttentionForward, MlpForward, LayerForward):
        assert kinds.count(kind) == model.config.num_hidden_layers
    attention = model.model.layers[0].self_attn
    if hasattr(attention, "q_proj"):
        assert joined([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]) is not None


@pytest.mark.parametrize("kind, expected", [("default", True), ("dynamic", False), ("odd", False)])
def test_angles_are_recognised_unless_they_change_with_the_length(kind, expected):
    model = make("llama")
    module = model.model.rotary_emb
    if kind == "odd":
        multiplied(module, 1.1)
    else:
        module.rope_type = kind
    assert (module in stand_ins(model)) is expected


def test_a_layer_of_the_same_class_that_computes_otherwise_is_left_alone():
    model = make("llama")
    odd = model.model.layers[1].self_attn

    class Scaled(type(odd)):
        def forward(self, *args, **kwargs):
            out, weights = super().forward(*args, **kwargs)
            return 1.1 * out, weights

    odd.__class__ = Scaled
    expected = logits_over_branches(model)
    fuse(model)
    torch.testing.assert_close(logits_over_branches(model, fused), expected, atol=1e-5, rtol=1e-5)


def silenced(model, layer=0):
    """A layer that writes nothing, as the first ones of a model that was grown."""
    with torch.no_grad():
        model.model.layers[layer].self_attn.o_proj.weight.zero_()
        model.model.layers[layer].mlp.down_proj.weight.zero_()
    return model


def stand_ins(model):
    fuse(model)
    with fused(model):
        return {module: type(module.forward) for module in model.modules() if "forward" in module.__dict__}


def multiplied(module, factor):
    """Make a module return a multiple of what it would."""

    class Multiplied(type(module)):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            return (factor * out[0], *out[1:]) if isinstance(out, tuple) else factor * out

    module.__class__ = Multiplied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3"])
def test_layers_that_write_nothing_are_recognised_and_keep_their_weights(family, dtype):
    model = silenced(make(family).to(dtype))
    drawn = torch.get_rng_state()
    kinds = list(stand_ins(model).values())
    for kind in (AttentionForward, MlpForward, LayerForward):
        assert kinds.count(kind) == model.config.num_hidden_layers
    layer = model.model.layers[0]
    assert not layer.self_attn.o_proj.weight.any() and not layer.mlp.down_proj.weight.any()
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize(
    "shape", [pytest.param("68m", marks=pytest.mark.slow), pytest.param("160m", marks=pytest.mark.slow)]
)
def test_grown_models_are_recognised_whole(shape):
    draft = load_demo_pair()[1]
    model = grow(draft, shape, dtype=torch.bfloat16)
    kinds = list(stand_ins(model).values())
    for kind in (AttentionForward, MlpForward, LayerForward):
        assert kinds.count(kind) == model.config.num_hidden_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.1, 0.0])
@pytest.mark.parametrize("part", ["self_attn", "mlp"])
def test_a_part_that_writes_nothing_and_computes_otherwise_is_left_alone(part, factor, dtype):
    model = silenced(make("llama").to(dtype))
    odd = getattr(model.model.layers[0], part)
    multiplied(odd, factor)
    assert odd not in stand_ins(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("silent", [True, False])
@pytest.mark.parametrize("part", ["self_attn", "mlp"])
def test_a_layer_that_adds_otherwise_is_left_alone_also_under_a_large_residual(part, silent, dtype):
    model = make("llama").to(dtype)
    layer = silenced(model).model.layers[0] if silent else model.model.layers[0]

    class Weighted(type(layer)):
        """Halves what one part adds, by a call that its parts know nothing of."""

        def forward(self, hidden_states, **kwargs):
            module = getattr(self, part)
            handle = module.register_forward_hook(
                lambda _, __, out: (out[0] * 0.5, *out[1:]) if isinstance(out, tuple) else out * 0.5
            )
            try:
                return super().forward(hidden_states, **kwargs)
            finally:
                handle.remove()

    layer.__class__ = Weighted
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1000)
    assert layer not in stand_ins(model)


def test_fusing_uses_no_memory_and_changes_no_parameter():
    model = make("qwen2")
    before = {name: (id(parameter), parameter.clone()) for name, parameter in model.named_parameters()}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    undo = fuse(model)

    def storages():
        return {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}

    assert sum(storages().values()) == sum(p.numel() * p.element_size() for p in model.parameters())
    assert len(storages()) < len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert (id(parameter), True) == (before[name][0], torch.equal(parameter, before[name][1]))
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    undo()
    assert len(storages()) == len(list(model.parameters()))


@pytest.mark.compat
def test_a_fused_model_is_saved_and_loaded_as_before(tmp_path):
    model = make("llama")
    plain = copy.deepcopy(model)
    fuse(model)
    model.save_pretrained(tmp_path / "fused")
    plain.save_pretrained(tmp_path / "plain")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("fused", "plain")]
    assert sizes[0] == sizes[1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fused")
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    torch.save(model.state_dict(), tmp_path / "state.pt")
    plain.load_state_dict(torch.load(tmp_path / "state.pt"))


@pytest.mark.parametrize("change", ["load", "assign", "double", "copy", "train"])
def test_weights_may_change_after_fusing(change):
    model, other = make("llama", seed=0), make("llama", seed=1)
    fuse(model)
    logits_over_branches(model, fused)
    if change == "load":
        model.load_state_dict(other.state_dict())
    elif change == "assign":
        model.load_state_dict(other.state_dict(), assign=True)
    elif change == "double":
        model.to(torch.float64).to(torch.float32)
    elif change == "copy":
        model = copy.deepcopy(model)
        assert (
            joined([p.weight for p in (model.model.layers[0].mlp.gate_proj, model.model.layers[0].mlp.up_proj)]) is None
        )
    else:
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
        optimiser.step()
    torch.testing.assert_close(
        logits_over_branches(model, fused), logits_over_branches(model), atol=1e-5, rtol=1e-5
    )  # fmt: skip


class Adapter(nn.Module):
    """A low-rank update around a linear layer, as adapters are loaded."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.low = nn.Linear(base_layer.in_features, 2, bias=False)
        self.high = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.high(self.low(x))


@pytest.mark.parametrize("part", ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"])
def test_adapters_loaded_after_fusing_take_effect(part):
    model = make("llama")
    fuse(model)
    without = logits_over_branches(model, fused)
    parent, name = part.split(".")
    owner = getattr(model.model.layers[0], parent)
    torch.manual_seed(0)
    setattr(owner, name, Adapter(getattr(owner, name)))
    got, expected = logits_over_branches(model, fused), logits_over_branches(model)
    assert (expected - without).abs().max() > 1e-3
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("part", ["self_attn", "self_attn.k_proj", "mlp.gate_proj", "input_layernorm", "mlp"])
def test_hooks_are_called_and_obeyed(part):
    model = make("llama")
    fuse(model)
    calls = []

    def hook(module, args, output):
        calls.append(module)
        return (output[0] * 2, *output[1:]) if isinstance(output, tuple) else output * 2

    model.model.layers[1].get_submodule(part).register_forward_hook(hook)
    expected = logits_over_branches(model)
    calls.clear()
    torch.testing.assert_close(logits_over_branches(model, fused), expected, atol=1e-5, rtol=1e-5)
    assert calls


def test_hidden_states_are_recorded_under_kernels():
    model = make("llama")
    fuse(model)
    call = dict(input_ids=torch.tensor([[5, 9, 3]]), output_hidden_states=True)
    with torch.no_grad():
        expected = model(**call).hidden_states
        with fused(model):
            got = model(**call).hidden_states
    for one, two in zip(got, expected, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


def test_an_exception_leaves_the_model_as_it_was():
    model = make("llama")
    forwards = {module: module.forward for module in model.modules()}
    hooks = len(model._forward_pre_hooks)
    with pytest.raises(KeyError), fused(model):
        assert any("forward" in module.__dict__ for module in model.modules())
        raise KeyError
    assert {module: module.forward for module in model.modules()} == forwards
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert (model.config._attn_implementation, len(model._forward_pre_hooks)) == ("sdpa", hooks)


def test_parameters_shared_by_two_modules_stay_shared():
    model = make("llama")
    first, second = (layer.mlp for layer in model.model.layers)
    second.gate_proj.weight, second.up_proj.weight = first.gate_proj.weight, first.up_proj.weight
    fuse(model)
    assert second.gate_proj.weight is first.gate_proj.weight
    torch.testing.assert_close(logits_over_branches(model, fused), logits_over_branches(model), atol=1e-5, rtol=1e-5)


@pytest.mark.compat
def test_the_attention_can_be_asked_for_by_name():
    register()
    model = make("llama")
    ids = torch.tensor([[5, 9, 3, 17, 40, 22]])
    expected, branches = model(ids).logits, logits_over_branches(model)
    generated = model.generate(ids, max_new_tokens=8, do_sample=False)
    model.set_attn_implementation("specbranch")
    torch.testing.assert_close(model(ids).logits, expected)
    torch.testing.assert_close(logits_over_branches(model), branches)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), generated)


@pytest.mark.parametrize("change", ["nothing", "compiled"])
def test_attention_by_name_can_be_trained(change):
    register()
    model, expected = make("llama").train(), make("llama").train()
    model.set_attn_implementation("specbranch")
    ids = torch.arange(1, 13).view(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    run = model if change == "nothing" else torch.compile(model, backend="aot_eager")
    for each in (expected, run):
        each(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    for got, wanted in zip(model.parameters(), expected.parameters()):
        assert torch.allclose(got.grad, wanted.grad, atol=1e-5)


@pytest.mark.parametrize("contexts", [(fused, fused), (fused, overriding), (overriding, fused)])
def test_last_context_restores_the_attention(contexts):
    model = make("gpt-neox").to(torch.bfloat16)
    first, second = (context(model) for context in contexts)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert model.config._attn_implementation != "sdpa" and original_attention(model.config) == "sdpa"
    second.__exit__(None, None, None)
    assert model.config._attn_implementation == "sdpa" and not attention_interface.one_pass.active


def test_attention_is_overridden_only_where_a_module_still_needs_it():
    model = make("llama").to(torch.bfloat16)
    with fused(model):
        assert model.config._attn_implementation == "sdpa"
    with overriding(model):
        with fused(model):
            pass
        assert model.config._attn_implementation != "sdpa"
    assert model.config._attn_implementation == "sdpa"


def test_generation_may_begin_while_the_attention_is_overridden():
    model, draft = (make("llama", seed=seed).to(torch.bfloat16) for seed in (0, 1))
    model = attached(model)
    kwargs = dict(input_ids=torch.arange(1, 9)[None], max_new_tokens=8, do_sample=False)
    with ThreadPoolExecutor(1) as pool, overriding(model):
        got = pool.submit(model.generate, **kwargs, assistant_model=draft).result()
    assert got.shape == (1, 16)


def test_block_lists_are_forgotten_with_every_pass(monkeypatch):
    forgotten, model = [], make("llama")
    monkeypatch.setattr(attention_interface.one_pass, "forget", lambda: forgotten.append(1))
    with torch.no_grad(), fused(model):
        forgotten.clear()
        model(torch.tensor([[1, 2]]))
        model(torch.tensor([[1, 2]]))
        assert len(forgotten) == 2


def test_autotuned_plans_are_kept_on_disk_and_broken_files_ignored(tmp_path):
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


def test_choices_that_come_with_the_package_are_plans_that_fit():
    assert autotune.plans.shipped
    for name, plan in autotune.plans.shipped.items():
        gpu, dtype, rows, shape, kind = name.split("|")
        columns, depth = map(int, shape.split("x"))
        assert gpu and dtype == "bfloat16" and rows in ("16", "32") and columns > 0
        assert kind in get_args(autotune.Kind)
        assert plan is None or (plan in PLANS and depth % BLOCK == 0 and depth // BLOCK >= plan.splits)
        assert plan is None or kind == "split-k" or plan.splits == 1


@pytest.mark.skipif(not INTERPRETED, reason="under the interpreter only")
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_kernel_in_a_model(family):
    model = make(family)
    fuse(model)
    expected = logits_over_branches(model)
    torch.testing.assert_close(logits_over_branches(model, fused), expected, atol=1e-5, rtol=1e-5)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "gpt-oss"])
def test_a_fused_model_computes_the_same_on_a_gpu(family):
    model = make(family).to("cuda")
    expected = logits_over_branches(model, device="cuda")
    fuse(model)
    got = logits_over_branches(model, fused, device="cuda")
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_a_fused_forward_is_captured_and_sees_what_is_visible_at_each_replay():
    model = make("llama").to("cuda")
    fuse(model)
    ids = torch.tensor([[5, 9, 3]], device="cuda")
    mask = torch.ones((1, 1, 3, 3), dtype=torch.bool, device="cuda").tril()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), fused(model), torch.cuda.stream(stream):
        model(ids, attention_mask=mask, use_cache=False)
        graph.capture_begin()
        logits = model(ids, attention_mask=mask, use_cache=False).logits
        graph.capture_end()
    for hidden in (0, 1):
        mask[0, 0, 2, hidden] = False
        stream.wait_stream(torch.cuda.current_stream())
        graph.replay()
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.fixture
def nothing_chosen(tmp_path, monkeypatch):
    """No product has been chosen, here or elsewhere."""
    monkeypatch.setattr(autotune, "plans", cache := PlanCache(tmp_path / "products.json", tmp_path / "no.json"))
    return cache


@pytest.mark.gpu
def test_the_faster_product_is_chosen_once(nothing_chosen, monkeypatch):
    weights = [torch.randn((4096, 4096), device="cuda", dtype=torch.bfloat16) for _ in range(10)]
    plan = autotune.autotune(weights, 9, "split-k")
    assert list(read_plans(nothing_chosen.file).values()) == [plan]
    monkeypatch.setattr(autotune, "plans", PlanCache(nothing_chosen.file, nothing_chosen.shipped_file))
    monkeypatch.setattr(autotune, "_fastest", None)  # not measured again
    assert autotune.autotune(weights, 3, "split-k") == plan


@pytest.mark.gpu
def test_a_product_with_its_gate_is_chosen_too(nothing_chosen):
    weights = [torch.randn((6144, 768), device="cuda", dtype=torch.bfloat16) for _ in range(10)]
    plan = autotune.autotune(weights, 9, "gated")
    assert plan is None or plan.splits == 1
    before, name = read_plans(nothing_chosen.file)  # the product that follows is first: both are measured together
    assert before.endswith("768x3072|split-k") and name.endswith("6144x768|gated")


def test_weights_that_stand_for_those_behind_gate_and_up_cost_no_memory():
    weight = torch.randn(24, 5)
    down = autotune._down(weight)
    assert down.shape == (5, 12) and down.is_contiguous() and down.data_ptr() == weight.data_ptr()
    x = torch.randn(2, 5)
    expected = gated_reference(x @ weight.T, "silu") @ down.T
    torch.testing.assert_close(autotune._product("gated", None, x, weight, None), expected)


@pytest.mark.gpu
def test_fusing_on_a_gpu_needs_one_group_of_weights_more_for_a_moment():
    model = make("llama")
    for layer in model.model.layers:
        layer.mlp.gate_proj, layer.mlp.up_proj = nn.Linear(1024, 4096, bias=False), nn.Linear(1024, 4096, bias=False)
        layer.mlp.down_proj = nn.Linear(4096, 1024, bias=False)
    model.to("cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fuse(model)
    assert torch.cuda.memory_allocated() <= before
    assert torch.cuda.max_memory_allocated() - before <= 2 * 4096 * 1024 * 4 + (1 << 20)


def test_a_recorded_stage_is_cut_once_behind_its_second_layer():
    model, ids, cuts = make("llama"), torch.arange(1, 5)[None], []
    watched = [layer.register_forward_hook(lambda *_: cuts.append("layer")) for layer in model.model.layers]
    with torch.no_grad(), fused(model):
        model(ids)  # finds out what stands in; nothing is recorded yet
        cuts.clear()
        with split_graph(lambda: cuts.append("cut")):
            model(ids)
            model(ids)
        model(ids)
    number = len(watched)
    assert number >= 2 and cuts == ["layer", "cut", "layer"] + ["layer"] * (3 * number - 2)
