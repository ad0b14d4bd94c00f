"""Time a target pass and a draft step against the limit: a pass cannot be faster than its weights can be read once.

    python examples/benchmarks/pass_time.py
    python examples/benchmarks/pass_time.py --grow 7b:68m --device cuda --dtype bfloat16 --contexts 512,4000,16000
    python examples/benchmarks/pass_time.py --grow qwen2.5-7b:qwen2.5-0.5b --device cuda --dtype bfloat16 \
        --draft-weights int8 --draft-shortlist 65536

The limit is the weights' bytes over the bandwidth of a large copy on the same device. The draft step is timed at the
first context only.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specbranch.bench.limit import copy_bandwidth, token_cost
from hf_specbranch.bench.timing import forget, timed
from hf_specbranch.decoding.draft_copy import DraftForm, copy_of
from hf_specbranch.kernels.spans import SPANS
from hf_specbranch.model_state import state_of
from hf_specbranch.runtime.eager import EagerRunner
from hf_specbranch.runtime.selection import runner_for

sys.path.insert(0, str(Path(__file__).parent))
from lab import check_context, finish, load, overrides, parser_for, whole_numbers  # noqa: E402

BRANCHES = (1, 4)  # draft steps are timed with so many branches
STEPS = (2, 6)  # the cost of a step is the difference between stages of these lengths


@torch.no_grad()
def target_pass(
    model: PreTrainedModel, context: int, queries: int, runtime: str, kernels: bool | str = "auto", repeats: int = 30
) -> float:
    """Return the median seconds of one pass over `queries` tokens after a context of `context` tokens.

    On CUDA the passes are queued one after another. Launching is hidden where the runtime launches faster than the
    device runs.
    """
    device, total = model.device, context + queries
    tokens, columns = tokens_and_columns(model, total)
    last = columns[:, context:]  # [1, Q]
    with runner_for(model, "target", rows=1, slots=total, runtime=runtime, kernels=kernels) as runner:
        visible = visible_spans(runner, total, last + 1, (last, last))
        runner.prefill(tokens[:, :context], columns[:, :context], None)
        return median(timed(lambda: runner.forward(tokens[:, context:], last, last, visible), device, repeats))


@torch.no_grad()
def draft_step(
    model: PreTrainedModel, context: int, branches: int, runtime: str, kernels: bool | str = "auto", repeats: int = 30
) -> float:
    """Return the seconds that one more draft step takes, over one token of each branch after `context` tokens.

    It is the difference between a longer and a shorter stage. Where stages are captured, launching is not part of it.
    """
    device, total = model.device, context + branches
    tokens, columns = tokens_and_columns(model, total)
    last = columns[:, context:]  # [1, K]
    positions = torch.full_like(last, context)
    with runner_for(model, "draft", rows=1, slots=total, runtime=runtime, kernels=kernels) as runner:
        visible = visible_spans(runner, total, positions, (last, last + 1))  # the context, and each branch itself
        runner.prefill(tokens[:, :context], columns[:, :context], None)
        buffers = runner.buffers(object())  # a key of its own: these buffers are not shared

        def stage(steps: int) -> None:
            for _ in range(steps):
                logits = runner.forward_uncaptured(tokens[:, context:], positions, last, visible).logits
                if (shortlist := state_of(model).shortlist) is not None:
                    shortlist.expand(logits)

        fewer, more = (
            median(timed(partial(buffers.run, steps, partial(stage, steps)), device, repeats)) for steps in STEPS
        )
    return (more - fewer) / (STEPS[1] - STEPS[0])


def tokens_and_columns(model: PreTrainedModel, length: int) -> tuple[Tensor, Tensor]:
    """Return random tokens [1, L] and their columns [1, L], which serve as positions and as slots."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    return tokens.to(model.device), torch.arange(length, device=model.device)[None]


def visible_spans(runner: EagerRunner, total: int, end: Tensor, own: tuple[Tensor, Tensor]) -> Tensor:
    """Reserve slots; return what queries [1, Q] see, as the runner takes it: slots before `end`, and the span `own`."""
    shown = runner.bucket(total)
    runner.reserve(1, max(shown, total))
    spans = torch.stack([torch.zeros_like(end), end, *own], -1).to(SPANS)  # [1, Q, 4]
    return runner.visible(spans, shown, torch.ones((1, shown), dtype=torch.bool, device=end.device))


