"""Kernels that were never built are built side by side.

Triton builds a kernel when it is first launched: on a machine that has never seen it, about half a second for the code
and for the program that launches it, one kernel after the other. In a rehearsal nothing is launched; every kernel that
would be is built, each in a thread of its own. Whatever a rehearsed stage computes is noise.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
        rehearsal = _rehearsal.get()
        if rehearsal is None:
            if _aside:
                _decided.wait()  # until Triton is set up
            self.jitted[grid](*args, **options)
        else:
            rehearsal.build(self, grid, args, options)

    def build(self, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """As launching it would, and nothing more."""
        built = self.jitted.warmup(*args, grid=grid, **options)
        getattr(built, "run", None)  # the program that launches it, and the code on the device

    def kind(self, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        """What Triton compiles it for; arguments alike in this share a build."""
        names = self.jitted.arg_names[: len(args)] if args else ()
        alike = (_kind(argument, name in self.varying) for name, argument in zip(names, args))
        return self, *alike, *sorted(options.items())


def _kind(argument: Any, varies: bool) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if type(argument) is int:
        return argument.bit_length() < 32, not varies and argument == 1, not varies and argument % 16 == 0
    return type(argument)


class AllBuilt(Exception):
    """Kernels are found on disk; there is nothing to rehearse."""


class Rehearsal:
    """Builds kernels in threads.

    Args:
        pool: the threads.
        device: a CUDA device.
        waits: Triton is being set up elsewhere; nothing is built before it is known whether anything has to be.
    """

    def __init__(self, pool: ThreadPoolExecutor, device: torch.device, waits: bool = False) -> None:
        self.pool, self.device, self.waits = pool, device, waits
        self.tells = not waits and not _cold  # its second kernel: with the first Triton sets itself up
        self.jobs: dict[tuple[Any, ...], Future[float]] = {}

    def build(self, kernel: Kernel, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Have a kernel built for such arguments, unless that is under way."""
        kind = kernel.kind(args, options)
        if kind not in self.jobs:
            job = self.jobs[kind] = self.pool.submit(self._in_turn, kernel, grid, args, options)
            if self.tells and len(self.jobs) <= 2:
                took = LONG if job.exception() else job.result()
                if len(self.jobs) == 2:
                    _cold.append(took >= LONG)
                    _decided.set()
                    if took >= LONG:
                        logger.warning("hf_specbranch builds its GPU kernels: some seconds, once on this machine")
        if False in _cold:
            raise AllBuilt

    def _in_turn(self, *job: Any) -> float:
        if self.waits:
            _decided.wait()
        return 0.0 if False in _cold else self._build(*job)

    def _build(self, kernel: Kernel, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> float:
        began = time.perf_counter()
        with torch.cuda.device(self.device):
            kernel.build(grid, args, options)
        return time.perf_counter() - began


_rehearsal: ContextVar[Rehearsal | None] = ContextVar("rehearsal", default=None)
_cold: list[bool] = []  # whether this process has met kernels that were not on disk
_aside: list[threading.Thread] = []  # where the first rehearsal of this process goes on, if it was begun aside
_begin_once = threading.Lock()
_decided = threading.Event()  # that one has told whether kernels are on disk, or has ended


def rehearsing() -> bool:
    """Whether kernels are built and not launched."""
    return _rehearsal.get() is not None


def rehearse(stage: Callable[[], object], device: torch.device) -> None:
    """Build the kernels of a stage side by side.

    Where the first kernels of a process are found on disk, so are the others: rehearsals end there and are left out.

    Args:
        stage: may be run once more at any time, and keeps to what it is given when what it computes is noise: memory
            that a kernel was to write must come from `room`.
        device: a CUDA device.
    """
    if device.type != "cuda" or False in _cold:
        return
    waits = bool(_aside) and _aside[0] is not threading.current_thread() and not _decided.is_set()
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        rehearsal = Rehearsal(pool, device, waits)
        before = _rehearsal.set(rehearsal)
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
            _rehearsal.reset(before)
    logger.debug("%d kernels were rehearsed", len(rehearsal.jobs))


def rehearse_aside(stage: Callable[[], object], device: torch.device) -> None:
    """Begin the first rehearsal of this process in a thread of its own; others build when its second kernel has told.

    Args:
        stage: see `rehearse`.
        device: a CUDA device.
    """
    with _begin_once:
        if _aside or _cold:
            return

        def run() -> None:
            try:
                rehearse(stage, device)
            finally:
                _decided.set()

        _aside.append(threading.Thread(target=run, name="hf_specbranch builds kernels"))
        _aside[0].start()


def room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for indices that a kernel will write; in a rehearsal, where it does not, they are valid all the same."""
    make = torch.zeros if rehearsing() else torch.empty
    return make(shape, dtype=dtype, device=device)
