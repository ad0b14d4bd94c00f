"""Time the experts of a mixture, against the time to read those that the tokens touch.

python examples/benchmarks/experts.py --device cuda --dtype bfloat16
python examples/benchmarks/experts.py --device cuda --dtype bfloat16 --shapes gpt-oss-20b --tokens 1,8 --sweep
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_specbranch.bench.timing import timed
from hf_specbranch.kernels.experts import Experts, Gate, apply_experts, apply_experts_reference, fits, usual_plan
from hf_specbranch.kernels.linear import Plan
from hf_specbranch.kernels.routing import route

sys.path.insert(0, str(Path(__file__).parent))
from lab import finish, whole_numbers  # noqa: E402

# hidden size, intermediate size, experts, experts per token
SHAPES = {"qwen3-30b-a3b": (2048, 768, 128, 8), "gpt-oss-20b": (2880, 2880, 32, 4), "mixtral-8x7b": (4096, 14336, 8, 2)}
SWEPT = [Plan(splits, stages) for splits in (2, 4, 8) for stages in (3, 4, 5, 6)]
CLAMPED = Gate("clamped", interleaved=True, alpha=1.702, limit=7.0)


class Mixture:
    """The experts of a few layers, which do not fit in a cache together.

    Args:
        shape: a name, or hidden size x intermediate size x experts x experts per token.
        layers: number of layers.
        dtype: of the weights.
        device: of the weights.
    """

    def __init__(self, shape: str, layers: int, dtype: torch.dtype, device: torch.device) -> None:
        hidden, size, number, self.choices = SHAPES.get(shape) or tuple(map(int, shape.split("x")))
        self.shape, self.hidden, self.number, self.dtype, self.device = shape, hidden, number, dtype, device
        transposed = shape.startswith("gpt-oss")  # and with biases

        def weight(rows: int, columns: int) -> Tensor:
            sizes = (number, columns, rows) if transposed else (number, rows, columns)
            drawn = torch.empty(sizes, dtype=dtype, device=device).normal_(std=0.02)
            return drawn.mT if transposed else drawn

        def bias(columns: int) -> Tensor | None:
            return torch.zeros((number, columns), dtype=dtype, device=device) if transposed else None

        gate = CLAMPED if transposed else Gate("silu")
        self.layers = [
            Experts(weight(2 * size, hidden), weight(hidden, size), bias(2 * size), bias(hidden), gate)
            for _ in range(layers)
        ]
        self.expert_bytes = 3 * hidden * size * self.layers[0].down.element_size()

    def work(self, tokens: int, plan: Plan | None = None) -> tuple[Callable[[], None], int]:
        """Return what runs all layers over random choices of so many tokens, and how many experts they touch in all."""
        x = torch.randn((tokens, self.hidden), device=self.device).to(self.dtype)
        logits = [torch.randn((tokens, self.number), device=self.device) for _ in self.layers]
        routings = [route(each, self.choices, True, torch.float32) for each in logits]
        ours = fits(x, self.layers[0])

        def run() -> None:
            for routing, layer in zip(routings, self.layers):
                if ours:
                    apply_experts(x, routing.touched, layer, plan=plan)
                else:
                    apply_experts_reference(x, routing.chosen, routing.weights, layer)

        run()
        touched = sum(int(routing.touched.used) for routing in routings)
        if self.device.type != "cuda":
            return run, touched
        graph = torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        with torch.cuda.graph(graph):
            run()
        return graph.replay, touched


@torch.no_grad()
def measure(mixture: Mixture, tokens: int, bandwidth: float, repeats: int, sweep: bool) -> dict[str, Any]:
    """Return the microseconds of a layer, and how many times those to read its touched experts they are."""
    layers = len(mixture.layers)

    def us(plan: Plan | None) -> tuple[float, float]:
        torch.manual_seed(0)
        work, touched = mixture.work(tokens, plan)
        return 1e6 * min(timed(work, mixture.device, repeats)) / layers, touched / layers

    taken, touched = us(None)
    limit = 1e6 * touched * mixture.expert_bytes / bandwidth
    found: dict[str, Any] = {"shape": mixture.shape, "tokens": tokens, "touched": touched, "us": taken, "limit": limit}
    if sweep:
        found["usual"] = list(usual_plan(mixture.layers[0]))
        found["sweep"] = [{"plan": list(plan), "us": us(plan)[0]} for plan in SWEPT]
    return found


def lines(found: list[dict[str, Any]]) -> list[str]:
    """Return one line per number of tokens, and one per plan that was tried on it."""
    text = []
    for entry in found:
        text.append(
            f"{entry['shape']}, {entry['tokens']} tokens touch {entry['touched']:.0f} experts: {entry['us']:.1f} us, "
            f"{entry['us'] / entry['limit']:.2f}x the {entry['limit']:.1f} us to read them"
        )
        for tried in entry.get("sweep", ()):
            text.append(f"  splits {tried['plan'][0]}, stages {tried['plan'][1]}: {tried['us']:.1f} us")
    return text


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="e.g. cpu or cuda (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="e.g. bfloat16 (default: %(default)s)")
    parser.add_argument(
        "--shapes", nargs="+", default=list(SHAPES), help=f"{', '.join(SHAPES)}, or e.g. 2048x768x128x8"
    )
    parser.add_argument("--tokens", type=whole_numbers, default=(1, 4, 8, 16), help="tokens in a pass")
    parser.add_argument("--layers", type=int, default=6, help="layers with weights of their own (default: %(default)s)")
    parser.add_argument("--bandwidth", type=float, default=4.28e12, help="bytes per second (default: an H200's)")
    parser.add_argument("--repeat", type=int, default=20, help="timed calls, the fastest counts (default: %(default)s)")
    parser.add_argument("--sweep", action="store_true", help="time other plans too")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args(argv)
    found = []
    for shape in args.shapes:
        mixture = Mixture(shape, args.layers, getattr(torch, args.dtype), torch.device(args.device))
        found += [measure(mixture, tokens, args.bandwidth, args.repeat, args.sweep) for tokens in args.tokens]
    finish(args, found, lines(found))


if __name__ == "__main__":
    main()
