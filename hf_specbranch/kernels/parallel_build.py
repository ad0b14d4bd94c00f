"""Kernels that were never built are built side by side.

Triton builds a kernel when it is first launched: on a machine that has never seen it, about half a second for the code
and for the program that launches it, one kernel after the other. In a rehearsal nothing is launched; every kernel that
would be is built, each in a thread of its own. Whatever a rehearsed stage computes is noise.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

LONG = 0.1  # seconds: what takes longer was built, not found on disk
ABOUT_NOISE = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError)


class Kernel:
    """A Triton kernel, launched as usual: `kernel[grid](...)`.

    Args:
        jitted: what `triton.jit` made.
        varying: its integers that Triton was told not to compile anew for.
    """

    def __init__(self, jitted: Any, varying: Sequence[str] = ()) -> None:
        self.jitted, self.varying = jitted, varying

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        dry_run = _dry_run.get()
        if dry_run is None:
            _wait_for_triton()
            self.jitted[grid](*args, **options)
        else:
            dry_run.build(self, grid, args, options)

    def build(self, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """As launching it would, and nothing more."""
        built = self.jitted.warmup(*args, grid=grid, **options)
        getattr(built, "run", None)  # the program that launches it, and the code on the device

    def kind(self, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        """What Triton compiles it for; arguments alike in this share a build."""
        alike = (_kind(argument, name in self.varying) for argument, name in zip(args, self.jitted.arg_names))
        return self, *alike, *sorted(options.items())


def _kind(argument: Any, varies: bool) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if type(argument) is int:
        return argument.bit_length() < 32, not varies and argument == 1, not varies and argument % 16 == 0
    return type(argument)


class AllBuilt(BaseException):
    """Kernels are found on disk; there is nothing to rehearse. No error, so whoever expects errors lets it pass."""


class DryRun:
    """Builds kernels in threads.

    Args:
        pool: the threads.
        device: a CUDA device.
        tells: from how long its first kernel takes it is told whether kernels are on disk; not from the very first of
            a process, with which Triton sets itself up.
    """

    def __init__(self, pool: ThreadPoolExecutor, device: torch.device, tells: bool) -> None:
        self.pool, self.device, self.tells = pool, device, tells
        self.jobs: dict[tuple[Any, ...], Future[None]] = {}

    def build(self, kernel: Kernel, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Have a kernel built for such arguments, unless that is under way."""
        kind = kernel.kind(args, options)
        if kind not in self.jobs:
            job = self.jobs[kind] = self.pool.submit(self._build, kernel, grid, args, options)
            if not _set_up.is_set():
                wait([job])
                _set_up.set()
            elif self.tells and not _cold:
                _cold.append(bool(wait([job], timeout=LONG).not_done) or job.exception() is not None)
                if True in _cold:
                    logger.warning("hf_specbranch builds its GPU kernels: some seconds, once on this machine")
        if self.tells and False in _cold:
            raise AllBuilt

    def _build(self, kernel: Kernel, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        with torch.cuda.device(self.device):
            kernel.build(grid, args, options)


_dry_run: ContextVar[DryRun | None] = ContextVar("rehearsal", default=None)
_cold: list[bool] = []  # whether the last model whose modules were tried has met kernels that were not on disk
_set_up = threading.Event()  # Triton is: a kernel has been built
_aside: list[threading.Thread] = []  # where that happens, if not where it is needed
_begin_once = threading.Lock()


def is_dry_run() -> bool:
    """Whether kernels are built and not launched."""
    return _dry_run.get() is not None


def build_in_parallel(stage: Callable[[], object], device: torch.device, new_model: bool = False) -> None:
    """Build the kernels of a stage side by side.

    Where the first kernel that a model needs is found on disk, so are its others: rehearsals end there and are left
    out.

    Args:
        stage: may be run once more at any time, and keeps to what it is given when what it computes is noise: memory
            that a kernel was to write must come from `room`.
        device: a CUDA device.
        new_model: the stage belongs to a model that has not run through kernels before, and may need others.
    """
    _wait_for_triton()
    if new_model and False in _cold:
        _cold.clear()
    if device.type == "cuda" and False not in _cold:
        _dry_run_stage(stage, device, tells=True)


def build_in_background(stage: Callable[[], object], device: torch.device) -> None:
    """Begin the first rehearsal of this process in a thread of its own, so that Triton is set up there.

    Everything else waits for that, but not for its further kernels.

    Args:
        stage: see `build_in_parallel`.
        device: a CUDA device.
    """

    def run() -> None:
        try:
            _dry_run_stage(stage, device, tells=False)
        finally:
            _set_up.set()  # or it will be by whoever comes next

    with _begin_once:
        if _aside or _cold or _set_up.is_set():
            return
        thread = threading.Thread(target=run, name="hf_specbranch builds kernels")
        try:
            thread.start()
        except RuntimeError as error:  # there may be too many
            logger.debug("nothing is built aside: %s", error)
        else:
            _aside.append(thread)


def _wait_for_triton() -> None:
    if _aside:
        _set_up.wait()


def _dry_run_stage(stage: Callable[[], object], device: torch.device, tells: bool) -> None:
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        dry_run = DryRun(pool, device, tells)
        before = _dry_run.set(dry_run)
        try:
            stage()
        except AllBuilt:
            pass
        except ABOUT_NOISE as error:  # or about the stage: then it will be heard of when it runs
            logger.debug("a rehearsal ended early: %s", error)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            _dry_run.reset(before)
    logger.debug("%d kernels were rehearsed", len(dry_run.jobs))


def room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for indices that a kernel will write; in a rehearsal, where it does not, they are valid all the same."""
    make = torch.zeros if is_dry_run() else torch.empty
    return make(shape, dtype=dtype, device=device)
