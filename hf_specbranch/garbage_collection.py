"""Pauses Python's garbage collection while stages are captured, and while kernels and models are prepared for that.

Graphs of a model that is gone may be garbage, and to destroy one ends a capture. And what is prepared makes so many
objects that a full collection would come in between: it takes a quarter of a second in a process that has imported
transformers.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, get_ident


class _GarbageCollection:
    """Counts those who need it paused, in all threads."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.pauses: Counter[int] = Counter()  # by thread, of those that have any
        self.was_enabled = False

    def pause(self) -> None:
        with self.lock:
            if not self.pauses:
                self.was_enabled = gc.isenabled()
                gc.disable()
            self.pauses[get_ident()] += 1

    def resume(self) -> None:
        with self.lock:
            self.pauses -= Counter([get_ident()])
            if not self.pauses and self.was_enabled:
                gc.enable()

    def continue_in_child(self) -> None:
        """Forget the other threads, in a child process, where only the one that forked still runs."""
        paused, own = bool(self.pauses), self.pauses[get_ident()]
        self.lock, self.pauses = Lock(), Counter({get_ident(): own} if own else ())
        if paused and not own and self.was_enabled:
            gc.enable()


_garbage_collection = _GarbageCollection()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_garbage_collection.continue_in_child)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect no garbage in any thread while the context lasts."""
    _garbage_collection.pause()
    try:
        yield
    finally:
        _garbage_collection.resume()
