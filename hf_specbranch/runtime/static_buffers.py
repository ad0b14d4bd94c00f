"""Fixed memory and the stages that work on it.

A stage (draft a line, verify a chain, judge it) is a function without arguments or result that reads and writes the
tensors of a desk. Where its shapes are fixed and it asks the device nothing, it can be captured as one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import torch
from torch import Tensor

from ..kernels import build_in_parallel
from ..kernels.forwards import split_graph

_serials = count()


class Buffers:
    """Memory for one generation, and stages that run as they are.

    Args:
        device: where the memory is.
        fixed: stages keep to shapes that do not depend on what the device has found, and ask it nothing. Without
            that they may ask, and do only what is needed.
    """

    def __init__(self, device: torch.device, static_shapes: bool = False) -> None:
        self.device, self.static_shapes = device, static_shapes
        self.serial = next(_serials)  # names this memory; never used again
        self.memory: dict[str, Tensor] = {}

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.long) -> Tensor:
        """Zeros that stay where they are."""
        return torch.zeros(tuple(shape), dtype=dtype, device=self.device)

    def keep(self, name: str, value: Tensor) -> Tensor:
        """Copy a result of a stage to memory that stays where it is; `recall` finds it, after a replay too."""
        memory = self.memory.get(name)
        if memory is None:
            memory = self.memory.setdefault(name, torch.empty_like(value))
        return memory.copy_(value)

    def recall(self, name: str) -> Tensor:
        """What was kept last under this name."""
        return self.memory[name]

    def generator(self, name: str, seed: int) -> torch.Generator:
        """A source of randomness for stages."""
        return torch.Generator(self.device).manual_seed(seed)

    def run(self, key: Hashable, stage: Callable[[], None], only_our_kernels: bool = False) -> None:
        """Do the work of a stage.

        Args:
            key: names everything about it that is not in the desk's memory.
            stage: the work.
            in_kernels: all that a stage does beyond filling memory that it owns is done by our kernels, so that it can
                be rehearsed.
        """
        stage()


class GraphMemory:
    """Memory that graphs share, and the stream they are recorded on. They must never replay at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.captures = 0  # graphs recorded so far
        self.renew()

    def renew(self) -> None:
        """Begin anew once all graphs are gone: their memory went with the last of them."""
        self.pool = torch.cuda.graph_pool_handle()

    def record(
        self, stage: Callable[[], object], generators: Sequence[torch.Generator] = ()
    ) -> list[torch.cuda.CUDAGraph]:
        """What a stage launches, as graphs to be replayed in order."""
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            for generator in generators:
                graphs[-1].register_generator_state(generator)
            graphs[-1].capture_begin(pool=self.pool, capture_error_mode="thread_local")

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        begin()
        try:
            with split_graph(cut):
                stage()
        finally:
            graphs[-1].capture_end()
        return graphs

    @contextmanager
    def aside(self) -> Iterator[None]:
        """On the stream for recording, after what was launched before and ahead of what follows."""
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)


class StaticBuffers(Buffers):
    """Memory that outlives a generation, and stages captured as CUDA graphs.

    A stage runs eagerly the first time and is recorded then; from the second time on it is one launch, or two.

    Args:
        device: a CUDA device.
        graph_memory: what the graphs of a model share.
        rehearses: stages in kernels are rehearsed: what they need is built side by side before they first run.
    """

    def __init__(self, device: torch.device, graph_memory: GraphMemory, builds_in_parallel: bool = False) -> None:
        super().__init__(device, static_shapes=True)
        self.graph_memory, self.builds_in_parallel = graph_memory, builds_in_parallel
        self.generators: dict[str, torch.Generator] = {}
        self.graphs: dict[Hashable, list[torch.cuda.CUDAGraph]] = {}  # of each stage, in order

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.long) -> Tensor:
        known = self.memory.get(name)
        if known is None:
            return self.memory.setdefault(name, super().tensor(name, shape, dtype))
        assert known.shape == tuple(shape) and known.dtype == dtype, (name, known.shape, tuple(shape))
        return known.zero_()

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

    def _run_and_capture(self, stage: Callable[[], None], in_parallel: bool) -> list[torch.cuda.CUDAGraph]:
        self.graph_memory.captures += 1
        with self.graph_memory.aside():
            if in_parallel:
                self._dry_run_stage(stage)
            stage()  # this time's work; recording does none
            return self.graph_memory.record(stage, list(self.generators.values()))

    def _dry_run_stage(self, stage: Callable[[], None]) -> None:
        states = [(generator, generator.get_state()) for generator in self.generators.values()]
        build_in_parallel(stage, self.device)
        for generator, state in states:
            generator.set_state(state)
