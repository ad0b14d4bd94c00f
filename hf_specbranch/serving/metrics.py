"""Metrics of an engine in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .completion import Completion
from .engine import Engine

BUCKETS = 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0  # seconds
PREFIX = "hf_specbranch_"


class Histogram:
    """Counts values by size.

    Args:
        name: of the metric.
        help: what it measures.
    """

    def __init__(self, name: str, help: str) -> None:
        self.name, self.help = PREFIX + name, help
        self.counts, self.total, self.number = [0] * len(BUCKETS), 0.0, 0

    def add(self, value: float) -> None:
        self.counts = [count + (value <= most) for count, most in zip(self.counts, BUCKETS)]
        self.total, self.number = self.total + value, self.number + 1

    def lines(self) -> list[str]:
        rows = [f'{self.name}_bucket{{le="{most:g}"}} {count}' for most, count in zip(BUCKETS, self.counts)]
        rows += [f'{self.name}_bucket{{le="+Inf"}} {self.number}']
        rows += [f"{self.name}_sum {self.total:g}", f"{self.name}_count {self.number}"]
        return [f"# HELP {self.name} {self.help}", f"# TYPE {self.name} histogram", *rows]


class Metrics:
    """Counts the answers of an engine.

    Args:
        engine: generates them.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: Counter[str] = Counter()  # by how they ended
        self.prompt_tokens = 0
        self.first_token = Histogram("time_to_first_token_seconds", "From the request to the first token.")
        self.whole = Histogram("answer_seconds", "From the request to the last token.")

    def add(self, answers: Sequence[Completion]) -> None:
        """Count answers that nobody waits for any longer."""
        for answer in answers:
            self.answers[answer.finish_reason or "cancelled"] += 1
            self.prompt_tokens += len(answer.prompt)
            if answer.tokens:
                self.first_token.add(answer.stats.time_to_first_token)
                self.whole.add(answer.stats.total_seconds)

    def text(self) -> str:
        """Return all metrics."""
        engine, stats = self.engine, self.engine.stats
        counters = {
            "prompt_tokens_total": ("Tokens of prompts.", self.prompt_tokens),
            "generated_tokens_total": ("Generated tokens.", stats.new_tokens),
            "draft_tokens_total": ("Draft tokens, those on branches included.", stats.num_draft_tokens),
            "accepted_tokens_total": ("Draft tokens that are in answers.", stats.num_accepted_tokens),
            "target_passes_total": ("Passes of the target over the batch.", stats.target_forwards),
        }
        gauges = {
            "running_answers": ("Answers that have a row of the batch.", engine.running),
            "waiting_answers": ("Answers that wait for a row.", len(engine.queue)),
            "max_rows": ("The most answers at a time.", engine.sizes[-1]),
        }
        lines = []
        for kind, metrics in (("counter", counters), ("gauge", gauges)):
            for name, (help, value) in metrics.items():
                lines += [f"# HELP {PREFIX}{name} {help}", f"# TYPE {PREFIX}{name} {kind}", f"{PREFIX}{name} {value}"]
        name = PREFIX + "answers_total"
        lines += [f"# HELP {name} Answers, by how they ended.", f"# TYPE {name} counter"]
        lines += [f'{name}{{finish_reason="{reason}"}} {count}' for reason, count in sorted(self.answers.items())]
        return "\n".join([*lines, *self.first_token.lines(), *self.whole.lines()]) + "\n"
