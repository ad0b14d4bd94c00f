"""Choose the plans of a model's products by the time of whole passes over few tokens, one product after the other.

python examples/benchmarks/choose_plans.py --model smollm3-3b --wide --device cuda --dtype bfloat16
python examples/benchmarks/choose_plans.py --model llama3.1-8b --variant int4 --seconds 300 --json plans.json
python examples/benchmarks/choose_plans.py --model llama3.2-1b --wide --tokens 4 --seconds 300 --json plans.json

What a product takes alone says little of what it takes in a layer, where the next kernel starts before it ends. So each
plan is tried in a captured pass, together with when the next kernel may start and how many registers a thread may have.
A plan is taken if the pass is 0.3% faster twice. Entries of the result can be added to `kernels/products.json`. The
weights are random, so times say nothing about texts. It needs CUDA.

With `--wide`, dense layers more than 1,024 wide also run with norms and sums in their products; in passes over several
tokens all dense layers do. Compare the last time with that of a run without. Plans for two to four tokens are the same,
and so are those for five to eight: choose them with `--tokens 4` and `--tokens 8`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hf_specbranch.bench.limit import copy_bandwidth, token_cost
from hf_specbranch.bench.random_model import random_model
from hf_specbranch.bench.shapes import config_of
from hf_specbranch.bench.timing import timed
from hf_specbranch.decoding.draft_copy import DraftForm, copy_of
from hf_specbranch.kernels import autotune
from hf_specbranch.kernels.autotune import PlanCache, alike_rows, without_versions
from hf_specbranch.kernels.backend import AT_END, EARLY, LATE
from hf_specbranch.kernels.gemv import GEMV_PLANS
from hf_specbranch.kernels.linear import BLOCK, PLANS, Plan
from hf_specbranch.kernels.parallel_build import ABOUT_NOISE, ParallelBuilder, dry_run
from hf_specbranch.kernels.tile_fragments import ROWS_OF_W
from hf_specbranch.kernels.tile_plans import MOST_ROWS, MOST_STATES, WIDEST, narrow_plans, needed
from hf_specbranch.runtime.selection import runner_for

sys.path.insert(0, str(Path(__file__).parent))
from pass_time import tokens_and_columns, visible_spans  # noqa: E402
from variants import VARIANTS  # noqa: E402

FASTER = 0.997  # what a plan must make of the time of a pass, twice: such times scatter by 0.1% to 0.2%
CONTEXT = 300  # tokens before the pass
SHORTLIST = 33000  # tokens that a copy of a draft scores
FEW_COLUMNS = 3072  # of a result that narrow tiles are tried for
PROGRAMS, REGISTERS = (2, 3, 4), (96, 128, 168)
Plans = dict[str, Plan | None]  # by product, as in `products.json`


class Recorded(dict[str, Any]):
    """The shipped plans; notes which products were asked for."""

    def __init__(self, plans: Plans) -> None:
        super().__init__(plans)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


class Chosen(PlanCache):
    """Plans that a search changes. Products without one are autotuned alone first; nothing is written to disk."""

    def __init__(self, plans: Plans) -> None:
        super().__init__(Path(), Path())
        self.shipped = Recorded(plans)

    def find(self, key: str) -> tuple[bool, Plan | None]:
        plan = self.shipped.get(name := without_versions(key), ...)
        return name in self.shipped, None if plan is ... else plan

    def store(self, key: str, plan: Plan | None) -> None:
        self.shipped[without_versions(key)] = plan


def candidates(key: str) -> list[Plan | None]:
    """Return the plans to try for a product.

    Example:
        >>> [plan.splits for plan in candidates("GPU|bfloat16|16|64x128|split-k") if plan is not None]
        [1, 1, 1]
        >>> {plan.strip for plan in candidates("GPU|bfloat16 dense|1 rows|896x4864|whole") if plan is not None}
        {8, 16}
    """
    _gpu, kept, rows, shape, kind = key.split("|")
    columns, depth = map(int, shape.split("x"))
    if rows == "16":
        fitting = [plan for plan in PLANS if depth // BLOCK >= plan.splits and (plan.splits == 1 or kind == "split-k")]
        return [None, *fitting]
    by_tiles = []
    for warps in (2, 4, 8, 16):
        whole = needed(depth, warps)
        if whole <= 8:
            by_tiles += [Plan(1, programs, ROWS_OF_W, warps, whole) for programs in (0, *PROGRAMS)]
        by_tiles += [Plan(1, 0, ROWS_OF_W, warps, spans) for spans in (1, 2, 4) if spans < whole]
    by_tiles = [plan for plan in by_tiles if registers_suffice(plan, kept, int(rows.removesuffix(" rows")))]
    if rows == "1 rows" and kind == "whole" and columns <= FEW_COLUMNS:
        by_tiles += narrow_plans(depth, 16 if kept.endswith(" dense") else 8)
    return [*by_tiles, *(GEMV_PLANS if not kept.endswith(" dense") else ())]


def registers_suffice(plan: Plan, kept: str, rows: int) -> bool:
    """Return whether a thread can have W and several rows of x in registers; for one row all plans are tried.

    Example:
        >>> [registers_suffice(Plan(1, 0, 16, 8, 6), "bfloat16 dense", rows) for rows in (1, 4, 8)]
        [True, True, False]
    """
    states, words = plan.spans * 2 * rows, plan.spans * 2 * (16 if kept.endswith(" dense") else 8)
    most = min(255, (1 << 16) // (32 * plan.warps))  # of one thread, and of the threads of a multiprocessor
    return rows == 1 or (states <= MOST_STATES and states + words <= most)


def launches(plan: Plan | None) -> list[Plan | None]:
    """Return a plan with every way to launch it."""
    if plan is None or plan.warps == 0:
        return []
    starts = [plan._replace(next=start) for start in (0, EARLY, LATE, AT_END)]
    return [*starts, *(plan._replace(registers=most) for most in (0, *REGISTERS) if plan.spans > 0)]


def wide_plans(used: Sequence[str], rows: int = 1) -> Plans:
    """Return plans by which wide dense layers compute norms and sums in their products, given what they use without.

    Layers of any width get plans for several rows: only one row is autotuned in narrow ones.

    Example:
        >>> products = ("8192x2048|gated", "2048x4096|split-k", "32000x2048|whole")
        >>> for name, plan in wide_plans([f"GPU|bfloat16|16|{each}" for each in products]).items():
        ...     print(name, tuple(plan))
        GPU|bfloat16 dense|1 rows|8192x2048|normed-gated (1, 0, 16, 8, 2, 0, 0)
        GPU|bfloat16 dense|1 rows|2048x4096|whole (1, 0, 16, 8, 4, 0, 0)
    """
    plans: Plans = {}
    most = alike_rows(rows)
    widths = {name.split("|")[3].split("x")[1] for name in used if name.endswith("|gated")}
    for name in used:
        gpu, dtype, alike, shape, kind = name.split("|")
        columns, depth = shape.split("x")
        autotuned = rows == 1 and min(int(columns), int(depth)) <= WIDEST
        if alike != "16" or kind == "whole" or not widths & {columns, depth} or autotuned:
            continue
        fused = "normed-gated" if kind == "gated" else "whole" if columns in widths else "normed"
        kept, plan = f"{dtype} dense", Plan(1, 0, ROWS_OF_W, 8, min(8, needed(int(depth), 8)))
        plan = plan if registers_suffice(plan, kept, most) else plan._replace(spans=2)
        plans[f"{gpu}|{kept}|{most} rows|{shape}|{fused}"] = plan
    return plans


def search(
    plans: Plans,
    keys: Sequence[str],
    seconds: Callable[[], float],
    limit: float,
    build: Callable[[str, Sequence[Plan | None]], object] = lambda key, options: None,
) -> float:
    """Improve plans one product at a time until nothing helps; return the time of a pass.

    Args:
        plans: changed in place.
        keys: the products to choose plans for.
        seconds: measures a pass by the present plans; infinity where it cannot run.
        limit: the search ends after so many seconds.
        build: builds the kernels for the plans of a product, before they are measured.

    Example:
        >>> plans = {"GPU|bfloat16|16|64x128|split-k": None}
        >>> took = {1: 1.0, 0: 2.0}
        >>> search(plans, list(plans), lambda: took[plans["GPU|bfloat16|16|64x128|split-k"] is not None], 9.0)
        1.0
    """
    ends, best = time.monotonic() + limit, seconds()
    for _ in range(3):
        before = best
        for key in keys:
            for options in (candidates, lambda key: launches(plans[key])):
                if time.monotonic() > ends:
                    break
                chosen = plans[key]
                build(key, options(key))
                for plan in options(key):
                    if plan == chosen or time.monotonic() > ends:
                        continue
                    plans[key] = plan
                    took = seconds()
                    if took < FASTER * best and (took := max(took, seconds())) < FASTER * best:
                        best, chosen = took, plan
                plans[key] = chosen
        if best == before or time.monotonic() > ends:
            break
    return best


@torch.no_grad()
def choose(model: Any, role: str, wide: bool, limit: float, queries: int = 1) -> tuple[float, float, Plans]:
    """Return the seconds of a pass by shipped or autotuned plans, those by the chosen plans, and these.

    The pass has `queries` tokens, one after the other.
    """
    autotune.plans = chosen = Chosen(autotune.plans.shipped)
    device, total = model.device, CONTEXT + queries
    tokens, columns = tokens_and_columns(model, total)
    last = columns[:, CONTEXT:]
    with runner_for(model, role, rows=1, slots=total, runtime="graph", kernels=True) as runner:
        visible = visible_spans(runner, total, last + 1, (last, last))
        runner.prefill(tokens[:, :CONTEXT], columns[:, :CONTEXT], None)

        def seconds() -> float:
            runner.drop_graphs()
            try:
                return median(timed(lambda: runner.forward(tokens[:, CONTEXT:], last, last, visible), device, 25))
            except Exception as error:  # a plan that this GPU cannot run
                print(f"left out: {error}", file=sys.stderr)
                return float("inf")

        def build(key: str, options: Sequence[Plan | None]) -> None:
            kept = chosen.shipped[key]
            with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
                builder = ParallelBuilder(pool, device, detects=False)
                for plan in options:
                    chosen.shipped[key] = plan
                    try:
                        with dry_run(builder):
                            runner.forward_uncaptured(tokens[:, CONTEXT:], last, last, visible)
                    except ABOUT_NOISE as error:  # `seconds` leaves such a plan out
                        print(f"not built: {error}", file=sys.stderr)
            chosen.shipped[key] = kept

        before = seconds()  # autotunes what has no plan
        if wide:
            chosen.shipped.update({**wide_plans(sorted(chosen.shipped.asked), queries), **chosen.shipped})
        chosen.shipped.asked.clear()
        seconds()
        keys = sorted(key for key in chosen.shipped.asked if key in chosen.shipped and key.split("|")[2] != "32")
        after = search(chosen.shipped, keys, seconds, limit, build)
    return before, after, {key: chosen.shipped[key] for key in keys}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3.1-8b", help="a shape of `bench --families` (default: %(default)s)")
    kinds = [*VARIANTS, "draft"]
    parser.add_argument("--variant", default="dense", choices=kinds, help='"draft": an FP8 copy with a shortlist')
    parser.add_argument("--wide", action="store_true", help="norms and sums in the products of wide dense layers")
    few = range(1, MOST_ROWS + 1)
    parser.add_argument(
        "--tokens", type=int, default=1, choices=few, metavar="N", help="in a pass: 1 to 8 (default: 1)"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="end the search after this (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the plans to this file")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if device.type != "cuda" or not torch.cuda.is_available():
        parser.error(f"--device {args.device}: products have plans on CUDA devices only, and here is none")
    model = random_model(config_of(args.model), device, getattr(torch, args.dtype))
    model = copy_of(model, DraftForm("float8", SHORTLIST)) if args.variant == "draft" else VARIANTS[args.variant](model)
    limit = token_cost(model).bytes / copy_bandwidth(device)
    role = "draft" if args.variant == "draft" else "target"
    before, after, plans = choose(model, role, args.wide, args.seconds, args.tokens)
    for key, plan in plans.items():
        print(f"{json.dumps(key)}: {json.dumps(plan)}")
    for name, took in (("before", before), ("chosen", after)):
        print(f"{name}: {1000 * took:.4f} ms, {took / limit:.3f} of {1000 * limit:.4f} ms to read the weights")
    if args.json is not None:
        args.json.write_text(json.dumps(plans, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
