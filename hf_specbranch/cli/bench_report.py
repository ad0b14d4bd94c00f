"""What the kinds of `hf-specbranch bench` share: the files of a report, its settings and the exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..bench.plots import save_speedup
from . import options
from .printing import INTERRUPTED, TERMINATED, Terminated


class Files(NamedTuple):
    """Files that the report is written to."""

    json: Path | None
    markdown: Path | None
    png: Path | None

    def check(self) -> None:
        """Refuse files that cannot be written, before any work."""
        options.check_file("--json", self.json)
        options.check_file("--markdown", self.markdown)
        options.check_picture(self.png)

    def write(self, report: dict[str, Any], markdown: Callable[[dict[str, Any]], str]) -> None:
        if self.json is not None:
            self.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if self.markdown is not None:
            self.markdown.write_text(markdown(report), encoding="utf-8")
        if self.png is not None:
            save_speedup(report, self.png)


def exit_status(stopped: BaseException | None, failed: bool) -> int:
    """Return the exit status; raises what stopped the run unless it was Ctrl-C or SIGTERM."""
    if isinstance(stopped, KeyboardInterrupt):
        return TERMINATED if isinstance(stopped, Terminated) else INTERRUPTED
    if stopped is not None:
        raise stopped
    return 1 if failed else 0


def plain_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return options as JSON can hold them."""

    def plain(value: Any) -> Any:
        return (
            [plain(each) for each in value]
            if isinstance(value, list)
            else str(value)
            if isinstance(value, Path)
            else value
        )

    return {name: plain(value) for name, value in values.items()}
