"""Tensors that grow in place: their addresses are reserved once, and physical memory is mapped to them when needed.

A captured graph contains addresses. If memory that it uses grows by copying, the graph is lost; memory that grows here
stays where it is. Reserved addresses cost nothing.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from .cuda_driver import OUT_OF_MEMORY, Driver, DriverError, driver_of

logger = logging.getLogger(__name__)

PIECE = 32 << 20  # the most bytes that are mapped at once, and the least that can be unmapped


class VirtualTensor:
    """A tensor whose first dimension grows and whose address never changes.

    `tensor` has the whole shape from the beginning, but only its first entries may be used: those that `grow` was last
    called for. The memory is freed when neither this object nor any view of the tensor is left.

    Args:
        shape: the first number is the largest number of entries.
        dtype: of the tensor.
        device: a CUDA device for which `is_available` is true.
        entries: the number of entries that can be used at once; at least one page is mapped.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, entries: int) -> None:
        self.limit = shape[0]
        self.entry_bytes = math.prod(shape[1:]) * dtype.itemsize
        index = torch.cuda.current_device() if device.index is None else device.index
        self._memory = _Memory(_Pages(index, self.limit * self.entry_bytes))
        self.grow(max(1, entries))  # torch asks the driver about the first address
        with torch.inference_mode(False):  # the tensor may be written in every mode
            memory = torch.as_tensor(self._memory, device=torch.device("cuda", index))
            assert memory.data_ptr() == self._memory.pages.address, "torch has copied the memory"
            self.tensor: Tensor = memory[: self.limit * self.entry_bytes].view(dtype).view(*shape)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of physical memory."""
        return sum(self._memory.pages.pieces)

    def grow(self, entries: int) -> None:
        """Make the first `entries` entries usable. New ones are zero; nothing happens to the others."""
        grow([self], entries)

    def release(self, entries: int = 0) -> int:
        """Free physical memory so that at most this many entries keep theirs; return how many do.

        The address stays. Other entries cannot be used until `grow` is called again. Waits for the device, and for
        captures in other threads. Nobody may launch work on this tensor meanwhile.
        """
        _unmapping.release(self._memory.pages, entries * self.entry_bytes)
        return min(entries, self.mapped_bytes // self.entry_bytes)


def grow(tensors: Sequence[VirtualTensor], entries: int) -> None:
    """Make the first `entries` entries of all these tensors usable. It costs less than one call for each.

    If there is not enough memory, `torch.cuda.OutOfMemoryError` is raised. What was usable before still is, and the
    call can be repeated.
    """
    devices: set[Driver] = set()
    try:
        for tensor in tensors:
            if entries > tensor.limit:
                raise ValueError(f"{entries} entries were asked for, but addresses are reserved for {tensor.limit}")
            if tensor._memory.pages.map(entries * tensor.entry_bytes):
                devices.add(tensor._memory.pages.driver)
    finally:
        # All streams may use the memory from now on, so the host waits until it is filled with zeros. (A hidden value
        # must not be NaN: attention multiplies it by zero.)
        for driver in devices:
            with driver.current():
                driver.wait()


def is_available(device: torch.device) -> bool:
    """Return whether this device has virtual memory management, found out by trying."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return _works(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache
def _works(index: int) -> bool:
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        VirtualTensor((1,), torch.uint8, torch.device("cuda", index), entries=1)
    except torch.cuda.OutOfMemoryError:
        raise  # says nothing about the device
    except (OSError, AttributeError, RuntimeError, AssertionError) as error:
        logger.debug("no virtual memory management on cuda:%d: %s", index, error)
        return False
    return True


