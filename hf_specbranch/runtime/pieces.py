"""Split models are captured in pieces: graphs, and what runs between two of them.

accelerate splits a model by hooks. They move tensors to the device of a module, and bring the weights of modules that
are offloaded to the device for each pass. A CUDA graph has one device and cannot wait for the host. So a stage of such
a model becomes several graphs. A module that is offloaded, or that is not on a GPU, runs between two graphs as it is.
Where the model goes on on another GPU, tensors are copied between two graphs, the second of which is on that GPU.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from ..model_state import every_module, every_parameter


class Part(Protocol):
    """A part of a captured stage: a CUDA graph, or what runs between two of them."""

    def replay(self) -> None: ...


class Graph(Part, Protocol):
    """A CUDA graph whose capture has begun."""

    def capture_end(self) -> None: ...


class Copies(NamedTuple):
    """Copies tensors to another device, between two graphs."""

    pairs: list[tuple[Tensor, Tensor]]  # what the first graph writes, and what the second one reads

    def replay(self) -> None:
        for source, copy in self.pairs:
            copy.copy_(source, non_blocking=True)


class Outside(NamedTuple):
    """Runs a module between two graphs."""

    forward: Callable[..., Any]
    args: tuple[Any, ...]  # what the first graph writes
    kwargs: dict[str, Any]
    output: Any  # what the second one reads
    caches: list[tuple[Any, Tensor | None, int]]  # each with the slots that the pass writes, and how many it reads

    def replay(self) -> None:
        for cache, slots, shown in self.caches:
            cache.point_at(slots, shown)
        output = self.forward(*self.args, **self.kwargs)
        for memory, value in zip(_tensors(self.output), _tensors(output), strict=True):
            memory.copy_(value)


class WarmUpRun:
    """Runs a stage as it is, before it is captured, and keeps what modules outside of the graphs return, in order."""

    def __init__(self) -> None:
        self.outputs: deque[Any] = deque()

    def run_outside(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module that is in no graph."""
        with _as_active(OUTSIDE):
            output = forward(*args, **kwargs)
        self.outputs.append(tree_map_only(Tensor, torch.clone, output))
        return output

    def begin_pass(self) -> None: ...

    def go_on(self, device: torch.device, values: Any) -> Any:
        """Return values whose tensors are on a device."""
        with _as_active(OUTSIDE):
            return tree_map_only(Tensor, lambda tensor: tensor.to(device), values)


