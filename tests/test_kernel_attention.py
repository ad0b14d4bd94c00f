"""Rotary and attention: kernels equal their references, references equal transformers; the attention interface."""

from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.models.cohere2 import modeling_cohere2 as cohere2
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.glm4 import modeling_glm4 as glm4
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.llama import modeling_llama as llama
from transformers.models.olmo2 import modeling_olmo2 as olmo2
from transformers.models.phi3 import modeling_phi3 as phi3

from hf_specbranch.kernels import attention, attention_interface, register
from hf_specbranch.kernels import rotary as rotary_kernel
from hf_specbranch.kernels.angles import angles, angles_reference
from hf_specbranch.kernels.attention import attend
from hf_specbranch.kernels.attention_interface import original_attention, override_attention
from hf_specbranch.kernels.attention_reference import attend_reference
from hf_specbranch.kernels.backend import INTERPRETED
from hf_specbranch.kernels.norm import FORMS, GEMMA, PLAIN, WIDE, rms_norm_reference
from hf_specbranch.kernels.rotary import HeadNorm, Slots, rotary
from hf_specbranch.kernels.rotation import HALVES, ROTATIONS, Rotation, rotary_reference
from hf_specbranch.kernels.spans import SPANS
from hf_specbranch.layers import fused

from .families import make
from .kernels import DEVICE, assert_close, dtypes, logits_over_branches, on_kernels, partials_and_sum, randn, seeds
from .models import attached


@on_kernels
@given(dtypes, seeds, st.integers(1, 2), st.integers(1, 5), st.sampled_from([(16, 16), (80, 32)]),
       st.sampled_from([2, 8]), st.sampled_from([None, PLAIN, GEMMA, WIDE]), st.booleans())  # fmt: skip
def test_kernel_rotary_sums_partials(dtype, seed, rows, tokens, sizes, splits, form, odd):
    torch.manual_seed(seed)
    size, turned = sizes
    partials, total = partials_and_sum((rows, tokens, 6 * size), splits, dtype)
    angle = randn(1, tokens, turned)
    cos, sin = angle.cos().to(dtype), angle.sin().to(torch.float64 if odd else dtype)  # which the kernel cannot take
    norm = None if form is None else HeadNorm(randn(size, dtype=dtype), randn(size, dtype=dtype), 1e-6, form)
    places = torch.arange(tokens, device=DEVICE).flip(0).expand(rows, -1)
    results = []
    for product in (partials.terms.view(splits, rows, tokens, 6, size), total.view(rows, tokens, 6, size)):
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
@given(dtypes, st.integers(1, 3), st.integers(1, 40), st.sampled_from([4, 12, 64]), st.integers(0, 32000),
       st.booleans())  # fmt: skip
def test_kernel_angles(dtype, rows, tokens, half, first, neighbours):
    positions = first + torch.arange(rows * tokens, device=DEVICE).view(rows, tokens)
    frequencies = 10000.0 ** -(torch.arange(half, device=DEVICE) / half)
    given_ = (positions, frequencies, 1.1, dtype, neighbours)
    for got, expected in zip(angles(*given_), angles_reference(*given_), strict=True):
        assert_close(got, expected)


@on_kernels
@given(dtypes, seeds, st.integers(1, 2), st.sampled_from([(4, 2), (3, 3), (8, 1)]), st.integers(1, 5),
       st.sampled_from([(16, 16), (24, 24), (80, 32)]), st.sampled_from([None, *FORMS]), st.booleans(),
       st.sampled_from(ROTATIONS), st.booleans())  # fmt: skip
