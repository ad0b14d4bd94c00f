"""Time attention over a prompt that is read in chunks, against torch's flash attention.

python examples/benchmarks/prefill_attention.py --device cuda --dtype bfloat16
python examples/benchmarks/prefill_attention.py --device cuda --dtype bfloat16 --lengths 32000 --sweep
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from hf_specbranch.bench.timing import timed
from hf_specbranch.kernels.prefill_attention import Tiles, attend_chunk, tiles_for

sys.path.insert(0, str(Path(__file__).parent))
from lab import finish, whole_numbers  # noqa: E402

SWEPT = [
    Tiles(queries, keys, warps, stages)
    for queries, keys, warps in [(128, 128, 8), (128, 64, 8), (128, 64, 4), (64, 128, 4), (64, 64, 4)]
    for stages in (2, 3)
]


class Prompt:
    """The queries, keys and values of one prompt.

    Args:
        length: number of tokens.
        heads: number of query heads, and of key and value heads.
        size: elements of a head.
        dtype: of all of them.
        device: of all of them.
    """

    def __init__(self, length: int, heads: tuple[int, int], size: int, dtype: torch.dtype, device: torch.device):
        def random(number: int) -> Tensor:
            return torch.randn((length, 1, number, size), device=device).to(dtype)

        # Slot-major, as in the cache of a runner; torch gets each head in one piece.
        self.cache = [random(heads[1]).permute(1, 2, 0, 3) for _ in range(2)]
        self.query = random(heads[0]).permute(1, 2, 0, 3)
        self.contiguous = [each.contiguous() for each in (self.query, *self.cache)]
        self.spans = torch.zeros((1, 1, length, 4), dtype=torch.int32, device=device)
        self.spans[..., 1] = torch.arange(1, length + 1, device=device)
        self.length, self.size, self.device = length, size, device
        self.operations = 2 * length * length * size * heads[0]  # half of the scores, two products

    def ours(self, chunk: int, tiles: Tiles | None = None) -> None:
        """Read the prompt in chunks with our kernel."""
        for start in range(0, self.length, chunk):
            part = slice(start, start + chunk)
            attend_chunk(self.query[:, :, part], *self.cache, self.spans[:, :, part], self.size**-0.5, tiles=tiles)

    def torch_in_chunks(self, chunk: int) -> None:
        """Read the prompt in chunks with torch."""
        query, key, value = self.contiguous
        for start in range(0, self.length, chunk):
            end = min(start + chunk, self.length)
            functional.scaled_dot_product_attention(
                query[:, :, start:end], key[:, :, :end], value[:, :, :end],
                attn_mask=causal_lower_right(end - start, end), enable_gqa=query.shape[1] != key.shape[1],
            )  # fmt: skip

    def torch_at_once(self) -> None:
        """Read the whole prompt at once with torch."""
        query, key, value = self.contiguous
        functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
        )


@torch.no_grad()
def measure(prompt: Prompt, chunk: int, sweep: bool = False, repeats: int = 5) -> dict[str, Any]:
    """Return the milliseconds of our kernel and of torch for one prompt, and with `sweep` those of other tiles."""

    def ms(work: Callable[[], None]) -> float:
        return 1000 * min(timed(work, prompt.device, repeats))

    usual = tiles_for(prompt.size, prompt.query.dtype, prompt.device)
    found: dict[str, Any] = {
        "length": prompt.length,
        "heads": [prompt.query.shape[1], prompt.cache[0].shape[1]],
        "chunk": chunk,
        "tiles": list(usual),
        "ms": ms(lambda: prompt.ours(chunk)),
        "torch_chunks_ms": ms(lambda: prompt.torch_in_chunks(chunk)),
        "torch_ms": ms(prompt.torch_at_once),
    }
    found["tflops"] = prompt.operations / found["ms"] / 1e9
    if sweep:
        found["sweep"] = []
        for tiles in SWEPT:
            try:
                found["sweep"].append({"tiles": list(tiles), "ms": ms(lambda: prompt.ours(chunk, tiles))})  # noqa: B023
            except Exception as error:  # too much shared memory for this GPU
                found["sweep"].append({"tiles": list(tiles), "error": str(error).splitlines()[0]})
    return found


def lines(found: list[dict[str, Any]]) -> list[str]:
    """Return one line per prompt, and one per tiles that were tried on it."""
    text = []
    for entry in found:
        text.append(
            f"{entry['length']} tokens, heads {entry['heads'][0]}/{entry['heads'][1]}, chunks of {entry['chunk']}: "
            f"{entry['ms']:.2f} ms ({entry['tflops']:.0f} TFLOP/s), torch in chunks {entry['torch_chunks_ms']:.2f}, "
            f"at once {entry['torch_ms']:.2f}; tiles {tuple(entry['tiles'])}"
        )
        for tried in entry.get("sweep", ()):
            text.append(f"  {tuple(tried['tiles'])}: {tried.get('error') or format(tried['ms'], '.2f') + ' ms'}")
    return text


def _heads(text: str) -> tuple[int, int]:
    queries, _, keys = text.partition("/")
    return int(queries), int(keys or queries)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="e.g. cpu or cuda (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="e.g. bfloat16 (default: %(default)s)")
    parser.add_argument("--lengths", type=whole_numbers, default=(8000, 32000), help="tokens of the prompts")
    parser.add_argument("--chunks", type=whole_numbers, default=(1024, 2048), help="queries in a chunk")
    parser.add_argument("--heads", type=_heads, nargs="+", default=[(32, 32), (32, 8)], help="e.g. 32/32 32/8")
    parser.add_argument("--size", type=int, default=128, help="elements of a head (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="timed calls, the fastest counts (default: %(default)s)")
    parser.add_argument("--sweep", action="store_true", help="time other tiles too")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args(argv)
    found = []
    for heads in args.heads:
        for length in args.lengths:
            prompt = Prompt(length, heads, args.size, getattr(torch, args.dtype), torch.device(args.device))
            found += [measure(prompt, chunk, args.sweep, args.repeat) for chunk in args.chunks]
    finish(args, found, lines(found))


if __name__ == "__main__":
    main()
