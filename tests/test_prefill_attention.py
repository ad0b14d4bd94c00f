"""Attention for a chunk of a prompt: the kernel equals its reference, and the reference equals torch."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from hf_specbranch.kernels.attention_reference import attend_reference
from hf_specbranch.kernels.backend import INTERPRETED
from hf_specbranch.kernels.prefill_attention import Tiles, attend_chunk, attend_chunk_reference, tiles_for

from .dry_runs import recorded_dry_run
from .kernels import DEVICE, assert_close, dtypes, on_kernels, randn, seeds, where_triton_runs

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "benchmarks"))
benchmark = importlib.import_module("prefill_attention")

SMALL = Tiles(32, 16, 4, 2)  # many tiles and blocks in small examples


def slot_major(rows, heads, slots, size, dtype=torch.float32):
    """Return a cache [B, H, S, D] in which a slot's rows and heads lie together in memory."""
    return randn(slots, rows, heads, size, dtype=dtype).permute(1, 2, 0, 3)


def causal_spans(rows, queries, before, padding=0, window=None):
    """Return spans [B, 1, Q, 4] of a chunk after `before` slots; each row has 3 more slots of padding."""
    spans = torch.zeros((rows, 1, queries, 4), dtype=torch.int32, device=DEVICE)
    spans[..., 1] = before + 1 + torch.arange(queries, device=DEVICE)
    first = padding + 3 * torch.arange(rows, device=DEVICE).view(rows, 1, 1)
    spans[..., 0] = first if window is None else torch.maximum(first, spans[..., 1] - window)
    spans[..., 2:] = torch.tensor([7, 2], device=DEVICE)  # empty
    return spans


def mask_of(spans, slots):
    """Return the mask [B, 1, Q, S] that spans stand for."""
    slot = torch.arange(slots, device=spans.device)
    return (slot >= spans[..., 0:1]) & (slot < spans[..., 1:2])


def spoil(spans, *caches):
    """Fill the slots that no query of a row sees with NaN."""
    unseen = ~mask_of(spans, caches[0].shape[2]).any(2)[..., None]
    return [cache.masked_fill_(unseen, torch.nan) for cache in caches]


# ---- the reference


@pytest.mark.parametrize("window", [None, 9])
def test_chunks_equal_attention_over_the_whole_prompt(window):
    query, key, value = torch.randn(1, 4, 50, 8), torch.randn(1, 2, 50, 8), torch.randn(1, 2, 50, 8)
    causal = mask_of(causal_spans(1, 50, 0, window=window).cpu(), 50)
    expected = functional.scaled_dot_product_attention(query, key, value, causal, enable_gqa=True).transpose(1, 2)
    cache = [torch.full((1, 2, 200, 8), torch.nan) for _ in range(2)]
    for start in range(0, 50, 20):
        end = min(start + 20, 50)
        cache[0][:, :, start:end], cache[1][:, :, start:end] = key[:, :, start:end], value[:, :, start:end]
        spans = causal_spans(1, end - start, start, window=window).cpu()
        got = attend_chunk_reference(query[:, :, start:end], *cache, spans, 8**-0.5)
        torch.testing.assert_close(got, expected[:, start:end])


def test_blind_queries_get_zeros():
    query, cache = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 30, 8)
    spans = causal_spans(2, 6, 10).cpu()
    spans[1, 0, 2, 1] = 0
    got = attend_chunk_reference(query, cache, cache, spans, 0.3)
    assert not got[1, 2].any() and got[0, 2].all()
    spans[..., 1] = 0
    assert not attend_chunk_reference(query, cache, cache, spans, 0.3).any()


def test_what_the_kernel_cannot_take_is_computed_in_torch():
    query, cache = randn(1, 2, 5, 8), randn(1, 2, 30, 8)
    spans = causal_spans(1, 5, 10)
    for given_ in ((query, cache, cache, spans.long(), 0.3), (query, cache, cache, spans, -0.3),
                   (query.double(), cache.double(), cache.double(), spans, 0.3)):  # fmt: skip
        assert torch.equal(attend_chunk(*given_), attend_chunk_reference(*given_))


