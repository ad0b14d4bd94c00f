"""Finds plans for products of few rows with dense weights and what is fused with them: a norm, or a residual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import autotune
from .autotune import Kind, alike_rows, gpu_and_versions, name_of, seconds_of_each, unit_norm, without_versions
from .backend import HALF_PRECISION
from .few_rows import MOST_ROWS, few_rows
from .linear import Plan
from .norm import Norm
from .packed import dense
from .parallel_build import is_dry_run
from .tile_plans import WIDEST, suits, tile_plans


@dataclass(frozen=True)
class _Fused:
    """A product with what is fused with it.

    Args:
        kind: of the product.
        residual: [1, N], added to a "whole" product.
    """

    kind: Kind
    residual: Tensor

    def __call__(self, x: Tensor, norm: Norm, weight: Tensor, plan: Plan | None) -> Tensor:
        assert plan is not None
        if self.kind == "whole":
            return few_rows(x, dense(weight), None, plan, residual=self.residual)
        return few_rows(x, dense(weight), None, plan, "silu" if self.kind == "normed-gated" else None, norm)


def autotune_fused(weight: Tensor, rows: int, kind: Kind, find_weights: Callable[[], Sequence[Tensor]]) -> Plan | None:
    """Return the plan for one launch over few rows of x; None where there is none.

    Only narrow weights and one row are measured here. Wider ones, and several rows, have the plans that are shipped, of
    models in which they were faster: what a product takes alone says little of what it takes in their layers.

    Args:
        weight: [N, K].
        rows: of x; some share a plan, see `alike_rows`.
        kind: "normed", "normed-gated", or "whole" for a product to which a residual is added.
        find_weights: returns all weights of this shape; called only if something is measured.
    """
    if not weight.is_cuda or weight.dtype not in HALF_PRECISION or not 0 < rows <= MOST_ROWS:
        return None
    columns, depth = weight.shape
    kept, alike = f"{name_of(weight.dtype)} dense", f"{alike_rows(rows)} rows"
    key = f"{gpu_and_versions(weight.device)}|{kept}|{alike}|{columns}x{depth}|{kind}"
    if rows > 1 or min(weight.shape) > WIDEST:
        return autotune.plans.shipped.get(without_versions(key))
    found, plan = autotune.plans.find(key)
    if found or torch.cuda.is_current_stream_capturing():
        return plan
    x = weight.new_ones((1, depth))
    candidates = [plan for plan in tile_plans(x, dense(weight)) if suits(plan, kind)]
    measured = _Fused(kind, weight.new_zeros((1, columns)))
    if is_dry_run():
        for each in candidates:
            measured(x, unit_norm(x), weight, each)
        return None
    seconds = seconds_of_each(measured, find_weights(), x, candidates)
    plan = min(seconds, key=lambda each: seconds[each]) if seconds else None
    autotune.plans.store(key, plan)
    return plan