@example(torch.float16, 0, 2, (4, 2), 3, (80, 32), PLAIN, True, Rotation(neighbours=True), False)
@example(torch.float16, 0, 1, (3, 3), 3, (24, 24), None, True, Rotation(True, "neighbours"), False)
@example(torch.float16, 0, 1, (3, 3), 3, (24, 24), None, True, HALVES, True)
@example(torch.float16, 0, 2, (4, 2), 3, (24, 24), PLAIN, True, None, False)
def test_kernel_rotary(dtype, seed, rows, heads, tokens, sizes, form, scattered, rotation, wide):
    torch.manual_seed(seed)
    (queries, keys), (size, turned) = heads, sizes
    every = randn(rows, tokens, (queries + 2 * keys), size, dtype=dtype).transpose(1, 2)  # one product, as views
    query, key, value = every.split([queries, keys, keys], dim=1)
    angle = randn(1, tokens, turned // 2 if rotation is not None and rotation.table == "once" else turned)
    cos, sin = (table.to(torch.float32 if wide else dtype) for table in (angle.cos(), angle.sin()))
    if rotation == Rotation(neighbours=True):  # one angle for each pair
        cos, sin = (torch.cat((table[..., : turned // 2],) * 2, dim=-1) for table in (cos, sin))
    norm = None if form is None else HeadNorm(randn(size, dtype=dtype), randn(size, dtype=dtype), 1e-6, form)
    wanted_query, wanted_key = query, key
    if norm is not None:
        wanted_query, _ = rms_norm_reference(query, norm.query, norm.eps, form=form)
        wanted_key, _ = rms_norm_reference(key, norm.key, norm.eps, form=form)
    wanted_query, wanted_key = (rotary_reference(x, cos, sin, rotation) for x in (wanted_query, wanted_key))
    if not scattered:
        got = rotary(query, key, None, cos, sin, norm, None, rotation, dtype)
        assert_close(got[0], wanted_query)
        assert_close(got[1], wanted_key)
        return
    cache = [torch.zeros((rows, keys, 9, size), dtype=dtype, device=DEVICE) for _ in range(2)]
    places = torch.stack([torch.randperm(9, device=DEVICE)[:tokens] for _ in range(rows)])
    got, none = rotary(query, key, value, cos, sin, norm, Slots(*cache, places), rotation, dtype)
    assert none is None
    assert_close(got, wanted_query)
    index = places[:, None, :, None].expand(-1, keys, -1, size)
    assert_close(cache[0].gather(2, index), wanted_key)
    assert torch.equal(cache[1].gather(2, index), value)
    assert cache[0].count_nonzero() == cache[0].gather(2, index).count_nonzero()  # and nowhere else


@on_kernels
@given(dtypes, seeds, st.sampled_from([(4, 2), (6, 1), (2, 4)]), st.booleans(), st.booleans())
def test_rotary_of_several_heads_at_once(dtype, seed, heads, normalised, scattered):
    """A program takes several heads where there are many tokens. The result has the same bits."""
    torch.manual_seed(seed)
    (queries, keys), size, rows, tokens = heads, 24, 2, 3
    parts = randn(rows, queries + 2 * keys, tokens, size, dtype=dtype).split([queries, keys, keys], dim=1)
    angle = randn(1, tokens, 16)
    norm = HeadNorm(randn(size, dtype=dtype), randn(size, dtype=dtype), 1e-6) if normalised else None
    places = torch.arange(tokens, device=DEVICE).flip(0).expand(rows, -1)
    results = []
    for many in (1, 1 << 30):
        cache = [torch.zeros((rows, keys, 9, size), dtype=dtype, device=DEVICE) for _ in range(2)]
        slots = Slots(*cache, places) if scattered else None
        with mock.patch.object(rotary_kernel, "MANY_PROGRAMS", many):
            results.append([*rotary(*parts, angle.cos().to(dtype), angle.sin().to(dtype), norm, slots), *cache])
    for got, expected in zip(*results, strict=True):
        assert (got is None and expected is None) or torch.equal(got, expected)


@on_kernels
@given(dtypes, seeds, st.sampled_from([64, 128]), st.integers(1, 4), st.integers(1, 300))
def test_keys_after_the_last_visible_one_are_not_read(dtype, seed, size, queries, length):
    torch.manual_seed(seed)
    query = randn(2, 4, queries, size, dtype=dtype)
    ends = torch.tensor([length, max(1, length // 2)])
    first, end = torch.zeros(2, queries), ends[:, None].expand(-1, queries)
    spans = torch.stack([first, end, first, first], -1)[:, None].to(DEVICE, SPANS)
    key, value = (randn(2, 2, length + 70, size, dtype=dtype) for _ in range(2))
    expected = attend_reference(query, key, value, spans, size**-0.5)
    for row, last in enumerate(ends):
        key[row, :, last:] = value[row, :, last:] = torch.nan
    assert_close(attend(query, key, value, spans, size**-0.5), expected)


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
@given(st.sampled_from([16, 64, 96]), st.integers(1, 5), st.sampled_from([40, 1300, 2300]), seeds)
@example(16, 1, 2300, 0)
@example(64, 3, 1300, 0)
def test_spans_of_long_and_short_texts(size, queries, length, seed):
    """More splits than are combined at a time, rows of different lengths, a query that sees nothing."""
    torch.manual_seed(seed)
    query, (key, value) = randn(2, 4, queries, size), randn(2, 2, 2, length + 40, size)
    end = length - torch.arange(queries) - length // 2 * torch.arange(2)[:, None]  # [B, Q]
    spans = torch.stack([end % 3 * 30, end, end + 5, end + 5 + torch.arange(queries) % 3], -1)[:, None]
    spans[1, :, -1] = 0
    given_ = query, key, value, spans.to(DEVICE, SPANS), size**-0.5
    with mock.patch.object(attention, "multiprocessors", lambda device: 132):
        assert_close(attend(*given_), attend_reference(*given_))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("module, turned, rotation", [
    (llama, 32, HALVES), (phi3, 24, HALVES), (olmo2, 32, HALVES),
    (glm4, 16, Rotation(neighbours=True)), (cohere2, 32, Rotation(neighbours=True, table="neighbours")),
])  # fmt: skip
def test_rotary_equals_transformers(module, turned, rotation, dtype):
    query, key = torch.randn(2, 4, 5, 32, dtype=dtype), torch.randn(2, 2, 5, 32, dtype=dtype)
    angle = torch.randn(2, 5, turned // 2)
    angle = angle.repeat_interleave(2, -1) if rotation.table == "neighbours" else torch.cat([angle, angle], -1)
    cos, sin = (table.to(torch.float32 if module is olmo2 else dtype) for table in (angle.cos(), angle.sin()))
    expected = module.apply_rotary_pos_emb(query, key, cos, sin)
    got = rotary(query, key, None, cos, sin, rotation=rotation, dtype=dtype)
    for one, two in zip(got, expected, strict=True):
        if module is glm4 and dtype == torch.bfloat16:  # which rounds more often
            torch.testing.assert_close(one, two, atol=2e-2, rtol=2e-2)
        else:
            assert torch.equal(one, two)


@pytest.mark.parametrize("family, softcap, with_sinks", [("gemma2", 2.0, False), ("gpt-oss", None, True)])
def test_attention_equals_transformers(family, softcap, with_sinks):
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


def overriding(model):
    """Return a context in which the config of a model names our attention."""
    register()
    return override_attention(model.config, attention_interface.UNCAPPED)


@pytest.mark.compat
def test_attention_by_name():
    register()
    model = make("llama")
    ids = torch.tensor([[5, 9, 3, 17, 40, 22]])
    expected, branches = model(ids).logits, logits_over_branches(model)
    generated = model.generate(ids, max_new_tokens=8, do_sample=False)
    model.set_attn_implementation("specbranch")
    torch.testing.assert_close(model(ids).logits, expected)
    torch.testing.assert_close(logits_over_branches(model), branches)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), generated)


@pytest.mark.parametrize("change", ["nothing", pytest.param("compiled", marks=pytest.mark.slow)])
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
    model = make("gpt2").to(torch.bfloat16)
    first, second = (context(model) for context in contexts)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert model.config._attn_implementation != "sdpa" and original_attention(model.config) == "sdpa"
    second.__exit__(None, None, None)
    assert model.config._attn_implementation == "sdpa" and not attention_interface.one_pass.active


def test_attention_is_overridden_only_where_needed():
    model = make("llama").to(torch.bfloat16)
    with fused(model):
        assert model.config._attn_implementation == "sdpa"
    with overriding(model):
        with fused(model):
            pass
        assert model.config._attn_implementation != "sdpa"
    assert model.config._attn_implementation == "sdpa"


def test_generation_while_attention_is_overridden():
    model, draft = (make("llama", seed=seed).to(torch.bfloat16) for seed in (0, 1))
    model = attached(model)
    kwargs = dict(input_ids=torch.arange(1, 9)[None], max_new_tokens=8, do_sample=False)
    with ThreadPoolExecutor(1) as pool, overriding(model):
        got = pool.submit(model.generate, **kwargs, assistant_model=draft).result()
    assert got.shape == (1, 16)


def test_other_threads_run_the_model_itself():
    """While a thread runs a model through our kernels, others run its own code, and none waits for it."""
    model = make("llama")
    ids = torch.tensor([[1, 2, 3]])
    mask = torch.ones((1, 1, 3, 3), dtype=torch.bool).tril()
    spans = torch.tensor([[[[0, 1, 0, 0], [0, 2, 0, 0], [0, 3, 0, 0]]]], dtype=torch.int32)
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        expected = model(ids, attention_mask=mask).logits
        with fused(model):
            theirs = pool.submit(torch.no_grad()(model), ids, attention_mask=mask).result().logits
            ours = model(ids, attention_mask=spans).logits  # which only our attention can read
            with pytest.raises(RuntimeError, match="dtype"):
                pool.submit(torch.no_grad()(model), ids, attention_mask=spans).result()
        assert torch.equal(theirs, expected)
        torch.testing.assert_close(ours, expected)


def test_block_lists_are_forgotten_with_every_pass(monkeypatch):
    forgotten, model = [], make("llama")
    monkeypatch.setattr(attention_interface.one_pass, "forget", lambda: forgotten.append(1))
    with torch.no_grad(), fused(model):
        forgotten.clear()
        model(torch.tensor([[1, 2]]))
        model(torch.tensor([[1, 2]]))
        assert len(forgotten) == 2
