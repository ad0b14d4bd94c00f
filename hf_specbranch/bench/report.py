"""The report of a run: one dictionary for JSON, and tables for the terminal and Markdown."""

from __future__ import annotations

import platform
from importlib.metadata import version
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from .kinds import markdown_kinds, print_kinds, speeds_by_kind
from .measure import Benchmark, complaints
from .results import Measurement, summarize
from .timing import needed_memory, percentile

WIDE = 170  # terminal columns from which all figures are shown side by side


class Column(NamedTuple):
    """One figure of a method."""

    key: str
    title: str
    form: str


# On a narrow terminal the groups are shown one below the other.
GROUPS = (
    (
        Column("tokens_per_second", "tok/s", ".1f"),
        Column("ratio_to_plain", "x plain", ".2f"),
        Column("ratio_to_autoregressive", "x autoreg", ".2f"),
        Column("differing_outputs", "differ", "d"),
    ),
    (
        Column("mean_acceptance_length", "tok/\npass", ".2f"),
        Column("rollback_rate", "roll\nback", ".2f"),
        Column("branch_hit_rate", "hits", ".2f"),
        Column("wasted_per_token", "wasted\n/tok", ".2f"),
        Column("hidden_fraction", "hidden", ".2f"),
    ),
    (
        Column("gap_p50_ms", "p50\nms", ".1f"),
        Column("gap_p95_ms", "p95\nms", ".1f"),
        Column("time_to_first_token_ms", "first\nms", ".1f"),
        Column("warm_up_seconds", "warm\ns", ".1f"),
        Column("peak_memory_gib", "GiB", ".1f"),
    ),
    (
        Column("runtime", "runtime", "s"),
        Column("seconds_per_generation", "s/run", ".2f"),
    ),
)
LEGEND = (
    "x plain, x autoreg: speed over plain generate() and over our autoregressive decoding, where these ran; medians "
    "over prompts. tok/pass: tokens per target pass. differ: outputs that differ from the first method's. "
    "rollback: rolled back / (accepted + rolled back) draft tokens. hits: branch points at which a branch survived. "
    "hidden: drafting during target passes; empty on a CPU, whose cores both models share. wasted/tok: draft tokens "
    "wasted on branches, per new token. "
    "p50, p95: gaps between streamed tokens (0 within a round). first: time to the first token. warm: first "
    "generation minus a later one of the same prompt. GiB: peak of the first generation. runtime: of our methods. "
    "s/run: seconds per measured generation, the median."
)


def versions(device: torch.device) -> dict[str, Any]:
    """Return the versions and the device that the figures were taken with."""
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
    """Return the figures of one method by name; None where one does not apply or is not known yet.

    Args:
        measurement: of the method.
        plain: of plain `generate()`, if that took part.
        ours: of our autoregressive decoding, if that took part.
        longest: index of the longest prompt, on which each method started.
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
        "hidden_fraction": stats.hidden_fraction if stats and drafted and stats.hidden_seconds else None,
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


def build(benchmark: Benchmark, settings: dict[str, Any], interrupted: bool) -> dict[str, Any]:
    """Return everything that was measured, ready for JSON.

    Args:
        benchmark: finished or interrupted.
        settings: the options of the command.
        interrupted: whether the run was interrupted.
    """
    found = benchmark.measurements
    plain, ours = found.get("plain"), found.get("autoregressive")
    everything = [entry for measurement in found.values() for entry in measurement.differences]
    length = benchmark.inputs[benchmark.longest]["input_ids"].shape[1] + benchmark.plan.max_new_tokens
    return {
        "versions": versions(benchmark.pair.target.device),
        "settings": settings,
        "interrupted": interrupted,
        "failed": benchmark.failed,
        "warnings": warnings(benchmark),
        "memory": needed_memory(benchmark.pair, length),
        "methods": {
            name: {
                **measurement.method.to_dict(),
                **row(measurement, plain, ours, benchmark.longest),
                "first_generation_seconds": measurement.first_seconds,
                "seconds_spent": benchmark.spent.get(name),
                "run_again": measurement.run_again,
                "acceptance_histogram": measurement.stats.acceptance_histogram if measurement.stats else None,
                "prompts": per_prompt(benchmark, measurement),
            }
            for name, measurement in found.items()
        },
        "kinds": speeds_by_kind(benchmark),
        "sweeps": benchmark.sweeps,
        "compared_with": benchmark.reference,
        "differences": {**summarize(everything), "each": [entry.to_dict() for entry in everything]},
    }


def warnings(benchmark: Benchmark) -> list[str]:
    """Return why methods of ours did not run as requested."""
    wanted = benchmark.plan.overrides.expected_runtime(benchmark.pair.target.device.type)
    all_stats = [(name, measurement.stats) for name, measurement in benchmark.measurements.items()]
    return [
        reason
        for name, stats in all_stats
        if stats is not None
        for reason in complaints(name, stats.runtime, stats.slowed_by, wanted)
    ]


def per_prompt(benchmark: Benchmark, measurement: Measurement) -> list[dict[str, Any]]:
    """Return the figures of one method, prompt by prompt."""
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


def cell(column: Column, row: dict[str, Any]) -> str:
    """Return a figure as text; empty where it is not known."""
    value = row.get(column.key)
    return "" if value is None else format(value, column.form)


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print tables and notes, as one table if the terminal is wide enough."""
    methods = report["methods"]
    if not methods:
        console.print("nothing was measured")
        for line in lines(report):
            console.print(line, highlight=False)
        return
    print_tables("method", methods, GROUPS, console)
    print_kinds(report, console)
    console.print(LEGEND, style="dim", highlight=False)
    for line in lines(report):
        console.print(line, highlight=False, soft_wrap=False)


