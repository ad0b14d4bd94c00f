"""Time a model with recurrent layers: a token against the limit, a verify pass, and speculation at a known acceptance.

    python examples/benchmarks/recurrent.py
    python examples/benchmarks/recurrent.py --model qwen3.5-9b --device cuda --dtype bfloat16

The weights are random, except that every token has one clear continuation: rounding then cannot change the text. The
draft repeats the text that the target has generated alone; a part of its tokens, drawn with a fixed seed, is replaced.
It runs on the host.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import CandidateGenerator

from hf_specbranch import SpecBranchConfig, SpecBranchStats, specbranch
from hf_specbranch.bench.families import seconds_per_token, why_slow
from hf_specbranch.bench.limit import copy_bandwidth, token_cost
from hf_specbranch.bench.random_model import random_model
from hf_specbranch.bench.shapes import SHAPES, config_of

sys.path.insert(0, str(Path(__file__).parent))
from lab import finish  # noqa: E402
from pass_time import target_pass  # noqa: E402

TINY = "qwen3.5-9b"  # the architecture of "tiny"
VERIFIED = 8  # tokens of the verify pass
CLEARNESS = 4.0  # the spread of embeddings; a layer adds about 1
TRIES = 4  # calls until nothing is captured any more


class RecordedText(CandidateGenerator):
    """Drafts what comes next in a recorded text, with some tokens replaced.

    Args:
        text: [1, L] the prompt and what the target has generated.
        replaced: the probability that a token is replaced.
        count: draft tokens per round.
        vocabulary: of the model.
    """

    def __init__(self, text: Tensor, replaced: float, count: int, vocabulary: int) -> None:
        self.text, self.count = text.cpu(), count
        generator = torch.Generator().manual_seed(0)
        wrong = torch.rand(self.text.shape, generator=generator) < replaced
        self.drafts = torch.where(wrong, (self.text + 1 + vocabulary // 2) % vocabulary, self.text)

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        known = input_ids.shape[1]
        return torch.cat([self.text[:, :known], self.drafts[:, known : known + self.count]], dim=1), None


@torch.no_grad()
def make_predictable(model: PreTrainedModel) -> None:
    """Let token i + 1 follow token i clearly: the output layer finds the embedding in the residual stream."""
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    spread = embedding.std()
    output.copy_(embedding.roll(1, 0))
    embedding.mul_(CLEARNESS / spread)


def settled(model: Any, ids: Tensor, new_tokens: int, **arguments: Any) -> tuple[Tensor, SpecBranchStats]:
    """Generate until nothing is captured any more; return the text [1, L] and the statistics of the last call."""
    for _ in range(TRIES):
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, **arguments
        )
        if not model.specbranch_stats.graphs_captured:
            break
    return out, model.specbranch_stats


def measure(model: PreTrainedModel, args: argparse.Namespace, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure all three ratios.

    Args:
        model: with random weights.
        args: of this script.
        say: receives a line per step.
    """
    ours, device = specbranch(model), model.device
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(args.context, device=device)[None] % vocabulary
    settings = {"runtime": args.runtime, "kernels": "auto" if args.kernels is None else args.kernels}
    limit = token_cost(model).bytes / copy_bandwidth(device)
    alone = SpecBranchConfig(policy="autoregressive", **settings)
    text, stats = settled(ours, ids, args.new_tokens, specbranch=alone)
    token, why = seconds_per_token(stats), why_slow(model, stats)
    say(f"autoregressive ({stats.runtime}{', ' * bool(why)}{why}): {1000 * token:.2f} ms per token")
    runs = args.runtime, settings["kernels"], args.repeat
    passes = [target_pass(model, args.context, count, *runs) for count in (1, VERIFIED)]
    say(f"a pass over 1 token takes {1000 * passes[0]:.2f} ms, over {VERIFIED} tokens {1000 * passes[1]:.2f} ms")
    draft = RecordedText(text, args.replaced, args.draft_tokens, vocabulary)
    speculation = SpecBranchConfig(policy="auto", **settings)
    again, speculated = settled(ours, ids, args.new_tokens, specbranch=speculation, assistant_model=draft)
    say(
        f"auto ({speculated.runtime}): {1000 * seconds_per_token(speculated):.2f} ms per token, "
        f"{speculated.mean_acceptance_length:.2f} tokens per pass"
    )
    return {
        "runtime": stats.runtime,
        "slowed_by": why or speculated.slowed_by,
        "limit_ms": 1000 * limit,
        "token_over_limit": token / limit,
        "verify_over_token": passes[1] / passes[0],
        "auto_over_autoregressive": token / seconds_per_token(speculated),
        "mean_acceptance_length": speculated.mean_acceptance_length,
        "equal": torch.equal(text, again),
    }


def lines(name: str, found: dict[str, Any]) -> list[str]:
    """Return the table."""
    note = f" ({found['slowed_by']})" if found["slowed_by"] else ""
    return [
        f"| {name}, {found['runtime']}{note} | measured | bar |",
        "|---|---|---|",
        f"| autoregressive, over {found['limit_ms']:.2f} ms to read the weights | {found['token_over_limit']:.2f}x "
        f"| at most 2.0x |",
        f"| pass over {VERIFIED} tokens, over one token | {found['verify_over_token']:.2f}x | at most 1.5x |",
        f"| auto, over autoregressive | {found['auto_over_autoregressive']:.2f}x | at least 1.6x |",
        f"| texts | {'equal' if found['equal'] else 'DIFFERENT'} | equal |",
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", *SHAPES), default="tiny", help="its shape (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="e.g. cpu or cuda (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="e.g. bfloat16 (default: %(default)s)")
    parser.add_argument("--runtime", help="auto, eager or graph (default: graph on a GPU)")
    parser.add_argument("--kernels", action=argparse.BooleanOptionalAction, help="our kernels in captured graphs")
    parser.add_argument("--layers", type=int, help="fewer layers than the model's own")
    parser.add_argument("--context", type=int, default=512, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=200, help="tokens of a text (default: %(default)s)")
    parser.add_argument("--draft-tokens", type=int, default=7, help="draft tokens per round (default: %(default)s)")
    parser.add_argument("--replaced", type=float, default=0.2, help="part of draft tokens (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=30, help="timed passes (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args(argv)
    args.runtime = args.runtime or ("graph" if torch.device(args.device).type == "cuda" else "auto")
    config = config_of(TINY if args.model == "tiny" else args.model, args.layers, args.model == "tiny")
    model = random_model(config, args.device, getattr(torch, args.dtype))
    make_predictable(model)
    found = measure(model, args)
    finish(args, found, lines(args.model, found))


if __name__ == "__main__":
    main()