def test_tiles_fit_in_shared_memory():
    for size in (16, 64, 80, 128, 256):
        tiles = tiles_for(size, torch.bfloat16, torch.device("cpu"))
        assert (tiles.queries + 2 * tiles.stages * tiles.keys) * size * 2 <= 227 << 10


def test_benchmark_times_ours_and_torch(tmp_path, capsys):
    sizes = ["--lengths", "40", "--chunks", "16,40", "--heads", "4/4", "4/2", "--size", "8", "--repeat", "1"]
    benchmark.main([*sizes, "--sweep", "--json", str(tmp_path / "result.json")])
    found = json.loads((tmp_path / "result.json").read_text())
    assert [(entry["heads"], entry["chunk"]) for entry in found] == [
        ([4, 4], 16), ([4, 4], 40), ([4, 2], 16), ([4, 2], 40)
    ]  # fmt: skip
    assert all(min(entry["ms"], entry["torch_ms"], entry["torch_chunks_ms"]) > 0 for entry in found)
    assert "40 tokens, heads 4/2, chunks of 16" in capsys.readouterr().out


# ---- the kernel


@on_kernels
@given(dtypes, seeds, st.integers(1, 3), st.sampled_from([(2, 2), (4, 2), (6, 1)]), st.integers(1, 300),
       st.integers(0, 500), st.sampled_from([64, 80, 128, 256]), st.integers(0, 40),
       st.sampled_from([None, 5, 60, 200]), st.sampled_from([None, 5.0]), st.booleans())  # fmt: skip
