"""Overlaps the draft's work with the target's pass, and measures how much of it the pass hides.

On a CPU, other processes want the same cores: `CpuThreads` leaves them some.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch

from ..stats import SpecBranchStats
from .streams import side_stream

LOAD = "/proc/loadavg"  # its fourth field begins with the number of tasks on the machine that run or wait for a core
CHECK_SECONDS, CONFIRM_SECONDS = 0.1, 0.001  # between two looks at the load; until a process that runs briefly is done
QUIET_CHECKS = 5  # in a row, before more threads are used again
UNLIMITED = 1 << 16  # threads
FORGET_SECONDS = 10.0  # how long the number of running tasks is remembered

Result = TypeVar("Result")
Span = tuple[float, float]
Work = Literal["draft", "verify", "branch"]  # drafting before a pass; the pass; drafting while the target runs


class Totals(NamedTuple):
    """Time and size of all forwards of one kind."""

    seconds: float = 0.0
    forwards: int = 0
    positions: int = 0  # tokens per row that they read

    def __add__(self, other: Totals) -> Totals:  # type: ignore[override]
        return Totals(self.seconds + other.seconds, self.forwards + other.forwards, self.positions + other.positions)


class Clock:
    """Takes timestamps: device events where both models are on GPUs, the host's clock elsewhere."""

    def __init__(self, target: torch.device, draft: torch.device) -> None:
        self.by_events, self.target = target.type == "cuda" and draft.type == "cuda", target
        for device in {target, draft} if target != draft and self.by_events else ():
            torch.cuda.synchronize(device)  # two GPUs agree on the time when both have nothing to do
        self.origins = {device: self.now(device) for device in (target, draft)}

    def now(self, device: torch.device | None = None) -> Any:
        """Return a timestamp; on a GPU, by default the target's, of the moment when its current stream gets there."""
        device = device or self.target
        if not self.by_events:
            return device, time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return device, event

    def seconds(self, moment: Any) -> float:
        """Return the seconds from the creation of the clock to a timestamp. Waits for the device to reach it."""
        device, reached = moment
        _, origin = self.origins[device]
        if not self.by_events:
            return float(reached - origin)
        reached.synchronize()
        return float(origin.elapsed_time(reached)) / 1000


