"""Time the first generation of new processes, on a GPU above all: from `specbranch()` to the last token.

    python examples/benchmarks/first_call.py --processes 3
    python examples/benchmarks/first_call.py --grow 7b:68m --device cuda --dtype bfloat16 --processes 4

The first process may also build kernels and check models, which is kept on disk; the others show what every process
takes. Nothing else has been generated before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hf_specbranch import SpecBranchConfig, specbranch
from hf_specbranch.bench.methods import Pair
from hf_specbranch.bench.timing import wait

sys.path.insert(0, str(Path(__file__).parent))
from lab import finish, inputs_of, load, parser_for  # noqa: E402

IN_PROCESS = """
import runpy, sys, time
began = time.perf_counter()
import torch, transformers
print(time.perf_counter() - began)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
LATER = 4  # further generations, of which the median is the usual time


def first_call(pair: Pair, args: argparse.Namespace) -> dict[str, Any]:
    """Attach SpecBranch and generate one text a few times. Call this once per process."""
    inputs = {name: ids.repeat(1, 8)[:, : args.prompt_length] for name, ids in inputs_of(args, pair)[0][1].items()}
    settings = SpecBranchConfig(args.policy)
    arguments: dict[str, Any] = dict(max_new_tokens=args.new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    wait(pair.target)
    began, seconds = time.perf_counter(), []
    model: Any = specbranch(pair.target, draft=pair.draft)
    for _ in range(1 + LATER):
        model.generate(**inputs, **arguments, specbranch=settings)
        wait(pair.target)
        seconds.append(time.perf_counter() - began)
        if len(seconds) == 1:
            stats = model.specbranch_stats
        began = time.perf_counter()
    found = {"first": seconds[0], "second": seconds[1], "later": median(seconds[1:])}
    return {**found, "graphs": stats.graphs_captured, "capture_seconds": stats.capture_seconds}


def line_of(found: dict[str, Any]) -> str:
    """Return one process as text."""
    return (
        f"first call {found['first']:.2f} s, the second {found['second']:.2f} s, usually {found['later']:.2f} s: "
        f"warm-up {found['first'] - found['later']:.2f} s, of which {found['capture_seconds']:.2f} s for "
        f"{found['graphs']} graphs; imports took {found['imports']:.1f} s"
    )


def in_new_process(arguments: list[str]) -> dict[str, Any]:
    """Run this script once in a process of its own."""
    command = [sys.executable, "-c", IN_PROCESS, __file__, *arguments, "--within"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return {**json.loads(output[-1]), "imports": float(output[0])}


def main(arguments: list[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--processes", type=int, default=3, help="one after the other (default: %(default)s)")
    parser.add_argument("--policy", default="auto", help="default: %(default)s")
    parser.add_argument("--prompt-length", type=int, default=240, help="tokens at most (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="per generation (default: %(default)s)")
    parser.add_argument("--within", action="store_true", help=argparse.SUPPRESS)
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parser.parse_args(arguments)
    if args.within:
        print(json.dumps(first_call(load(args), args)))
        return
    found = [in_new_process(arguments) for _ in range(args.processes)]
    finish(args, found, map(line_of, found))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
