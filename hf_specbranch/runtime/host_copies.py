"""A few integers a round between device and host, through pinned memory."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor


class PinnedCopy(NamedTuple):
    """Integers on the host, and the moment from which on they are there."""

    numbers: Tensor
    arrived: torch.cuda.Event | None


class HostCopies:
    """From the device to the host. `send` returns at once; `read` is where the host waits.

    Two letters may be under way at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.in_flight: deque[PinnedCopy] = deque()
        self.pinned_copies: dict[torch.Size, deque[PinnedCopy]] = {}  # pinned memory to write on, the oldest first

    def send(self, numbers: Tensor) -> None:
        """Put integers of any shape on their way."""
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
        """The oldest letter, as soon as it is there."""
        copy = self.in_flight.popleft()
        if copy.arrived is not None:
            copy.arrived.synchronize()
        return copy.numbers.tolist()

    def skip(self) -> None:
        """Throw the oldest letter away unread."""
        self.in_flight.popleft()


def _new_pinned_copy(shape: torch.Size) -> PinnedCopy:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return PinnedCopy(torch.empty(shape, dtype=torch.long, pin_memory=True), event)


class DeviceCopy:
    """From the host to the device. The memory on either side stays where it is."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.staging = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=memory.device.type == "cuda")

    def send(self, numbers: list[list[int]]) -> None:
        """Copy integers to the device. The last ones must have arrived, as they have when the host has waited since."""
        self.staging.copy_(torch.tensor(numbers, dtype=self.memory.dtype))
        self.memory.copy_(self.staging, non_blocking=True)
