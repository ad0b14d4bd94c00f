"""The report of `bench --families`: one row per model, for JSON, the terminal and Markdown."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

from .families import FamiliesBenchmark, ModelResult
from .report import Column, markdown_page, print_tables, versions

GROUPS = (
    (
        Column("billions", "params\nB", ".2f"),
        Column("active_billions", "active\nB", ".2f"),
        Column("limit_ms", "limit\nms", ".2f"),
        Column("ours_ms", "ours\nms", ".2f"),
        Column("ratio", "ratio", ".2f"),
        Column("plain_ms", "plain\nms", ".2f"),
        Column("kernels_per_token", "kernels\n/tok", ".0f"),
        Column("runtime", "runtime", "s"),
        Column("fused", "fused", "d"),
    ),
)
LEGEND = (
    "limit: time to read the weights that one token needs, keys and values not counted; of embedding tables only one "
    "that is also the output layer, of experts the chosen ones. ours: time per token of our autoregressive decoding. "
    "ratio: ours over the limit. plain: time per token of plain generate(). kernels/tok: GPU kernels per token. "
    'runtime: "graph" is captured. fused: modules that run through our kernels.'
)


def build_families(benchmark: FamiliesBenchmark, settings: dict[str, Any], interrupted: bool) -> dict[str, Any]:
    """Return everything that was measured, ready for JSON.

    Args:
        benchmark: finished or interrupted.
        settings: the options of the command.
        interrupted: whether the run was interrupted.
    """
    plan = benchmark.plan
    return {
        "versions": versions(plan.device),
        "settings": settings,
        "interrupted": interrupted,
        "bandwidth": benchmark.bandwidth,
        "bandwidth_measured": plan.bandwidth is None,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "context": plan.context,
        "max_new_tokens": plan.max_new_tokens,
        "models": {name: row(result) for name, result in benchmark.results.items()},
    }


def row(result: ModelResult) -> dict[str, Any]:
    """Return the figures of one model by name; None where one is not known."""
    parameters, active = result.parameters, result.active_parameters
    return {
        **asdict(result),
        "ratio": result.ratio,
        "billions": None if parameters is None else parameters / 1e9,
        "active_billions": None if active is None or active == parameters else active / 1e9,
        "fused": sum(result.fused_modules.values()) if result.ours_ms is not None else None,
    }


def print_families(report: dict[str, Any], console: Console) -> None:
    """Print the table, and notes below it."""
    if report["models"]:
        print_tables("model", report["models"], GROUPS, console)
        console.print(LEGEND, style="dim", highlight=False)
    else:
        console.print("nothing was measured")
    for line in notes(report):
        console.print(line, highlight=False, markup=False)


def families_markdown(report: dict[str, Any]) -> str:
    """Return the table and the notes below it."""
    return markdown_page("model", report["models"], GROUPS, LEGEND, notes(report))


def notes(report: dict[str, Any]) -> list[str]:
    """Return what a reader of the table must know, one per line."""
    used = report["versions"]
    found = [
        f"{used['device']}, torch {used['torch']}, transformers {used['transformers']}",
        f"{report['dtype']}, random weights, batch size 1, {report['context']} tokens of context, "
        f"{report['max_new_tokens']} new tokens, greedy",
    ]
    if report["bandwidth"] is not None:
        how = "measured: a large copy, bytes read and written" if report["bandwidth_measured"] else "as given"
        found.append(f"limit at {report['bandwidth'] / 1e12:.3g} TB/s ({how})")
    if report["interrupted"]:
        found.append("interrupted: these are the figures so far")
    for name, model in report["models"].items():
        found += [f"{name} failed: {model['failed']}"] if model["failed"] else []
        found += [f"{name}: {model['reason']}"] if model["reason"] else []
    return found
