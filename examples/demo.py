"""Generate with the embedded pair: without a draft, with plain speculation and with SpecBranch; compare them.

python examples/demo.py
python examples/demo.py --prompt "class Stack:" --max-new-tokens 200 --draft weak --policies vanilla pearl specbranch
"""

import argparse
import sys
import time
from typing import Any

import torch
from transformers import TextStreamer
from transformers.utils import logging

from hf_specbranch import SpecBranchConfig, SpecBranchStats, load_demo_pair, specbranch
from hf_specbranch.planning.chooser import choose, plans_within
from hf_specbranch.planning.simulate import StepCosts, predict, read_agreement

POLICIES = ("auto", "vanilla", "pearl", "specbranch")
RATIO = 40  # draft steps per target pass: a 68M draft and a 7B target, both captured on a GPU
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
    """Return the output of `model.generate(**kwargs)` and its tokens per second."""
    start = time.perf_counter()
    out = model.generate(**kwargs, do_sample=False, return_dict_in_generate=True)
    new_tokens = out.sequences.shape[1] - kwargs["input_ids"].shape[1]
    return out, new_tokens / (time.perf_counter() - start)


def show(speeds: dict[str, float], all_stats: dict[str, SpecBranchStats]) -> None:
    """Print one column per method."""
    plain = speeds["plain"]
    rows = {
        "tokens per second": [f"{speed:.1f}" for speed in speeds.values()],
        "over plain": [f"{speed / plain:.2f}x" for speed in speeds.values()],
        "tokens per target pass": ["1.00", *(f"{stats.mean_acceptance_length:.2f}" for stats in all_stats.values())],
        "draft tokens": ["", *(str(stats.num_draft_tokens) for stats in all_stats.values())],
        "  accepted": ["", *(str(stats.num_accepted_tokens) for stats in all_stats.values())],
        "  rolled back": ["", *(str(stats.rollback_tokens) for stats in all_stats.values())],
        "  wasted": ["", *(str(stats.wasted_branch_tokens) for stats in all_stats.values())],
        "branch points hit": ["", *(f"{stats.branch_hits}/{stats.branch_points}" for stats in all_stats.values())],
        "drafting hidden": ["", *(f"{stats.hidden_fraction:.0%}" for stats in all_stats.values())],
    }
    if not any(stats.hidden_seconds for stats in all_stats.values()):  # both models on one CPU
        del rows["drafting hidden"]
    print(f"{'':<22}" + "".join(f"{name:>12}" for name in speeds))
    for name, values in rows.items():
        print(f"{name:<22}" + "".join(f"{value:>12}" for value in values))


def explain(speeds: dict[str, float], draft: Any, sequences: torch.Tensor, before: int) -> None:
    """Print what the figures mean, and what they would be where the draft is cheap and hidden."""
    if "specbranch" in speeds and speeds["specbranch"] < speeds.get("vanilla", 0.0):
        print(
            "\n'specbranch' drafts on several branches while the target runs. On a CPU both models share the same\n"
            "cores, and a step of this draft takes a good part of a pass of this small target, so drafting slows\n"
            "the target down. 'auto', the default, measures that in its first texts (not timed here), and then\n"
            "uses what is fastest."
        )
    agreement = read_agreement(draft, sequences, before)
    costs = StepCosts(target_pass=1.0, draft_step=1 / RATIO, hidden=1.0)
    named = {name: SpecBranchConfig(policy=name) for name in speeds if name in POLICIES and name != "auto"}
    speedups = {name: predict([agreement], config, costs, captured=True).speedup for name, config in named.items()}
    plan = choose(plans_within(SpecBranchConfig(), captured=True), [agreement], costs, captured=True)
    speedups["auto"] = plan.tokens_per_second * costs.target_pass
    listed = ", ".join(f"{name} {speedup:.2f}x" for name, speedup in speedups.items())
    print(
        f"\nThe same text, replayed where a pass takes as long as {RATIO} draft steps and drafting is hidden, as with\n"
        f"a large target on a GPU (a prediction; docs/benchmarks.md has measurements): {listed}"
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default=PROMPT, help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--draft", choices=("good", "weak"), default="good")
    parser.add_argument("--policies", choices=POLICIES, nargs="+", default=["vanilla", "specbranch", "auto"])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each method; the best counts")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; models this small gain little from more")
    args = parser.parse_args(argv)
    for name in ("max_new_tokens", "repeats", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}: expected 1 or more")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    logging.disable_progress_bar()
    target, draft, tokenizer = load_demo_pair(draft=args.draft)
    model = specbranch(target)
    inputs = dict(tokenizer(args.prompt, return_tensors="pt")) | {"max_new_tokens": args.max_new_tokens}
    methods: dict[str, dict[str, Any]] = {"plain": {}}
    for policy in args.policies:
        methods[policy] = {"assistant_model": draft, "specbranch": SpecBranchConfig(policy=policy)}

    print(f"The embedded pair, draft '{args.draft}', policy '{args.policies[-1]}':\n")
    model.generate(**inputs, **methods[args.policies[-1]], do_sample=False, streamer=TextStreamer(tokenizer))
    for _ in range(2 if "auto" in methods else 0):  # it measures in its first texts
        model.generate(**inputs, **methods["auto"], do_sample=False)
    speeds, outputs = dict.fromkeys(methods, 0.0), {}
    for _ in range(args.repeats):  # in turns, so that a busy moment of the machine affects all alike
        for name, more in methods.items():
            outputs[name], speed = timed(model, **inputs, **more)
            speeds[name] = max(speeds[name], speed)

    print()
    show(speeds, {name: outputs[name].stats for name in args.policies})
    text = outputs["plain"].sequences
    if not all(torch.equal(out.sequences, text) for out in outputs.values()):
        print("\nThe outputs DIFFER. Speculation must not change greedy output: please report this.")
        return 1
    print("\nAll outputs are identical, token for token.")
    explain(speeds, draft, text, inputs["input_ids"].shape[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