def test_kernel_prefill(dtype, seed, rows, heads, queries, before, size, padding, window, softcap, with_sinks):
    if INTERPRETED:
        rows, queries, before, size = 1 + rows % 2, 1 + queries % 70, before % 90, min(size, 80)
    torch.manual_seed(seed)
    query = randn(rows, heads[0], queries, size, dtype=dtype)
    spans = causal_spans(rows, queries, before, padding, window)
    spans[0, :, queries // 2, 1] = 0  # sees nothing
    key, value = spoil(spans, *(slot_major(rows, heads[1], before + queries + 150, size, dtype) for _ in range(2)))
    sinks = randn(heads[0], dtype=dtype) if with_sinks else None
    given_ = (query, key, value, spans, size**-0.5, softcap, sinks)
    expected = attend_chunk_reference(*given_)
    for tiles in (SMALL,) if INTERPRETED else (None, SMALL):
        assert_close(attend_chunk(*given_, tiles=tiles if dtype != torch.float32 or INTERPRETED else None), expected)


@on_kernels
@given(dtypes, seeds, st.integers(1, 80), st.sampled_from([16, 100, 300]), st.booleans())
def test_kernel_prefill_takes_any_spans(dtype, seed, queries, slots, empty):
    torch.manual_seed(seed)
    query, key, value = randn(2, 2, queries, 16, dtype=dtype), *(slot_major(2, 1, slots, 16, dtype) for _ in range(2))
    spans = torch.randint(0, slots + 1, (2, 1, queries, 4), device=DEVICE, dtype=torch.int32)
    spans[..., :2] = spans[..., :2].sort(-1, descending=empty).values
    given_ = (query, key, value, spans, 0.25)
    assert_close(attend_chunk(*given_, tiles=SMALL), attend_chunk_reference(*given_))


@on_kernels
@given(seeds, st.sampled_from([1, 33, 64]))
def test_kernel_prefill_reads_strided_queries_and_spans(seed, queries):
    torch.manual_seed(seed)
    query = randn(2, queries, 4, 32).transpose(1, 2)
    spans = torch.cat([causal_spans(2, queries, 40)] * 2, dim=1)[:, 1:].expand(2, 1, queries, 4)
    key, value = (slot_major(2, 2, 120, 32) for _ in range(2))
    given_ = (query, key, value, spans, 0.2)
    assert_close(attend_chunk(*given_, tiles=SMALL), attend_chunk_reference(*given_))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads, size", [((8, 8), 128), ((8, 2), 128), ((4, 4), 64), ((4, 2), 256), ((4, 2), 96)])
@pytest.mark.parametrize("before, queries, window", [(0, 1024, None), (3000, 1024, None), (2500, 777, 1000)])
def test_chunk_is_exact_within_rounding(dtype, heads, size, before, queries, window):
    torch.manual_seed(0)
    query = randn(2, heads[0], queries, size, dtype=dtype)
    spans = causal_spans(2, queries, before, 100 if before else 0, window)
    key, value = spoil(spans, *(slot_major(2, heads[1], before + queries + 200, size, dtype) for _ in range(2)))
    mask = mask_of(spans, key.shape[2])
    exact = (each.double().nan_to_num(0.0) for each in (query, key, value))
    expected = attend_reference(*exact, mask, size**-0.5)
    got = attend_chunk(query, key, value, spans, size**-0.5).double()
    seen = mask.sum(-1)[:, 0, :, None, None].clamp(min=1)  # the mean of n values is about 1 / sqrt(n)
    error = (got - expected).abs() * seen.sqrt()
    assert error.max() < 8 * torch.finfo(dtype).eps and got.isfinite().all()


@where_triton_runs
def test_one_build_serves_every_length():
    """Passes that are captured have 256 tokens and more; others may have any number, in any number of rows."""
    with recorded_dry_run() as recorded:
        for rows, queries in ((1, 256), (4, 257), (3, 300), (8, 66)):
            query, cache = randn(rows, 4, queries, 64), randn(rows, 2, 512, 64)
            spans = torch.zeros((rows, 1, queries, 4), dtype=torch.int32, device=DEVICE)
            attend_chunk(query, cache, cache, spans, scaling=0.125)
    assert len(recorded.launches) == 4 and len(recorded.specializations) == 1


@pytest.mark.gpu
def test_one_captured_chunk_serves_every_length():
    torch.manual_seed(0)
    query, key, value = (
        randn(1, 8, 256, 128, dtype=torch.bfloat16),
        *(slot_major(1, 2, 131072, 128, torch.bfloat16).fill_(torch.nan) for _ in range(2)),
    )
    spans = causal_spans(1, 256, 0)
    key[:, :, :256].normal_(), value[:, :, :256].normal_()
    attend_chunk(query, key, value, spans, 0.1)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend_chunk(query, key, value, spans, 0.1)
    for before in (0, 100, 5000, 100000, 131072 - 256):
        spans.copy_(causal_spans(1, 256, before, padding=min(before, 30)))
        key[:, :, : before + 256].normal_(), value[:, :, : before + 256].normal_()
        graph.replay()
        assert_close(out, attend_chunk_reference(query, key, value, spans, 0.1))


@pytest.mark.gpu
def test_offsets_exceed_32_bits():
    rows, heads, slots, size = 16, 8, 131072, 128  # 2^31 elements each
    key, value = (torch.empty(slots, rows, heads, size, dtype=torch.bfloat16, device="cuda").permute(1, 2, 0, 3)
                  for _ in range(2))  # fmt: skip
    query = randn(rows, heads, 64, size, dtype=torch.bfloat16)
    spans = causal_spans(rows, 64, slots - 64, padding=slots - 300)
    key[:, :, -300:].normal_(), value[:, :, -300:].normal_()
    got = attend_chunk(query, key, value, spans, 0.1)
    spans[..., :2] -= slots - 300
    assert_close(got, attend_chunk_reference(query, key[:, :, -300:], value[:, :, -300:], spans, 0.1))
