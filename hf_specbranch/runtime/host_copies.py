"""Copies a few integers per round between device and host, through pinned memory."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor


class PinnedCopy(NamedTuple):
    """Integers in pinned host memory, and the event after which they are valid."""

    numbers: Tensor
    arrived: torch.cuda.Event | None


class HostCopies:
    """Copies integers from the device to the host. `send` returns at once; `read` is where the host waits.

    Two copies of the same shape may be in flight at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.in_flight: deque[PinnedCopy] = deque()
        self.pinned_copies: dict[torch.Size, deque[PinnedCopy]] = {}  # reusable pinned memory, the oldest first

    def send(self, numbers: Tensor) -> None:
        """Start to copy integers of any shape to the host."""
        if not self.on_gpu:
            self.in_flight.append(PinnedCopy(numbers.clone(), None))
            return
        pinned_copies = self.pinned_copies.setdefault(numbers.shape, deque())
        copy = pinned_copies.popleft() if len(pinned_copies) == 2 else _new_pinned_copy(numbers.shape)
        pinned_copies.append(copy)
        copy.numbers.copy_(numbers, non_blocking=True)
        assert copy.arrived is not None
        copy.arrived.record(torch.cuda.current_stream(numbers.device))
        self.in_flight.append(copy)

    def read(self) -> list[list[int]]:
        """Return the oldest copy in flight; wait until it has arrived."""
        copy = self.in_flight.popleft()
        if copy.arrived is not None:
            copy.arrived.synchronize()
        return copy.numbers.tolist()

    def skip(self) -> None:
        """Drop the oldest copy in flight unread."""
        self.in_flight.popleft()


def _new_pinned_copy(shape: torch.Size) -> PinnedCopy:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return PinnedCopy(torch.empty(shape, dtype=torch.long, pin_memory=True), event)


class DeviceCopy:
    """Copies integers from the host to the device, through pinned staging memory. Neither side ever moves."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.staging = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=memory.device.type == "cuda")

    def send(self, numbers: list[list[int]]) -> None:
        """Start to copy integers to the device.

        The previous copy must have arrived. It has if the host has waited for the device since then.
        """
        self.staging.copy_(torch.tensor(numbers, dtype=self.memory.dtype))
        self.memory.copy_(self.staging, non_blocking=True)