class Recorder:
    """Captures a stage in parts. A context, inside which the stage runs.

    Args:
        home: the device on which the stage begins and ends.
        begin: begins to capture a graph on the current device.
        at: makes a device other than `home` the current one, and its stream for captures too.
        outputs: what modules outside of the graphs returned in a warm-up run: the memory for what they will return.
    """

    def __init__(
        self,
        home: torch.device,
        begin: Callable[[], Graph],
        at: Callable[[torch.device], AbstractContextManager[Any]],
        outputs: Sequence[Any] = (),
    ) -> None:
        self.home, self.device, self.begin, self.at = home, home, begin, at
        self.outputs = deque(outputs)
        self.parts: list[Part] = []
        self.graph: Graph | None = None
        self.place = ExitStack()
        self.copies: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}  # of this pass, by source and device

    def __enter__(self) -> Recorder:
        self.token = _active.set(self)
        self._begin()
        return self

    def __exit__(self, *error: object) -> None:
        _active.reset(self.token)
        try:
            self._end()
        finally:
            self.place.close()

    def _begin(self) -> None:
        self.graph = self.begin()

    def _end(self) -> None:
        graph, self.graph = self.graph, None
        if graph is not None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # between two modules outside
                graph.capture_end()
            self.parts.append(graph)

    def cut(self) -> None:
        """Continue in another graph."""
        self._end()
        self._begin()

    def run_outside(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let a module run between two graphs; return the memory for its output."""
        self._end()
        output = self.outputs.popleft()
        addresses = [(each, each.address) for each in (*args, *kwargs.values()) if hasattr(each, "point_at")]
        caches = [(cache, address.slots, address.shown) for cache, address in addresses]
        self.parts.append(Outside(forward, args, kwargs, output, caches))
        self._begin()
        return output

    def begin_pass(self) -> None:
        """Say that memory may have changed since it was copied to another device."""
        self.copies.clear()

    def go_on(self, device: torch.device, values: Any = ()) -> Any:
        """Continue on a device; return values whose tensors are there."""
        missing = [tensor for tensor in _tensors(values) if tensor.device != device]
        missing = [tensor for tensor in missing if (id(tensor), device) not in self.copies]
        if missing or device != self.device:
            self._end()
            if device != self.device:
                self.place.close()
                self.device = device
                if device != self.home:
                    self.place.enter_context(self.at(device))
            if missing:
                pairs = [(tensor, torch.empty_like(tensor, device=device)) for tensor in missing]
                self.copies.update({(id(tensor), device): (tensor, copy) for tensor, copy in pairs})
                self.parts.append(Copies(pairs))
            self._begin()
        found = lambda tensor: tensor if tensor.device == device else self.copies[id(tensor), device][1]  # noqa: E731
        return tree_map_only(Tensor, found, values)


OUTSIDE = object()  # a module outside of the graphs is running
_active: ContextVar[Any] = ContextVar("active", default=None)  # a warm-up run, a recorder, OUTSIDE or nothing


@contextmanager
def _as_active(value: Any) -> Iterator[None]:
    token = _active.set(value)
    try:
        yield
    finally:
        _active.reset(token)


@contextmanager
def warm_up_run() -> Iterator[WarmUpRun]:
    """Provide a warm-up run: that of a stage that runs inside the context."""
    with _as_active(WarmUpRun()):
        yield _active.get()


def is_outside() -> bool:
    """Return whether a module is running that is in no graph."""
    return _active.get() is OUTSIDE


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device, if it is not there; a stage that is captured goes on there."""
    if isinstance(recorder := _active.get(), Recorder):
        return recorder.go_on(device, tensor)  # type: ignore[no-any-return]
    return tensor.to(device)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


# ---- the pieces of a model


class Piece:
    """Takes the place of the forward of a module, while a stage may be captured.

    Args:
        module: the module, with a hook of accelerate or around modules that have some.
        device: where it runs; None: between graphs, wherever its hooks say.
        is_root: it is the whole model.
    """

    def __init__(self, module: nn.Module, device: torch.device | None, is_root: bool) -> None:
        self.module, self.device, self.is_root = module, device, is_root
        self.replaced = module.__dict__.get("forward")
        self.forward = module.forward
        self.without_hook: Callable[..., Any] = getattr(module, "_old_forward", module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        active = _active.get()
        if not isinstance(active, (WarmUpRun, Recorder)):
            return self.forward(*args, **kwargs)
        if self.device is None:
            return active.run_outside(self.forward, args, kwargs)
        if self.is_root:
            active.begin_pass()
        args, kwargs = active.go_on(self.device, (args, kwargs))
        output = self.without_hook(*args, **kwargs)
        return active.go_on(self.device, output) if self.is_root else output

    def put(self) -> None:
        self.module.forward = self

    def take_away(self) -> None:
        if self.replaced is None:
            del self.module.forward
        else:
            self.module.forward = self.replaced


def pieces_of(model: PreTrainedModel) -> list[Piece]:
    """Return the pieces in which a model is captured; nothing if it can be captured as a whole."""
    hooked = [module for module in every_module(model) if "_hf_hook" in module.__dict__ and hooks_of(module)]
    if not hooked:
        return []
    home, outside = model.get_input_embeddings().weight.device, _outside(model)
    devices = {module: execution_device(module, home) for module in hooked} | {model: home}
    if not outside and set(devices.values()) == {home}:
        return []
    inner = {each for module in outside for each in every_module(module)}
    pieces = [Piece(module, None, is_root=False) for module in outside]
    return pieces + [
        Piece(module, device, module is model) for module, device in devices.items() if module not in inner
    ]


def _outside(model: PreTrainedModel) -> list[nn.Module]:
    """Return the largest modules that are offloaded, or run on another device than a GPU, as a whole."""
    home = model.get_input_embeddings().weight.device
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        held = every_parameter(module)
        is_callable = type(module).forward is not nn.Module.forward
        elsewhere = [each.is_meta or each.device.type != home.type for each in held]
        if held and all(elsewhere) and is_callable:
            found.append(module)
        elif any(elsewhere):
            for child in module.children():
                visit(child)

    visit(model)
    return list(dict.fromkeys(found))


def execution_device(module: nn.Module, default: torch.device) -> torch.device:
    """Return the device to which the hooks of a module move its inputs."""
    named = [device for hook in hooks_of(module) if (device := hook.execution_device) is not None]
    if not named:
        return default
    device = torch.device("cuda", named[-1]) if isinstance(named[-1], int) else torch.device(named[-1])
    return torch.device("cuda", 0) if device == torch.device("cuda") else device


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks of accelerate that a module has."""
    hook = module.__dict__.get("_hf_hook")  # torch looks for attributes that a module does not have, which takes long
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))


def only_places(module: nn.Module) -> bool:
    """Return whether the hooks of a module do no more than to place its inputs, its weights and its output."""
    kinds = {(type(hook).__module__, type(hook).__name__) for hook in hooks_of(module)}
    return kinds == {("accelerate.hooks", "AlignDevicesHook")}


@contextmanager
def in_pieces(pieces: Sequence[Piece]) -> Iterator[None]:
    """Let a model run in these pieces."""
    for piece in pieces:
        piece.put()
    try:
        yield
    finally:
        for piece in pieces:
            piece.take_away()
