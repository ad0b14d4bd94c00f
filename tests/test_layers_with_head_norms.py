"""Layers that normalise the heads of q and k: for one token that takes no kernel by itself."""

from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from hf_specbranch.kernels.attention import finishes_norms
from hf_specbranch.kernels.linear import Plan
from hf_specbranch.kernels.spans import SPANS
from hf_specbranch.layers import attention, fuse, fused
from hf_specbranch.layers.product import Tuned
from hf_specbranch.runtime.kv_cache import SlotCache

from .families import make_tiny
from .kernels import DEVICE, where_triton_runs

PLAN = Plan(1, 0, 16, 1, 1)
TOKENS = (20, 31)


@cache
def tiny():
    sizes = dict(vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=1, pad_token_id=0)
    shape = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    model = make_tiny(lambda: AutoModelForCausalLM.from_config(shape)).to(DEVICE, torch.float16)
    fuse(model)
    return model


@torch.no_grad()
def logits(model, kernels=True):
    """Return the logits of some tokens after a prompt, one after the other: each reads the keys of those before it."""
    prompt, cache, found = torch.arange(5, 13, device=DEVICE)[None], SlotCache(), []
    model(prompt, past_key_values=cache, use_cache=True)
    for place, token in enumerate(TOKENS, start=prompt.shape[1]):
        places = torch.tensor([[place]], device=DEVICE)
        cache.address.point_at(places, 16)
        call = dict(input_ids=torch.tensor([[token]], device=DEVICE), position_ids=places, past_key_values=cache)
        if kernels:
            spans = torch.tensor([[[[0, place + 1, 0, 0]]]], dtype=SPANS, device=DEVICE)
            with fused(model):
                found.append(model(**call, attention_mask=spans).logits)
        else:
            bias = torch.zeros((1, 1, 1, 16), dtype=model.dtype, device=DEVICE)
            bias[..., place + 1 :] = torch.finfo(model.dtype).min
            found.append(model(**call, attention_mask=bias).logits)
    return torch.cat(found, dim=1)


@where_triton_runs
@pytest.mark.parametrize("left", [True, False])
def test_norms_of_heads_are_left_to_attention(left, monkeypatch):
    """Not in float16, where numbers before a norm may be too large: here that is allowed for the test."""
    model = tiny()
    expected = logits(model, kernels=False)
    logits(model)  # layers are compared with the model's own before they are replaced
    kinds = ("whole", "normed", "normed-gated")
    monkeypatch.setattr(Tuned, "fused", lambda tuned, x, weight, kind: PLAN if kind in kinds else None)
    if left:
        monkeypatch.setattr(attention, "finishes_norms", lambda *given: True)
    calls, kernel = [], attention.rotary
    monkeypatch.setattr(attention, "rotary", lambda *given: calls.append(1) or kernel(*given))
    torch.testing.assert_close(logits(model), expected, atol=3e-2, rtol=3e-2)
    assert len(calls) == (0 if left else len(TOKENS))


def test_norms_are_left_to_attention_where_one_program_has_all_queries_of_a_key():
    assert finishes_norms(16, 1, torch.bfloat16) and finishes_norms(32, 2, torch.bfloat16)
    assert not finishes_norms(17, 1, torch.bfloat16)
    assert not finishes_norms(16, 1, torch.float16)
