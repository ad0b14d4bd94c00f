"""What the tests of kernels share.

Kernels run on a GPU, or on the CPU under Triton's interpreter (`TRITON_INTERPRET=1`).
"""

import math

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from hf_specbranch.kernels.backend import INTERPRETED
from hf_specbranch.kernels.linear import Partials
from hf_specbranch.runtime.kv_cache import SlotCache

DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
# The interpreter truncates where bfloat16 should be rounded, so bfloat16 is tested on a GPU only.
DTYPES = (torch.float32, torch.float16) if DEVICE == "cpu" else (torch.float32, torch.float16, torch.bfloat16)
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # about two units in the last place


def where_triton_runs(test):
    """Run a test on a GPU, or under the interpreter."""
    return test if INTERPRETED else pytest.mark.gpu(test)


def on_kernels(test):
    """Run a test where Triton runs, with few examples where it is slow."""
    few = settings(
        max_examples=6 if INTERPRETED else 8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
    )
    return where_triton_runs(few(test))


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def assert_close(got, expected):
    assert got.isfinite().all()
    rounding = ROUNDING[expected.dtype]
    torch.testing.assert_close(got, expected, rtol=rounding, atol=rounding)


dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 99)


def partials_and_sum(shape, splits, dtype):
    """Return split-K partials of a product, and the product."""
    partials = Partials(randn(splits, math.prod(shape[:-1]), shape[-1]), torch.Size(shape), dtype)
    total = partials.terms[0]
    for term in partials.terms[1:]:
        total = total + term
    return partials, total.to(dtype).view(shape)


def logits_over_branches(model, context=None, device="cpu"):
    """Return the logits of two branches after a prompt, in scattered slots of one cache."""
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
