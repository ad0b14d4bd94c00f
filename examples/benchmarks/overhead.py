"""Measure how much of a round is spent outside model forwards, here and in transformers' own assisted decoding.

    python examples/benchmarks/overhead.py
    python examples/benchmarks/overhead.py --pair demo --lengths 4 8 --repeats 9

Both run the same target and draft in turns: greedy, with drafts of the same fixed length, on one thread.
"""

from __future__ import annotations

import argparse
import inspect
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_specbranch import SpecBranchConfig, load_demo_pair, specbranch

PROMPT_TOKENS = 32


class Run(NamedTuple):
    """The speed of one generation."""

    tokens_per_second: float
    outside: float  # share of the time not spent in forwards of either model


class ForwardTimer:
    """Adds up the time spent in a model's forward."""

    def __init__(self, *models: PreTrainedModel) -> None:
        self.seconds = 0.0
        for model in models:
            model.forward = self._timed(model.forward)

    def _timed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return forward(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        timed.__signature__ = inspect.signature(forward)
        return timed


def tiny_pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return random models so small that a forward is little more than its Python code."""

    def make(layers: int) -> PreTrainedModel:
        torch.manual_seed(0)
        sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, max_position_embeddings=512)
        return LlamaForCausalLM(
            LlamaConfig(vocab_size=256, num_hidden_layers=layers, eos_token_id=None, **sizes)
        ).eval()

    return make(2), make(1)


def compare(
    target: PreTrainedModel, draft: PreTrainedModel, length: int, max_new_tokens: int, repeats: int
) -> dict[str, Any]:
    """Measure both in turns, and return medians."""
    timer = ForwardTimer(target, draft)
    model = specbranch(target)
    vocabulary = target.config.vocab_size
    ids = torch.randint(3, vocabulary, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    draft.generation_config.update(
        num_assistant_tokens=length, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    settings = SpecBranchConfig(policy="vanilla", max_draft_length=length, confidence_threshold=0.0)
    common = dict(max_new_tokens=max_new_tokens, min_new_tokens=max_new_tokens, do_sample=False, assistant_model=draft)

    def run(choice: SpecBranchConfig | bool) -> tuple[Run, torch.Tensor]:
        timer.seconds, began = 0.0, time.perf_counter()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), specbranch=choice, **common)
        total = time.perf_counter() - began
        return Run(max_new_tokens / total, 1 - timer.seconds / total), out

    pairs = []
    for _ in range(repeats + 1):  # the first is a warm-up
        (theirs, text), (ours, same) = run(False), run(settings)
        if not torch.equal(text, same):
            raise RuntimeError("the two generated different tokens")
        pairs.append((theirs, ours))
    pairs = pairs[1:]
    return {
        "draft_length": length,
        "transformers_tokens_per_second": median(theirs.tokens_per_second for theirs, _ in pairs),
        "specbranch_tokens_per_second": median(ours.tokens_per_second for _, ours in pairs),
        "ratio": median(ours.tokens_per_second / theirs.tokens_per_second for theirs, ours in pairs),
        "transformers_outside_forwards": median(theirs.outside for theirs, _ in pairs),
        "specbranch_outside_forwards": median(ours.outside for _, ours in pairs),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pair", choices=("tiny", "demo"), default="tiny", help="random tiny models, or the embedded pair"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 4, 8], help="draft lengths")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="torch threads; one is steadier for small models")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    if not args.json:
        print("draft length   transformers   vanilla   ratio   outside forwards: transformers, vanilla")
    for length in args.lengths:
        target, draft = tiny_pair() if args.pair == "tiny" else load_demo_pair()[:2]
        row = compare(target, draft, length, args.max_new_tokens, args.repeats)
        if args.json:
            print(json.dumps(row))
        else:
            theirs, ours = row["transformers_tokens_per_second"], row["specbranch_tokens_per_second"]
            outside = f"{row['transformers_outside_forwards']:.0%}, {row['specbranch_outside_forwards']:.0%}"
            print(f"{length:>12}   {theirs:>8.0f} t/s {ours:>7.0f} t/s {row['ratio']:>6.2f}x   {outside:>12}")


if __name__ == "__main__":
    main()
