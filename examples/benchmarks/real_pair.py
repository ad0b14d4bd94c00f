"""Compare the greedy text of a real pair with plain `generate()`, and time both.

    python examples/benchmarks/real_pair.py TARGET DRAFT --prompts prompts.jsonl
    python examples/benchmarks/real_pair.py TARGET DRAFT --prompts prompts.jsonl --device cpu --dtype float32

In float32 the texts must be equal. In half precision two computations of the same logits round differently, so a text
may differ from plain `generate()` where its two likeliest tokens are nearly tied. Each first difference is printed with
the gap between the logits of both tokens. The script ends with status 1 if a text differs anywhere else.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specbranch import SpecBranchConfig, specbranch

NEAR_TIE = 0.1  # the largest gap between two logits, in units of their spread, that rounding explains


class Difference(NamedTuple):
    """The first difference of a text from plain `generate()`."""

    prompt: int
    token: int  # index among the new tokens
    gap: float  # logit of plain's token minus that of ours
    spread: float  # standard deviation of these logits

    @property
    def is_near_tie(self) -> bool:
        return abs(self.gap) <= NEAR_TIE * self.spread


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="folder or repository of the target, with its tokenizer")
    parser.add_argument("draft", help="folder or repository of the draft")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with a field prompt")
    parser.add_argument("--num-prompts", type=int, default=12, help="spread evenly over the file")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--policies", default="autoregressive,vanilla,specbranch,auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(options.device).eval()
        for name in (options.target, options.draft)
    )
    prompts = read_prompts(options.prompts, options.num_prompts)
    inputs = [chat_inputs(tokenizer, prompt, options.device) for prompt in prompts]
    wrong = compare(target, draft, inputs, options.max_new_tokens, options.policies.split(","))
    return int(wrong)


def read_prompts(path: Path, count: int) -> list[str]:
    rows = [json.loads(line)["prompt"] for line in path.read_text().splitlines() if line.strip()]
    count = min(count, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]


def chat_inputs(tokenizer: Any, prompt: str, device: str) -> Any:
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(device)


@torch.no_grad()
def compare(target: Any, draft: Any, inputs: list[Any], max_new_tokens: int, policies: list[str]) -> bool:
    """Generate every text without and with each policy; return whether a text differs by more than rounding."""

    def timed(each: Any, **arguments: Any) -> tuple[Tensor, float]:
        begin = time.perf_counter()
        ids = target.generate(**each, max_new_tokens=max_new_tokens, do_sample=False, **arguments)
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        return ids, time.perf_counter() - begin

    timed(inputs[0])  # a warm-up
    plain = [timed(each) for each in inputs]
    new = sum(ids.shape[1] - each["input_ids"].shape[1] for (ids, _), each in zip(plain, inputs))
    print(f"plain generate(): {new / sum(seconds for _, seconds in plain):.1f} tokens/s over {len(inputs)} prompts")
    specbranch(target, draft=draft)
    wrong = False
    for policy in policies:
        config = SpecBranchConfig(policy=policy)
        runs = []
        for _ in range(2):  # the first captures graphs for new lengths
            runs.append([timed(each, specbranch=config) for each in inputs])
        speeds = [new_tokens(run, inputs) / sum(seconds for _, seconds in run) for run in runs]
        texts = [ids for ids, _ in runs[-1]]
        found = [
            first_difference(target, number, theirs, ours, each["input_ids"].shape[1])
            for number, ((theirs, _), ours, each) in enumerate(zip(plain, texts, inputs))
        ]
        differences = [each for each in found if each is not None]
        equal = len(inputs) - len(differences)
        print(
            f"{policy:15s} {speeds[0]:7.1f} tokens/s in the first run, {speeds[1]:7.1f} in the second; "
            f"{equal} of {len(inputs)} texts equal"
        )
        for each in differences:
            kind = "a near tie" if each.is_near_tie else "NOT a near tie"
            print(
                f"    prompt {each.prompt}, token {each.token}: gap {each.gap:.3f} at a spread of {each.spread:.2f}, "
                f"{kind}"
            )
        wrong = wrong or any(not each.is_near_tie for each in differences)
    return wrong


def new_tokens(run: list[tuple[Tensor, float]], inputs: list[Any]) -> int:
    return sum(ids.shape[1] - each["input_ids"].shape[1] for (ids, _), each in zip(run, inputs))


def first_difference(target: Any, prompt: int, plain: Tensor, ours: Tensor, prompt_length: int) -> Difference | None:
    shorter = min(plain.shape[1], ours.shape[1])
    differing = (plain[0, :shorter] != ours[0, :shorter]).nonzero()
    if not len(differing):
        if plain.shape == ours.shape:
            return None
        return Difference(prompt, shorter - prompt_length, float("inf"), 1.0)
    at = int(differing[0])
    logits = target(input_ids=plain[:, :at], use_cache=False).logits[0, -1].float()
    gap = float(logits[plain[0, at]] - logits[ours[0, at]])
    return Difference(prompt, at - prompt_length, gap, float(logits.std()))


if __name__ == "__main__":
    sys.exit(main())
