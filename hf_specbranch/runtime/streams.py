"""CUDA streams. A stream on which a graph is captured belongs to its owner alone.

torch hands out the same few streams in turn. If another thread were given the stream of a capture under way, its work
would become part of the captured graph.
"""

from __future__ import annotations

from collections import Counter
from threading import Lock, current_thread, local
from weakref import finalize

import torch

ATTEMPTS = 64  # torch has 32 streams of each priority


class _OfThread(local):
    def __init__(self) -> None:
        self.known: dict[tuple[torch.device, int], torch.cuda.Stream] = {}
        self.used: set[int] = set()  # addresses of all that this thread has had


class _Streams:
    def __init__(self) -> None:
        self.lock = Lock()
        self.for_captures: Counter[int] = Counter()  # owners, by address of the stream
        self.for_sides: Counter[int] = Counter()  # threads, by address of the stream
        self.of_this_thread = _OfThread()

    def _another(self, device: torch.device, priority: int, *avoided: Counter[int]) -> torch.cuda.Stream:
        """Return a stream without any of these uses; if there is none, one without the first use; else any."""
        for uses in (avoided, avoided[:1]):
            for _ in range(ATTEMPTS):
                stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
                if not any(use[stream.cuda_stream] for use in uses):
                    return stream
        return stream

    def for_capture(self, device: torch.device, owner: object) -> torch.cuda.Stream:
        with self.lock:
            stream = self._another(device, 0, self.for_captures, self.for_sides)
            self._use(self.for_captures, stream, owner)
        return stream

    def side(self, device: torch.device, priority: int) -> torch.cuda.Stream:
        known, key = self.of_this_thread.known, (device, priority)
        with self.lock:
            if key not in known or self.for_captures[known[key].cuda_stream]:
                known[key] = self._another(device, priority, self.for_captures)
                if (address := known[key].cuda_stream) not in self.of_this_thread.used:
                    self.of_this_thread.used.add(address)
                    self._use(self.for_sides, known[key], current_thread())
            return known[key]

    def _use(self, uses: Counter[int], stream: torch.cuda.Stream, owner: object) -> None:
        uses[stream.cuda_stream] += 1
        finalize(owner, uses.subtract, {stream.cuda_stream: 1})


_streams = _Streams()


def capture_stream(device: torch.device, owner: object) -> torch.cuda.Stream:
    """Return a stream for captures, which is given to nothing else while the owner lives."""
    return _streams.for_capture(device, owner)


def side_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """Return a stream of this thread that is not used for captures."""
    return _streams.side(device, priority)
