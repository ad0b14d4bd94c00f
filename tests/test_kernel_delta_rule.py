"""Kernels of gated delta networks: they equal their references, references equal transformers, at every rollback."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn import functional
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from hf_specbranch.kernels.delta_rule import DeltaGates, DeltaHeads, delta_rule, delta_rule_reference
from hf_specbranch.kernels.gated_norm import gated_norm, gated_norm_reference
from hf_specbranch.kernels.kept_states import KeptStates
from hf_specbranch.kernels.short_convolution import short_convolution, short_convolution_reference

from .kernels import DEVICE, ROUNDING, assert_close, dtypes, on_kernels, randn, seeds

HEADS = DeltaHeads(2, 4, 12, 20), DeltaHeads(1, 1, 16, 16), DeltaHeads(1, 2, 128, 128)
rows, tokens = st.integers(1, 3), st.integers(1, 16)


def kept_states(rows, tokens, shape, dtype, more=2):
    """States of noise for a pass that begins at another slot in each row."""
    states = randn((tokens + more) * rows, *shape, dtype=dtype)
    first = torch.randint(0, 40, (rows, 1), device=DEVICE)
    repeated = torch.randint(0, 3, (rows, 1), device=DEVICE)  # some rows begin with the same token more than once
    return KeptStates(states, first + (torch.arange(tokens, device=DEVICE) - repeated).clamp(min=0))


def with_repeated_tokens(x, slots):
    """The same token in the same slot."""
    first = (slots == slots[:, :1]).sum(1) - 1
    rows = torch.arange(len(x), device=x.device)
    return torch.where((slots == slots[:, :1])[..., None], x[rows, first][:, None], x)


def random_gates(rows, tokens, heads, dtype):
    columns = torch.randperm(3 * heads.value_heads, device=DEVICE)[: 2 * heads.value_heads].view(2, -1)
    x = 2 * randn(rows, tokens, 3 * heads.value_heads, dtype=dtype)
    return DeltaGates(x, *columns, randn(heads.value_heads, dtype=dtype), randn(heads.value_heads, dtype=dtype))


def random_delta_rule(rows, tokens, heads, dtype):
    mixed = randn(rows, tokens, 2 * heads.key_heads * heads.key_size + heads.value_heads * heads.value_size)
    kept = kept_states(rows, tokens, (heads.value_heads, *heads[2:]), torch.float32)
    gates = random_gates(rows, tokens, heads, dtype)
    mixed = with_repeated_tokens(mixed.to(dtype), kept.slots)
    return mixed, gates._replace(x=with_repeated_tokens(gates.x, kept.slots)), heads, kept


def random_convolution(rows, tokens, channels, taps, biased, dtype):
    x = randn(rows, tokens, channels + 7, dtype=dtype)
    columns = torch.randperm(channels + 7, device=DEVICE)[:channels]
    bias = randn(channels, dtype=dtype) if biased else None
    kept = kept_states(rows, tokens, (channels, taps), dtype)
    return with_repeated_tokens(x, kept.slots), columns, randn(channels, taps, dtype=dtype), bias, "silu", kept


def assert_same(kernel, reference, *arguments):
    """The output, and all states that are kept: none but those after the tokens may change."""
    *given, kept = arguments
    again = KeptStates(kept.states.clone(), kept.slots)
    got, expected = kernel(*given, kept), reference(*given, again)
    assert_close(got, expected)
    rounding = max(1e-4, ROUNDING[got.dtype])
    torch.testing.assert_close(kept.states, again.states, atol=rounding, rtol=rounding)


@on_kernels
@given(dtypes, seeds, rows, tokens, st.sampled_from(HEADS))
@example(torch.float32, 0, 2, 8, HEADS[2])
def test_kernel_delta_rule(dtype, seed, rows, tokens, heads):
    torch.manual_seed(seed)
    assert_same(delta_rule, delta_rule_reference, *random_delta_rule(rows, tokens, heads, dtype))


@on_kernels
@given(dtypes, seeds, rows, tokens, st.integers(1, 300), st.integers(2, 4), st.booleans())
@example(torch.float32, 0, 2, 8, 256, 4, False)
def test_kernel_short_convolution(dtype, seed, rows, tokens, channels, taps, biased):
    torch.manual_seed(seed)
    given = random_convolution(rows, tokens, channels, taps, biased, dtype)
    assert_same(short_convolution, short_convolution_reference, *given)


@on_kernels
@given(dtypes, seeds, rows, tokens, st.integers(1, 4), st.sampled_from([16, 20, 128]))
def test_kernel_gated_norm(dtype, seed, rows, tokens, heads, size):
    torch.manual_seed(seed)
    x, gate = randn(rows, tokens, heads, size, dtype=dtype), randn(rows, tokens, heads * size + 5, dtype=dtype)
    columns = torch.randperm(heads * size + 5, device=DEVICE)[: heads * size]
    given = x, randn(size, dtype=dtype), 1e-6, gate, columns
    assert_close(gated_norm(*given), gated_norm_reference(*given))


@pytest.mark.parametrize("heads", HEADS[:2])
def test_delta_rule_equals_transformers_from_any_kept_state(heads):
    torch.manual_seed(0)
    mixed, gates, _, kept = random_delta_rule(2, 5, heads, torch.float32)
    widths = [heads.key_heads * heads.key_size] * 2 + [heads.value_heads * heads.value_size]
    parts = torch.split(mixed, widths, dim=-1)
    q, k, v = (part.unflatten(-1, (-1, size)) for part, size in zip(parts, (*[heads.key_size] * 2, heads.value_size)))
    share = heads.value_heads // heads.key_heads
    g = -gates.a_log.exp() * functional.softplus(gates.x[..., gates.a] + gates.dt_bias)
    beta = gates.x[..., gates.b].sigmoid()
    own = qwen3_next.torch_recurrent_gated_delta_rule
    got = delta_rule(mixed, gates, heads, kept)
    for token in range(5):
        one = slice(token, token + 1)
        expected, states = own(
            q[:, one].repeat_interleave(share, 2), k[:, one].repeat_interleave(share, 2), v[:, one], g=g[:, one],
            beta=beta[:, one], initial_state=kept.before(token), output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        torch.testing.assert_close(got[:, one], expected, atol=1e-5, rtol=1e-4)
        after = KeptStates(kept.states, kept.slots + 1)
        torch.testing.assert_close(after.before(token), states, atol=1e-5, rtol=1e-4)


def test_convolution_equals_transformers_token_by_token():
    torch.manual_seed(0)
    x, columns, weight, bias, activation, kept = random_convolution(2, 5, 11, 4, False, torch.float32)
    got = short_convolution(x, columns, weight, bias, activation, kept)
    for token in range(5):
        window = kept.before(token)
        given = x[:, token : token + 1, columns].transpose(1, 2)
        expected = qwen3_next.causal_conv1d_update(given, window, weight, None, activation)  # in place
        torch.testing.assert_close(got[:, token], expected[..., 0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(KeptStates(kept.states, kept.slots + 1).before(token), window)
