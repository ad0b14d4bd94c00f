"""The experts of a mixture, for a few tokens: gate and up product with activation, then down product and weighted sum.

Both products are bound by reading the weights of the touched experts once (`routing.Touched`). An expert multiplies all
tokens of the pass: a tensor core tile has room for them, and nothing needs to be gathered or sorted. Activations of
tokens that did not choose the expert are zero, the others are multiplied by the token's weight, and the down product
adds over all experts:

    a[s, t] = share[s, t] * gate(W_gate_up[e_s] x[t] + b_gate_up[e_s])
    y[t]    = sum over s of (W_down[e_s] a[s, t] + share[s, t] * b_down[e_s])

The down product is divided among programs by its inner steps, over all experts one after the other. Its partials are
summed by the next norm, as those of other products are.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .activation import activate
from .backend import (
    Value,
    can_run,
    constexpr,
    dependent_launch,
    launch_dependents,
    multiprocessors,
    power_of_two,
    tl,
    triton,
    varying,
    wait_for_dependencies,
)
from .gated import apply_gate
from .linear import BLOCK, MOST_ROWS, STRIP, Partials, Plan
from .routing import Touched

MOST_SPLITS = 8


class Gate(NamedTuple):
    """How an expert combines the two halves of its first product: act(gate) * up, or clamped as in gpt-oss."""

    activation: Literal["silu", "gelu_tanh", "clamped"]
    interleaved: bool = False  # gate and up alternate; otherwise the gate's columns come first
    alpha: float = 1.0  # clamped: min(gate, limit) * sigmoid(alpha * min(gate, limit)) * (clip(up, limit) + 1)
    limit: float = 0.0

    def __call__(self, both: Tensor) -> Tensor:
        """Return the activations [..., I] of a product [..., 2 * I], in plain torch."""
        gate, up = (both[..., ::2], both[..., 1::2]) if self.interleaved else both.chunk(2, dim=-1)
        if self.activation != "clamped":
            return activate(gate, self.activation) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(self.alpha * gate))


class Experts(NamedTuple):
    """The weights of all experts of a layer."""

    gate_up: Tensor  # [E, 2 * I, H], of any strides
    down: Tensor  # [E, H, I], of any strides
    gate_up_bias: Tensor | None  # [E, 2 * I]
    down_bias: Tensor | None  # [E, H]
    gate: Gate


class Addend(NamedTuple):
    """What is added to the output of the experts: that of a shared expert."""

    values: Tensor  # [T, H]
    gate: Tensor | None = None  # [T, 1]: the values are multiplied by its sigmoid


def apply_experts(
    x: Tensor, touched: Touched, experts: Experts, addend: Addend | None = None, plan: Plan | None = None
) -> Partials:
    """Return the weighted sum of the chosen experts' outputs.

    Args:
        x: [T, H].
        touched: the experts that the tokens touch, and the weight of each for each token.
        experts: all experts of the layer; see `fits`.
        addend: added to the result.
        plan: splits of the down product, and stages of both for steps of `BLOCK` elements; None: the usual one.

    Returns:
        [T, H], as partials.
    """
    plan = plan or usual_plan(experts)
    rows, depth = x.shape
    size, slots = experts.down.shape[2], touched.experts.shape[0]
    hidden = x.new_empty((slots, rows, size))
    weight, bias = experts.gate_up, experts.gate_up_bias
    block, height = block_of(depth), 16 if rows <= 16 else 32
    # Programs of slots that are not in use end at once.
    _gate_up_kernel[(triton.cdiv(size, STRIP // 2), slots)](
        x, weight, weight if bias is None else bias, *touched, hidden, rows, size, depth, x.stride(0), *weight.stride(),
        BIAS=bias is not None, TANH=experts.gate.activation == "gelu_tanh",
        CLAMPED=experts.gate.activation == "clamped", INTERLEAVED=experts.gate.interleaved, ALPHA=experts.gate.alpha,
        LIMIT=experts.gate.limit, EVEN=size % (STRIP // 2) == 0, ROWS=height, STRIP=STRIP, BLOCK=block,
        num_warps=4, num_stages=stages(plan, block, x.dtype), **dependent_launch(x.device),
    )  # fmt: skip
    weight, bias, block = experts.down, experts.down_bias, block_of(size)
    strips, splits = triton.cdiv(depth, STRIP), plan.splits
    terms = x.new_empty((splits, rows, depth), dtype=torch.float32)
    values, scale = (x, x) if addend is None else (addend.values, x if addend.gate is None else addend.gate)
    _down_kernel[(strips, splits)](
        hidden, weight, weight if bias is None else bias, *touched, values, scale, terms, rows, size, depth,
        *weight.stride(), BIAS=bias is not None, ADD=addend is not None,
        GATED=addend is not None and addend.gate is not None, EVEN=depth % STRIP == 0,
        MOST=power_of_two(triton.cdiv(slots, splits) + 1, 32), ROWS=height, STRIP=STRIP, BLOCK=block,
        num_warps=4, num_stages=stages(plan, block, x.dtype), **dependent_launch(x.device),
    )  # fmt: skip
    return Partials(terms, x.shape, x.dtype)


def apply_experts_reference(
    x: Tensor, index: Tensor, weights: Tensor, experts: Experts, addend: Addend | None = None
) -> Tensor:
    """Compute what `apply_experts` does in plain torch, from the choices [T, k] and their weights."""
    both = torch.einsum("tknh,th->tkn", experts.gate_up[index], x)
    if experts.gate_up_bias is not None:
        both = both + experts.gate_up_bias[index]
    out = torch.einsum("tkhn,tkn->tkh", experts.down[index], experts.gate(both))
    if experts.down_bias is not None:
        out = out + experts.down_bias[index]
    total = (out * weights[..., None]).sum(1).to(x.dtype)
    if addend is None:
        return total
    return total + (addend.values if addend.gate is None else functional.sigmoid(addend.gate) * addend.values)


def fits(x: Tensor, experts: Experts, addend: Addend | None = None) -> bool:
    """Return whether the kernels can compute this."""
    depth, size = experts.down.shape[1:]
    added = (addend.values, addend.gate) if addend is not None else ()
    return (
        can_run(x, experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias, *added)
        and x.dim() == 2
        and 0 < x.shape[0] <= MOST_ROWS
        and x.stride(-1) == 1
        and depth % 16 == size % 16 == 0
        and all(tensor.is_contiguous() for tensor in added if tensor is not None)
        and all(1 in weight.stride()[1:] for weight in (experts.gate_up, experts.down))
        and all(bias is None or bias.is_contiguous() for bias in (experts.gate_up_bias, experts.down_bias))
    )


def block_of(depth: int) -> int:
    """Return the elements of the inner dimension per step: as many as divide it."""
    return next(block for block in (BLOCK, BLOCK // 2, BLOCK // 4, 16) if depth % block == 0)


def stages(plan: Plan, block: int, dtype: torch.dtype) -> int:
    """Return the stages of the software pipeline: the same bytes in flight for steps of any size."""
    return min(8, 2 * plan.stages * BLOCK // (block * dtype.itemsize))


def usual_plan(experts: Experts) -> Plan:
    """Return a plan that gives the down product two programs for each multiprocessor."""
    strips = triton.cdiv(experts.down.shape[1], STRIP)
    programs = 2 * multiprocessors(experts.down.device)
    return Plan(min(MOST_SPLITS, power_of_two(triton.cdiv(programs, strips))), stages=4)


@varying("rows")
def _gate_up_kernel(
    x: Value,
    weight: Value,
    bias: Value,
    experts: Value,
    count: Value,
    shares: Value,
    hidden: Value,
    rows: Value,
    size: Value,
    depth: Value,
    x_row: Value,
    weight_expert: Value,
    weight_column: Value,
    weight_inner: Value,
    BIAS: constexpr,
    TANH: constexpr,
    CLAMPED: constexpr,
    INTERLEAVED: constexpr,
    ALPHA: constexpr,
    LIMIT: constexpr,
    EVEN: constexpr,
    ROWS: constexpr,
    STRIP: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    HALF: tl.constexpr = STRIP // 2
    wait_for_dependencies(PDL)
    slot = tl.program_id(1)
    if slot >= tl.load(count):
        return
    expert = tl.load(experts + slot).to(tl.int64)
    start, place = tl.program_id(0) * HALF, tl.arange(0, STRIP)
    if INTERLEAVED:
        strip = 2 * start + place  # gate and up of a column are neighbours
        exists = strip < 2 * size
    else:
        strip = start + place % HALF + place // HALF * size  # the gate's rows, then the up projection's
        exists = start + place % HALF < size
    inner, row = tl.arange(0, BLOCK), tl.arange(0, ROWS)
    left = weight + expert * weight_expert + strip.to(tl.int64)[:, None] * weight_column + inner[None, :] * weight_inner
    right = x + row[None, :] * x_row + inner[:, None]
    result = tl.zeros((STRIP, ROWS), tl.float32)
    for _ in range(0, depth // BLOCK):
        if EVEN:
            read = tl.load(left)
        else:
            read = tl.load(left, mask=exists[:, None], other=0.0)
        seen = tl.load(right, mask=(row < rows)[None, :], other=0.0)
        result = tl.dot(read, seen, result, input_precision="ieee")
        left += BLOCK * weight_inner
        right += BLOCK
    if BIAS:
        result += tl.load(bias + expert * 2 * size + strip, mask=exists, other=0.0).to(tl.float32)[:, None]
    both = result.to(hidden.dtype.element_ty)
    if INTERLEAVED:
        gate, up = tl.split(tl.permute(tl.reshape(both, (HALF, 2, ROWS)), (0, 2, 1)))
    else:
        gate, up = tl.split(tl.permute(tl.reshape(both, (2, HALF, ROWS)), (1, 2, 0)))
    if CLAMPED:
        low = tl.minimum(gate.to(tl.float32), LIMIT)
        high = tl.minimum(tl.maximum(up.to(tl.float32), -LIMIT), LIMIT)
        active = (high + 1.0) * (low / (1.0 + tl.exp(-ALPHA * low)))
    else:
        active = apply_gate(gate, up, TANH).to(tl.float32)
    share = tl.load(shares + slot * rows + row, mask=row < rows, other=0.0)[None, :]
    active = tl.where(share != 0, active * share, 0.0)
    column = (start + tl.arange(0, HALF))[:, None]
    target = hidden + (slot * rows + row)[None, :].to(tl.int64) * size + column
    tl.store(target, active.to(both.dtype), mask=(row < rows)[None, :] & (column < size))


@varying("rows")
def _down_kernel(
    hidden: Value,
    weight: Value,
    bias: Value,
    experts: Value,
    count: Value,
    shares: Value,
    addend: Value,
    addend_gate: Value,
    terms: Value,
    rows: Value,
    size: Value,
    columns: Value,
    weight_expert: Value,
    weight_column: Value,
    weight_inner: Value,
    BIAS: constexpr,
    ADD: constexpr,
    GATED: constexpr,
    EVEN: constexpr,
    MOST: constexpr,
    ROWS: constexpr,
    STRIP: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    strip, row = tl.program_id(0) * STRIP + tl.arange(0, STRIP), tl.arange(0, ROWS)
    split, splits = tl.program_id(1), tl.num_programs(1)
    lane, order = tl.arange(0, BLOCK), tl.arange(0, MOST)
    offset = strip.to(tl.int64)[:, None] * weight_column + lane[None, :] * weight_inner
    source = row[None, :] * size + lane[:, None]
    steps = size // BLOCK
    wait_for_dependencies(PDL)
    slots = tl.load(count)
    begin, end = split * slots * steps // splits, (split + 1) * slots * steps // splits
    first = begin // steps
    table = tl.load(experts + first + order, mask=first + order < slots, other=0)
    result = tl.zeros((STRIP, ROWS), tl.float32)
    for step in range(begin, end):
        slot = step // steps
        inner = (step - slot * steps) * BLOCK
        # From registers: a load of the index in this loop would delay the loads that depend on it.
        expert = tl.sum(tl.where(order == slot - first, table, 0), 0).to(tl.int64)
        left = weight + expert * weight_expert + inner * weight_inner + offset
        right = hidden + (slot * rows).to(tl.int64) * size + inner + source
        if EVEN:
            read = tl.load(left)
        else:
            read = tl.load(left, mask=(strip < columns)[:, None], other=0.0)
        seen = tl.load(right, mask=(row < rows)[None, :], other=0.0)
        result = tl.dot(read, seen, result, input_precision="ieee")
    inside = (row < rows)[None, :] & (strip < columns)[:, None]
    if BIAS:
        for slot in range(split, slots, splits):
            expert = tl.load(experts + slot).to(tl.int64)
            share = tl.load(shares + slot * rows + row, mask=row < rows, other=0.0)
            added = tl.load(bias + expert * columns + strip, mask=strip < columns, other=0.0)
            result += added.to(tl.float32)[:, None] * share[None, :]
    if ADD:
        if split == 0:
            added = tl.load(addend + row[None, :] * columns + strip[:, None], mask=inside, other=0.0).to(tl.float32)
            if GATED:
                scale = tl.load(addend_gate + row, mask=row < rows, other=0.0).to(tl.float32)
                added = added / (1.0 + tl.exp(-scale))[None, :]
            result += added
    place = (split * rows + row)[None, :].to(tl.int64) * columns + strip[:, None]
    tl.store(terms + place, result, mask=inside)
