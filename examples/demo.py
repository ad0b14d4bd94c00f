"""Generate with the embedded pair, with and without speculation, and compare.

python examples/demo.py
python examples/demo.py --prompt "class Stack:" --max-new-tokens 200 --draft weak --policy vanilla
"""

import argparse
import sys
import time
from typing import Any

import torch
from transformers import TextStreamer
from transformers.utils import logging

from hf_specbranch import SpecBranchConfig, SpecBranchStats, load_demo_pair, specbranch

POLICIES = ("autoregressive", "vanilla", "pearl", "specbranch")
PROMPT = '''class Cache:
    """A dictionary that forgets the entry that was not used for the longest time.

    Parameters
    ----------
    capacity : int
        How many entries to keep.
    """

    def __init__(self, capacity):
'''


def timed(model: Any, **kwargs: Any) -> tuple[Any, float]:
    """The output of `model.generate(**kwargs)` and its tokens per second."""
    start = time.perf_counter()
    out = model.generate(**kwargs, do_sample=False, return_dict_in_generate=True)
    new_tokens = out.sequences.shape[1] - kwargs["input_ids"].shape[1]
    return out, new_tokens / (time.perf_counter() - start)


def show(stats: SpecBranchStats, plain: float, speculative: float) -> None:
    rows = [
        ("plain greedy", f"{plain:.1f} tokens/s"),
        ("speculative", f"{speculative:.1f} tokens/s"),
        ("ratio", f"{speculative / plain:.2f}x"),
        ("tokens a target pass", f"{stats.mean_acceptance_length:.2f}"),
        ("forward passes", f"{stats.target_forwards} target, {stats.draft_forwards} draft"),
        ("drafted tokens accepted", f"{stats.draft_acceptance_rate:.0%} of {stats.num_draft_tokens}"),
        ("rolled back", f"{stats.rollback_tokens} tokens ({stats.rollback_rate:.0%})"),
        ("branch points hit", f"{stats.branch_hits} of {stats.branch_points} ({stats.branch_hit_rate:.0%})"),
        ("wasted on lost branches", f"{stats.wasted_branch_tokens} tokens"),
    ]
    for name, value in rows:
        print(f"  {name:<26}{value}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default=PROMPT, help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--draft", choices=("good", "weak"), default="good")
    parser.add_argument("--policy", choices=POLICIES, default="specbranch")
    parser.add_argument("--repeats", type=int, default=3, help="time each way this often and take the best")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; models this small gain little from more")
    args = parser.parse_args(argv)
    for name in ("max_new_tokens", "repeats", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}: expected 1 or more")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    config = SpecBranchConfig(policy=args.policy)
    torch.set_num_threads(args.threads)
    logging.disable_progress_bar()
    target, draft, tokenizer = load_demo_pair(draft=args.draft)
    model = specbranch(target)
    inputs = dict(tokenizer(args.prompt, return_tensors="pt")) | {"max_new_tokens": args.max_new_tokens}
    assisted = inputs | {"assistant_model": draft, "specbranch": config}

    print(f"The embedded pair, draft '{args.draft}', policy '{args.policy}':\n")
    model.generate(**assisted, do_sample=False, streamer=TextStreamer(tokenizer))
    speculative = plain = 0.0
    for _ in range(args.repeats):  # in turns, so that a busy moment of the machine hits both ways alike
        out, speed = timed(model, **assisted)
        speculative = max(speculative, speed)
        reference, speed = timed(model, **inputs)
        plain = max(plain, speed)

    print()
    show(out.stats, plain, speculative)
    if not torch.equal(out.sequences, reference.sequences):
        print("\nThe two outputs DIFFER. Speculation must not change greedy output: please report this.")
        return 1
    print("\nBoth outputs are identical, token for token.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
