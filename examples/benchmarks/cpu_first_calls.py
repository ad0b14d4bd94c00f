"""Measure how the first calls on a CPU compare with plain `generate()`, on a quiet machine or on a busy one.

Plain and attached calls alternate, so that both meet the same load; the figures are ratios of neighbouring calls. The
first attached call includes what is found out once about a model.

    python examples/benchmarks/cpu_first_calls.py --pairs 20
    python examples/benchmarks/cpu_first_calls.py --pairs 20 --busy 2
    python examples/benchmarks/cpu_first_calls.py --compare --num-prompts 20
    python examples/benchmarks/cpu_first_calls.py --compare --plain-only --num-prompts 8 --target T --draft D

With `--compare`, `auto` is compared with fixed policies and plain `generate()` over several prompts, all methods in
turns on each prompt.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from torch import Tensor

from hf_specbranch import SpecBranchConfig, specbranch
from hf_specbranch.bench.methods import Pair

sys.path.insert(0, str(Path(__file__).parent))
from lab import finish, inputs_of, load, parser_for  # noqa: E402

PROMPT = "def fibonacci(n):"  # of the README
# What `auto` is compared with. The lengths and thresholds are those that it chooses from on a CPU.
FIXED: dict[str, SpecBranchConfig | None] = {
    "autoregressive": SpecBranchConfig("autoregressive"),
    **{
        f"vanilla, length {length}": SpecBranchConfig("vanilla", length, confidence_threshold=0.4)
        for length in (2, 4, 6, 8)
    },
    "vanilla, length 6, low threshold": SpecBranchConfig("vanilla", 6, confidence_threshold=0.2),
    "vanilla, length 4, 4 tree leaves": SpecBranchConfig("vanilla", 4, confidence_threshold=0.2, tree_leaves=4),
    "specbranch": SpecBranchConfig("specbranch"),
}


def seconds_of(pair: Pair, inputs: dict[str, Tensor], new_tokens: int, settings: SpecBranchConfig | None) -> float:
    """Return the seconds of one greedy call; plain `generate()` if there are no settings."""
    more: dict[str, Any] = {} if settings is None else {"assistant_model": pair.draft, "specbranch": settings}
    if settings is None and hasattr(pair.target, "specbranch_stats"):
        more["specbranch"] = False
    start = time.perf_counter()
    pair.target.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, **more)
    return time.perf_counter() - start


def first_calls(pair: Pair, inputs: dict[str, Tensor], new_tokens: int, pairs: int) -> dict[str, Any]:
    """Time pairs of calls: plain, then attached. The model is attached for the latter only."""
    seconds: list[tuple[float, float]] = []
    plans: list[list[dict[str, Any]]] = []
    seconds_of(pair, inputs, new_tokens, None)  # the first call of all includes torch's own start
    for _ in range(pairs):
        plain = seconds_of(pair, inputs, new_tokens, None)
        specbranch(pair.target)
        seconds.append((plain, seconds_of(pair, inputs, new_tokens, SpecBranchConfig())))
        plans.append(pair.target.specbranch_stats.plans)
    ratios = [attached / plain for plain, attached in seconds]
    return {"seconds": seconds, "first": ratios[0], "others": median(ratios[1:]), "ratios": ratios, "plans": plans}


def compare(
    pair: Pair,
    all_inputs: list[tuple[str, dict[str, Tensor]]],
    new_tokens: int,
    fixed: dict[str, SpecBranchConfig | None],
) -> dict[str, Any]:
    """Time plain `generate()`, each fixed policy and `auto` in turns on each prompt; sums over the prompts."""
    methods = {"plain": None, **fixed, "auto": SpecBranchConfig()}
    specbranch(pair.target)
    for settings in methods.values():
        seconds_of(pair, all_inputs[0][1], 16, settings)
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _, inputs in all_inputs:
        for name, settings in methods.items():
            seconds[name].append(seconds_of(pair, inputs, new_tokens, settings))
    sums = {name: sum(each) for name, each in seconds.items()}
    best = min((name for name in methods if name != "auto"), key=lambda name: sums[name])
    paired = geometric_mean(ours / other for ours, other in zip(seconds["auto"], seconds[best]))
    over_plain = [ours / plain for ours, plain in zip(seconds["auto"], seconds["plain"])]
    over_best = sums["auto"] / sums[best]
    return {"seconds": sums, "best": best, "auto_over_best": over_best, "paired": paired, "over_plain": over_plain}


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep this many cores busy."""
    program = f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(100_000))"
    others = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(processes)]
    try:
        if others:
            time.sleep(1.0)  # until they have started
        yield
    finally:
        for each in others:
            each.terminate()
            each.wait()


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = parser_for(__doc__)
    parser.add_argument("--busy", type=int, default=0, help="processes that keep the cores busy (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of calls (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens per call (default: %(default)s)")
    parser.add_argument("--prompt", default=PROMPT, help="prompt of the first calls (default: the README's)")
    parser.add_argument("--compare", action=argparse.BooleanOptionalAction, help="compare auto with fixed policies")
    parser.add_argument("--plain-only", action="store_true", help="with --compare: with plain generate() only")
    args = parser.parse_args(arguments)
    pair = load(args)
    with busy(args.busy):
        if args.compare:
            found = compare(pair, inputs_of(args, pair), args.new_tokens, {} if args.plain_only else FIXED)
            lines = [f"{seconds:8.2f} s  {name}" for name, seconds in found["seconds"].items()]
            lines.append(f"auto over {found['best']}: {found['auto_over_best']:.3f} (paired {found['paired']:.3f})")
            lines.append("auto over plain: " + ", ".join(f"{ratio:.2f}" for ratio in found["over_plain"]))
        else:
            inputs = dict(pair.tokenizer(args.prompt, return_tensors="pt").to(pair.target.device))
            found = first_calls(pair, inputs, args.new_tokens, args.pairs)
            lines = [
                f"plain {plain:.3f} s, attached {ours:.3f} s: {ours / plain:.2f}" for plain, ours in found["seconds"]
            ]
            lines.append(f"first call {found['first']:.2f}x plain, median of the others {found['others']:.2f}x")
    finish(args, found, lines)
    return found


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
