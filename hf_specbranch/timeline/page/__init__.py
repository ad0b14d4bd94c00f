"""One page that shows recordings: no network, no build step, everything inside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..recording import Recording
from ..waits import waits

FOLDER = Path(__file__).parent
SCRIPTS = ("format.js", "lanes.js", "text.js", "view.js", "start.js")


def timeline_page(recordings: list[Recording], title: str = "Timeline") -> str:
    """The page as HTML.

    Args:
        recordings: one, or several to compare, all on the same scale of time.
        title: of the page.
    """
    page = (FOLDER / "timeline.html").read_text(encoding="utf-8")
    style = (FOLDER / "timeline.css").read_text(encoding="utf-8")
    script = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS)
    data = {"title": title, "runs": [_run(recording) for recording in recordings]}
    # The data goes last: it may contain anything, the other marks included.
    for mark, content in (("/*STYLE*/", style), ("/*SCRIPT*/", script), ("/*DATA*/", harmless_json(data))):
        page = page.replace(mark, content, 1)
    return page


def harmless_json(data: Any) -> str:
    """JSON that can stand inside a script element: nothing in it can end the element or open another."""
    written = json.dumps(data, ensure_ascii=True)
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _run(recording: Recording) -> dict[str, Any]:
    return {**recording.to_dict(), "waits": [wait._asdict() for wait in waits(recording)]}
