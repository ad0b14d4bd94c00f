"""Measure a running batch: tokens per second and time to the first token of streams that ask one prompt after another.

    python examples/benchmarks/serving.py --streams 1,4 --requests 2 --max-new-tokens 32
    python examples/benchmarks/serving.py --grow 7b:68m --device cuda --dtype bfloat16 --streams 1,16 --rows 16

Streams begin at random moments, and wait for each answer before they ask again. The first answers of each number of
streams are a warm-up. `generate()` is measured too, one prompt after another.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hf_specbranch import specbranch
from hf_specbranch.serving.completion import Completion, CompletionSettings
from hf_specbranch.serving.engine import Engine
from hf_specbranch.serving.row_sampling import Sampling

sys.path.insert(0, str(Path(__file__).parent))
from lab import finish, inputs_of, load, overrides, parser_for, whole_numbers  # noqa: E402


def ask(engine: Engine, prompt: list[int], settings: CompletionSettings) -> Completion:
    """Submit a prompt, and wait for the answer."""
    done = threading.Event()
    answer = Completion(prompt, settings, engine.tokenizer, lambda each: done.set() if each.finished else None)
    engine.submit(answer)
    done.wait()
    if answer.error:
        raise RuntimeError(answer.error)
    return answer


def measure(
    engine: Engine, prompts: list[list[int]], settings: CompletionSettings, streams: int, requests: int, spread: float
) -> dict[str, Any]:
    """Let streams ask so many prompts each; `spread` is the time in seconds within which they begin."""
    chance, answers = random.Random(streams), list[Completion]()

    def stream(number: int, delay: float) -> None:
        time.sleep(delay)
        for turn in range(requests):
            answers.append(ask(engine, prompts[(number * requests + turn) % len(prompts)], settings))

    threads = [threading.Thread(target=stream, args=(at, spread * chance.random())) for at in range(streams)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    return {
        "streams": streams,
        "tokens_per_second": sum(len(answer.tokens) for answer in answers) / seconds,
        "first_token_ms": 1000 * median(answer.stats.time_to_first_token for answer in answers),
        "acceptance_rate": median(answer.stats.draft_acceptance_rate for answer in answers),
    }


def generate_alone(model: Any, prompts: list[list[int]], count: int) -> float:
    """Return the tokens per second of `generate()`, prompt after prompt; the first call is a warm-up."""
    seconds = 0.0
    for turn, prompt in enumerate([prompts[0], *prompts]):
        ids = torch.tensor([prompt], device=model.device)
        began = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count
        )
        seconds += (time.perf_counter() - began) * (turn > 0)
    return count * len(prompts) / seconds


def main(argv: list[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--streams", type=whole_numbers, default=(1, 4), help="numbers of streams, e.g. 1,16")
    parser.add_argument("--requests", type=int, default=3, help="prompts of each stream (default: %(default)s)")
    parser.add_argument("--rows", type=int, help="most answers at a time (default: by the size of the models)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of each answer (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--spread", type=float, default=0.5, help="seconds within which streams begin")
    args = parser.parse_args(argv)
    pair = load(args)
    prompts = [inputs["input_ids"][0].tolist() for _, inputs in inputs_of(args, pair)]
    model = specbranch(pair.target, pair.draft)
    settings = CompletionSettings(args.max_new_tokens, Sampling(args.temperature, seed=1))
    alone = generate_alone(model, prompts, args.max_new_tokens)
    found, lines = [], [f"generate(): {alone:.0f} tokens/s"]
    ours = overrides(args)
    with Engine(
        model, pair.tokenizer, args.rows, settings={"runtime": ours.runtime, "kernels": ours.kernels}
    ) as engine:
        for streams in args.streams:
            measure(engine, prompts, settings, streams, 1, 0.0)
            row = measure(engine, prompts, settings, streams, args.requests, args.spread if streams > 1 else 0.0)
            found.append(row)
            lines.append(
                f"{streams} streams: {row['tokens_per_second']:.0f} tokens/s "
                f"({row['tokens_per_second'] / found[0]['tokens_per_second']:.2f}x of {args.streams[0]}), "
                f"first token after {row['first_token_ms']:.0f} ms, acceptance {row['acceptance_rate']:.0%}"
            )
    finish(args, {"generate": alone, "engine": found, "rows": engine.sizes[-1]}, lines)


if __name__ == "__main__":
    main()
