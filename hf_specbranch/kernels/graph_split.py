"""Where a recorded stage is cut in two.

The device begins with a graph when the host has launched all of it, and a stage has hundreds of kernels. Behind its
first layers a stage is cut: the device works on the short first piece while the host launches the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

LAYERS = 2  # of the first piece


class _Cut:
    def __init__(self, cut: Callable[[], None]) -> None:
        self.cut, self.layers = cut, 0


_cut: ContextVar[_Cut | None] = ContextVar("cut", default=None)


@contextmanager
def splitting(cut: Callable[[], None]) -> Iterator[None]:
    """Calls `cut` once, when the first layers are done."""
    before = _cut.set(_Cut(cut))
    try:
        yield
    finally:
        _cut.reset(before)


def layer_done() -> None:
    """Says that a layer has run."""
    if (cut := _cut.get()) is not None:
        cut.layers += 1
        if cut.layers == LAYERS:
            cut.cut()
