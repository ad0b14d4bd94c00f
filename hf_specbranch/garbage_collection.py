"""Pauses Python's garbage collection while stages are captured, and while kernels and models are prepared for that.

Graphs of a model that is gone may be garbage, and to destroy one ends a capture. And what is prepared makes so many
objects that a full collection would come in between: it takes a quarter of a second in a process that has imported
transformers.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class _GarbageCollection:
    """Counts those who need it paused, in all threads."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.pauses = 0
        self.was_enabled = False

    def pause(self) -> None:
        with self.lock:
            if not self.pauses:
                self.was_enabled = gc.isenabled()
                gc.disable()
            self.pauses += 1

    def resume(self) -> None:
        with self.lock:
            self.pauses -= 1
            if not self.pauses and self.was_enabled:
                gc.enable()


_garbage_collection = _GarbageCollection()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect no garbage in any thread while the context lasts."""
    _garbage_collection.pause()
    try:
        yield
    finally:
        _garbage_collection.resume()
