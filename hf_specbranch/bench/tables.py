"""A report as tables: on the terminal and in Markdown."""

from __future__ import annotations

from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

WIDE = 170  # columns of a terminal that shows all figures side by side


class Column(NamedTuple):
    """One figure of a way."""

    key: str
    title: str
    form: str


# Groups that fit a narrow terminal one below the other.
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
        Column("wasted_per_token", "waste\n/tok", ".2f"),
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
    "x plain, x autoreg: speed over plain generate() and over our autoregressive way, where these ran; medians over "
    "prompts. tok/pass: committed tokens a target pass. p50, p95: gaps between streamed tokens (0 within a round), in "
    "a pass of its own. warm: first generation minus a later one of the same prompt. GiB: peak of the first "
    "generation. runtime: what ran our ways. s/run: seconds a measured generation, the median."
)


def cell(column: Column, row: dict[str, Any]) -> str:
    value = row.get(column.key)
    return "" if value is None else format(value, column.form)


def print_report(report: dict[str, Any], console: Console) -> None:
    """Tables and lines on the terminal, in one piece if it is wide enough."""
    ways = report["ways"]
    if not ways:
        console.print("nothing was measured")
        for line in lines(report):
            console.print(line, highlight=False)
        return
    groups = [tuple(column for group in GROUPS for column in group)] if console.width >= WIDE else GROUPS
    for group in groups:
        table = Table(pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
        table.add_column("way", overflow="fold")
        for column in group:
            table.add_column(column.title, justify="right", no_wrap=False)
        for name, row in ways.items():
            table.add_row(name, *(cell(column, row) for column in group))
        console.print(table)
        console.print()
    console.print(LEGEND, style="dim", highlight=False)
    for line in lines(report):
        console.print(line, highlight=False, soft_wrap=False)


def markdown(report: dict[str, Any]) -> str:
    """One table with every figure, and the lines below it."""
    columns = [column for group in GROUPS for column in group]
    titles = [column.title.replace("\nms", " ms").replace("\ns", " s").replace("\n", "") for column in columns]
    text = [f"| way | {' | '.join(titles)} |", "|---" * (len(columns) + 1) + "|"]
    for name, row in report["ways"].items():
        text.append(f"| {name} | {' | '.join(cell(column, row) for column in columns)} |")
    text += ["", LEGEND, "", *(f"- {line}" for line in lines(report))]
    return "\n".join(text) + "\n"


def lines(report: dict[str, Any]) -> list[str]:
    """Everything but the table, one finding a line."""
    versions = report["versions"]
    said = [f"{versions['device']}, torch {versions['torch']}, transformers {versions['transformers']}"]
    if report["interrupted"]:
        counts = {len(way["prompts"]) for way in report["ways"].values()}
        over = f"over {max(counts)} prompts" if len(counts) == 1 else "each way over the prompts that it has run"
        said.append(f"interrupted: these are the figures so far, {over}")
    said += [f"warning: {reason}" for reason in report["warnings"]]
    said += [f"{name} is left out, it failed: {reason}" for name, reason in report["failed"].items()]
    said += [_sweep_line(name, tried) for name, tried in report["sweeps"].items()]
    for name, way in report["ways"].items():
        if count := way["run_again"]:
            said.append(f"{name} captured graphs in {count} measured generations, which were run again")
    sampled = report["settings"].get("temperature")
    said.append(
        f"sampled at temperature {sampled:g}; outputs are not compared"
        if sampled
        else _difference_line(report["differences"], report["compared_with"], len(report["ways"]))
    )
    if predictions := report.get("predictions"):
        said += _prediction_lines(predictions)
    if limit := report.get("limit"):
        said += _limit_lines(limit)
    if found := report.get("draft_steps"):
        said += _step_lines(found)
    for found in report.get("kernels") or ():
        said.append(
            f"{found['name']}: {found['us']:.1f} us, in torch {found['torch_us']:.1f}; a copy of its bytes takes "
            f"{found['copy_us']:.1f}"
        )
    if found := report.get("time_to_first_token"):
        said.append(
            f"first token of a {found['prompt_tokens']}-token prompt: plain {found['plain_ms']:.1f} ms, specbranch "
            f"{found['specbranch_ms']:.1f} ms, ratio {found['ratio']:.2f}"
        )
    for found in report.get("round_cost") or ():
        said.append(
            f"a round at {found['context']} tokens of context: {found['ms_per_round']:.2f} ms, "
            f"{found['ratio_to_first']:.2f} times the first"
        )
    if found := report.get("stability"):
        memory = [found[f"allocated_bytes_{when}"] for when in ("first", "last")]
        shown = (
            ""
            if memory[0] is None
            else f"; {memory[0] / 2**30:.2f} GiB in use at first, {memory[1] / 2**30:.2f} at last"
        )
        said.append(f"{found['runs']} runs: the last tenth at {found['ratio']:.3f} of the speed of the first{shown}")
    return said


def _sweep_line(name: str, tried: list[dict[str, Any]]) -> str:
    best = max(tried, key=lambda entry: float(entry["tokens_per_second"]))
    thresholds = len({entry["confidence_threshold"] for entry in tried}) > 1

    def shown(entry: dict[str, Any]) -> str:
        epsilon = f"/{entry['confidence_threshold']}" if thresholds else ""
        return f"{entry['max_draft_length']}{epsilon}"

    figures = ", ".join(f"{shown(entry)}: {entry['tokens_per_second']:.1f}" for entry in tried)
    return f"sweep for {name}: best {shown(best)} (tokens/s {figures})"


def _difference_line(found: dict[str, Any], reference: str | None, ways: int) -> str:
    if ways < 2:
        return "one way alone: its outputs are compared with no other's"
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


def _prediction_lines(found: dict[str, Any]) -> list[str]:
    off = found["median_error"]
    first = (
        f"predicted by replay, each way at the step costs of the others: tokens/s behind the first token "
        f"{off['tokens_per_second']:.0%} off what was measured (median), tokens a pass {off['tokens_per_pass']:.1%}"
    )
    return [first] + [
        f"{name}: predicted {way['predicted']['tokens_per_second']:.1f} tokens/s, measured "
        f"{way['measured']['tokens_per_second']:.1f} ({way['error']['tokens_per_second']:+.0%}); tokens a pass "
        f"{way['predicted']['tokens_per_pass']:.2f} and {way['measured']['tokens_per_pass']:.2f}"
        for name, way in found["ways"].items()
    ]


def _limit_lines(limit: dict[str, Any]) -> list[str]:
    first = (
        f"limit: {limit['weight_bytes'] / 1e9:.2f} GB of target weights at {limit['copy_bytes_per_second'] / 1e12:.2f} "
        f"TB/s (a copy, read and written) take {limit['limit_ms']:.2f} ms"
    )
    return [first] + [
        f"a target pass ({limit['runtime']}) over {entry['tokens']} token{'s' * (entry['tokens'] > 1)} at "
        f"{entry['context']} of context: {entry['ms']:.2f} ms, {entry['times_the_limit']:.2f} times the limit"
        for entry in limit["passes"]
    ]


def _step_lines(found: dict[str, Any]) -> list[str]:
    return [
        f"a draft step ({found['runtime']}) with {entry['branches']} branch{'es' * (entry['branches'] > 1)} at "
        f"{found['context']} of context: {entry['ms']:.3f} ms, {entry['times_the_limit']:.2f} times the "
        f"{found['limit_ms']:.3f} ms that reading {found['weight_bytes'] / 1e9:.2g} GB of draft weights takes"
        for entry in found["steps"]
    ]
