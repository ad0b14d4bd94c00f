"""What long work reports while it runs."""

from __future__ import annotations


class Progress:
    """Receives the progress of a run; this one ignores it."""

    def doing(self, what: str) -> None:
        """Show what runs now."""

    def advance(self) -> None:
        """Count one finished generation."""

    def say(self, line: str) -> None:
        """Show a line that the user should see before the run ends."""
