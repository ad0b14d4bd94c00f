"""Products of few rows of x in one launch: by `tiles.py` or `gemv.py`, as the plan says."""

from __future__ import annotations

from torch import Tensor

from . import gemv, tile_plans, tile_splits, tiles
from .backend import AT_END
from .combine import MOST_FOR_PRODUCT, SplitHeads
from .gated import Activation
from .linear import Plan
from .norm import Norm
from .packed import Packed

MOST_ROWS = tile_plans.MOST_ROWS


def few_rows(
    x: Tensor | SplitHeads,
    weight: Packed,
    bias: Tensor | None,
    plan: Plan,
    gate: Activation | None = None,
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute a product; see `gemv.gemv` and `tiles.tile_product`. Splits are combined if the kernel cannot."""
    if isinstance(x, SplitHeads) and tile_plans.holds_next_back(weight, x.leaves_l1):
        plan = plan._replace(next=plan.next or AT_END)
    if isinstance(x, SplitHeads) and not combines(x, weight, plan):
        x = x.combined()
    if isinstance(x, SplitHeads) or plan.spans > 0:
        return tiles.tile_product(x, weight, bias, plan, gate, norm, residual)
    return gemv.gemv(x, weight, bias, plan, gate, norm, residual)


def combines(x: SplitHeads, weight: Packed, plan: Plan) -> bool:
    """Return whether the kernel of this plan takes splits of x as they are."""
    rows, splits = x.sums.shape[0] * x.sums.shape[1], x.sums.shape[3]
    whole_loads = x.size % tile_splits.ELEMENTS == 0
    takes = x.spans is not None and splits <= MOST_FOR_PRODUCT and whole_loads
    return takes and tile_plans.combines(weight, plan, rows)


def fits(x: Tensor, weight: Packed, bias: Tensor | None, plan: Plan) -> bool:
    """Return whether the kernel of this plan can compute the product."""
    return tile_plans.fits(x, weight, bias, plan) if plan.spans > 0 else gemv.fits(x, weight, bias, plan)


def few_rows_plans(x: Tensor, weight: Packed, bias: Tensor | None) -> list[Plan]:
    """Return the plans that may be the fastest.

    For two rows and more, tiles were faster than the other kernel in all products of three models on an H200, but for
    one that took 1% longer. For one row either may be. Not every weight has plans for tiles. With 4 bits in wide
    layers they are only fast among each other, so no product of such a layer takes the other kernel.
    """
    by_tiles = tile_plans.tile_plans(x, weight)
    if by_tiles and (x.numel() > x.shape[-1] or tile_plans.has_wide_codes(weight)):
        return by_tiles
    return [*by_tiles, *(plan for plan in gemv.GEMV_PLANS if gemv.fits(x, weight, bias, plan))]