class Overlap:
    """Runs the target's pass on a side stream while the draft works.

    On CUDA each has its own stream. The draft's has high priority, so that its small kernels need not wait for the
    target's. Where launching takes long (eager forwards), a thread launches the target's pass.

    Args:
        target: the target's device.
        draft: the draft's device.
        stats: counts the forwards of both.
        inline: launch the target's pass from the calling thread, because it is a replay and launching takes no time.
        enabled: overlap the two; otherwise the draft works after the pass. May change between rounds.

    Example:
        >>> with Overlap(torch.device("cpu"), torch.device("cpu")) as overlap:
        ...     answer = overlap.start(lambda: 6 * 7)
        ...     with overlap.working("branch"):
        ...         pass
        ...     answer()
        42
    """

    def __init__(
        self,
        target: torch.device,
        draft: torch.device,
        stats: SpecBranchStats | None = None,
        inline: bool = False,
        enabled: bool = True,
    ) -> None:
        self.inline, self.enabled, self.stats = inline, enabled, stats or SpecBranchStats()
        self.stream = self.draft_stream = None
        if target.type == "cuda":
            self.stream = side_stream(target)
        if draft.type == "cuda":
            self.draft_stream = side_stream(draft, priority=-1)
        self.device = draft
        self.saves_time = target.type == "cuda" or target != draft  # two models on one CPU slow each other down
        self.modes = inherited_modes(target.type)
        self.threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="specbranch-target")
        self.clock = Clock(target, draft)
        self.target, self.places = target, {"draft": draft, "verify": target, "branch": draft}
        self.spans = _no_spans()  # since the last `take`

    def __enter__(self) -> Overlap:
        self.exit = ExitStack()
        if self.draft_stream is not None:
            outer = torch.cuda.current_stream(self.device)
            self.draft_stream.wait_stream(outer)
            self.exit.callback(outer.wait_stream, self.draft_stream)
            self.exit.enter_context(torch.cuda.stream(self.draft_stream))
            if self.target.type == "cuda":  # the stream's device has become the current one
                self.exit.enter_context(torch.cuda.device(self.target))
        self.exit.callback(self.threads.shutdown)
        return self

    def __exit__(self, *error: object) -> None:
        self.join()
        self.exit.close()

    def fork(self) -> None:
        """Let later work on the side stream wait for what was launched so far, and for nothing after it."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def on_side_stream(self) -> AbstractContextManager[Any]:
        """Inside the context, work is launched on the side stream. It may begin when all before `fork` is done."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def join(self) -> None:
        """Let later work wait for the side stream."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def start(self, work: Callable[..., Result], *arguments: Any) -> Callable[[], Result]:
        """Start `work(*arguments)` on the side stream. The returned function waits for its result."""
        if not self.enabled:
            with self.working("verify"):
                done = work(*arguments)
            return lambda: done
        self.fork()
        finished = self._run(work, arguments) if self.inline else None
        future = None if self.inline else self.threads.submit(self._run, work, arguments)

        def result() -> Result:
            value = cast(Result, finished if future is None else future.result())
            self.join()
            return value

        return result

    def _run(self, work: Callable[..., Result], arguments: tuple[Any, ...]) -> Result:
        modes: AbstractContextManager[Any] = nullcontext() if self.inline else self.modes()
        with modes, self.on_side_stream(), self.working("verify"):
            return work(*arguments)

    @contextmanager
    def working(self, what: Work) -> Iterator[None]:
        """Record when the work inside the context begins and ends, and count its forwards."""
        place = self.places[what]
        before, begin = self._counted(what), self.clock.now(place)
        yield
        if place.type == "cuda" and not self.clock.by_events:  # the host's clock must not be read while a GPU works
            torch.cuda.current_stream(place).synchronize()
        done = (after - once for once, after in zip(before, self._counted(what)))
        self.spans[what].append((begin, self.clock.now(place), Totals(0.0, *done)))

    def discard_round(self) -> None:
        """Remove the last round from all counts, because it was started after the end of the text."""
        done = {what: spans.pop()[2] for what, spans in self.spans.items()}
        stats, drafted = self.stats, done["draft"] + done["branch"]
        stats.row_passes -= done["verify"].forwards
        stats.target_forwards -= done["verify"].forwards
        stats.target_positions -= done["verify"].positions
        stats.draft_forwards -= drafted.forwards
        stats.draft_positions -= drafted.positions

    def _counted(self, what: Work) -> tuple[int, int]:
        stats = self.stats
        if what == "verify":
            return stats.target_forwards, stats.target_positions
        return stats.draft_forwards, stats.draft_positions

    def take(self) -> dict[Work, Totals]:
        """Return the work of each kind since the last call. Waits until the device has done it."""
        seconds = self.clock.seconds
        spans = {what: [(seconds(begin), seconds(end)) for begin, end, _ in all] for what, all in self.spans.items()}
        totals = {what: Totals(sum(end - begin for begin, end in spans[what])) for what in spans}
        for what, marks in self.spans.items():
            totals[what] = sum((done for *_, done in marks), start=totals[what])
        self.stats.draft_seconds += totals["draft"].seconds + totals["branch"].seconds
        if self.saves_time:
            self.stats.hidden_seconds += shared_time(spans["verify"], spans["branch"])
        self.spans = _no_spans()
        return totals


def _no_spans() -> dict[Work, list[tuple[Any, Any, Totals]]]:
    """Return empty lists of (begin, end, forwards in between) for each kind of work."""
    return {"draft": [], "verify": [], "branch": []}


def inherited_modes(device_type: str) -> Callable[[], AbstractContextManager[None]]:
    """Return a context that sets the caller's gradient, inference and autocast modes in another thread."""
    inference = torch.is_inference_mode_enabled()
    autocast, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)

    @contextmanager
    def modes() -> Iterator[None]:
        without_gradients: AbstractContextManager[Any] = torch.inference_mode() if inference else torch.no_grad()
        with without_gradients, torch.autocast(device_type, dtype=dtype, enabled=autocast):
            yield

    return modes


