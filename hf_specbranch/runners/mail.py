"""A few integers a round between device and host, through pinned memory."""

from __future__ import annotations

import torch
from torch import Tensor


class Inbox:
    """From the device to the host. `send` returns at once; `read` is where the host waits."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.letter = torch.empty(0, dtype=torch.long)
        self.pinned: dict[torch.Size, Tensor] = {}
        if self.on_gpu:
            self.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, numbers: Tensor) -> None:
        """Put integers of any shape on their way."""
        if not self.on_gpu:
            self.letter = numbers
            return
        if numbers.shape not in self.pinned:
            self.pinned[numbers.shape] = torch.empty(numbers.shape, dtype=torch.long, pin_memory=True)
        self.letter = self.pinned[numbers.shape]
        self.letter.copy_(numbers, non_blocking=True)
        self.arrived.record(torch.cuda.current_stream(numbers.device))

    def read(self) -> list[list[int]]:
        """What was sent last, as soon as it is there."""
        if self.on_gpu:
            self.arrived.synchronize()
        return self.letter.tolist()


class Outbox:
    """From the host to the device. The memory on either side stays where it is."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.staging = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=memory.device.type == "cuda")

    def send(self, numbers: list[list[int]]) -> None:
        """Copy integers to the device. The last ones must have arrived, as they have when the host has waited since."""
        self.staging.copy_(torch.tensor(numbers, dtype=self.memory.dtype))
        self.memory.copy_(self.staging, non_blocking=True)
