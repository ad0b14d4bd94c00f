"""Uses fewer CPU threads while other processes keep the cores busy.

torch splits each product over all cores, and a product is done when its slowest thread is. Where one thread must wait
for a core, all others wait with it, hundreds of times per pass: on a busy machine with two cores, a pass over five
tokens of the embedded target took 430 ms with two threads and 85 ms with one. So while this thread has spent much of
its time waiting for a core, half of the threads are used.

Linux tells how long a thread was ready to run and had to wait. Elsewhere the number of threads stays as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

WAITING = 0.2  # the share of its time that a thread waits for a core on a busy machine
STILL_WAITING = 0.05  # the same with fewer threads
FEWEST_SECONDS = 0.02  # of work and waiting, to judge by
CALLS, MOST_CALLS = 4, 64  # calls with fewer threads, until all are tried again; doubled each time that goes wrong
SCHEDULE = Path("/proc/thread-self/schedstat")


class _Judgement(threading.local):
    """What one thread knows about the load."""

    seen = (0.0, 0.0)  # seconds of running and of waiting, at the last reading
    calls_left = 0
    calls = CALLS


_judgement = _Judgement()


@contextmanager
def fewer_threads_if_busy(device: torch.device | None) -> Iterator[None]:
    """Run the context with half of torch's threads if the machine is busy and this device is a CPU."""
    threads = torch.get_num_threads() if device is not None and device.type == "cpu" else 1
    if threads == 1 or not _is_busy():
        yield
        return
    torch.set_num_threads(max(1, threads // 2))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if _waiting() > STILL_WAITING:  # all threads would have to wait much longer
            _judgement.calls_left = max(1, _judgement.calls_left)


def _is_busy() -> bool:
    """Return whether this thread had to wait for a core since the last reading, or lately."""
    now, waiting = _judgement, _waiting()
    if now.calls_left:
        now.calls_left -= 1
        return True
    if waiting < WAITING:
        return False
    now.calls_left, now.calls = now.calls - 1, min(2 * now.calls, MOST_CALLS)
    return True


def _waiting() -> float:
    """Return the share of its time that this thread has waited for a core since the last reading; 0 if unknown."""
    try:
        ran, waited = (int(number) / 1e9 for number in SCHEDULE.read_text().split()[:2])
    except (OSError, ValueError):
        return 0.0
    ran_before, waited_before = _judgement.seen
    _judgement.seen = ran, waited
    ran, waited = ran - ran_before, waited - waited_before
    return waited / (ran + waited) if ran + waited > FEWEST_SECONDS else 0.0