def shared_time(first: list[Span], second: list[Span]) -> float:
    """Return for how many seconds both lists of spans overlap. Each list is in order of time."""
    shared, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        shared += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return shared


class CpuThreads(threading.local):
    """Uses fewer of torch's threads while other processes need the cores. Each thread of a program has its own state.

    torch splits each product over its threads and waits for the slowest. A thread that has to wait for a core delays
    all others, hundreds of times per pass: on two cores with two busy processes, a pass over five tokens of the
    embedded target took 430 ms with two threads and 85 ms with one. So the threads are halved until there are no more
    of them than free cores. Linux says how many tasks are running; elsewhere nothing changes.

    Example:
        >>> threads = CpuThreads()
        >>> with threads.limited(torch.device("cpu")):
        ...     list(threads.watch(range(3)))
        [0, 1, 2]
    """

    most = 1  # torch's threads outside; 1 while there is nothing to decide
    used = 1
    last_used = UNLIMITED  # by the last call
    quiet = 0  # looks in a row that found more free cores
    looked = 0.0  # when

    @contextmanager
    def limited(self, device: torch.device | None) -> Iterator[None]:
        """Run the context with as many threads as there are free cores, if the device is a CPU; restore them after."""
        outer, threads = (self.most, self.used), torch.get_num_threads() if device == torch.device("cpu") else 1
        is_recent = time.monotonic() - self.looked < FORGET_SECONDS
        self.most, self.used = threads, min(threads, self.last_used) if is_recent else threads
        try:
            if threads > 1:
                self._look()
                torch.set_num_threads(self.used)
            yield
        finally:
            if threads > 1:
                torch.set_num_threads(threads)
                self.last_used = self.used if self.used < threads else UNLIMITED
            self.most, self.used = outer

    def watch(self, rounds: Iterable[int]) -> Iterator[int]:
        """Yield these rounds; end early where the number of threads changes, since costs change with it."""
        for each in rounds:
            yield each
            if self.most > 1 and time.monotonic() - self.looked > CHECK_SECONDS and self._look():
                torch.set_num_threads(self.used)
                return

    def _look(self) -> bool:
        """Find out how many threads to use; return whether that is another number than before."""
        before, fitting = self.used, self._fitting()
        if fitting < before:
            time.sleep(CONFIRM_SECONDS)
            fitting = self._fitting()
        self.quiet = self.quiet + 1 if fitting > before else 0
        if fitting < before or self.quiet >= QUIET_CHECKS:
            self.used, self.quiet = fitting, 0
        self.looked = time.monotonic()
        return self.used != before

    def _fitting(self) -> int:
        """Return how many threads have a core to themselves: all of them, half of them, a quarter, and so on."""
        cores, running, threads = os.cpu_count() or 1, tasks_running(), self.most
        if running > 1 + cores - threads:  # of other processes, perhaps; torch's own threads wait actively for a while
            others = running - own_tasks_running()
            while others > 0 and threads > max(1, cores - others):
                threads //= 2
        return threads


def tasks_running() -> int:
    """Return how many tasks on this machine run or wait for a core; 0 if unknown. Takes about 0.03 ms."""
    try:
        with open(LOAD, "rb") as file:
            return int(file.read().split()[3].split(b"/")[0])
    except (OSError, ValueError, IndexError):
        return 0


def own_tasks_running() -> int:
    """Return how many threads of this process run or wait for a core; at least this one does."""
    running = 0
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/stat", "rb") as file:
                running += file.read().rpartition(b")")[2].split()[0] == b"R"
        except (OSError, IndexError):
            pass  # it has ended
    return max(1, running)


cpu_threads = CpuThreads()
