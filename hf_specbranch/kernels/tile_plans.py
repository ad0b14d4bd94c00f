"""Where products by tiles pay, by which plans, and which operands they take. See `tiles.py`."""

from __future__ import annotations

from torch import Tensor

from .backend import (
    HALF_PRECISION,
    can_run,
    converts_float8,
    multiplies_tiles,
    multiprocessors,
    power_of_two,
    triton,
)
from .gemv import aligned
from .gemv_words import BYTES_PER_LOAD, format_of
from .linear import Plan
from .packed import Packed
from .tile_fragments import DEPTH, ROWS_OF_W

MOST_ROWS = 8
WARPS = (1, 2, 4, 8, 16)
NARROW = ROWS_OF_W // 2  # rows of W of a program, where there are fewer tiles than multiprocessors
# The smaller side of a weight, unless its elements have 4 bits. Larger products are faster by tiles too if timed alone,
# but in their layers they were slower by plans chosen alone: on an H200 one token took 6% longer with Llama-3.2-1B
# (2,048 wide), 15% with SmolLM3-3B (2,048), and a step over four tokens of an FP8 copy of Llama-3.2-1B 13%. By plans
# that were chosen in whole passes (`products.json`) both models are faster by tiles. With Qwen2.5-0.5B (896) they took
# 9% to 20% less time. With 4 bits other kernels are bound by their arithmetic, and tiles are faster in wide layers too.
WIDEST = 1024
# With 4 bits in wide layers: registers that a thread may have, by the warps of a program, so that three programs or
# two run on a multiprocessor at a time; and how many operands it may have then. With more it would keep some in memory.
MOST_REGISTERS = {4: 160, 8: 128}
MOST_OPERANDS = 80
# Registers of a thread for W: all spans at once, or with those of the next tile or step beside them; and for x.
MOST_WORDS, MOST_WORDS_TWICE, MOST_STATES = 112, 64, 64


