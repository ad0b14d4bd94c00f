"""Is the simulation right? Each of our ways is predicted from what the others took, and held against its measurement.

The texts are known by then, so all that is run is one pass of the draft over each of them.
"""

from __future__ import annotations

from statistics import median
from typing import Any, NamedTuple

import torch

from ..config import SpecBranchConfig
from ..decoding.assembly import is_cheap
from ..planning.measure import TimedRounds, fit_costs, was_captured
from ..planning.simulate import Agreement, Round, StepCosts, effective_config, read_agreement, replay
from .findings import Measurement
from .measure import Benchmark

FEWEST = 4  # ways; with less than three others there is nothing to find prices from
PARTS = 4  # a way's prompts are put together in so many sums


class Played(NamedTuple):
    """One way, replayed prompt by prompt."""

    settings: SpecBranchConfig
    captured: bool
    rounds: dict[int, list[Round]]  # by prompt
    seconds: dict[int, float]  # measured, behind the first token
    tokens_per_pass: float  # measured

    def sums(self) -> list[TimedRounds]:
        """A few sums over prompts: each is less noisy than a prompt."""
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
    """Predicted and measured speed and tokens a pass of each of our ways without a head; None if there are too few.

    Args:
        benchmark: a run whose measured turns are done.
    """
    agreements = record(benchmark)
    played = {name: play(benchmark, found, agreements) for name, found in benchmark.measurements.items()}
    ways = {name: way for name, way in played.items() if way is not None and way.rounds}
    if len(ways) < FEWEST:
        return None
    costs = {name: fit_costs(run for other in ways if other != name for run in ways[other].sums()) for name in ways}
    found = {name: compare(way, costs[name]) for name, way in ways.items()}
    errors = {
        key: median(abs(entry["error"][key]) for entry in found.values())
        for key in ("tokens_per_second", "tokens_per_pass")
    }
    everything = fit_costs(run for way in ways.values() for run in way.sums())
    return {
        "costs": everything.to_dict(),
        "ways": found,
        "median_error": errors,
        "by_length": {
            name: by_length(benchmark, name, agreements, costs[name], ways[name].captured)
            for name in benchmark.sweeps
            if name in ways
        },
    }


def record(benchmark: Benchmark) -> dict[int, Agreement]:
    """What the draft makes of the reference's text, by prompt; texts of one token are left out."""
    wanted = [way.settings.max_branches for found in benchmark.measurements.values() if (way := found.way).settings]
    found = {}
    for prompt, tokens in benchmark.outputs.items():
        if len(tokens) > 1:
            ids = benchmark.inputs[prompt]["input_ids"]
            text = torch.cat([ids, torch.tensor([tokens], dtype=ids.dtype, device=ids.device)], dim=1)
            found[prompt] = read_agreement(benchmark.pair.draft, text, ids.shape[1], max([4, *wanted]) + 1)
    return found


def play(benchmark: Benchmark, measurement: Measurement, agreements: dict[int, Agreement]) -> Played | None:
    """Replay what a way was measured on; None for transformers' ways, for heads, and for the planner, which does so."""
    way, stats = measurement.way, measurement.stats
    if way.settings is None or way.settings.policy == "auto" or way.head is not None or stats is None:
        return None
    captured = was_captured(stats)
    settings = effective_config(way.settings, captured, is_cheap(benchmark.pair.target, benchmark.pair.draft))
    measured = {at: found for at, found in measurement.prompts.items() if at in agreements}
    rounds = {at: replay(agreements[at], settings, captured) for at in measured}
    seconds = {at: median(found.decode_seconds) for at, found in measured.items()}
    return Played(settings, captured, rounds, seconds, stats.mean_acceptance_length)


def compare(way: Played, costs: StepCosts) -> dict[str, Any]:
    """A way's prediction, its measurement, and by which part the first is above the second: medians over prompts, as in
    the table, so that a busy moment of the machine does not decide.
    """
    tokens = {at: sum(each.committed for each in rounds) for at, rounds in way.rounds.items()}
    said = {at: tokens[at] / costs.seconds(rounds, way.settings.overlap) for at, rounds in way.rounds.items()}
    seen = {at: tokens[at] / way.seconds[at] for at in tokens}
    passes = sum(1 + len(rounds) for rounds in way.rounds.values())  # the prompt's pass gives a token too
    per_pass = (sum(tokens.values()) + len(tokens)) / passes
    return {
        "predicted": {"tokens_per_second": median(said.values()), "tokens_per_pass": per_pass},
        "measured": {"tokens_per_second": median(seen.values()), "tokens_per_pass": way.tokens_per_pass},
        "error": {
            "tokens_per_second": median(said[at] / seen[at] for at in said) - 1,
            "tokens_per_pass": per_pass / way.tokens_per_pass - 1,
        },
    }


def by_length(
    benchmark: Benchmark, name: str, agreements: dict[int, Agreement], costs: StepCosts, captured: bool
) -> list[dict[str, Any]]:
    """Predicted and measured speed of a swept way at each draft length; of several thresholds the faster."""
    cheap = is_cheap(benchmark.pair.target, benchmark.pair.draft)
    texts = [agreements[at] for at in benchmark.sweep_prompts if at in agreements]
    rows: dict[int, dict[str, Any]] = {}
    for entry, config in zip(benchmark.sweeps[name], benchmark.candidates(name)):
        settings = effective_config(config, captured, cheap)
        rounds = [each for agreement in texts for each in replay(agreement, settings, captured)]
        if not rounds or entry["decode_tokens_per_second"] is None:
            continue
        predicted = sum(each.committed for each in rounds) / costs.seconds(rounds, settings.overlap)
        known = rows.setdefault(settings.draft_length, {"max_draft_length": settings.draft_length})
        known["predicted"] = max(predicted, known.get("predicted", 0.0))
        known["measured"] = max(entry["decode_tokens_per_second"], known.get("measured", 0.0))
    return list(rows.values())
