"""What long work reports while it runs."""

from __future__ import annotations

import sys
from typing import Any


class Progress:
    """Receives the progress of a run; this one ignores it."""

    def doing(self, what: str) -> None:
        """Show what runs now."""

    def advance(self) -> None:
        """Count one finished generation."""

    def say(self, line: str) -> None:
        """Show a line that the user should see before the run ends."""


class TqdmProgress(Progress):
    """Shows progress on a tqdm bar; lines stay on the screen, or in a log, above it.

    Args:
        bar: a `tqdm` bar on standard error.
    """

    def __init__(self, bar: Any) -> None:
        self.bar = bar

    def doing(self, what: str) -> None:
        self.bar.set_description(what)

    def advance(self) -> None:
        self.bar.update()

    def say(self, line: str) -> None:
        self.bar.write(line, file=sys.stderr)
