"""Time products with quantised weights by their fastest plan, and what it takes to dequantise a weight.

python examples/benchmarks/quantised_products.py
python examples/benchmarks/quantised_products.py --rows 1,8 --formats int4 --every-plan

The shapes are those of Llama-3.1-8B. Microseconds of a product include a small norm before it, as in a layer. `limit`
is the time to read the packed weight, or to read it and to write the dequantised one. A plan is split-K, stages, rows
of W per program, and the warps of a product without tensor cores (0: with them). It needs CUDA.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_specbranch.bench.limit import copy_bandwidth
from hf_specbranch.kernels.autotune import DEQUANTISE, Kind, seconds_of_each
from hf_specbranch.kernels.dequantise import dequantised
from hf_specbranch.kernels.linear import Plan
from hf_specbranch.kernels.norm import Norm, normalise
from hf_specbranch.kernels.packed import Packed
from hf_specbranch.layers.quantised import Operands, candidate_plans

sys.path.insert(0, str(Path(__file__).parent))
from lab import finish, whole_numbers  # noqa: E402

SHAPES: dict[str, tuple[int, int, Kind]] = {
    "q, k and v": (6144, 4096, "whole"),
    "attention's output": (4096, 4096, "split-k"),
    "gate and up": (28672, 4096, "gated"),
    "down": (4096, 14336, "split-k"),
}
NOT_CACHED = 256 << 20  # bytes of all weights of a shape


def random_weight(name: str, rows: int, depth: int) -> Packed:
    """Return a random weight: FP8 with blocks of 128 x 128, FP8 with groups of 128, or 4 bits with groups of 128."""
    groups = depth // 128
    if name == "int4":
        words = torch.randint(-(1 << 31), 1 << 31, (rows, depth // 8), device="cuda").to(torch.int32)
        return Packed(words, torch.full((rows, groups), 0.005, device="cuda", dtype=torch.bfloat16), "offset", 128)
    data = torch.randn((rows, depth), device="cuda").mul_(64).to(torch.float8_e4m3fn)
    if name == "float8":
        return Packed(data, torch.full((rows // 128, groups), 3e-4, device="cuda"), "float8", 128, scale_rows=128)
    return Packed(data, torch.full((rows, groups), 3e-4, device="cuda", dtype=torch.bfloat16), "float8", 128)


def weights_of(name: str, rows: int, depth: int) -> list[Packed]:
    """Return so many weights of a shape that no cache holds all of them."""
    first = random_weight(name, rows, depth)
    return [first, *(random_weight(name, rows, depth) for _ in range(min(23, NOT_CACHED // first.data.nbytes)))]


def product_times(name: str, shape: str, rows: int) -> dict[Plan, float]:
    """Return the microseconds of a product by each plan."""
    columns, depth, kind = SHAPES[shape]
    operands = [Operands([weight], [None]) for weight in weights_of(name, columns, depth)]
    x = torch.randn((rows, depth), device="cuda", dtype=torch.bfloat16)

    def product(x: Tensor, norm: Norm, each: Operands, plan: Plan | None) -> Any:
        assert plan is not None
        x = normalise(x, norm)
        return each.gated(x, "silu", plan) if kind == "gated" else each.product(x, plan)

    seconds = seconds_of_each(product, operands, x, candidate_plans(x, operands, kind))
    return {plan: 1e6 * each for plan, each in seconds.items() if plan is not None}


def dequantise_times(shape: str) -> dict[Plan | None, float]:
    """Return the microseconds in which the kernel dequantises a weight, and torch (None)."""
    columns, depth, _ = SHAPES[shape]

    def weight(x: Tensor, norm: Norm, each: Packed, plan: Plan | None) -> Tensor:
        normalise(x, norm)
        if plan is not None:
            return dequantised(each, x.dtype)
        return each.data.to(x.dtype).view(columns, -1, 128) * each.scale.to(x.dtype)[:, :, None]

    x = torch.randn((1, depth), device="cuda", dtype=torch.bfloat16)
    seconds = seconds_of_each(weight, weights_of("groups", columns, depth), x, [None, DEQUANTISE])
    return {plan: 1e6 * each for plan, each in seconds.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=whole_numbers, default=(1, 4, 8, 16), help="tokens (default: 1,4,8,16)")
    parser.add_argument("--formats", default="float8,int4", help="default: %(default)s")
    parser.add_argument("--every-plan", action="store_true", help="print every plan, not the fastest alone")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    bandwidth, found = copy_bandwidth(torch.device("cuda")), []
    lines = []
    for shape, (columns, depth, _) in SHAPES.items():
        limit, times = 3e6 * columns * depth / bandwidth, dequantise_times(shape)
        found.append({"shape": shape, "limit": limit, "torch": times[None], "kernel": times[DEQUANTISE]})
        lines.append(
            f"dequantise {shape} ({columns}x{depth}): {times[DEQUANTISE]:.1f} us, in torch {times[None]:.1f}; limit "
            f"{limit:.1f}"
        )
    for name in args.formats.split(","):
        for rows in args.rows:
            for shape, (columns, depth, _) in SHAPES.items():
                weight = random_weight(name, columns, depth)
                limit = 1e6 * (weight.data.nbytes + weight.scale.nbytes) / bandwidth
                by_plan = product_times(name, shape, rows)
                us, plan = min((us, plan) for plan, us in by_plan.items())
                found.append({"format": name, "rows": rows, "shape": shape, "limit": limit, "us": us, "plan": plan})
                lines.append(f"{name}, {rows} rows, {shape}: {us:.1f} us by {tuple(plan)}; limit {limit:.1f}")
                if args.every_plan:
                    lines += [f"    {us:8.1f} {tuple(plan)}" for plan, us in sorted(by_plan.items())]
    finish(args, found, lines)


if __name__ == "__main__":
    main()
