"""Predict from measured step costs what a second GPU for the draft gains, and how many GPUs serve how many users.

    python examples/benchmarks/scaling.py
    python examples/benchmarks/scaling.py --num-prompts 2 --max-new-tokens 32    # quicker, less exact

The costs below were measured on one H200 with the 7B / 68M and 33B / 1.3B twins (docs/benchmarks.md, "Passes and
kernels" and "Long prompts and prefixes"). How the draft agrees with the target is recorded here on the embedded pair,
whose function the twins compute. Everything that is printed is a prediction, except where it says "measured".
"""

from __future__ import annotations

import argparse
from math import ceil
from typing import NamedTuple

import torch

from hf_specbranch import SpecBranchConfig, load_demo_pair
from hf_specbranch.bench import python_prompts, read_prompts
from hf_specbranch.planning.chooser import Choice, choose, describe, plans_within
from hf_specbranch.planning.costs import interpolate
from hf_specbranch.planning.simulate import Agreement, StepCosts, record_agreement

WIDEST = 16  # tokens of a row in a pass


class Pair(NamedTuple):
    """Measured times of a pair, in milliseconds."""

    name: str
    passes: tuple[tuple[float, float], ...]  # tokens of all rows in a pass of the target, and its time
    draft_step: float
    draft_branches: float  # a step over four branches

    def pass_ms(self, tokens: int) -> float:
        """The time of a pass over so many tokens of all rows; after the widest, it grows as between the last two."""
        (low, first), (high, second) = self.passes[-2:]
        beyond = max(0.0, tokens - high) * (second - first) / (high - low)
        return interpolate(self.passes, tokens) + beyond

    def costs(self, rows: int = 1) -> StepCosts:
        """The step costs of a batch, without overlap."""
        branch = (self.draft_branches - self.draft_step) / 3
        widths = tuple((sent, 1e-3 * self.pass_ms(rows * (sent + 1))) for sent in range(WIDEST))
        return StepCosts(
            target_pass=widths[0][1],
            target_token=(widths[-1][1] - widths[-2][1]),
            draft_step=1e-3 * (self.draft_step + (rows - 1) * branch),
            draft_branch=1e-3 * rows * branch,
            passes=widths,
        )


# One row over 1 and 8 tokens at 512 tokens of context; 16, 32 and 64 rows of one token at 240.
SMALL = Pair("7B / 68M", ((1, 3.59), (8, 3.72), (16, 4.42), (32, 5.24), (64, 7.29)), 0.047, 0.049)
LARGE = Pair("33B / 1.3B", ((1, 16.00), (8, 16.32)), 0.967, 1.000)
MEASURED = {  # tokens per second on one GPU, in the tables "7B / 68M twins" and "33B / 1.3B twins"
    SMALL.name: {"autoregressive": 276.4, "vanilla": 734.4, "specbranch": 628.5},
    LARGE.name: {"autoregressive": 61.9, "vanilla": 131.1, "specbranch": 97.9},
}


def best(texts: list[Agreement], costs: StepCosts, policy: str) -> Choice:
    """The fastest plan of one policy."""
    plans = plans_within(SpecBranchConfig(prompt_lookup_num_tokens=0), captured=True)
    return choose([plan for plan in plans if plan.policy == policy], texts, costs, captured=True)


def row(*cells: object) -> None:
    """Print a row of a table."""
    print(f"| {' | '.join(map(str, cells))} |")


def two_gpus(texts: list[Agreement]) -> None:
    """Print the fastest plan of each policy on one GPU, and with a GPU for the draft."""
    print("| pair | policy | one GPU, measured | one GPU | two GPUs | plan on two GPUs |\n|---|---|---|---|---|---|")
    for pair in (SMALL, LARGE):
        for policy in ("autoregressive", "vanilla", "specbranch"):
            one, two = (best(texts, pair.costs().on_gpus(count), policy) for count in (1, 2))
            speeds = MEASURED[pair.name][policy], one.tokens_per_second, two.tokens_per_second
            row(pair.name, policy, *map(round, speeds), describe(two.plan, overlap=policy == "specbranch"))


def users(texts: list[Agreement]) -> dict[int, float]:
    """Print the speed of each user by users on one GPU; return the better one."""
    print("\n| users on one GPU | alone | with the draft | gain | all users | tokens per pass and user |")
    print("|---|---|---|---|---|---|")
    speeds = {}
    for rows in (1, 2, 4, 8, 16, 32, 64):
        costs = SMALL.costs(rows)
        alone, drafted = (best(texts, costs, policy) for policy in ("autoregressive", "vanilla"))
        speeds[rows] = max(alone.tokens_per_second, drafted.tokens_per_second)
        gain = drafted.tokens_per_second / alone.tokens_per_second
        each = round(alone.tokens_per_second), round(drafted.tokens_per_second), f"{gain:.2f}x"
        row(rows, *each, round(rows * speeds[rows]), f"{drafted.tokens_per_pass:.2f}")
    return speeds


def gpus(speeds: dict[int, float]) -> None:
    """Print how many GPUs serve so many users at so many tokens per second each."""
    wanted = (50, 100, 200, 300, 500)
    print("\n| users at a time |" + "".join(f" {speed} tokens/s each |" for speed in wanted))
    print("|---" * (1 + len(wanted)) + "|")
    for count in (1, 8, 32, 128, 512):
        cells = []
        for speed in wanted:
            rows = max((rows for rows, reached in speeds.items() if reached >= speed), default=0)
            cells.append(str(ceil(count / rows)) if rows else "-")
        row(count, *cells)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", help="JSON lines with an id and a prompt each; default: Python functions")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128, help="per prompt")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    target, draft, tokenizer = load_demo_pair()
    prompts = python_prompts() if args.prompts is None else read_prompts(args.prompts)
    inputs = [tokenizer(each.prompt, return_tensors="pt") for each in prompts[: args.num_prompts]]
    texts = [record_agreement(target, draft, each, args.max_new_tokens) for each in inputs]
    two_gpus(texts)
    gpus(users(texts))


if __name__ == "__main__":
    main()