def tile_plans(x: Tensor, weight: Packed) -> list[Plan]:
    """Return the plans that may be the fastest for products with this weight; none if they do not pay in its layers."""
    if min(weight.shape) > WIDEST and not has_wide_codes(weight):
        return []
    (columns, depth), bits = weight.shape, format_of(weight).BITS
    tiles = triton.cdiv(columns, ROWS_OF_W)
    rows = power_of_two(x.numel() // x.shape[-1])
    plans = []
    for warps in WARPS:
        spans = needed(depth, warps)
        words, states = spans * 2 * bits, spans * 2 * rows
        if depth < DEPTH * warps or words > MOST_WORDS or states > MOST_STATES:
            continue
        plans.append(Plan(1, 0, ROWS_OF_W, warps, spans))
        if words <= MOST_WORDS_TWICE:
            in_turn = [programs for programs in (2, 4) if tiles > programs * multiprocessors(x.device)]
            plans += [Plan(1, programs, ROWS_OF_W, warps, spans) for programs in in_turn]
    most = min(MOST_WORDS_TWICE // (4 * bits), MOST_STATES // (4 * rows))
    for warps in (4, 8, 16):
        in_steps = [spans for spans in (most, most // 2) if 0 < spans < needed(depth, warps)]
        plans += [Plan(1, 0, ROWS_OF_W, warps, spans) for spans in in_steps]
    if tiles < multiprocessors(x.device):
        plans += narrow_plans(depth, bits)
    return [plan for plan in plans if fits(x, weight, None, plan)]


def narrow_plans(depth: int, bits: int) -> list[Plan]:
    """Return plans whose programs have eight rows of W: all spans of a row at once, or half of them.

    Example:
        >>> [(plan.warps, plan.spans) for plan in narrow_plans(1024, 16)]
        [(1, 4), (2, 4), (2, 2), (4, 2)]
    """
    plans = []
    for warps in WARPS:
        whole = 2 * needed(depth, 2 * warps)
        if depth <= DEPTH * warps:  # half of the threads would have nothing
            continue
        for spans, most in ((whole, MOST_WORDS), (whole // 4 * 2, MOST_WORDS_TWICE)):
            plans += [Plan(1, 0, NARROW, warps, spans)] if 0 < spans * bits <= most else []
    return plans


def suits(plan: Plan, kind: str) -> bool:
    """Return whether a plan may be chosen for this kind of product (`autotune.Kind`).

    Narrow tiles have no pairs of rows, which a gate and a rotation need. The kernels would take wide ones instead.
    """
    return plan.spans == 0 or plan.strip == ROWS_OF_W or kind in ("whole", "split-k")


def has_wide_codes(weight: Packed) -> bool:
    """Return whether a weight has 4 bits and belongs to a wide layer: programs of its products fill the GPU."""
    return min(weight.shape) > WIDEST and format_of(weight).BITS == 4


def holds_next_back(weight: Packed, leaves_l1: bool) -> bool:
    """Return whether the kernel after a product that reads heads starts at its end, unless the plan says otherwise.

    That is so with 4 bits in wide layers, unless attention `leaves_l1`. On an H200 one token of Llama-3.1-8B took 1.84
    ms so, 1.98 ms if that held for all products, and 2.29 ms if for none; eight tokens 3.05 ms so, and 3.16 ms if that
    held for all. Where attention leaves the L1 cache to the products, one token takes 1.71 ms, and 1.76 ms so.
    """
    return has_wide_codes(weight) and not leaves_l1


def combines(weight: Packed, plan: Plan, rows: int) -> bool:
    """Return whether a product combines the splits of its input: by tiles that keep the whole row of x, if it pays.

    On an H200 one token after 300 took 10% less time with Qwen3-0.6B in bfloat16 and 5% less with Llama-3.2-1B, but a
    step of an FP8 copy of Qwen2.5-0.5B 5% more.
    """
    of_one_row = weight.code == "dense" and plan.spans > 0 and rows == 1
    return of_one_row and needed(weight.shape[1], plan.warps) <= plan.spans


def needed(depth: int, warps: int) -> int:
    """Return the spans of a row for each warp."""
    return -(-depth // (DEPTH * warps))


def most_registers(weight: Packed, plan: Plan, bits: int, rows: int) -> int | None:
    """Return how many registers a thread may have; None: as many as the compiler takes."""
    if plan.registers or not has_wide_codes(weight):
        return plan.registers or None
    few = 2 * plan.spans * (bits + rows) <= MOST_OPERANDS
    shared = plan.warps == 8 if plan.stages else few  # programs that take tile after tile should all run at once
    return MOST_REGISTERS.get(plan.warps) if shared else None


def fits(x: Tensor, weight: Packed, bias: Tensor | None, plan: Plan) -> bool:
    """Return whether the kernel can compute this product with this plan."""
    depth = x.shape[-1]
    return (
        plan.spans > 0
        and can_run(x, bias)
        and multiplies_tiles(x.device)
        and x.dtype in HALF_PRECISION
        and weight.data.device == x.device
        and 0 < x.numel() <= MOST_ROWS * depth
        and x.stride(-1) == 1
        and aligned(x)
        and depth % DEPTH == 0
        and (not plan.stages or needed(depth, plan.warps) <= plan.spans)  # programs in turn keep all of x
        and (plan.strip == ROWS_OF_W or _takes_narrow(weight, plan, x.numel() // depth))
        and kernel_takes(weight)
        and (weight.code != "dense" or weight.data.dtype == x.dtype)
    )


def _takes_narrow(weight: Packed, plan: Plan, rows: int) -> bool:
    """Return whether programs can have eight rows of W: for one row of x, and with an even number of spans."""
    return plan.strip == NARROW and plan.spans % 2 == 0 and rows == 1 and weight.code in ("dense", "float8")


def kernel_takes(weight: Packed) -> bool:
    """Return whether the kernel reads such a weight: rows of whole aligned loads, and groups of whole spans."""
    data = weight.data
    if weight.code not in ("dense", "float8", "offset", "signed") or weight.high_first or data.stride(1) != 1:
        return False
    if weight.code == "float8" and not converts_float8(data.device):
        return False
    form, row_bytes = format_of(weight), data.stride(0) * data.element_size()
    aligned = data.data_ptr() % BYTES_PER_LOAD == row_bytes % BYTES_PER_LOAD == 0
    return aligned and weight.shape[1] % DEPTH == form.GROUP % DEPTH == 0
