"""Builds the kernels that a stage needs in parallel, before it first runs.

Triton builds a kernel when it is first launched. On a machine that has never seen it this takes about half a second,
for the code and for the program that launches it, one kernel after another. In a dry run nothing is launched: every
kernel that would be is built, each in a thread of its own. Whatever a stage computes in a dry run is noise.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..garbage_collection import no_garbage_collection

logger = logging.getLogger(__name__)

LONG_BUILD = 0.1  # seconds: a kernel that takes longer was built, not found on disk
ABOUT_NOISE = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError)

Args: TypeAlias = tuple[Any, ...]
Options: TypeAlias = dict[str, Any]


class Kernel:
    """A Triton kernel, launched as usual: `kernel[grid](...)`.

    Args:
        jitted: the result of `triton.jit`.
        varying: its integers that Triton does not specialise for.
    """

    def __init__(self, jitted: Any, varying: Sequence[str] = ()) -> None:
        self.jitted, self.varying = jitted, varying

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        builder = _builder.get()
        if builder is None:
            build_state.wait_for_triton()
            self.jitted[grid](*args, **options)
        else:
            builder.build(self, grid, args, options)

    def build(self, grid: tuple[int, ...], args: Args, options: Options) -> None:
        """Build the kernel as a launch would, without launching it."""
        built = self.jitted.warmup(*args, grid=grid, **options)
        getattr(built, "run", None)  # builds the program that launches it, and loads the code on the device

    def specialization(self, args: Args, options: Options) -> tuple[Any, ...]:
        """Return what Triton compiles the kernel for; arguments that agree in this share a build."""
        alike = (_specialization(argument, name in self.varying) for argument, name in zip(args, self.jitted.arg_names))
        return self, *alike, *sorted(options.items())


def _specialization(argument: Any, varies: bool) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if type(argument) is int:
        return argument.bit_length() < 32, not varies and argument == 1, not varies and argument % 16 == 0
    return type(argument)


class Builder(Protocol):
    """Receives the kernels of a dry run."""

    def build(self, kernel: Kernel, grid: tuple[int, ...], args: Args, options: Options) -> None:
        """Called in place of a launch."""


AnyBuilder = TypeVar("AnyBuilder", bound=Builder)
_builder: ContextVar[Builder | None] = ContextVar("builder", default=None)


@contextmanager
def dry_run(builder: AnyBuilder) -> Iterator[AnyBuilder]:
    """Hand every kernel to a builder instead of launching it, in this thread and while the context lasts."""
    before = _builder.set(builder)
    try:
        yield builder
    finally:
        _builder.reset(before)


def is_dry_run() -> bool:
    """Return whether kernels are built and not launched."""
    return _builder.get() is not None


class BuildState:
    """What this process knows about its kernels.

    Attributes:
        on_disk: whether the kernels of the last new model were found on disk; None: not known yet.
        triton_ready: set once Triton is initialised, that is, a kernel has been built.
        background: the thread that initialises Triton, if one was started.
    """

    def __init__(self) -> None:
        self.on_disk: bool | None = None
        self.triton_ready = threading.Event()
        self.background: threading.Thread | None = None
        self._start_once = threading.Lock()

    def start_background(self, run: Callable[[], None]) -> None:
        """Start the background thread, unless there was one or Triton is initialised."""
        with self._start_once:
            if self.background is not None or self.on_disk is not None or self.triton_ready.is_set():
                return
            thread = threading.Thread(target=run, name="hf_specbranch builds kernels")
            try:
                thread.start()
            except RuntimeError as error:  # there may be too many
                logger.debug("nothing is built in the background: %s", error)
            else:
                self.background = thread

    def wait_for_triton(self) -> None:
        """Wait until the background thread, if there is one, has initialised Triton. A forked process has none."""
        if self.background is not None and self.background.is_alive():
            self.triton_ready.wait()


build_state = BuildState()


class AllBuilt(BaseException):
    """Ends a dry run: the kernels are on disk. Not an `Exception`, so that handlers of errors let it pass."""


class ParallelBuilder:
    """Builds kernels in threads.

    Args:
        pool: the threads.
        device: a CUDA device.
        detects: the time that the first kernel takes shows whether kernels are on disk. This excludes the very first
            kernel of a process, which also initialises Triton.
    """

    def __init__(self, pool: ThreadPoolExecutor, device: torch.device, detects: bool) -> None:
        self.pool, self.device, self.detects = pool, device, detects
        self.jobs: dict[tuple[Any, ...], Future[None]] = {}

    def build(self, kernel: Kernel, grid: tuple[int, ...], args: Args, options: Options) -> None:
        """Build a kernel for such arguments, unless that was started already."""
        specialization = kernel.specialization(args, options)
        if specialization not in self.jobs:
            job = self.jobs[specialization] = self.pool.submit(self._build, kernel, grid, args, options)
            if not build_state.triton_ready.is_set():
                wait([job])
                build_state.triton_ready.set()
            elif self.detects and build_state.on_disk is None:
                build_state.on_disk = not wait([job], timeout=LONG_BUILD).not_done and job.exception() is None
                if not build_state.on_disk:
                    logger.warning("hf_specbranch builds its GPU kernels: some seconds, once on this machine")
        if self.detects and build_state.on_disk:
            raise AllBuilt

    def _build(self, kernel: Kernel, grid: tuple[int, ...], args: Args, options: Options) -> None:
        with torch.cuda.device(self.device):
            kernel.build(grid, args, options)


def build_in_parallel(stage: Callable[[], object], device: torch.device, new_model: bool = False) -> None:
    """Build the kernels of a stage in parallel.

    Where the first kernel of a model is found on disk, so are its others. The dry run ends there, and later ones are
    skipped.

    Args:
        stage: may run once more at any time, and stays within its memory when what it computes is noise: memory that a
            kernel writes indices to must come from `room`.
        device: a CUDA device.
        new_model: the stage belongs to a model that has not run through kernels before, and may need others.
    """
    build_state.wait_for_triton()
    if new_model and build_state.on_disk:
        build_state.on_disk = None
    if device.type == "cuda" and not build_state.on_disk:
        _build_stage(stage, device, detects=True)


def build_in_background(
    stage: Callable[[], object], device: torch.device, then: Callable[[], object] = lambda: None
) -> None:
    """Do the first dry run of this process in a thread of its own, which initialises Triton.

    Launches and other dry runs wait for that, but not for the further kernels of this one.

    Args:
        stage: see `build_in_parallel`.
        device: a CUDA device.
        then: called in the same thread afterwards; nothing waits for it, and it may fail.
    """

    def run() -> None:
        try:
            with no_garbage_collection():
                _build_stage(stage, device, detects=False)
        finally:
            build_state.triton_ready.set()  # after a failure the next kernel initialises Triton
        try:
            then()
        except RuntimeError as error:  # such as a lack of memory
            logger.debug("not prepared in the background: %s", error)

    build_state.start_background(run)


def _build_stage(stage: Callable[[], object], device: torch.device, detects: bool) -> None:
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        builder = ParallelBuilder(pool, device, detects)
        try:
            with dry_run(builder):
                stage()
        except AllBuilt:
            pass
        except ABOUT_NOISE as error:  # an error of the stage itself is raised when it really runs
            logger.debug("a dry run stopped: %s", error)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    logger.debug("%d kernels were built in parallel", len(builder.jobs))


def room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate memory for indices that a kernel writes. In a dry run nothing writes them, so they are valid zeros."""
    make = torch.zeros if is_dry_run() else torch.empty
    return make(shape, dtype=dtype, device=device)