def print_tables(
    title: str, rows: dict[str, dict[str, Any]], groups: tuple[tuple[Column, ...], ...], console: Console
) -> None:
    """Print rows of figures by name, as one table if the terminal is wide enough, else one table per group."""
    everything = (tuple(column for group in groups for column in group),)
    for group in everything if console.width >= WIDE else groups:
        table = Table(pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
        table.add_column(title, overflow="fold")
        for column in group:
            table.add_column(column.title, justify="right", no_wrap=False)
        for name, row in rows.items():
            table.add_row(name, *(cell(column, row) for column in group))
        console.print(table)
        console.print()


def markdown(report: dict[str, Any]) -> str:
    """Return one table with every figure, and the notes below it."""
    return markdown_kinds(report) + markdown_page("method", report["methods"], GROUPS, LEGEND, lines(report))


def markdown_page(
    title: str,
    rows: dict[str, dict[str, Any]],
    groups: tuple[tuple[Column, ...], ...],
    legend: str,
    notes: list[str],
) -> str:
    """Return one table of rows of figures by name, its legend and notes."""
    columns = [column for group in groups for column in group]
    titles = [column.title.replace("\nms", " ms").replace("\ns", " s").replace("\n", "") for column in columns]
    text = [f"| {title} | {' | '.join(titles)} |", "|---" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        text.append(f"| {name} | {' | '.join(cell(column, row) for column in columns)} |")
    return "\n".join([*text, "", legend, "", *(f"- {line}" for line in notes)]) + "\n"


def lines(report: dict[str, Any]) -> list[str]:
    """Return the notes below the tables, one per line."""
    versions = report["versions"]
    notes = [f"{versions['device']}, torch {versions['torch']}, transformers {versions['transformers']}"]
    if report["interrupted"]:
        counts = {len(method["prompts"]) for method in report["methods"].values()}
        over = f"over {max(counts)} prompts" if len(counts) == 1 else "each method over the prompts that it has run"
        notes.append(f"interrupted: these are the figures so far, {over}")
    notes += [f"warning: {reason}" for reason in report["warnings"]]
    notes += [f"{name} is left out, it failed: {reason}" for name, reason in report["failed"].items()]
    notes += [_sweep_line(name, tried) for name, tried in report["sweeps"].items()]
    for name, method in report["methods"].items():
        if count := method["run_again"]:
            notes.append(f"{name} captured graphs in {count} measured generations, which were repeated")
    sampled = report["settings"].get("temperature")
    notes.append(
        f"sampled at temperature {sampled:g}; outputs are not compared"
        if sampled
        else _difference_line(report["differences"], report["compared_with"], len(report["methods"]))
    )
    return notes


def _sweep_line(name: str, tried: list[dict[str, Any]]) -> str:
    best = max(tried, key=lambda entry: float(entry["tokens_per_second"]))
    figures = ", ".join(f"{entry['max_draft_length']}: {entry['tokens_per_second']:.1f}" for entry in tried)
    return f"sweep for {name}: best draft length {best['max_draft_length']} (tokens/s {figures})"


def _difference_line(found: dict[str, Any], reference: str | None, methods: int) -> str:
    if methods < 2:
        return "only one method ran: its outputs are not compared"
    whose = "plain generate()'s" if reference == "plain" else f"{reference}'s"
    if not found["outputs"]:
        return f"all outputs equal {whose}"
    if found["largest_margin"] is None:
        return f"{found['outputs']} outputs differ from {whose}, only in where they end"
    return (
        f"{found['outputs']} outputs differ from {whose}; the largest logit margin at a first difference is "
        f"{found['largest_margin']:.3g} ({found['largest_margin_in_spacings']:.1f} steps of the dtype), "
        f"{found['largest_margin_float32']:.3g} with the output layer in float32"
    )
