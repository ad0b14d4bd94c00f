"""The gated delta rule over a few tokens, which keeps the state after every token.

For each head, with unit vectors q and k and a state S of [K, V]:

    S = exp(g) * S
    S = S + beta * k (v - k S)
    out = q S / sqrt(K)

where g = -exp(A_log) * softplus(a + dt_bias) and beta = sigmoid(b).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .backend import (
    Value,
    can_run,
    constexpr,
    dependent_launch,
    launch_dependents,
    power_of_two,
    tl,
    triton,
    varying,
    wait_for_dependencies,
)
from .kept_states import KeptStates

_EPS = 1e-6  # of the norm of q and k
# Values of a head in a program. With 128 keys, a warp then holds its part of the state in 32 registers per thread (with
# 16 values, registers are spilled), and sums over the keys need no shared memory.
_BLOCK = 8


class DeltaHeads(NamedTuple):
    """The sizes of the heads. Several value heads may share the q and k of one key head."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int


class DeltaGates(NamedTuple):
    """What decides how much a head forgets (`a`) and learns (`b`)."""

    x: Tensor  # [B, Q, N], a product that holds a and b
    a: Tensor  # [H] the column of each value head
    b: Tensor  # [H]
    a_log: Tensor  # [H]
    dt_bias: Tensor  # [H]


def delta_rule(mixed: Tensor, gates: DeltaGates, heads: DeltaHeads, kept: KeptStates) -> Tensor:
    """Apply the gated delta rule to the tokens of a pass, and keep the state after each of them.

    Args:
        mixed: [B, Q, 2 * key_heads * K + H * V]: q of all key heads, k of all key heads, v of all value heads.
        gates: how much each head forgets and learns.
        heads: their sizes.
        kept: states [size * B, H, K, V].

    Returns:
        [B, Q, H, V].

    Example:
        >>> from hf_specbranch.kernels.kept_states import empty_states
        >>> heads, kept = DeltaHeads(1, 2, 4, 8), empty_states(3, 5, (2, 4, 8), torch.float32, torch.device("cpu"))
        >>> gates = DeltaGates(torch.ones(3, 5, 4), *torch.arange(4).view(2, 2), torch.zeros(2), torch.zeros(2))
        >>> delta_rule(torch.ones(3, 5, 24), gates, heads, kept).shape
        torch.Size([3, 5, 2, 8])
    """
    if not can_run(mixed, gates.x) or kept.states.dtype != torch.float32:
        return delta_rule_reference(mixed, gates, heads, kept)
    rows, tokens, width = mixed.shape
    out = mixed.new_empty((rows, tokens, heads.value_heads, heads.value_size))
    block = min(_BLOCK, power_of_two(heads.value_size))
    _delta_rule_kernel[(triton.cdiv(heads.value_size, block), heads.value_heads, rows)](
        mixed.contiguous(), gates.x.contiguous(), gates.a, gates.b, gates.a_log, gates.dt_bias, kept.states,
        kept.slots.contiguous(), out, tokens, rows, width, gates.x.shape[-1], kept.size, heads.key_size**-0.5,
        KEY_HEADS=heads.key_heads, HEADS=heads.value_heads, KEYS=heads.key_size, VALUES=heads.value_size, EPS=_EPS,
        BLOCK_KEYS=power_of_two(heads.key_size), BLOCK=block, num_warps=1, **dependent_launch(mixed.device),
    )  # fmt: skip
    return out


