"""CUDA streams. A stream on which a graph is captured belongs to its owner alone.

torch hands out the same few streams in turn. If another thread were given the stream of a capture under way, its work
would become part of the captured graph.
"""

from __future__ import annotations

from collections import Counter
from threading import Lock, local
from weakref import finalize

import torch

ATTEMPTS = 64  # torch has 32 streams of each priority


class _OfThread(local):
    def __init__(self) -> None:
        self.known: dict[tuple[torch.device, int], torch.cuda.Stream] = {}


class _Streams:
    def __init__(self) -> None:
        self.lock = Lock()
        self.for_captures: Counter[int] = Counter()  # by address
        self.of_this_thread = _OfThread()

    def _another(self, device: torch.device, priority: int) -> torch.cuda.Stream:
        """Return a stream that is not used for captures; if there is none, any."""
        for _ in range(ATTEMPTS):
            stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
            if not self.for_captures[stream.cuda_stream]:
                break
        return stream

    def for_capture(self, device: torch.device, owner: object) -> torch.cuda.Stream:
        with self.lock:
            stream = self._another(device, 0)
            self.for_captures[stream.cuda_stream] += 1
        finalize(owner, self._release, stream.cuda_stream)
        return stream

    def _release(self, address: int) -> None:
        self.for_captures[address] -= 1

    def side(self, device: torch.device, priority: int) -> torch.cuda.Stream:
        known, key = self.of_this_thread.known, (device, priority)
        with self.lock:
            if key not in known or self.for_captures[known[key].cuda_stream]:
                known[key] = self._another(device, priority)
            return known[key]


_streams = _Streams()


def capture_stream(device: torch.device, owner: object) -> torch.cuda.Stream:
    """Return a stream for captures, which is given to nothing else while the owner lives."""
    return _streams.for_capture(device, owner)


def side_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """Return a stream of this thread that is not used for captures."""
    return _streams.side(device, priority)
