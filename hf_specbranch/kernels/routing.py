"""Routing of a mixture of experts: which experts a few tokens choose, with which weights, and which experts they touch.

The weights of a token are softmax(logits) at its k highest logits, as they are or divided by their sum. The sum of the
chosen exponentials is then the denominator, so softmax over the chosen logits is the same form.

The expert kernels read every touched expert once, whatever the number of tokens that chose it. So routing also lists
them, each with the weights of all tokens. How many there are is known on the device only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .backend import (
    FLOATS,
    Value,
    constexpr,
    dependent_launch,
    jit,
    launch_dependents,
    power_of_two,
    serves,
    tl,
    varying,
    wait_for_dependencies,
)
from .linear import MOST_ROWS, Partials, as_partials, sum_partials
from .parallel_build import room

MOST_EXPERTS = 512  # of which one program holds the logits of all tokens


class Touched(NamedTuple):
    """The experts that the tokens of a pass touch: in slots, as many as there could be at most."""

    experts: Tensor  # [slots] in increasing order; int32
    used: Tensor  # [1] slots in use; int32
    shares: Tensor  # [slots, T] the weight of the expert for each token, 0 if the token did not choose it; float32


class Routing(NamedTuple):
    """The choices of each token."""

    logits: Tensor  # [T, E]
    chosen: Tensor  # [T, k] experts, that of the highest logit first; int64
    weights: Tensor  # [T, k]
    touched: Touched


def route(logits: Tensor | Partials, choices: int, normalised: bool, dtype: torch.dtype) -> Routing:
    """Choose experts for each token; among equal logits the lowest index.

    Args:
        logits: [T, E], or split-K partials of them.
        choices: k, the experts per token.
        normalised: the weights of a token add up to 1.
        dtype: of the weights.

    Example:
        >>> routing = route(torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]]), 1, True, torch.float32)
        >>> routing.chosen.tolist(), routing.touched.experts.tolist(), routing.touched.shares.tolist()
        ([[1], [0]], [0, 1], [[0.0, 1.0], [1.0, 0.0]])
    """
    rows, experts = logits.shape
    terms, splits = as_partials(logits)
    if not _can_run(terms, rows, experts):
        return route_reference(logits if isinstance(logits, Tensor) else logits.sum(), choices, normalised, dtype)
    device = terms.device
    out = torch.empty((rows, experts), dtype=logits.dtype, device=device)
    index = room((rows, choices), torch.long, device)
    weights = torch.empty((rows, choices), dtype=dtype, device=device)
    touched = _empty_slots(rows, choices, experts, device)
    _route_kernel[(1,)](
        terms, out, index, weights, *touched, rows * experts, rows, experts,
        SPLITS=splits, NORMALISED=normalised, CHOICES=choices, COLUMNS=power_of_two(choices),
        **_tile(rows, experts), **dependent_launch(device),
    )  # fmt: skip
    return Routing(out, index, weights, touched)


def route_reference(logits: Tensor, choices: int, normalised: bool, dtype: torch.dtype) -> Routing:
    """Compute what `route` does, in plain torch."""
    ordered, order = torch.sort(logits.float(), dim=-1, descending=True, stable=True)
    index, exponentials = order[:, :choices], torch.exp(ordered - ordered[:, :1])
    chosen = exponentials[:, :choices]
    weights = (chosen / (chosen if normalised else exponentials).sum(-1, keepdim=True)).to(dtype)
    return Routing(logits, index, weights, list_touched_reference(index, weights, logits.shape[-1]))


def list_touched(index: Tensor, weights: Tensor, experts: int) -> Touched:
    """List the touched experts of choices that a model's own router made.

    Args:
        index: [T, k].
        weights: [T, k].
        experts: E, the number of all experts.
    """
    rows, choices = index.shape
    if not _can_run(weights, rows, experts):
        return list_touched_reference(index, weights, experts)
    touched = _empty_slots(rows, choices, experts, index.device)
    _list_kernel[(1,)](
        index.contiguous(), weights.contiguous(), *touched, rows, experts,
        CHOICES=choices, **_tile(rows, experts), **dependent_launch(index.device),
    )  # fmt: skip
    return touched


def list_touched_reference(index: Tensor, weights: Tensor, experts: int) -> Touched:
    """Compute what `list_touched` does, in plain torch. Slots that are not in use hold expert 0 and zero weights."""
    shares = torch.zeros((index.shape[0], experts), dtype=torch.float32, device=index.device)
    shares.scatter_add_(1, index, weights.float())
    hit = torch.zeros(experts, dtype=torch.bool, device=index.device)
    hit[index.flatten()] = True
    slots = min(experts, index.numel())
    order = torch.sort((~hit).to(torch.int8), stable=True).indices[:slots]
    used = hit[order]
    shares = torch.where(used[:, None], shares.T[order], 0.0)
    return Touched(torch.where(used, order, 0).int(), hit.sum(0, keepdim=True, dtype=torch.int32), shares)


def _can_run(values: Tensor, rows: int, experts: int) -> bool:
    return serves(values.device) and values.dtype in FLOATS and 0 < rows <= MOST_ROWS and 0 < experts <= MOST_EXPERTS


def _empty_slots(rows: int, choices: int, experts: int, device: torch.device) -> Touched:
    slots = min(experts, rows * choices)
    shares = torch.empty((slots, rows), dtype=torch.float32, device=device)
    return Touched(room((slots,), torch.int32, device), room((1,), torch.int32, device), shares)


def _tile(rows: int, experts: int) -> dict[str, int]:
    """Return the tile of the one program, as kernel constants: few different ones, since each is compiled."""
    height, width = 1 if rows == 1 else 16 if rows <= 16 else 32, power_of_two(experts, 16)
    return {"ROWS": height, "EXPERTS": width, "num_warps": min(16, max(1, height * width // 512))}


@varying("partial_stride", "rows", "experts")
def _route_kernel(
    terms: Value,
    logits: Value,
    index: Value,
    weights: Value,
    touched: Value,
    count: Value,
    shares: Value,
    partial_stride: Value,
    rows: Value,
    experts: Value,
    SPLITS: constexpr,
    NORMALISED: constexpr,
    CHOICES: constexpr,
    COLUMNS: constexpr,
    ROWS: constexpr,
    EXPERTS: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    row, expert = tl.arange(0, ROWS), tl.arange(0, EXPERTS)
    inside = (row < rows)[:, None] & (expert < experts)[None, :]
    place = row[:, None] * experts + expert[None, :]
    wait_for_dependencies(PDL)
    value = sum_partials(terms + place, partial_stride, inside, logits.dtype.element_ty, SPLITS)
    tl.store(logits + place, value, mask=inside)
    wide = tl.where((expert < experts)[None, :], value.to(tl.float32), -float("inf"))
    exponential = tl.exp(wide - tl.max(wide, 1)[:, None])

    column = tl.arange(0, COLUMNS)[None, :]
    order = tl.zeros((ROWS, COLUMNS), tl.int32)
    chosen = tl.zeros((ROWS, COLUMNS), tl.float32)  # their exponentials
    taken = tl.zeros((ROWS, EXPERTS), tl.int32)
    for choice in range(CHOICES):
        best = tl.max(wide, 1)
        first = tl.min(tl.where(wide == best[:, None], expert[None, :], experts - 1), 1)  # in range for NaN too
        hit = expert[None, :] == first[:, None]
        order = tl.where(column == choice, first[:, None], order)
        chosen = tl.where(column == choice, tl.sum(tl.where(hit, exponential, 0.0), 1)[:, None], chosen)
        wide = tl.where(hit, -float("inf"), wide)
        taken = tl.where(hit, 1, taken)
    if NORMALISED:
        total = tl.sum(chosen, 1)
    else:
        total = tl.sum(exponential, 1)
    stored = (row < rows)[:, None] & (column < CHOICES)
    place = row[:, None] * CHOICES + column
    tl.store(index + place, order, mask=stored)
    tl.store(weights + place, (chosen / total[:, None]).to(weights.dtype.element_ty), mask=stored)
    share = (exponential / total[:, None]).to(weights.dtype.element_ty).to(tl.float32)
    share = tl.where(taken != 0, share, 0.0)
    _store_touched(taken, share, touched, count, shares, rows, ROWS, EXPERTS)


@varying("rows", "experts")
def _list_kernel(
    index: Value,
    weights: Value,
    touched: Value,
    count: Value,
    shares: Value,
    rows: Value,
    experts: Value,
    CHOICES: constexpr,
    ROWS: constexpr,
    EXPERTS: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    row, expert = tl.arange(0, ROWS), tl.arange(0, EXPERTS)
    taken = tl.zeros((ROWS, EXPERTS), tl.int32)
    share = tl.zeros((ROWS, EXPERTS), tl.float32)
    wait_for_dependencies(PDL)
    for choice in range(CHOICES):
        place = row * CHOICES + choice
        chosen = tl.load(index + place, mask=row < rows, other=experts).to(tl.int32)
        weight = tl.load(weights + place, mask=row < rows, other=0.0).to(tl.float32)
        hit = (expert[None, :] == chosen[:, None]) & (expert < experts)[None, :]
        taken = tl.where(hit, 1, taken)
        share = tl.where(hit, share + weight[:, None], share)
    _store_touched(taken, share, touched, count, shares, rows, ROWS, EXPERTS)


@jit
def _store_touched(
    taken: Value,
    share: Value,
    touched: Value,
    count: Value,
    shares: Value,
    rows: Value,
    ROWS: constexpr,
    EXPERTS: constexpr,
) -> None:
    """Store the experts that any row has taken one after the other, each with the shares of all rows."""
    row, expert = tl.arange(0, ROWS), tl.arange(0, EXPERTS)
    hit = tl.max(tl.where((row < rows)[:, None], taken, 0), 0)
    slot = tl.cumsum(hit, 0) - 1
    tl.store(touched + slot, expert, mask=hit != 0)
    tl.store(count, tl.sum(hit, 0))
    place = slot[None, :] * rows + row[:, None]
    tl.store(shares + place, share, mask=(hit != 0)[None, :] & (row < rows)[:, None])
