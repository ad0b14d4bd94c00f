"""Layers with norms before and after attention and MLP leave the norms between both to the product of gate and up."""

from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, Glm4Config

from hf_specbranch.kernels import attention
from hf_specbranch.kernels.combine import SplitHeads
from hf_specbranch.kernels.linear import Plan
from hf_specbranch.kernels.spans import SPANS
from hf_specbranch.layers import decoder_layer, fuse, fused, product
from hf_specbranch.layers.product import Tuned
from hf_specbranch.runtime.kv_cache import SlotCache

from .families import make_tiny
from .kernels import DEVICE, where_triton_runs

LAYERS, PLAN = 2, Plan(1, 0, 16, 2, 1)
FAMILIES = {"gemma2": Gemma2Config, "gemma3": Gemma3TextConfig, "glm4": Glm4Config}


@cache
def tiny(family):
    sizes = dict(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS, pad_token_id=0)
    shape = FAMILIES[family](**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    model = make_tiny(lambda: AutoModelForCausalLM.from_config(shape)).to(DEVICE, torch.float16)
    fuse(model)
    return model


@torch.no_grad()
def logits(model, tokens=1, kernels=True):
    """Return the logits of tokens after a prompt that is in the slots of a cache."""
    prompt, given = torch.arange(5, 13, device=DEVICE)[None], torch.arange(20, 20 + tokens, device=DEVICE)[None]
    places, cache = torch.arange(8, 8 + tokens, device=DEVICE)[None], SlotCache()
    model(prompt, past_key_values=cache, use_cache=True)
    cache.address.point_at(places, 16)
    spans = torch.tensor([[[[0, 9 + row, 0, 0] for row in range(tokens)]]], dtype=SPANS, device=DEVICE)
    seen = torch.arange(16, device=DEVICE) < spans[..., 1:2]
    call = dict(input_ids=given, position_ids=places, past_key_values=cache)
    if not kernels:
        bias = torch.zeros(seen.shape, dtype=model.dtype, device=DEVICE)
        return model(**call, attention_mask=bias.masked_fill(~seen, torch.finfo(model.dtype).min)).logits
    with fused(model):
        return model(**call, attention_mask=spans).logits


def counted(monkeypatch, module, name):
    calls, function = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given, **named: calls.append(1) or function(*given, **named))
    return calls


def with_plans(monkeypatch, plans):
    """Give products plans by their kind, or by their shape and kind."""
    find = lambda tuned, x, weight, kind: plans.get((*weight.shape, kind), plans.get(kind))  # noqa: E731
    monkeypatch.setattr(Tuned, "fused", find)


@where_triton_runs
@pytest.mark.parametrize("family", FAMILIES)
def test_no_kernel_runs_between_attention_and_mlp_but_their_products(family, monkeypatch):
    """A layer launches one norm, at its end; without plans, or for two tokens, it launches two."""
    model = tiny(family)
    expected = [logits(model, tokens, kernels=False) for tokens in (1, 2)]
    with_plans(monkeypatch, {})
    torch.testing.assert_close(logits(model), expected[0], atol=2e-2, rtol=2e-2)
    norms, sums = counted(monkeypatch, decoder_layer, "add_norm"), counted(monkeypatch, product, "gated_of_sum")
    monkeypatch.setattr(attention, "multiprocessors", lambda device: 16)
    monkeypatch.setattr(SplitHeads, "combined", lambda heads: pytest.fail("the product combines splits"))
    with_plans(monkeypatch, {"whole": PLAN, "normed-gated": PLAN})
    torch.testing.assert_close(logits(model), expected[0], atol=2e-2, rtol=2e-2)
    assert (len(norms), len(sums)) == (LAYERS, LAYERS)
    monkeypatch.undo()
    norms, sums = counted(monkeypatch, decoder_layer, "add_norm"), counted(monkeypatch, product, "gated_of_sum")
    with_plans(monkeypatch, {"whole": PLAN, "normed-gated": PLAN})
    torch.testing.assert_close(logits(model, tokens=2), expected[1], atol=2e-2, rtol=2e-2)
    assert (len(norms), len(sums)) == (2 * LAYERS, 0)


@where_triton_runs
@pytest.mark.parametrize(
    ("plans", "sums"),
    [
        ({(128, 128, "whole"): PLAN, "normed-gated": PLAN}, LAYERS),  # q, k, v and down run as they do elsewhere
        ({"whole": PLAN}, 0),
        ({"normed-gated": PLAN}, 0),
        ({"whole": PLAN, "normed-gated": PLAN._replace(stages=1)}, 0),
    ],
)
def test_plans_decide_where_the_sum_is_computed(plans, sums, monkeypatch):
    model = tiny("gemma3")
    expected = logits(model, kernels=False)
    with_plans(monkeypatch, plans)
    calls = counted(monkeypatch, product, "gated_of_sum")
    torch.testing.assert_close(logits(model), expected, atol=2e-2, rtol=2e-2)
    assert len(calls) == sums


@where_triton_runs
def test_norms_in_float32_are_computed_by_a_kernel(monkeypatch):
    """Some models keep the weights of norms so. The product takes weights of its own dtype."""
    model = tiny("gemma3")
    with_plans(monkeypatch, {"whole": PLAN, "normed-gated": PLAN})
    for layer in model.model.layers:
        norm = layer.pre_feedforward_layernorm
        monkeypatch.setattr(norm.weight, "data", norm.weight.float())
    expected, calls = logits(model, kernels=False), counted(monkeypatch, product, "gated_of_sum")
    torch.testing.assert_close(logits(model), expected, atol=2e-2, rtol=2e-2)
    assert not calls
