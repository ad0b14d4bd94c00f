"""A few integers a round between device and host, through pinned memory."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor


class Letter(NamedTuple):
    """Integers on the host, and the moment from which on they are there."""

    numbers: Tensor
    arrived: torch.cuda.Event | None


class Inbox:
    """From the device to the host. `send` returns at once; `read` is where the host waits.

    Two letters may be under way at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.under_way: deque[Letter] = deque()
        self.sheets: dict[torch.Size, deque[Letter]] = {}  # pinned memory to write on, the oldest first

    def send(self, numbers: Tensor) -> None:
        """Put integers of any shape on their way."""
        if not self.on_gpu:
            self.under_way.append(Letter(numbers.clone(), None))
            return
        sheets = self.sheets.setdefault(numbers.shape, deque())
        letter = sheets.popleft() if len(sheets) == 2 else _new_sheet(numbers.shape)
        sheets.append(letter)
        letter.numbers.copy_(numbers, non_blocking=True)
        assert letter.arrived is not None
        letter.arrived.record(torch.cuda.current_stream(numbers.device))
        self.under_way.append(letter)

    def read(self) -> list[list[int]]:
        """The oldest letter, as soon as it is there."""
        letter = self.under_way.popleft()
        if letter.arrived is not None:
            letter.arrived.synchronize()
        return letter.numbers.tolist()

    def skip(self) -> None:
        """Throw the oldest letter away unread."""
        self.under_way.popleft()


def _new_sheet(shape: torch.Size) -> Letter:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return Letter(torch.empty(shape, dtype=torch.long, pin_memory=True), event)


class Outbox:
    """From the host to the device. The memory on either side stays where it is."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.staging = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=memory.device.type == "cuda")

    def send(self, numbers: list[list[int]]) -> None:
        """Copy integers to the device. The last ones must have arrived, as they have when the host has waited since."""
        self.staging.copy_(torch.tensor(numbers, dtype=self.memory.dtype))
        self.memory.copy_(self.staging, non_blocking=True)
