"""Time every kernel of a pass alone, at a model's sizes, against torch and against a copy of as many bytes.

python examples/benchmarks/each_kernel.py
python examples/benchmarks/each_kernel.py --grow 7b:68m --device cuda --dtype bfloat16
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from hf_specbranch.bench.limit import copy_bandwidth
from hf_specbranch.bench.timing import timed
from hf_specbranch.kernels.angles import angles, angles_reference
from hf_specbranch.kernels.attention import attend
from hf_specbranch.kernels.autotune import autotune
from hf_specbranch.kernels.gated import gated, gated_product, gated_reference
from hf_specbranch.kernels.linear import linear_split_k
from hf_specbranch.kernels.norm import rms_norm, rms_norm_reference
from hf_specbranch.kernels.rotary import Slots, rotary, rotary_reference

sys.path.insert(0, str(Path(__file__).parent))
from lab import finish, load, parser_for  # noqa: E402

TOKENS, CONTEXT = 8, 512
LARGEST_CACHE = 128 << 20  # bytes; operands that a pass reads once must not come from a cache
CALLS = 16  # in one measurement


class Work(NamedTuple):
    """The work of one kernel. Both versions take the number of the call, which selects their operands."""

    name: str
    kernel: Callable[[int], object]
    in_torch: Callable[[int], object]
    moved: int  # bytes read and written


@torch.no_grad()
def each_kernel(model: PreTrainedModel, tokens: int = TOKENS, context: int = CONTEXT) -> list[dict[str, Any]]:
    """Return the microseconds of each kernel, of the same work in torch, and of a copy that moves as many bytes.

    On CUDA many calls are captured in one graph, so launching them costs nothing. On a CPU the kernels are their torch
    references.

    Args:
        model: gives sizes, dtype and device; must be of a kind that the kernels serve.
        tokens: number of tokens in the pass.
        context: number of tokens before the pass.

    Example:
        >>> from hf_specbranch import load_demo_pair
        >>> [line["name"] for line in each_kernel(load_demo_pair()[0])][:2]
        ['norm with residual', 'angles']
    """
    bandwidth = copy_bandwidth(model.device)
    found = []
    for work in Pass(model, tokens, context):
        taken = [1e6 * _seconds(version, model.device) for version in (work.kernel, work.in_torch)]
        limit = 1e6 * work.moved / bandwidth
        found.append({"name": work.name, "us": taken[0], "torch_us": taken[1], "copy_us": limit})
    return found


def check_sizes(model: PreTrainedModel) -> None:
    """Refuse models whose config names its sizes differently."""
    config = model.config.get_text_config(decoder=True)
    missing = [
        name for name in ("hidden_size", "intermediate_size", "num_attention_heads") if not hasattr(config, name)
    ]
    if missing:
        raise ValueError(
            f"{type(model).__name__} has no {', '.join(missing)} in its config; the kernels serve "
            f"models built like Llama"
        )


class Pass:
    """Makes the operands of a pass over some tokens, kernel by kernel."""

    def __init__(self, model: PreTrainedModel, tokens: int, context: int) -> None:
        config = model.config.get_text_config(decoder=True)
        self.device, self.dtype, self.tokens, self.context = model.device, model.dtype, tokens, context
        self.hidden, self.inner, self.heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
        self.shared = getattr(config, "num_key_value_heads", None) or self.heads
        self.size = getattr(config, "head_dim", None) or self.hidden // self.heads
        self.positions = torch.arange(tokens, device=model.device)[None]
        self.query = self.random(1, self.heads, tokens, self.size)

    def __iter__(self) -> Iterator[Work]:
        yield from (self.norm(), self.angles(), self.rotary(), self.attention(), self.gate())
        yield self.product("q, k and v", (self.heads + 2 * self.shared) * self.size, self.hidden)
        yield self.product("attention's output", self.hidden, self.heads * self.size)
        yield self.gated_product()
        yield self.product("down", self.hidden, self.inner)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def norm(self) -> Work:
        x, residual = self.random(1, self.tokens, self.hidden), self.random(1, self.tokens, self.hidden)
        weight = self.random(self.hidden)
        return Work(
            "norm with residual",
            lambda _: rms_norm(x, weight, 1e-6, residual),
            lambda _: rms_norm_reference(x, weight, 1e-6, residual),
            4 * x.nbytes,
        )

    def angles(self) -> Work:
        frequencies = torch.rand(self.size // 2, device=self.device)
        return Work(
            "angles",
            lambda _: angles(self.positions, frequencies, 1.0, self.dtype),
            lambda _: angles_reference(self.positions, frequencies, 1.0, self.dtype),
            2 * self.tokens * self.size * self.dtype.itemsize,
        )

    def rotary(self) -> Work:
        key = self.random(1, self.shared, self.tokens, self.size)
        cos, sin = self.random(1, self.tokens, self.size), self.random(1, self.tokens, self.size)
        keys, values = self.random(2, 1, self.shared, self.context + self.tokens, self.size)
        places = self.positions + self.context

        def by_torch(_: int) -> None:
            rotary_reference(self.query, cos, sin)
            keys.index_copy_(2, places[0], rotary_reference(key, cos, sin))
            values.index_copy_(2, places[0], key)

        return Work(
            "rotary with the cache",
            lambda _: rotary(self.query, key, key, cos, sin, None, Slots(keys, values, places)),
            by_torch,
            2 * (self.query.nbytes + 2 * key.nbytes),
        )

    def attention(self) -> Work:
        slots = self.context + self.tokens
        caches = _many(lambda: self.random(2, 1, self.shared, slots, self.size))
        mask = (torch.arange(slots, device=self.device) <= self.context + self.positions[0][:, None])[None, None]

        def ours(call: int) -> None:
            keys, values = caches[call % len(caches)]
            attend(self.query, keys, values, mask, self.size**-0.5)

        def by_torch(call: int) -> None:
            keys, values = caches[call % len(caches)]
            functional.scaled_dot_product_attention(self.query, keys, values, attn_mask=mask, enable_gqa=True)

        return Work("attention", ours, by_torch, caches[0].nbytes)

    def gate(self) -> Work:
        both = self.random(self.tokens, 2 * self.inner)
        moved = both.nbytes * 3 // 2
        return Work("gate", lambda _: gated(both, "silu"), lambda _: gated_reference(both, "silu"), moved)

    def gated_product(self) -> Work:
        weights, rows = _many(lambda: self.random(2 * self.inner, self.hidden)), self.random(self.tokens, self.hidden)
        plan = autotune(weights, self.tokens, "gated")
        return Work(
            f"product with gate ({2 * self.inner}x{self.hidden})",
            lambda call: gated_product(rows, weights[call % len(weights)], None, "silu", plan),
            lambda call: gated_reference(functional.linear(rows, weights[call % len(weights)]), "silu"),
            weights[0].nbytes,
        )

    def product(self, name: str, columns: int, depth: int) -> Work:
        weights, rows = _many(lambda: self.random(columns, depth)), self.random(self.tokens, depth)
        plan = autotune(weights, self.tokens, "split-k")
        return Work(
            f"product, {name} ({columns}x{depth})",
            lambda call: linear_split_k(rows, weights[call % len(weights)], None, plan),
            lambda call: functional.linear(rows, weights[call % len(weights)]),
            weights[0].nbytes,
        )


def _many(make: Callable[[], Tensor]) -> list[Tensor]:
    """Make so many operands that no cache holds all of them; one on a CPU."""
    first = make()
    size = first.numel() * first.element_size()
    more = min(CALLS, LARGEST_CACHE // size) if first.is_cuda else 0
    return [first, *(make() for _ in range(more))]


def _seconds(work: Callable[[int], object], device: torch.device) -> float:
    """Return the seconds of one call, the least of several measurements."""
    if device.type != "cuda":
        return min(timed(lambda: work(0), device, CALLS))
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work(0)  # compiled outside the capture
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for call in range(CALLS):
                work(call)
        finally:
            graph.capture_end()
        seconds = min(timed(graph.replay, device, 10)) / CALLS
    torch.cuda.current_stream(device).wait_stream(stream)
    return seconds


def lines(found: list[dict[str, Any]]) -> list[str]:
    """Return one line per kernel."""
    return [
        f"{entry['name']}: {entry['us']:.1f} us, in torch {entry['torch_us']:.1f}; a copy of its bytes takes "
        f"{entry['copy_us']:.1f}"
        for entry in found
    ]


def main(argv: list[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens in the pass (default: %(default)s)")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens before it (default: %(default)s)")
    args = parser.parse_args(argv)
    target = load(args).target
    check_sizes(target)
    found = each_kernel(target, args.tokens, args.context)
    finish(args, found, lines(found))


if __name__ == "__main__":
    main()
