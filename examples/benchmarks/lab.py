"""What the benchmark scripts share: arguments that name a pair and prompts, and a clock for one operation."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_specbranch.bench.methods import Overrides, Pair
from hf_specbranch.bench.prompts import python_prompts, read_prompts
from hf_specbranch.cli.pair import PairNames, load_bench_pair


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that already has the arguments of every script: the pair, the prompts and the output."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="target model (default: the embedded one)")
    parser.add_argument("--draft", help='draft model; "good" or "weak" for the embedded target')
    parser.add_argument("--grow", help="enlarge the pair to named shapes, e.g. 7b:68m")
    parser.add_argument("--device", default="cpu", help="e.g. cpu or cuda (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="dtype of both models (default: %(default)s)")
    parser.add_argument("--runtime", default="auto", help="auto, eager or graph (default: %(default)s)")
    parser.add_argument("--kernels", action=argparse.BooleanOptionalAction, help="our kernels in captured graphs")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads for torch; 0 keeps torch's default")
    parser.add_argument("--prompts", type=Path, help="JSON lines with id and prompt (default: the package's own)")
    parser.add_argument("--num-prompts", type=int, default=4, help="use the first N prompts (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    return parser


def load(args: argparse.Namespace) -> Pair:
    """Load the pair that the arguments name."""
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    return load_bench_pair(PairNames(args.target, args.draft, args.grow, None, args.device, args.dtype))


def overrides(args: argparse.Namespace) -> Overrides:
    """Return the settings of our methods that the arguments name."""
    return Overrides(runtime=args.runtime, kernels="auto" if args.kernels is None else args.kernels)


def inputs_of(args: argparse.Namespace, pair: Pair) -> list[tuple[str, dict[str, Tensor]]]:
    """Return the prompts' ids and their model inputs, `input_ids` [1, P]."""
    prompts = (read_prompts(args.prompts) if args.prompts is not None else python_prompts())[: args.num_prompts]
    device = pair.target.device
    return [(each.id, dict(pair.tokenizer(each.prompt, return_tensors="pt").to(device))) for each in prompts]


def finish(args: argparse.Namespace, result: Any, lines: Iterable[str]) -> None:
    """Print the lines, and write the result if a file was named."""
    print("\n".join(lines))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def whole_numbers(text: str) -> tuple[int, ...]:
    """Parse comma-separated whole numbers above 0; a type for `add_argument`."""
    numbers = tuple(int(part) for part in text.split(",") if part.strip())
    if any(number < 1 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text}: expected whole numbers above 0, e.g. 512,4000")
    return numbers


def check_context(pair: Pair, lengths: Iterable[int], room: int = 8) -> None:
    """Refuse prompts that leave no room for new tokens in a model's context."""
    for role, model in (("target", pair.target), ("draft", pair.draft)):
        limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        for length in lengths:
            if limit is not None and length + room > limit:
                raise ValueError(
                    f"a prompt of {length} tokens leaves no room for {room} more in the {role}'s context of {limit}: "
                    f"choose at most {limit - room}"
                )