class _Pages:
    """A reserved range of addresses, and the memory that is mapped to its beginning, in pieces."""

    def __init__(self, device: int, size: int) -> None:
        self.device, self.driver = device, driver_of(device)
        self.size = self._rounded(max(1, size))
        self.pieces: list[int] = []  # their sizes, from the first address on
        with self.driver.current():
            self.address = self.driver.reserve(self.size)

    def _rounded(self, size: int) -> int:
        return -(-size // self.driver.granularity) * self.driver.granularity

    def map(self, size: int) -> bool:
        """Map memory until the first `size` bytes are there. Return whether anything was missing."""
        mapped = sum(self.pieces)
        missing = self._rounded(size) - mapped
        if missing <= 0:
            return False
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("virtual memory cannot grow while a CUDA graph is captured: reserve it before")
        if not self._try_to_map(mapped, missing):
            _unmapping.free_waiting()
            torch.cuda.empty_cache()
            if not self._try_to_map(mapped, missing):
                free, total = torch.cuda.mem_get_info(self.device)
                raise torch.cuda.OutOfMemoryError(
                    f"CUDA out of memory: {missing / 2**20:.0f} MiB more were asked for on cuda:{self.device}, where "
                    f"{free / 2**20:.0f} of {total / 2**20:.0f} MiB are free"
                )
        return True

    def _try_to_map(self, mapped: int, missing: int) -> bool:
        """Map so much after what is mapped. Return False, and leave things as they were, if there is not enough."""
        try:
            with self.driver.current():
                for begin in range(0, missing, PIECE):
                    size = min(PIECE, missing - begin)
                    self.driver.map(self.address + mapped + begin, size)
                    self.pieces.append(size)
            return True
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            self.unmap(mapped)
            return False

    def unmap(self, keep: int = 0) -> None:
        """Free memory until at most `keep` bytes are left, once the device has done all its work.

        The driver does not wait for that.
        """
        mapped = sum(self.pieces)
        if mapped > keep:
            torch.cuda.synchronize(self.device)
        with self.driver.current():
            while mapped > keep:  # each piece on its own, the last first
                mapped -= self.pieces[-1]
                self.driver.unmap(self.address + mapped, self.pieces[-1])
                self.pieces.pop()

    def free(self) -> None:
        self.unmap()
        with self.driver.current():
            self.driver.free(self.address, self.size)


class _Memory:
    """What a torch tensor refers to for as long as it lives. It frees the pages when it is no longer referred to."""

    def __init__(self, pages: _Pages) -> None:
        self.pages = pages
        finalize(self, _unmapping.free, pages).atexit = False  # the end of the process frees them too

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.pages.size,), "typestr": "|u1", "data": (self.pages.address, False), "version": 3}


class _Unmapping:
    """Unmaps pages when no graph is being captured.

    Memory is unmapped after the device has done its work, and to wait for a whole device breaks the captures of all
    threads. Garbage collection may free a tensor at any time, also inside a capture; its pages then wait.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # its lock is reentrant, as garbage collection needs it
        self._capturing: list[int] = []  # threads, once for each capture
        self._waiting: list[_Pages] = []

    @contextmanager
    def postponed(self) -> Iterator[None]:
        with self._changed:
            self._capturing.append(threading.get_ident())
        try:
            yield
        finally:
            with self._changed:
                self._capturing.remove(threading.get_ident())
                self._changed.notify_all()
                self.free_waiting()

    def release(self, pages: _Pages, keep: int) -> None:
        with self._changed:
            if threading.get_ident() in self._capturing or torch.cuda.is_current_stream_capturing():
                raise RuntimeError("virtual memory cannot be released while this thread captures a CUDA graph")
            self._changed.wait_for(lambda: not self._capturing)
            pages.unmap(keep)

    def free(self, pages: _Pages) -> None:
        with self._changed:
            self._waiting.append(pages)
            self.free_waiting()

    def free_waiting(self) -> None:
        with self._changed:
            while self._waiting and not self._capturing:
                pages = self._waiting.pop()
                try:
                    if torch.cuda.is_current_stream_capturing():
                        raise RuntimeError("this thread captures a graph")
                    pages.free()
                except RuntimeError as error:  # somebody captures a graph without saying so, or the device has failed
                    logger.debug("virtual memory is freed later: %s", error)
                    self._waiting.append(pages)
                    return


_unmapping = _Unmapping()


def postpone_unmapping() -> AbstractContextManager[None]:
    """Return a context for the capture of a graph: while it lasts, no thread unmaps memory, which would break it."""
    return _unmapping.postponed()
