"""What a run found, as one dictionary."""

from __future__ import annotations

import platform
from importlib.metadata import version
from statistics import median
from typing import Any

import torch

from .differences import summary
from .findings import Measurement
from .measure import Benchmark, complaints
from .memory import needed
from .timing import percentile


def versions(device: torch.device) -> dict[str, Any]:
    """What the figures were taken with."""
    names = ("torch", "transformers")
    cuda = device.type == "cuda"
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in names},
        "cuda": torch.version.cuda if cuda else None,
        "device": torch.cuda.get_device_name(device) if cuda else f"CPU ({platform.machine()})",
        "threads": torch.get_num_threads(),
    }


def row(measurement: Measurement, plain: Measurement | None, ours: Measurement | None, longest: int) -> dict[str, Any]:
    """The figures of one way by name; None where one does not apply or is not known yet.

    Args:
        measurement: of the way.
        plain: of plain `generate()`, if that took part.
        ours: of our autoregressive way, if that did.
        longest: index of the longest prompt, on which each way started.
    """
    speeds = [found.speed for found in measurement.prompts.values()]
    stats = measurement.stats
    drafted = stats is not None and stats.num_draft_tokens > 0
    gaps = [percentile(measurement.gaps, part) for part in (0.5, 0.95)]
    first = median(measurement.first_token) if measurement.first_token else None
    return {
        "tokens_per_second": median(speeds) if speeds else None,
        "overall_tokens_per_second": measurement.overall_speed if speeds else None,
        "ratio_to_plain": measurement.ratio_to(plain),
        "ratio_to_autoregressive": measurement.ratio_to(ours),
        "mean_acceptance_length": stats.mean_acceptance_length if stats else None,
        "rollback_rate": stats.rollback_rate if stats and drafted else None,
        "branch_hit_rate": stats.branch_hit_rate if stats and stats.branch_points else None,
        "wasted_per_token": stats.wasted_branch_tokens / max(1, stats.new_tokens) if stats and drafted else None,
        "hidden_fraction": stats.hidden_fraction if stats and drafted and stats.draft_seconds else None,
        "gap_p50_ms": None if gaps[0] is None else gaps[0] * 1000,
        "gap_p95_ms": None if gaps[1] is None else gaps[1] * 1000,
        "time_to_first_token_ms": None if first is None else first * 1000,
        "warm_up_seconds": measurement.warm_up_seconds(longest),
        "peak_memory_gib": None if measurement.peak_memory is None else measurement.peak_memory / 2**30,
        "differing_outputs": len(measurement.differences),
        "runtime": stats.runtime if stats else None,
        "slowed_by": stats.slowed_by if stats else None,
        "seconds_per_generation": median(seconds for found in measurement.prompts.values() for seconds in found.seconds)
        if speeds
        else None,
    }


def build(benchmark: Benchmark, settings: dict[str, Any], extras: dict[str, Any], interrupted: bool) -> dict[str, Any]:
    """Everything that was measured, ready for JSON.

    Args:
        benchmark: finished or cut short.
        settings: what the command was given.
        extras: further findings by name ("predictions", "limit", "draft_steps", "stability", "time_to_first_token",
            "round_cost", "kernels").
        interrupted: it was cut short.
    """
    found = benchmark.measurements
    plain, ours = found.get("plain"), found.get("autoregressive")
    everything = [entry for measurement in found.values() for entry in measurement.differences]
    length = benchmark.inputs[benchmark.longest]["input_ids"].shape[1] + benchmark.plan.new_tokens
    return {
        "versions": versions(benchmark.pair.target.device),
        "settings": settings,
        "interrupted": interrupted,
        "failed": benchmark.failed,
        "warnings": warnings(benchmark),
        "memory": needed(benchmark.pair, length),
        "ways": {
            name: {
                **measurement.way.to_dict(),
                **row(measurement, plain, ours, benchmark.longest),
                "first_generation_seconds": measurement.first_seconds,
                "seconds_spent": benchmark.spent.get(name),
                "run_again": measurement.run_again,
                "acceptance_histogram": measurement.stats.acceptance_histogram if measurement.stats else None,
                "prompts": per_prompt(benchmark, measurement),
            }
            for name, measurement in found.items()
        },
        "sweeps": benchmark.sweeps,
        "compared_with": benchmark.reference,
        "differences": {**summary(everything), "each": [entry.to_dict() for entry in everything]},
        **extras,
    }


def warnings(benchmark: Benchmark) -> list[str]:
    """Our ways that did not run as they were asked to."""
    wanted = benchmark.plan.choices.expected_runtime(benchmark.pair.target.device.type)
    all_stats = [(name, measurement.stats) for name, measurement in benchmark.measurements.items()]
    return [
        reason
        for name, stats in all_stats
        if stats is not None
        for reason in complaints(name, stats.runtime, stats.slowed_by, wanted)
    ]


def per_prompt(benchmark: Benchmark, measurement: Measurement) -> list[dict[str, Any]]:
    """One way's figures, prompt by prompt."""
    return [
        {
            "id": benchmark.ids[at],
            "prompt_tokens": benchmark.inputs[at]["input_ids"].shape[1],
            "new_tokens": found.new_tokens,
            "seconds": found.seconds,
            "decode_seconds": found.decode_seconds,
            "tokens_per_second": found.speed,
            "stats": found.stats.to_dict() if found.stats else None,
        }
        for at, found in measurement.prompts.items()
    ]
