"""Letting two models work at the same time, and measuring how much of one is hidden behind the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

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
    """Runs the target's pass beside the draft's work: in a thread, and on CUDA on a stream of its own.

    Example:
        >>> with Beside(torch.device("cpu"), torch.device("cpu")) as beside:
        ...     answer = beside.start(lambda: 6 * 7)
        ...     with beside.drafting():
        ...         pass
        ...     answer()
        42
    """

    def __init__(self, target: torch.device, draft: torch.device) -> None:
        self.clock = Clock(target, draft)
        self.stream = None
        if target.type == "cuda":
            self.stream = torch.cuda.Stream(target)  # type: ignore[no-untyped-call]
        self.modes = inherited_modes(target.type)
        self.threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="specbranch-target")
        self.target_spans: list[tuple[Any, Any]] = []
        self.draft_spans: list[tuple[Any, Any]] = []

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *error: object) -> None:
        self.threads.shutdown(wait=True)

    def start(self, work: Callable[..., Result], *arguments: Any) -> Callable[[], Result]:
        """Begin `work(*arguments)`; the returned function waits for its result."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        future: Future[Result] = self.threads.submit(self._run, work, arguments)

        def result() -> Result:
            value = future.result()
            if self.stream is not None:
                torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            return value

        return result

    def _run(self, work: Callable[..., Result], arguments: tuple[Any, ...]) -> Result:
        on_stream: AbstractContextManager[Any] = nullcontext()
        if self.stream is not None:
            on_stream = torch.cuda.stream(self.stream)
        with self.modes(), on_stream:
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
