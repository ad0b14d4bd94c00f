"""The report of replayed traffic: figures per kind of traffic and per call, and the bars that they are held against."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console

from .report import Column, markdown_page, print_tables, versions
from .results import Difference, summarize
from .timing import percentile
from .traffic import BATCHES, BATCHES_AGAIN, CHAT, CHAT_CACHED, MIXED, REQUESTS
from .traffic_run import Call, Replay, TrafficBenchmark

GROUPS = (
    (
        Column("calls", "calls", "d"),
        Column("tokens_per_second", "tok/s", ".1f"),
        Column("steady_tokens_per_second", "steady \ntok/s", ".1f"),
        Column("ratio_to_steady", "x\nsteady", ".2f"),
        Column("slowest_seconds", "slowest\ns", ".2f"),
        Column("slowest_ratio", "x its\nsteady", ".2f"),
    ),
    (
        Column("first_token_p50_ms", "first p50\nms", ".1f"),
        Column("first_token_p95_ms", "first p95\nms", ".1f"),
        Column("graphs_captured", "graphs", "d"),
        Column("capture_seconds", "capture\ns", ".2f"),
        Column("reused_tokens", "reused \ntokens", "d"),
        Column("peak_gib", "peak \nGiB", ".1f"),
        Column("end_gib", "end \nGiB", ".1f"),
    ),
)
LEGEND = (
    "x steady: total time over that of the same calls in steady state, i.e. the fastest of a few repetitions in a "
    "row after everything else; where rounding made that another text, its time per pass of the target counts. "
    "slowest: the slowest call, and its time over its own steady time. first: time to the first token. graphs, "
    "capture: graphs captured, and the time of building and capturing. reused: prompt tokens that were not read again. "
    "GiB: in use on the device after the fullest call and after the last one."
)
TIE = 4.0  # steps of a half-precision dtype up to which a margin between two tokens is rounding


@dataclass(frozen=True)
class Bar:
    """One goal, and what was measured."""

    name: str
    value: float
    limit: float
    unit: str = ""
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def line(self) -> str:
        """Return the bar as a note.

        Example:
            >>> Bar("mixed lengths, time over steady", 1.1, 1.15, "x").line()
            'bar met: mixed lengths, time over steady: 1.1x (at most 1.15x)'
        """
        side = "at least" if self.at_least else "at most"
        met = "met" if self.met else "MISSED"
        return f"bar {met}: {self.name}: {self.value:.3g}{self.unit} ({side} {self.limit:g}{self.unit})"


def build_traffic(benchmark: TrafficBenchmark, settings: dict[str, Any], interrupted: bool) -> dict[str, Any]:
    """Return everything that was measured, ready for JSON.

    Args:
        benchmark: finished or interrupted.
        settings: the options of the command.
        interrupted: whether the run was interrupted.
    """
    replays = {name: replay for name, replay in benchmark.replays.items() if replay.calls}
    differences = [found for replay in replays.values() for found in replay.differences]
    return {
        "versions": versions(benchmark.pair.target.device),
        "settings": settings,
        "traffic": asdict(benchmark.traffic),
        "interrupted": interrupted,
        "warm_up_seconds": benchmark.warm_up_seconds,
        "first_call": None if benchmark.first is None else call_row(benchmark, benchmark.first),
        "kinds": {
            name: {**row(benchmark, replay), "each": [call_row(benchmark, call) for call in replay.calls]}
            for name, replay in replays.items()
        },
        "bars": [{**asdict(bar), "met": bar.met, "line": bar.line()} for bar in bars(benchmark)],
        "compared": sum(replay.compared for replay in replays.values()),
        "differences": {**summarize(differences), "each": [found.to_dict() for found in differences]},
        "slowed_by": sorted({call.stats.slowed_by for replay in replays.values() for call in replay.calls} - {""}),
        "runtime": sorted({call.stats.runtime for replay in replays.values() for call in replay.calls}),
    }


def row(benchmark: TrafficBenchmark, replay: Replay) -> dict[str, Any]:
    """Return the figures of one kind of traffic; None where one is not known."""
    calls = replay.calls
    known = [call for call in calls if call.item in benchmark.steady]
    seconds = sum(call.seconds for call in calls)
    steady_seconds = sum(steady_time(benchmark, call) for call in known)
    slowest = max(calls, key=lambda call: call.seconds)
    ratios = [call.seconds / steady_time(benchmark, call) for call in known]
    first = [percentile([call.stats.time_to_first_token for call in calls], part) for part in (0.5, 0.95)]
    memory = [call.memory for call in calls if call.memory is not None]
    return {
        "calls": len(calls),
        "seconds": seconds,
        "tokens_per_second": sum(call.new_tokens for call in calls) / seconds,
        "steady_tokens_per_second": sum(call.new_tokens for call in known) / steady_seconds if known else None,
        "ratio_to_steady": sum(call.seconds for call in known) / steady_seconds if known else None,
        "calls_with_steady": len(known),
        "slowest_seconds": slowest.seconds,
        "slowest_ratio": slowest.seconds / steady_time(benchmark, slowest) if slowest in known else None,
        "worst_ratio": max(ratios, default=None),
        "first_token_p50_ms": None if first[0] is None else first[0] * 1000,
        "first_token_p95_ms": None if first[1] is None else first[1] * 1000,
        "graphs_captured": sum(call.stats.graphs_captured for call in calls),
        "capture_seconds": sum(call.stats.capture_seconds for call in calls),
        "reused_tokens": sum(call.stats.reused_tokens for call in calls),
        "peak_gib": max(memory) / 2**30 if memory else None,
        "end_gib": memory[-1] / 2**30 if memory else None,
        "peak_allocated_gib": None if replay.peak_allocated is None else replay.peak_allocated / 2**30,
    }


def steady_time(benchmark: TrafficBenchmark, call: Call) -> float:
    """Return the steady time of a call that has one.

    In half precision a repetition may become another text, of which more or less is accepted. Then the time per pass
    of the target is compared.
    """
    steady = benchmark.steady[call.item]
    passes = 1.0 if steady.new == call.new else call.stats.target_forwards / max(1, steady.stats.target_forwards)
    return steady.seconds * passes


def call_row(benchmark: TrafficBenchmark, call: Call) -> dict[str, Any]:
    """Return the figures of one call."""
    steady = benchmark.steady.get(call.item)
    return {
        "rows": len(call.item.prompts),
        "prompt_tokens": [len(prompt) for prompt in call.item.prompts],
        "cached_tokens": call.item.cached,
        "new_tokens": call.new_tokens,
        "seconds": call.seconds,
        "steady_seconds": None if steady is None else steady_time(benchmark, call),
        "steady_passes": None if steady is None else steady.stats.target_forwards,
        "same_text_in_steady": None if steady is None else steady.new == call.new,
        "memory": call.memory,
        "stats": call.stats.to_dict(),
    }


def bars(benchmark: TrafficBenchmark) -> list[Bar]:
    """Return the bars for what was measured."""
    found, rows = [], {name: row(benchmark, replay) for name, replay in benchmark.replays.items() if replay.calls}
    if (ratio := rows.get(MIXED, {}).get("ratio_to_steady")) is not None:
        found.append(Bar("mixed lengths, first pass, time over steady", ratio, 1.15, "x"))
    for name in (CHAT, CHAT_CACHED):
        turns = _with_steady(benchmark, name)[2:]
        if turns:
            worst = min(steady / seconds for seconds, steady in turns)
            found.append(Bar(f"{name}, slowest turn after the second, speed over steady", worst, 0.9, "x", True))
    if (over := _over_steady_on_known_sizes(benchmark)) is not None:
        found.append(Bar("batch sizes seen before, worst call, time over steady", over * 1000, 20, " ms"))
    if benchmark.warm_up_seconds is not None:
        captured = sum(row["graphs_captured"] for row in rows.values())
        found.append(Bar("graphs captured after the warm-up", captured, 0))
        if (ratio := rows.get(REQUESTS, {}).get("ratio_to_steady")) is not None:
            found.append(Bar("requests after the warm-up, time over steady", ratio, 1.1, "x"))
            found += _memory_growth(benchmark.replays[REQUESTS].calls)
    if any(replay.compared for replay in benchmark.replays.values()):
        different = [each for replay in benchmark.replays.values() for each in replay.differences]
        wrong = [each for each in different if not is_tie(each, benchmark.pair.target.dtype)]
        found.append(Bar("outputs that differ from plain generate(), near-ties excluded", len(wrong), 0))
    return found


def is_tie(found: Difference, dtype: torch.dtype) -> bool:
    """Return whether rounding explains a difference: two tokens of almost equal logits, in half precision."""
    if dtype == torch.float32 or found.margin is None or not found.spacing:
        return False
    return abs(found.margin) <= TIE * found.spacing


def _with_steady(benchmark: TrafficBenchmark, name: str) -> list[tuple[float, float]]:
    """Return the time and the steady time of each call of a kind, where both are known."""
    calls = benchmark.replays[name].calls if name in benchmark.replays else []
    return [(call.seconds, steady_time(benchmark, call)) for call in calls if call.item in benchmark.steady]


def _over_steady_on_known_sizes(benchmark: TrafficBenchmark) -> float | None:
    """Return the most seconds over steady of calls with changing batch sizes, the first of each size left out."""
    seen: set[int] = set()
    over: list[float] = []
    for name in (BATCHES, BATCHES_AGAIN):
        for call in benchmark.replays[name].calls if name in benchmark.replays else []:
            if len(call.item.prompts) in seen and call.item in benchmark.steady:
                over.append(call.seconds - steady_time(benchmark, call))
            seen.add(len(call.item.prompts))
    return max(over, default=None)


def _memory_growth(calls: list[Call]) -> list[Bar]:
    """Return the bar for flat memory: the last call against the one after a quarter of the calls."""
    early, last = calls[len(calls) // 4].memory, calls[-1].memory
    if early is None or last is None:
        return []
    return [Bar("memory in use, growth over the last three quarters of the requests", last / early - 1, 0.01)]


def print_traffic(report: dict[str, Any], console: Console) -> None:
    """Print notes and bars, and the tables last."""
    for line in notes(report):
        console.print(line, highlight=False, soft_wrap=False)
    if not report["kinds"]:
        console.print("nothing was measured")
        return
    console.print(LEGEND, style="dim", highlight=False)
    console.print()
    print_tables("traffic", report["kinds"], GROUPS, console)


def traffic_markdown(report: dict[str, Any]) -> str:
    """Return one table with every figure, and the notes below it."""
    return markdown_page("traffic", report["kinds"], GROUPS, LEGEND, notes(report))


def notes(report: dict[str, Any]) -> list[str]:
    """Return what a reader of the table must know, one per line."""
    used, traffic = report["versions"], report["traffic"]
    found = [
        f"{used['device']}, torch {used['torch']}, transformers {used['transformers']}, "
        f"runtime {', '.join(report['runtime']) or 'unknown'}",
        f"prompts of up to {traffic['max_length']} tokens, {traffic['max_new_tokens']} new tokens per row, greedy",
    ]
    if report["interrupted"]:
        found.append("interrupted: these are the figures so far")
    if report["warm_up_seconds"] is not None:
        found.append(f"the warm-up took {report['warm_up_seconds']:.1f} s")
    if first := report["first_call"]:
        captured = first["stats"]["graphs_captured"]
        found.append(f"the first call took {first['seconds']:.2f} s and captured {captured} graphs")
    found += [f"warning: calls were driven step by step from the host: {reason}" for reason in report["slowed_by"]]
    if report["compared"]:
        differ = report["differences"]["outputs"]
        found.append(f"{report['compared'] - differ} of {report['compared']} compared texts equal plain generate()'s")
    return found + [bar["line"] for bar in report["bars"]]
