"""Every policy on the same pair and prompts, against plain `generate()` and transformers' assisted decoding.

python -m hf_specbranch.bench.policies
python -m hf_specbranch.bench.policies --draft weak --prompts my_prompts.jsonl --json
python -m hf_specbranch.bench.policies --grow 7b:68m --device cuda --dtype bfloat16

Greedy, batch size 1, one warm-up each. The ways run in turns, prompt by prompt; outputs are compared with plain
`generate()`'s.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import mean, median
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from .. import SpecBranchConfig, SpecBranchStats, load_demo_pair, specbranch
from .grow import grow
from .prompts import python_prompts, read_prompts

Way = SpecBranchConfig | bool | None  # settings; False: transformers' assisted decoding; None: plain generate()


def ways(length: int, epsilon: float, runtime: str) -> dict[str, Way]:
    """What is compared, plain `generate()` first."""

    def settings(policy: str, **more: Any) -> SpecBranchConfig:
        given = {"confidence_threshold": epsilon, "runtime": runtime, **more}
        return SpecBranchConfig(policy=policy, max_draft_length=length, **given)

    return {
        "plain generate()": None,
        "transformers assisted": False,
        "autoregressive": settings("autoregressive"),
        "vanilla, fixed length": settings("vanilla", confidence_threshold=0.0),
        "vanilla": settings("vanilla"),
        "pearl": settings("pearl"),
        "specbranch, one branch": settings("specbranch", max_branches=1),
        "specbranch, no overlap": settings("specbranch", overlap=False),
        "specbranch": settings("specbranch"),
    }


class Measurement:
    """Times, statistics and differences of one way."""

    def __init__(self) -> None:
        self.speeds: list[float] = []
        self.stats: list[SpecBranchStats] = []
        self.differing = 0

    def row(self, plain: Measurement) -> dict[str, Any]:
        """Figures by name; ratios are medians over prompts of ratios within a prompt."""

        def average(name: str) -> float | None:
            return mean(getattr(stats, name) for stats in self.stats) if self.stats else None

        return {
            "tokens_per_second": median(self.speeds),
            "ratio": median(ours / theirs for ours, theirs in zip(self.speeds, plain.speeds)),
            "mean_acceptance_length": average("mean_acceptance_length"),
            "rollback_rate": average("rollback_rate"),
            "branch_hit_rate": average("branch_hit_rate"),
            "wasted_per_token": mean(s.wasted_branch_tokens / s.new_tokens for s in self.stats) if self.stats else None,
            "hidden_fraction": average("hidden_fraction"),
            "differing_outputs": self.differing,
        }


def measure(
    target: PreTrainedModel, draft: PreTrainedModel, inputs: list[dict[str, torch.Tensor]], new_tokens: int,
    choices: dict[str, Way],
) -> dict[str, Measurement]:  # fmt: skip
    """Run every way on every prompt, in turns."""
    model = specbranch(target)
    found = {name: Measurement() for name in choices}
    with tqdm(total=(len(inputs) + 1) * len(choices), unit="run", leave=False) as bar:
        for turn, prompt in enumerate([inputs[0], *inputs]):  # the first turn is a warm-up
            for name, way in choices.items():
                extra = {} if way is None else {"assistant_model": draft, "specbranch": way}
                model.specbranch_stats = None
                _wait(target)
                began = time.perf_counter()
                out = model.generate(**prompt, max_new_tokens=new_tokens, do_sample=False, **extra)
                _wait(target)
                seconds = time.perf_counter() - began
                bar.update()
                if way is None:
                    reference = out
                if turn == 0:
                    continue
                found[name].speeds.append((out.shape[1] - prompt["input_ids"].shape[1]) / seconds)
                found[name].differing += not torch.equal(out, reference)
                if model.specbranch_stats is not None:
                    found[name].stats.append(model.specbranch_stats)
    return found


def _wait(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def load(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedModel, Any]:
    """The embedded pair, enlarged if asked."""
    dtype = getattr(torch, args.dtype)
    target, draft, tokenizer = load_demo_pair(draft=args.draft)
    if args.grow:
        large, small = args.grow.split(":")
        grown = [
            grow(model, shape, dtype=dtype, device=args.device) for model, shape in ((target, large), (draft, small))
        ]
        return grown[0], grown[1], tokenizer
    return target.to(args.device, dtype), draft.to(args.device, dtype), tokenizer


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", choices=("good", "weak"), default="good")
    parser.add_argument("--grow", metavar="TARGET:DRAFT", help="enlarge the pair to named shapes, e.g. 7b:68m")
    parser.add_argument("--prompts", metavar="FILE", help="JSON lines with id and prompt; by default the package's own")
    parser.add_argument("--num-prompts", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--draft-length", type=int, default=8)
    parser.add_argument("--epsilon", type=float, default=0.4, help="confidence threshold")
    parser.add_argument("--runtime", choices=("auto", "eager", "graph"), default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1, help="torch threads on the CPU")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    target, draft, tokenizer = load(args)
    draft.generation_config.update(
        num_assistant_tokens=args.draft_length,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    prompts = (read_prompts(args.prompts) if args.prompts else python_prompts())[: args.num_prompts]
    inputs = [dict(tokenizer(item.prompt, return_tensors="pt").to(args.device)) for item in prompts]
    found = measure(target, draft, inputs, args.new_tokens, ways(args.draft_length, args.epsilon, args.runtime))
    plain = found["plain generate()"]
    if not args.json:
        print(
            "| way | tokens/s | ratio | tokens a pass | rollback | branch hits | wasted a token | hidden | differing |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
    for name, measurement in found.items():
        row = measurement.row(plain)
        if args.json:
            print(json.dumps({"way": name, **row}))
            continue
        shown = ["" if value is None else f"{value:.2f}" for value in list(row.values())[1:-1]]
        print(f"| {name} | {row['tokens_per_second']:.1f} | {' | '.join(shown)} | {row['differing_outputs']} |")


if __name__ == "__main__":
    main()
