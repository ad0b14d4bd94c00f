"""What a run found, as one dictionary."""

from __future__ import annotations

import platform
from importlib.metadata import version
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from .differences import summary
from .measure import Benchmark, Measurement
from .timing import percentile
from .ways import Pair


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
        plain: of plain `generate()`.
        ours: of our autoregressive way.
        longest: index of the longest prompt, on which each way started.
    """
    speeds = [found.speed for found in measurement.prompts.values()]
    stats = measurement.stats
    drafted = stats is not None and stats.num_draft_tokens > 0
    gaps = [percentile(measurement.gaps, part) for part in (0.5, 0.95)]
    first = median(measurement.first_token) if measurement.first_token else None
    return {
        "tokens_per_second": median(speeds) if speeds else None,
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
    }


def build(benchmark: Benchmark, settings: dict[str, Any], extras: dict[str, Any], interrupted: bool) -> dict[str, Any]:
    """Everything that was measured, ready for JSON.

    Args:
        benchmark: finished or cut short.
        settings: what the command was given.
        extras: further measurements by name ("limit", "stability", "time_to_first_token", "round_cost").
        interrupted: it was cut short.
    """
    found = benchmark.measurements
    plain, ours = found.get("plain"), found.get("autoregressive")
    everything = [entry for measurement in found.values() for entry in measurement.differences]
    return {
        "versions": versions(benchmark.pair.target.device),
        "settings": settings,
        "interrupted": interrupted,
        "failed": benchmark.failed,
        "memory": memory(benchmark),
        "ways": {
            name: {
                **measurement.way.to_dict(),
                **row(measurement, plain, ours, benchmark.longest),
                "first_generation_seconds": measurement.first_seconds,
                "acceptance_histogram": measurement.stats.acceptance_histogram if measurement.stats else None,
                "prompts": per_prompt(benchmark, measurement),
            }
            for name, measurement in found.items()
        },
        "sweeps": benchmark.sweeps,
        "differences": {**summary(everything), "each": [entry.to_dict() for entry in everything]},
        **extras,
    }


def per_prompt(benchmark: Benchmark, measurement: Measurement) -> list[dict[str, Any]]:
    """One way's figures, prompt by prompt."""
    return [
        {
            "id": benchmark.ids[at],
            "prompt_tokens": benchmark.inputs[at]["input_ids"].shape[1],
            "new_tokens": found.new_tokens,
            "seconds": found.seconds,
            "tokens_per_second": found.speed,
            "stats": found.stats.to_dict() if found.stats else None,
        }
        for at, found in measurement.prompts.items()
    ]


def memory(benchmark: Benchmark) -> dict[str, Any]:
    """Bytes that a run needs at the least: weights, and caches for the longest prompt and its new tokens."""
    pair: Pair = benchmark.pair
    length = benchmark.inputs[benchmark.longest]["input_ids"].shape[1] + benchmark.plan.new_tokens
    needs = {}
    for role, model in (("target", pair.target), ("draft", pair.draft)):
        needs[f"{role}_weights"] = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        needs[f"{role}_cache"] = cache_bytes(model, length)
    return {**needs, "total": sum(needs.values()), "tokens": length}


def cache_bytes(model: PreTrainedModel, length: int) -> int:
    """Keys and values of `length` tokens in every layer."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * length * model.dtype.itemsize)
