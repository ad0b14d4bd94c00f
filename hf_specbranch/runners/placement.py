"""Letting two models work at the same time, and measuring how much of one is hidden behind the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch

Result = TypeVar("Result")
Span = tuple[float, float]


class Clock:
    """Marks moments: by device events where both models share one GPU, by the host's clock elsewhere."""

    def __init__(self, target: torch.device, draft: torch.device) -> None:
        self.by_events = target.type == "cuda" and target == draft
        self.origin = self.now()

    def now(self) -> Any:
        if not self.by_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream())
        return event

    def seconds(self, moment: Any) -> float:
        """Since the clock was made; waits for the device to reach the moment."""
        if not self.by_events:
            return float(moment - self.origin)
        moment.synchronize()
        return float(self.origin.elapsed_time(moment)) / 1000


class Beside:
    """Runs the target's pass beside the draft's work.

    On CUDA each has a stream of its own, the draft's with high priority, so that its small kernels need not queue
    behind the target's. Where launching takes long (eager forwards) the target's pass is launched from a thread.

    Args:
        target: the target's device.
        draft: the draft's device.
        inline: launch the target's pass from the calling thread: it is a replay, and takes no time.

    Example:
        >>> with Beside(torch.device("cpu"), torch.device("cpu")) as beside:
        ...     answer = beside.start(lambda: 6 * 7)
        ...     with beside.drafting():
        ...         pass
        ...     answer()
        42
    """

    def __init__(self, target: torch.device, draft: torch.device, inline: bool = False) -> None:
        self.inline = inline
        self.stream = self.draft_stream = None
        if target.type == "cuda":
            self.stream = torch.cuda.Stream(target)  # type: ignore[no-untyped-call]
        if draft.type == "cuda":
            self.draft_stream = torch.cuda.Stream(draft, priority=-1)  # type: ignore[no-untyped-call]
        self.device = draft
        self.modes = inherited_modes(target.type)
        self.threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="specbranch-target")
        self.clock = Clock(target, draft)
        self.target_spans: list[tuple[Any, Any]] = []
        self.draft_spans: list[tuple[Any, Any]] = []

    def __enter__(self) -> Beside:
        self.exit = ExitStack()
        if self.draft_stream is not None:
            outer = torch.cuda.current_stream(self.device)
            self.draft_stream.wait_stream(outer)
            self.exit.callback(outer.wait_stream, self.draft_stream)
            self.exit.enter_context(torch.cuda.stream(self.draft_stream))
        self.exit.callback(self.threads.shutdown)
        return self

    def __exit__(self, *error: object) -> None:
        self.exit.close()

    def start(self, work: Callable[..., Result], *arguments: Any) -> Callable[[], Result]:
        """Begin `work(*arguments)`; the returned function waits for its result."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        finished = self._run(work, arguments) if self.inline else None
        future = None if self.inline else self.threads.submit(self._run, work, arguments)

        def result() -> Result:
            value = cast(Result, finished if future is None else future.result())
            if self.stream is not None:
                torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            return value

        return result

    def _run(self, work: Callable[..., Result], arguments: tuple[Any, ...]) -> Result:
        on_stream: AbstractContextManager[Any] = nullcontext()
        if self.stream is not None:
            on_stream = torch.cuda.stream(self.stream)
        modes: AbstractContextManager[Any] = nullcontext() if self.inline else self.modes()
        with modes, on_stream:
            begin = self.clock.now()
            value = work(*arguments)
            self.target_spans.append((begin, self.clock.now()))
        return value

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Marks the draft's work, to be compared with the target's."""
        begin = self.clock.now()
        yield
        self.draft_spans.append((begin, self.clock.now()))

    def measure(self) -> tuple[float, float]:
        """Seconds of drafting, and the part of them during which the target ran."""
        target = [(self.clock.seconds(begin), self.clock.seconds(end)) for begin, end in self.target_spans]
        draft = [(self.clock.seconds(begin), self.clock.seconds(end)) for begin, end in self.draft_spans]
        return sum(end - begin for begin, end in draft), shared_time(target, draft)


def inherited_modes(device_type: str) -> Callable[[], AbstractContextManager[None]]:
    """Gradient, inference and autocast modes belong to a thread; this takes the caller's to another."""
    inference = torch.is_inference_mode_enabled()
    autocast, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)

    @contextmanager
    def modes() -> Iterator[None]:
        without_gradients: AbstractContextManager[Any] = torch.inference_mode() if inference else torch.no_grad()
        with without_gradients, torch.autocast(device_type, dtype=dtype, enabled=autocast):
            yield

    return modes


def shared_time(first: list[Span], second: list[Span]) -> float:
    """How long both lists of spans, each in order of time, are under way at once."""
    shared, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        shared += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return shared
