"""Speeds by kind of prompt: drafts agree with code more often than with prose, and a mean over all hides that."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from .measure import Benchmark
from .results import Measurement, pooled

ALL = "all"
NOTE = (
    "By kind of prompt: tokens per second, all new tokens over all seconds; in brackets over how many prompts, where a "
    "method ran on fewer. x: over our autoregressive decoding, on the same prompts."
)


def speeds_by_kind(benchmark: Benchmark) -> dict[str, Any]:
    """Return figures per kind of prompt and method, and over all kinds; empty if there is only one kind.

    Args:
        benchmark: finished or interrupted.
    """
    kinds = list(dict.fromkeys(benchmark.kinds))
    if len(kinds) < 2:
        return {}
    places = {kind: [at for at, each in enumerate(benchmark.kinds) if each == kind] for kind in kinds}
    places[ALL] = list(range(len(benchmark.kinds)))
    ours = benchmark.measurements.get("autoregressive")
    return {
        kind: {
            "prompts": len(chosen),
            "methods": {
                name: figures(measurement, ours, chosen) for name, measurement in benchmark.measurements.items()
            },
        }
        for kind, chosen in places.items()
    }


def figures(measurement: Measurement, ours: Measurement | None, chosen: list[int]) -> dict[str, Any]:
    """Return the figures of one method over some prompts; None where it has run on none of them.

    Args:
        measurement: of the method.
        ours: of our autoregressive decoding, if that took part.
        chosen: indices of the prompts.
    """
    there = [at for at in chosen if at in measurement.prompts]
    both = [at for at in there if ours is not None and at in ours.prompts]
    stats = pooled([found for at in there if (found := measurement.prompts[at].stats) is not None])
    return {
        "prompts": len(there),
        "tokens_per_second": _speed(measurement, there),
        "ratio_to_autoregressive": _speed(measurement, both) / _speed(ours, both) if ours and both else None,
        "mean_acceptance_length": stats.mean_acceptance_length if stats else None,
        "draft_acceptance_rate": stats.draft_acceptance_rate if stats and stats.num_draft_tokens else None,
    }


def _speed(measurement: Measurement, places: list[int]) -> Any:
    found = [measurement.prompts[at] for at in places]
    return sum(each.new_tokens for each in found) / sum(median(each.seconds) for each in found) if found else None


def rows(report: dict[str, Any]) -> list[list[str]]:
    """Return the table by kind, the titles first; empty if there is none."""
    kinds = report.get("kinds")
    if not kinds:
        return []
    names = list(kinds[ALL]["methods"])
    table = [["kind", "prompts", *names, *(["auto x", "auto tok/pass"] if "auto" in names else [])]]
    for kind, found in kinds.items():
        cells = [_cell(found["methods"][name], found["prompts"]) for name in names]
        if "auto" in names:
            auto = found["methods"]["auto"]
            cells += [_number(auto["ratio_to_autoregressive"]), _number(auto["mean_acceptance_length"])]
        table.append([kind, str(found["prompts"]), *cells])
    return table


def _cell(found: dict[str, Any], prompts: int) -> str:
    if found["tokens_per_second"] is None:
        return ""
    return f"{found['tokens_per_second']:.1f}" + ("" if found["prompts"] == prompts else f" ({found['prompts']})")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def print_kinds(report: dict[str, Any], console: Console) -> None:
    """Print the table by kind, if there is one."""
    if not (found := rows(report)):
        return
    table = Table(pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for place, title in enumerate(found[0]):
        table.add_column(title, justify="left" if place == 0 else "right", overflow="fold")
    for row in found[1:]:
        table.add_row(*row)
    console.print(table)
    console.print(NOTE, style="dim", highlight=False)
    console.print()


def markdown_kinds(report: dict[str, Any]) -> str:
    """Return the table by kind in Markdown; empty if there is none."""
    if not (found := rows(report)):
        return ""
    text = [f"| {' | '.join(row)} |" for row in found]
    return "\n".join([text[0], "|---" * len(found[0]) + "|", *text[1:], "", NOTE, ""]) + "\n"
