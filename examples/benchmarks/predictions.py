"""Check the simulator: predict each of our methods from the step costs of the others, and compare with its measurement.

    python examples/benchmarks/predictions.py
    python examples/benchmarks/predictions.py --methods autoregressive,vanilla-best,vanilla-stop,specbranch --png p.png

The texts are known once the methods have run, so a prediction takes one pass of the draft over each of them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from hf_specbranch import SpecBranchConfig
from hf_specbranch.bench.measure import Benchmark, Plan
from hf_specbranch.bench.methods import check_names
from hf_specbranch.bench.plots import Curve, draw_by_length, new_figure, save_figure
from hf_specbranch.bench.results import Measurement
from hf_specbranch.decoding.assembly import is_cheap
from hf_specbranch.planning.measure import TimedRounds, fit_costs, was_captured
from hf_specbranch.planning.simulate import Agreement, Round, StepCosts, effective_config, read_agreement, replay

sys.path.insert(0, str(Path(__file__).parent))
from lab import finish, inputs_of, load, overrides, parser_for, whole_numbers  # noqa: E402

METHODS = "autoregressive,vanilla-best,vanilla-stop,pearl-best,specbranch,specbranch-one-branch,specbranch-no-overlap"
FEWEST = 4  # methods; step costs cannot be fitted to fewer than three others
PARTS = 4  # sums over prompts per method


class Replayed(NamedTuple):
    """One method, replayed prompt by prompt."""

    settings: SpecBranchConfig
    captured: bool
    rounds: dict[int, list[Round]]  # by prompt
    seconds: dict[int, float]  # measured, after the first token
    tokens_per_pass: float  # measured

    def sums(self) -> list[TimedRounds]:
        """Return a few sums over prompts, which are less noisy than single prompts."""
        prompts = list(self.rounds)
        parts = [prompts[first::PARTS] for first in range(min(PARTS, len(prompts)))]
        return [
            TimedRounds(
                [each for at in part for each in self.rounds[at]],
                sum(self.seconds[at] for at in part),
                self.settings.overlap,
            )
            for part in parts
        ]


def predictions(benchmark: Benchmark) -> dict[str, Any] | None:
    """Return predicted and measured speed and tokens per pass of our methods without a head; None if too few ran.

    Args:
        benchmark: a finished run.
    """
    agreements = record(benchmark)
    replayed = {name: replay_method(benchmark, found, agreements) for name, found in benchmark.measurements.items()}
    methods = {name: method for name, method in replayed.items() if method is not None and method.rounds}
    if len(methods) < FEWEST:
        return None
    costs = {
        name: fit_costs(run for other in methods if other != name for run in methods[other].sums()) for name in methods
    }
    found = {name: compare(method, costs[name]) for name, method in methods.items()}
    errors = {
        key: median(abs(entry["error"][key]) for entry in found.values())
        for key in ("tokens_per_second", "tokens_per_pass")
    }
    everything = fit_costs(run for method in methods.values() for run in method.sums())
    return {
        "costs": everything.to_dict(),
        "methods": found,
        "median_error": errors,
        "by_length": {
            name: by_length(benchmark, name, agreements, costs[name], methods[name].captured)
            for name in benchmark.sweeps
            if name in methods
        },
    }


def record(benchmark: Benchmark) -> dict[int, Agreement]:
    """Record how the draft agrees with the reference text of each prompt; texts of one token are left out."""
    settings = [found.method.settings for found in benchmark.measurements.values()]
    wanted = [each.max_branches for each in settings if each is not None]
    found = {}
    for prompt, tokens in benchmark.outputs.items():
        if len(tokens) > 1:
            ids = benchmark.inputs[prompt]["input_ids"]
            text = torch.cat([ids, torch.tensor([tokens], dtype=ids.dtype, device=ids.device)], dim=1)
            found[prompt] = read_agreement(benchmark.pair.draft, text, ids.shape[1], max([4, *wanted]) + 1)
    return found


def replay_method(benchmark: Benchmark, measurement: Measurement, agreements: dict[int, Agreement]) -> Replayed | None:
    """Replay the texts of a method; None for transformers' methods, for heads and for the planner."""
    method, stats = measurement.method, measurement.stats
    if method.settings is None or method.settings.policy == "auto" or method.head is not None or stats is None:
        return None
    captured = was_captured(stats)
    settings = effective_config(method.settings, captured, is_cheap(benchmark.pair.target, benchmark.pair.draft))
    measured = {at: found for at, found in measurement.prompts.items() if at in agreements}
    rounds = {at: replay(agreements[at], settings, captured) for at in measured}
    seconds = {at: median(found.decode_seconds) for at, found in measured.items()}
    return Replayed(settings, captured, rounds, seconds, stats.mean_acceptance_length)