def delta_rule_reference(mixed: Tensor, gates: DeltaGates, heads: DeltaHeads, kept: KeptStates) -> Tensor:
    """Compute what `delta_rule` does, in plain torch."""
    widths = [heads.key_heads * heads.key_size] * 2 + [heads.value_heads * heads.value_size]
    q, k, v = torch.split(mixed.float(), widths, dim=-1)
    v = v.reshape(*v.shape[:2], -1, heads.value_size)
    q, k = (_unit_vectors(each.reshape(*each.shape[:2], -1, heads.key_size), heads) for each in (q, k))
    q = q / heads.key_size**0.5
    softplus = functional.softplus(gates.x[..., gates.a].float() + gates.dt_bias)
    g = (-gates.a_log.float().exp() * softplus).float()  # [B, Q, H]
    beta = gates.x[..., gates.b].sigmoid().float()
    outputs = []
    for token in range(mixed.shape[1]):
        key = k[:, token, :, :, None]
        state = kept.before(token).float() * g[:, token].exp()[..., None, None]  # [B, H, K, V]
        learnt = (v[:, token] - (state * key).sum(-2)) * beta[:, token, :, None]
        state = state + key * learnt[..., None, :]
        kept.put(token, state)
        outputs.append((state * q[:, token, :, :, None]).sum(-2))
    return torch.stack(outputs, dim=1).to(mixed.dtype)


def _unit_vectors(x: Tensor, heads: DeltaHeads) -> Tensor:
    """[B, Q, key_heads, K] -> [B, Q, H, K]"""
    unit = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)
    return unit.repeat_interleave(heads.value_heads // heads.key_heads, dim=2)


@varying("tokens", "rows", "size")
def _delta_rule_kernel(
    mixed: Value,
    gates: Value,
    a_columns: Value,
    b_columns: Value,
    a_log: Value,
    dt_bias: Value,
    states: Value,
    slots: Value,
    out: Value,
    tokens: Value,
    rows: Value,
    width: Value,
    gates_width: Value,
    size: Value,
    scale: Value,
    KEY_HEADS: constexpr,
    HEADS: constexpr,
    KEYS: constexpr,
    VALUES: constexpr,
    EPS: constexpr,
    BLOCK_KEYS: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    key = tl.arange(0, BLOCK_KEYS)
    value = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known_keys, known_values = key < KEYS, value < VALUES
    inside = known_keys[:, None] & known_values[None, :]
    a_column, b_column = tl.load(a_columns + head), tl.load(b_columns + head)
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    shift = tl.load(dt_bias + head).to(tl.float32)
    q_column = head // (HEADS // KEY_HEADS) * KEYS + key
    k_column = KEY_HEADS * KEYS + q_column
    v_column = 2 * KEY_HEADS * KEYS + head * VALUES + value
    place = head * (KEYS * VALUES) + key[:, None] * VALUES + value[None, :]
    wait_for_dependencies(PDL)
    first_slot = tl.load(slots + row * tokens)
    first = (first_slot % size * rows + row) * (HEADS * KEYS * VALUES)
    state = tl.zeros((BLOCK_KEYS, BLOCK), tl.float32)
    for token in range(tokens):
        at = row * tokens + token
        slot = tl.load(slots + at)
        if slot == first_slot:  # the first token, perhaps once more
            state = tl.load(states + first + place, mask=inside, other=0.0)
        q = tl.load(mixed + at * width + q_column, mask=known_keys, other=0.0).to(tl.float32)
        k = tl.load(mixed + at * width + k_column, mask=known_keys, other=0.0).to(tl.float32)
        v = tl.load(mixed + at * width + v_column, mask=known_values, other=0.0).to(tl.float32)
        a = tl.load(gates + at * gates_width + a_column).to(tl.float32) + shift
        b = tl.load(gates + at * gates_width + b_column)
        q = q * (tl.rsqrt(tl.sum(q * q, 0) + EPS) * scale)
        k = k * tl.rsqrt(tl.sum(k * k, 0) + EPS)
        softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        beta = (1.0 / (1.0 + tl.exp(-b.to(tl.float32)))).to(b.dtype).to(tl.float32)
        state = state * tl.exp(-rate * softplus)
        learnt = (v - tl.sum(state * k[:, None], 0)) * beta
        state = state + k[:, None] * learnt[None, :]
        result = tl.sum(state * q[:, None], 0)
        tl.store(out + (at * HEADS + head) * VALUES + value, result.to(out.dtype.element_ty), mask=known_values)
        entry = (slot + 1) % size * rows + row
        tl.store(states + entry * (HEADS * KEYS * VALUES) + place, state, mask=inside)
