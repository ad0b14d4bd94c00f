"""Show the progress of long work on standard error: a bar at a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from ..progress import Progress

LINE_SECONDS = 3.0  # between two lines in a log


@contextmanager
def showing_progress(total: int | None = None, quiet: bool = False) -> Iterator[Progress]:
    """Yield a `Progress` that is shown on standard error until the block ends.

    Args:
        total: how often `advance` will be called at most; None if it is not known.
        quiet: show nothing.
    """
    if quiet:
        yield Progress()
    elif not sys.stderr.isatty():
        yield Lines(total)
    else:
        columns = [SpinnerColumn(), TextColumn("{task.description}")]
        counted = [] if total is None else [BarColumn(), MofNCompleteColumn()]
        with RichProgress(
            *columns,
            *counted,
            TimeElapsedColumn(),
            console=rich.console.Console(stderr=True),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as shown:
            yield Bar(shown, shown.add_task("", total=total))


class Bar(Progress):
    """Progress on a bar; lines stay on the screen above it."""

    def __init__(self, shown: RichProgress, task: TaskID) -> None:
        self.shown, self.task = shown, task

    def doing(self, what: str) -> None:
        self.shown.update(self.task, description=what)

    def advance(self) -> None:
        self.shown.advance(self.task)

    def say(self, line: str) -> None:
        self.shown.console.print(line, highlight=False, markup=False)


class Lines(Progress):
    """Progress as lines: the first at once, further ones at least `LINE_SECONDS` apart."""

    def __init__(self, total: int | None) -> None:
        self.total, self.done, self.last = total, 0, -LINE_SECONDS

    def doing(self, what: str) -> None:
        now = time.monotonic()
        if now - self.last < LINE_SECONDS:
            return
        self.last = now
        self.say(what if self.total is None else f"{self.done} of {self.total} runs done; {what}")

    def advance(self) -> None:
        self.done += 1

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
