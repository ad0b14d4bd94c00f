"""Static buffers, the stages that run on them, and pinned copies between host and device.

A stage (propose a draft, run the target, verify, branch) is a function without arguments or result that reads and
writes the tensors of its buffers. If its shapes are static and it never syncs, it can be captured as a CUDA graph.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..garbage_collection import no_garbage_collection
from ..kernels import build_in_parallel
from ..layers.base import split_graph
from .pieces import Part, Recorder, warm_up_run
from .streams import capture_stream
from .virtual_memory import postpone_unmapping

_serials = count()


class Buffers:
    """Holds the memory of one generation, and runs its stages eagerly.

    Args:
        device: where the memory is.
        static_shapes: stages use shapes that do not depend on values on the device, and never sync. Without it they may
            sync, and do only the work that is needed.
    """

    def __init__(self, device: torch.device, static_shapes: bool = False) -> None:
        self.device, self.static_shapes = device, static_shapes
        self.serial = next(_serials)  # identifies this memory in keys of stages; never reused
        self.memory: dict[str, Tensor] = {}
        self.missed: dict[Hashable, float] = {}  # seconds that a stage would have saved, had it been captured

    def has_run(self, key: Hashable) -> bool:
        """Whether to run the stage with this key takes no capture."""
        return True

    def forget(self, key: Hashable) -> None:
        """Drop the captured stage with this key, if there is one."""

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.long) -> Tensor:
        """Return a tensor of zeros whose address does not change."""
        return torch.zeros(tuple(shape), dtype=dtype, device=self.device)

    def keep(self, name: str, value: Tensor) -> Tensor:
        """Copy a result of a stage to memory whose address does not change; `recall` returns it, after a replay too."""
        memory = self.memory.get(name)
        if memory is None:
            memory = self.memory.setdefault(name, torch.empty_like(value))
        return memory.copy_(value)

    @property
    def num_bytes(self) -> int:
        """The size of the memory that is kept."""
        return sum(tensor.nbytes for tensor in list(self.memory.values()))

    def recall(self, name: str) -> Tensor:
        """Return what was last kept under this name."""
        return self.memory[name]

    def generator(self, name: str, seed: int) -> torch.Generator:
        """Return a random number generator for stages, seeded again."""
        return torch.Generator(self.device).manual_seed(seed)

    def run(self, key: Hashable, stage: Callable[[], None], only_our_kernels: bool = False) -> None:
        """Run a stage: eagerly here, as a captured CUDA graph in `StaticBuffers`.

        A captured stage is replayed whenever its key comes again, and then its Python code does not run. So the key
        must name everything that changes the launches or the addresses that they use:

        - which stage it is;
        - under masks, the number of slots shown, rounded up by `EagerRunner.bucket`; spans are read by the kernels;
        - the tokens in the pass: queries, draft tokens, tree leaves, branches;
        - what the stage decides in Python, such as whether a draft is new or there are features for a length head;
        - other buffers that it reads, by their `serial`.

        What holds for all stages of the buffers is not in the key but in the settings that the runner keeps the buffers
        under (`EagerRunner.buffers`): rows, columns, sampling, implementation, logits processors, the configuration of
        the draft. Values in the tensors of the buffers need no key, because a replay reads them.

        `GraphRunner` keeps the buffers of at most `MOST_BUFFERS` settings. It drops the captured stages of all of them
        if the KV cache moves.

        Args:
            key: identifies the launches of the stage, as above.
            stage: the work. It must not depend on anything that neither the key, the settings nor the buffers hold.
            only_our_kernels: apart from filling memory that it owns, the stage computes with our kernels only. A dry
                run can then find out which kernels it needs.
        """
        stage()


class GraphMemory:
    """Holds the memory pool that CUDA graphs share, and the stream on which they are captured.

    Graphs that share a pool must never replay at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = capture_stream(device, self)
        self.other_streams: dict[torch.device, torch.cuda.Stream] = {}  # where a model is split over several devices
        self.captures = 0  # stages and forwards captured so far
        self.seconds = 0.0  # time that this took on the host, the first run of each stage included
        self.renew()

    def renew(self) -> None:
        """Start a new pool once all graphs are gone: the old one was freed with the last of them."""
        self.pool = torch.cuda.graph_pool_handle()
        self.num_bytes = 0  # of the pool, as far as captures made the allocator reserve more memory

    def run_and_record(self, stage: Callable[[], object], generators: Sequence[torch.Generator] = ()) -> list[Part]:
        """Run a stage, and capture what it launches; see `record`."""
        with warm_up_run() as first:
            stage()  # the work of this call; capturing does none
        return self.record(stage, generators, first.outputs)

    def record(
        self, stage: Callable[[], object], generators: Sequence[torch.Generator] = (), outputs: Sequence[Any] = ()
    ) -> list[Part]:
        """Capture what a stage launches, as graphs to be replayed in order, with what runs between them.

        Args:
            stage: the stage.
            generators: that it draws from.
            outputs: what modules that run between graphs have returned; see `pieces`.
        """

        def begin() -> torch.cuda.CUDAGraph:
            graph = torch.cuda.CUDAGraph()
            for generator in generators:
                graph.register_generator_state(generator)
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            return graph

        with Recorder(self.stream.device, begin, self._at, outputs) as recorder:
            with split_graph(recorder.cut):
                stage()
        return recorder.parts

    def _at(self, device: torch.device) -> torch.cuda.StreamContext:
        """Launch on the capture stream of another device."""
        if device not in self.other_streams:
            self.other_streams[device] = capture_stream(device, self)
        return torch.cuda.stream(self.other_streams[device])

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside the context, stages may be captured.

        Launches are on the capture stream, after all earlier work and before all later work, and no garbage is
        collected.
        """
        began, current = time.perf_counter(), torch.cuda.current_stream(self.stream.device)
        reserved = torch.cuda.memory_reserved(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream), postpone_unmapping(), no_garbage_collection():
            yield
        current.wait_stream(self.stream)
        self.captures += 1
        self.num_bytes += max(0, torch.cuda.memory_reserved(self.stream.device) - reserved)
        self.seconds += time.perf_counter() - began


class StaticBuffers(Buffers):
    """Holds memory that outlives a generation, and captures stages as CUDA graphs.

    The first time a key comes, its stage runs eagerly and is then captured. From the second time on it is replayed,
    with one launch or two. See `Buffers.run` for what a key must name.

    Args:
        device: a CUDA device.
        graph_memory: the memory that the graphs of a model share.
        builds_in_parallel: a dry run finds the kernels of a stage, which are built in parallel before it first runs.
    """

    def __init__(self, device: torch.device, graph_memory: GraphMemory, builds_in_parallel: bool = False) -> None:
        super().__init__(device, static_shapes=True)
        self.graph_memory, self.builds_in_parallel = graph_memory, builds_in_parallel
        self.generators: dict[str, torch.Generator] = {}
        self.graphs: dict[Hashable, list[Part]] = {}  # by key of the stage, in order
        self.named: set[str] = set()  # tensors that were asked for by name
        self.zeroed: set[str] = set()  # those that are zero since a generation began, and that it has not asked for

    def begin(self) -> None:
        """Set all tensors to zero for the next generation, in a few launches: it will ask for a hundred of them."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for name in self.named:
            if (tensor := self.memory[name]).numel():
                by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for tensors in by_dtype.values():
            torch._foreach_zero_(tensors)
        self.zeroed = set(self.named)

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.long) -> Tensor:
        known = self.memory.get(name)
        if known is None:
            self.named.add(name)
            return self.memory.setdefault(name, super().tensor(name, shape, dtype))
        assert known.shape == tuple(shape) and known.dtype == dtype, (name, known.shape, tuple(shape))
        if name in self.zeroed:
            self.zeroed.remove(name)
            return known
        return known.zero_()

    def has_run(self, key: Hashable) -> bool:
        return key in self.graphs

    def forget(self, key: Hashable) -> None:
        self.graphs.pop(key, None)

    def generator(self, name: str, seed: int) -> torch.Generator:
        known = self.generators.setdefault(name, torch.Generator(self.device))
        return known.manual_seed(seed)

    def run(self, key: Hashable, stage: Callable[[], None], only_our_kernels: bool = False) -> None:
        graphs = self.graphs.get(key)
        if graphs is None:
            self.graphs[key] = self._run_and_capture(stage, only_our_kernels and self.builds_in_parallel)
        else:
            for graph in graphs:
                graph.replay()

    def _run_and_capture(self, stage: Callable[[], None], in_parallel: bool) -> list[Part]:
        with self.graph_memory.capturing():
            if in_parallel:
                self._dry_run_stage(stage)
            return self.graph_memory.run_and_record(stage, list(self.generators.values()))

    def _dry_run_stage(self, stage: Callable[[], None]) -> None:
        """Build the kernels of a stage in parallel; a dry run advances generators, so they are reset."""
        states = [(generator, generator.get_state()) for generator in self.generators.values()]
        build_in_parallel(stage, self.device)
        for generator, state in states:
            generator.set_state(state)


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
