"""Printing, and ending a command cleanly."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import rich.console
import typer

NO_STATISTICS = "no statistics: transformers' own decoding ran"
INTERRUPTED, TERMINATED = 130, 143  # exit codes that shells expect after Ctrl-C and SIGTERM


class Terminated(KeyboardInterrupt):
    """SIGTERM, treated like Ctrl-C."""


class Console(rich.console.Console):
    """A console that leaves broken pipes to `leaving_cleanly`."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


@contextmanager
def leaving_cleanly() -> Iterator[None]:
    """Treat a closed pipe (`| head -1`) as success; end the command with one line on Ctrl-C."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would flush the rest on exit, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except KeyboardInterrupt as reason:
        print("\ninterrupted", file=sys.stderr)
        raise typer.Exit(TERMINATED if isinstance(reason, Terminated) else INTERRUPTED) from None


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM, as `timeout` sends it, end this block as Ctrl-C would."""

    def stop(*_: Any) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def note(line: str) -> None:
    """Print to standard error, apart from the output."""
    print(line, file=sys.stderr)