def compare(method: Replayed, costs: StepCosts) -> dict[str, Any]:
    """Return prediction, measurement and relative error of a method, as medians over prompts."""
    tokens = {at: sum(each.committed for each in rounds) for at, rounds in method.rounds.items()}
    predicted = {
        at: tokens[at] / costs.seconds(rounds, method.settings.overlap) for at, rounds in method.rounds.items()
    }
    measured = {at: tokens[at] / method.seconds[at] for at in tokens}
    passes = sum(1 + len(rounds) for rounds in method.rounds.values())  # the prefill gives a token too
    per_pass = (sum(tokens.values()) + len(tokens)) / passes
    return {
        "predicted": {"tokens_per_second": median(predicted.values()), "tokens_per_pass": per_pass},
        "measured": {"tokens_per_second": median(measured.values()), "tokens_per_pass": method.tokens_per_pass},
        "error": {
            "tokens_per_second": median(predicted[at] / measured[at] for at in predicted) - 1,
            "tokens_per_pass": per_pass / method.tokens_per_pass - 1,
        },
    }


def by_length(
    benchmark: Benchmark, name: str, agreements: dict[int, Agreement], costs: StepCosts, captured: bool
) -> list[dict[str, Any]]:
    """Return predicted and measured speed of a swept method at each draft length."""
    cheap = is_cheap(benchmark.pair.target, benchmark.pair.draft)
    texts = [agreements[at] for at in benchmark.sweep_prompts if at in agreements]
    rows: list[dict[str, Any]] = []
    for entry, config in zip(benchmark.sweeps[name], benchmark.candidates(name)):
        settings = effective_config(config, captured, cheap)
        rounds = [each for agreement in texts for each in replay(agreement, settings, captured)]
        if not rounds or entry["decode_tokens_per_second"] is None:
            continue
        predicted = sum(each.committed for each in rounds) / costs.seconds(rounds, settings.overlap)
        measured = entry["decode_tokens_per_second"]
        rows.append({"max_draft_length": settings.draft_length, "predicted": predicted, "measured": measured})
    return rows


def lines(found: dict[str, Any]) -> list[str]:
    """Return the predictions as text."""
    error = found["median_error"]
    first = (
        f"predicted by replay, each method at the step costs of the others: tokens/s after the first token "
        f"{error['tokens_per_second']:.0%} off (median), tokens per pass {error['tokens_per_pass']:.1%} off"
    )
    return [first] + [
        f"{name}: predicted {method['predicted']['tokens_per_second']:.1f} tokens/s, measured "
        f"{method['measured']['tokens_per_second']:.1f} ({method['error']['tokens_per_second']:+.0%}); tokens per pass "
        f"{method['predicted']['tokens_per_pass']:.2f} and {method['measured']['tokens_per_pass']:.2f}"
        for name, method in found["methods"].items()
    ]


def save_predictions(found: dict[str, Any], path: Path) -> None:
    """Draw predicted and measured speed of each method, and by draft length where lengths were swept."""
    figure = new_figure(14, 4)
    axes = figure.subplots(1, 2 if found["by_length"] else 1, squeeze=False)[0]
    names = list(found["methods"])
    for what, marker in (("predicted", "|"), ("measured", "o")):
        speeds = [found["methods"][name][what]["tokens_per_second"] for name in names]
        axes[0].plot(speeds, names, linestyle="", marker=marker, ms=12 if marker == "|" else 6, mew=2, label=what)
    axes[0].invert_yaxis()
    axes[0].set(xlabel="tokens per second after the first token", xlim=(0, None))
    error = found["median_error"]["tokens_per_second"]
    axes[0].set_title(f"each method at the step costs of the others: {error:.0%} off (median)", fontsize=10)
    axes[0].legend(fontsize=8)
    if found["by_length"]:
        curves = [
            Curve(name, *({row["max_draft_length"]: row[what] for row in rows} for what in ("predicted", "measured")))
            for name, rows in found["by_length"].items()
        ]
        draw_by_length(axes[1], curves)
        axes[1].set_title("fixed draft lengths", fontsize=10)
    save_figure(figure, path)


def main(argv: list[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument(
        "--methods", default=METHODS, help="of `hf-specbranch bench`, at least four of ours without a head"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, help="per prompt (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=1, help="measured runs per prompt (default: %(default)s)")
    parser.add_argument("--sweep", type=whole_numbers, default=(2, 4, 8), help="draft lengths to try, e.g. 2,4,8")
    parser.add_argument("--png", type=Path, help="draw the result")
    args = parser.parse_args(argv)
    pair = load(args)
    names = check_names(tuple(args.methods.split(",")))
    plan = Plan(names, overrides(args), args.max_new_tokens, args.repeat, args.sweep, stream_prompts=0)
    benchmark = Benchmark(pair, inputs_of(args, pair), plan)
    benchmark.run()
    found = predictions(benchmark)
    if found is None:
        parser.error(f"--methods {args.methods}: expected at least {FEWEST} of ours without a head")
    if args.png is not None:
        save_predictions(found, args.png)
    finish(args, found, lines(found))


if __name__ == "__main__":
    main()