def distance_to_limit(
    model: PreTrainedModel,
    contexts: tuple[int, ...],
    runtime: str,
    kernels: bool | str = "auto",
    queries: tuple[int, ...] = (1, 8),
) -> dict[str, Any]:
    """Compare the time of a pass with reading the weights once, at each context and number of tokens."""
    weights, bandwidth = token_cost(model).bytes, copy_bandwidth(model.device)
    limit = weights / bandwidth
    passes = []
    for context in contexts:
        for count in queries:
            seconds = target_pass(model, context, count, runtime, kernels)
            passes.append(
                {"context": context, "tokens": count, "ms": seconds * 1000, "times_the_limit": seconds / limit}
            )
    return {
        "weight_bytes": weights,
        "copy_bytes_per_second": bandwidth,
        "limit_ms": limit * 1000,
        "runtime": runtime,
        "passes": passes,
    }


def draft_steps(model: PreTrainedModel, context: int, runtime: str, kernels: bool | str = "auto") -> dict[str, Any]:
    """Compare the time of a draft step with reading the weights once, for one branch and for several."""
    weights, bandwidth = token_cost(model).bytes, copy_bandwidth(model.device)
    limit = weights / bandwidth
    steps = []
    for branches in BRANCHES:
        seconds = draft_step(model, context, branches, runtime, kernels)
        steps.append({"branches": branches, "ms": seconds * 1000, "times_the_limit": seconds / limit})
    return {
        "weight_bytes": weights,
        "copy_bytes_per_second": bandwidth,
        "limit_ms": limit * 1000,
        "runtime": runtime,
        "context": context,
        "steps": steps,
    }


def pass_lines(found: dict[str, Any]) -> list[str]:
    """Return the result of `distance_to_limit` as text."""
    first = (
        f"limit: {found['weight_bytes'] / 1e9:.2f} GB of target weights at {found['copy_bytes_per_second'] / 1e12:.2f} "
        f"TB/s (a copy, read and written) take {found['limit_ms']:.2f} ms"
    )
    return [first] + [
        f"target pass ({found['runtime']}) over {entry['tokens']} token{'s' * (entry['tokens'] > 1)} at "
        f"{entry['context']} tokens of context: {entry['ms']:.2f} ms, {entry['times_the_limit']:.2f} times the limit"
        for entry in found["passes"]
    ]


def step_lines(found: dict[str, Any]) -> list[str]:
    """Return the result of `draft_steps` as text."""
    return [
        f"draft step ({found['runtime']}) with {entry['branches']} branch{'es' * (entry['branches'] > 1)} at "
        f"{found['context']} tokens of context: {entry['ms']:.3f} ms, {entry['times_the_limit']:.2f} times the "
        f"{found['limit_ms']:.3f} ms that reading {found['weight_bytes'] / 1e9:.2g} GB of draft weights takes"
        for entry in found["steps"]
    ]


def main(argv: list[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--contexts", type=whole_numbers, default=(512,), help="tokens before the pass, e.g. 512,4000")
    parser.add_argument(
        "--draft-weights", choices=("int8", "float8"), help="time a copy of the draft with such weights"
    )
    parser.add_argument("--draft-shortlist", type=int, help="time a copy of the draft that scores so many tokens")
    args = parser.parse_args(argv)
    pair, ours = load(args), overrides(args)
    check_context(pair, args.contexts)
    target = distance_to_limit(pair.target, args.contexts, ours.runtime, ours.kernels)
    forget(pair)
    form = DraftForm(args.draft_weights, args.draft_shortlist)
    model = pair.draft if form == DraftForm() else copy_of(pair.draft, form)
    draft = draft_steps(model, args.contexts[0], ours.runtime, ours.kernels)
    finish(args, {"target": target, "draft": draft}, [*pass_lines(target), *step_lines(draft)])


if __name__ == "__main__":
    main()
