"""Measure further: time to the first token, ms per round by context, ms per step by rows, stability over many runs.

    python examples/benchmarks/latency.py --first-token-at 100 --rounds-at 100,400 --runs 20
    python examples/benchmarks/latency.py --grow 7b:68m --device cuda --dtype bfloat16 --first-token-at 1000,8000 \\
        --rounds-at 500,4000 --steps-at 240,32000 --rows 1,16 --runs 100

A step is one token per row of autoregressive decoding; its limit is the time to read the weights, keys and values. All
others use the policy specbranch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from hf_specbranch.bench.limit import copy_bandwidth, token_cost
from hf_specbranch.bench.methods import Method, Overrides, Pair
from hf_specbranch.bench.timing import TimingStreamer, cache_bytes, generate_once

sys.path.insert(0, str(Path(__file__).parent))
from lab import check_context, finish, inputs_of, load, overrides, parser_for, whole_numbers  # noqa: E402

FIRST_TOKENS = 8  # generated to time the first one
ROUND_TOKENS = 96  # generated to time a round
REPEATS = 5


def prompt_of_length(all_inputs: list[dict[str, Tensor]], length: int) -> dict[str, Tensor]:
    """Join the prompts, repeat them, and cut the result to `length` tokens: [1, length]."""
    joined = torch.cat([inputs["input_ids"] for inputs in all_inputs], dim=1)
    ids = joined.repeat(1, -(-length // joined.shape[1]))[:, :length]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def time_to_first_token(
    pair: Pair, all_inputs: list[dict[str, Tensor]], ours: Overrides, length: int, repeats: int = REPEATS
) -> dict[str, Any]:
    """Time plain `generate()` and specbranch in turns on a prompt of `length` tokens, after a warm-up; medians.

    The second token is another one each time, so that nothing is reused of the prompt before.
    """
    inputs = prompt_of_length(all_inputs, length)
    methods = {"plain": Method("plain"), "specbranch": Method("specbranch", ours.settings("specbranch"), drafts=True)}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(repeats + 1):
        inputs["input_ids"][:, 1:2] = turn + 1
        for name, method in methods.items():
            streamer = TimingStreamer()
            generate_once(pair, method, inputs, FIRST_TOKENS, streamer)
            seconds[name].append(streamer.time_to_first_token)
    plain, speculative = (median(seconds[name][1:]) for name in methods)  # the first is a warm-up
    return {
        "prompt_tokens": length,
        "plain_ms": plain * 1000,
        "specbranch_ms": speculative * 1000,
        "ratio": speculative / plain,
    }


def round_cost(
    pair: Pair, all_inputs: list[dict[str, Tensor]], ours: Overrides, contexts: tuple[int, ...], repeats: int = REPEATS
) -> list[dict[str, Any]]:
    """Return ms per round of specbranch at each context: the time after the first token over the passes after it."""
    method = Method("specbranch", ours.settings("specbranch"), drafts=True)
    rows: list[dict[str, Any]] = []
    for context in contexts:
        inputs, costs, passes = prompt_of_length(all_inputs, context), [], 0
        for _ in range(repeats + 2):
            stats = generate_once(pair, method, inputs, _room(pair, context)).stats
            assert stats is not None
            passes = stats.target_forwards - 1  # the prefill gives the first token
            costs.append((stats.total_seconds - stats.time_to_first_token) / max(1, passes) * 1000)
        ms = median(costs[2:])  # the first two capture new sizes
        ratio = ms / rows[0]["ms_per_round"] if rows else 1.0
        rows.append({"context": context, "ms_per_round": ms, "rounds": passes, "ratio_to_first": ratio})
    return rows


def step_cost(
    pair: Pair,
    all_inputs: list[dict[str, Tensor]],
    ours: Overrides,
    sizes: list[tuple[int, int]],
    repeats: int = REPEATS,
) -> list[dict[str, Any]]:
    """Return ms per step of autoregressive decoding for each (context, rows), and the limit."""
    method = Method("autoregressive", ours.settings("autoregressive"))
    bandwidth, weights = copy_bandwidth(pair.target.device), token_cost(pair.target).bytes
    found: list[dict[str, Any]] = []
    for context, rows in sizes:
        inputs = {name: value.repeat(rows, 1) for name, value in prompt_of_length(all_inputs, context).items()}
        costs = []
        for _ in range(repeats + 2):
            stats = generate_once(pair, method, inputs, _room(pair, context)).stats
            assert stats is not None
            passes = stats.target_forwards - 1
            costs.append((stats.total_seconds - stats.time_to_first_token) / max(1, passes) * 1000)
        cached = rows * cache_bytes(pair.target, context + ROUND_TOKENS // 2)
        limit, ms = 1000 * (weights + cached) / bandwidth, median(costs[2:])  # the first two capture
        found.append({"context": context, "rows": rows, "ms_per_step": ms, "limit_ms": limit, "ratio": ms / limit})
    return found


def _room(pair: Pair, context: int) -> int:
    limit = getattr(pair.target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return ROUND_TOKENS if limit is None else min(ROUND_TOKENS, limit - context)


def stability(
    pair: Pair, inputs: dict[str, Tensor], ours: Overrides, times: int, max_new_tokens: int
) -> dict[str, Any]:
    """Run specbranch on one prompt `times` times: speed of the last tenth over the first, and memory in use."""
    method = Method("specbranch", ours.settings("specbranch"), drafts=True)
    generate_once(pair, method, inputs, max_new_tokens)  # a warm-up
    speeds, memory = [], []
    for _ in range(times):
        found = generate_once(pair, method, inputs, max_new_tokens)
        speeds.append(len(found.tokens) / found.seconds)
        memory.append(allocated_memory(pair.target))
    tenth = max(1, times // 10)
    return {
        "runs": times,
        "first_tenth_tokens_per_second": mean(speeds[:tenth]),
        "last_tenth_tokens_per_second": mean(speeds[-tenth:]),
        "ratio": mean(speeds[-tenth:]) / mean(speeds[:tenth]),
        "allocated_bytes_first": memory[0],
        "allocated_bytes_last": memory[-1],
        "tokens_per_second": speeds,
    }


def allocated_memory(model: Any) -> int | None:
    """Return the bytes in use now; None without CUDA."""
    return int(torch.cuda.memory_allocated(model.device)) if model.device.type == "cuda" else None


def lines(found: dict[str, Any]) -> list[str]:
    """Return what was measured as text."""
    text = []
    for first in found.get("time_to_first_token", ()):
        text.append(
            f"first token of a {first['prompt_tokens']}-token prompt: plain {first['plain_ms']:.1f} ms, specbranch "
            f"{first['specbranch_ms']:.1f} ms, ratio {first['ratio']:.2f}"
        )
    for row in found.get("round_cost", ()):
        text.append(
            f"at {row['context']} tokens of context: {row['ms_per_round']:.2f} ms per round, "
            f"{row['ratio_to_first']:.2f} times the first"
        )
    for row in found.get("step_cost", ()):
        text.append(
            f"{row['rows']} rows at {row['context']} tokens of context: {row['ms_per_step']:.3f} ms per step, "
            f"{row['ratio']:.2f} times the limit of {row['limit_ms']:.3f} ms"
        )
    if runs := found.get("stability"):
        memory = [runs[f"allocated_bytes_{when}"] for when in ("first", "last")]
        shown = (
            ""
            if memory[0] is None
            else f"; {memory[0] / 2**30:.2f} GiB in use at first, {memory[1] / 2**30:.2f} at last"
        )
        text.append(f"{runs['runs']} runs: the last tenth at {runs['ratio']:.3f} of the speed of the first{shown}")
    return text


def main(argv: list[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--first-token-at", type=whole_numbers, default=(), help="time the first token after these")
    parser.add_argument("--rounds-at", type=whole_numbers, default=(), help="time rounds at these contexts")
    parser.add_argument(
        "--steps-at", type=whole_numbers, default=(), help="time autoregressive steps at these contexts"
    )
    parser.add_argument("--rows", type=whole_numbers, default=(1,), help="for --steps-at: batch sizes (default: 1)")
    parser.add_argument("--runs", type=int, help="run one prompt this often, and compare the last runs with the first")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="for --runs (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=REPEATS, help="counted repeats (default: %(default)s)")
    args = parser.parse_args(argv)
    contexts = [*args.first_token_at, *args.rounds_at, *args.steps_at]
    if not contexts and args.runs is None:
        parser.error("nothing to measure: give --first-token-at, --rounds-at, --steps-at or --runs")
    pair, ours = load(args), overrides(args)
    check_context(pair, contexts, FIRST_TOKENS)
    inputs = [each for _, each in inputs_of(args, pair)]
    found: dict[str, Any] = {}
    if args.first_token_at:
        found["time_to_first_token"] = [
            time_to_first_token(pair, inputs, ours, length, args.repeat) for length in args.first_token_at
        ]
    if args.rounds_at:
        found["round_cost"] = round_cost(pair, inputs, ours, args.rounds_at, args.repeat)
    if args.steps_at:
        # Several rows at the first context only: a cache of many long rows does not fit every GPU.
        sizes = [(args.steps_at[0], rows) for rows in args.rows] + [(context, 1) for context in args.steps_at[1:]]
        found["step_cost"] = step_cost(pair, inputs, ours, sizes, args.repeat)
    if args.runs is not None:
        found["stability"] = stability(pair, inputs[0], ours, args.runs, args.max_new_tokens)
    finish(args, found, lines(found))


if __name__ == "__main__":
    main()
