"""Layers over several tokens compute norms and sums in their products, if all of these have plans for so many rows."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specbranch.kernels import autotune, autotune_fused
from hf_specbranch.kernels.autotune import PlanCache
from hf_specbranch.kernels.linear import Plan
from hf_specbranch.kernels.norm import add_norm, normalise
from hf_specbranch.kernels.rotary import rotary
from hf_specbranch.kernels.spans import SPANS
from hf_specbranch.layers import fuse, fused, product
from hf_specbranch.runtime.kv_cache import SlotCache

from .families import make_tiny
from .kernels import DEVICE, where_triton_runs

KEY = "GPU|float16 dense|{rows}|{product}"
PRODUCTS = ("192x128|normed", "128x128|whole", "512x128|normed-gated", "128x256|whole")  # of the layer of `model`
BY_THEMSELVES = {  # kernels of norms, sums and rotary embeddings, where layers launch them
    "hf_specbranch.layers.norm.normalise": normalise,
    "hf_specbranch.layers.product.normalise": normalise,
    "hf_specbranch.layers.decoder_layer.add_norm": add_norm,
    "hf_specbranch.layers.attention.rotary": rotary,
}
PROMPT = 5  # tokens


@pytest.fixture
def shipped(monkeypatch, tmp_path):
    """The plans that are shipped for this device, which is a GPU as far as plans are concerned: none at first."""

    def find(weight, *given):
        return autotune_fused.autotune_fused(
            SimpleNamespace(is_cuda=True, device=None, dtype=weight.dtype, shape=weight.shape), *given
        )

    plans = PlanCache(tmp_path / "products.json", tmp_path / "none.json")
    monkeypatch.setattr(autotune, "plans", plans)
    monkeypatch.setattr(autotune_fused, "gpu_and_versions", lambda device: "GPU|torch|triton")
    monkeypatch.setattr(product, "autotune_fused", find)
    return plans.shipped


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels of norms, sums and rotary embeddings that layers launch by themselves."""
    names = []
    for path, function in BY_THEMSELVES.items():
        monkeypatch.setattr(path, counted(function, names))
    return names


def counted(function, names):
    return lambda *given, **named: (names.append(function.__name__), function(*given, **named))[1]


def ship(shipped, rows, products=PRODUCTS, plan=Plan(1, 0, 16, 2, 1)):  # noqa: B008
    shipped.update({KEY.format(rows=rows, product=each): plan for each in products})


@pytest.fixture(scope="module")
def model():
    sizes = dict(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4)
    config = LlamaConfig(**sizes, num_key_value_heads=1, head_dim=32, pad_token_id=0)
    tiny = make_tiny(lambda: LlamaForCausalLM(config)).to(DEVICE, torch.float16)
    fuse(tiny)
    logits(tiny, 1, 3, context=fused)  # examines the modules
    return tiny


def logits(model, batch, tokens, by_spans=False, context=None):
    """Return the logits of tokens after a prompt, some of them on a branch, in scattered slots."""
    drawn = torch.Generator().manual_seed(0)
    prompt, given = (torch.randint(1, 64, (batch, n), generator=drawn).to(DEVICE) for n in (PROMPT, tokens))
    places = torch.stack([torch.randperm(11, generator=drawn)[:tokens] + PROMPT for _ in range(batch)]).to(DEVICE)
    positions = torch.full((batch, tokens), PROMPT, device=DEVICE)
    spans = torch.stack([positions * 0, positions, places, places + 1], -1)  # the prompt and the token itself
    slots = torch.arange(16, device=DEVICE)
    first, end, own, own_end = spans[..., None].unbind(2)
    seen = ((slots >= first) & (slots < end)) | ((slots >= own) & (slots < own_end))  # [B, Q, S]
    cache = SlotCache()
    with torch.no_grad():
        model(prompt, past_key_values=cache, use_cache=True)
        cache.address.point_at(places, 16)
        mask = spans.to(SPANS)[:, None] if by_spans else seen[:, None]
        call = dict(input_ids=given, attention_mask=mask, position_ids=positions, past_key_values=cache)
        if context is None:
            return model(**call).logits
        with context(model):
            return model(**call).logits


@where_triton_runs
@pytest.mark.parametrize(
    ("batch", "tokens", "by_spans", "rows"),
    [(1, 2, False, "4 rows"), (1, 4, True, "4 rows"), (2, 2, True, "4 rows"), (1, 7, True, "8 rows")],
)
def test_layers_over_several_tokens_launch_products_and_attention_alone(
    model, shipped, launched, batch, tokens, by_spans, rows
):
    """The model launches one norm, the last."""
    expected = logits(model, batch, tokens)
    ship(shipped, rows)
    got = logits(model, batch, tokens, by_spans, fused)
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)
    assert launched == ["normalise"]


@where_triton_runs
@pytest.mark.parametrize("missing", PRODUCTS)
def test_layers_run_in_norms_if_a_product_has_no_plan(model, shipped, launched, missing):
    expected = logits(model, 2, 2)
    logits(model, 2, 2, context=fused)
    in_norms = launched.copy()
    launched.clear()
    ship(shipped, "4 rows", [each for each in PRODUCTS if each != missing])
    ship(shipped, "8 rows")
    torch.testing.assert_close(logits(model, 2, 2, context=fused), expected, atol=2e-2, rtol=2e-2)
    assert launched == in_norms and launched.count("add_norm") == 2 and launched.count("rotary") == 1


@where_triton_runs
def test_products_of_one_layer_may_have_different_plans(model, shipped, launched):
    expected = logits(model, 1, 4)
    plans = Plan(1, 0, 16, 1, 1), Plan(1, 0, 16, 1, 2), Plan(1, 1, 16, 1, 1), Plan(1, 1, 16, 2, 1)
    for each, plan in zip(PRODUCTS, plans):
        ship(shipped, "4 rows", [each], plan)
    torch.testing.assert_close(logits(model, 1, 4, True, fused), expected, atol=2e-2, rtol=2e-2)
    assert launched == ["normalise"]


def test_each_number_of_rows_has_its_plans(shipped):
    """Those of another number are not taken, and only one row is measured."""
    weight, tuned = torch.zeros((128, 128), dtype=torch.float16), product.Tuned()
    tuned.find_weights = lambda: pytest.fail("measured")
    for most in (1, 4, 8):
        ship(shipped, f"{most} rows", ["128x128|whole"], Plan(1, 0, 16, 1, most))
    found = [tuned.fused(torch.zeros((1, rows, 128)), weight, "whole") for rows in range(1, 10)]
    assert [plan and plan.spans for plan in found] == [1, 4, 4, 4, 8, 8, 8, 8, None]
    shipped.clear()
    ship(shipped, "1 rows", ["128x128|whole"])
    assert [tuned.fused(torch.zeros((1, rows, 128)), weight, "whole") for rows in (0, 2, 4, 8)] == [None] * 4
