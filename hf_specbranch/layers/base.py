"""What all replacement forwards have in common, and how one takes the place of a module's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from threading import get_ident
from typing import Any, NamedTuple

from torch import Tensor, nn

FIRST_LAYERS = 2  # in the first graph of a captured stage


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Record(NamedTuple):
    """What one call of a module's own forward was given, and what it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


class Call:
    """One call of a module's own forward. It is made when something of it is asked for, which may be never.

    Args:
        make: makes the call, or finds its record.

    Example:
        >>> call = Call(lambda: Record((1, 2), {}, 3))
        >>> call.args, call.output
        ((1, 2), 3)
    """

    def __init__(self, make: Callable[[], Record]) -> None:
        self._make = make

    @cached_property
    def _record(self) -> Record:
        return self._make()

    @property
    def args(self) -> tuple[Any, ...]:
        return self._record.args

    @property
    def kwargs(self) -> dict[str, Any]:
        return self._record.kwargs

    @property
    def output(self) -> Any:
        return self._record.output


class Replacement:
    """A forward in place of a module's own, inside a `fused` context: the same arguments, the same values.

    Attributes:
        bypassed: the modules that it does not call; none of them may have hooks.
        gives_partials: it may return split-K partials in place of a tensor, where the layer sums them.
        has_ties: where two experts are nearly tied for a token, rounding decides what is computed for that token.
    """

    gives_partials = False
    has_ties = False

    def __init__(self, bypassed: list[nn.Module] | None = None) -> None:
        self.bypassed = bypassed or []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def telling_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Return other arguments, on which an error of this replacement is above the noise floor; None if any will do.

        Args:
            args: of a call of the module.
            kwargs: of the same call.
        """
        return None

    def fuses_around(self, x: Tensor) -> bool:
        """Return whether this can normalise its input x, and add a residual to its output, without further launches."""
        return False

    def compared(self, output: Any) -> Tensor:
        """Return what of an output, of the module or of this replacement, must agree."""
        return tensor_of(output)


class ThreadForward:
    """Takes the place of a module's `forward`: ours in the thread that runs the kernels, the module's own in others."""

    def __init__(self, module: nn.Module, ours: Callable[..., Any]) -> None:
        self.ours, self.own, self.thread = ours, module.forward, get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.ours if get_ident() == self.thread else self.own)(*args, **kwargs)


def gives_partials(module: nn.Module) -> bool:
    """Return whether a module runs through a replacement that may return split-K partials."""
    ours = _replacement_of(module)
    return ours is not None and ours.gives_partials


def fuses_around(module: nn.Module, x: Tensor) -> bool:
    """Return whether a module runs through a replacement that normalises x and adds a residual in its own launches."""
    ours = _replacement_of(module)
    return ours is not None and ours.fuses_around(x)


def _replacement_of(module: nn.Module) -> Replacement | None:
    forward = vars(module).get("forward")
    ours = forward.ours if isinstance(forward, ThreadForward) else None
    return ours if isinstance(ours, Replacement) else None


def untouched(module: Any) -> bool:
    """Return whether a module has no hooks and its class's own forward."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" not in module.__dict__ and not any(getattr(module, name) for name in hooks)


def submodules(module: Any, names: Sequence[str]) -> list[nn.Module]:
    """Return the submodules of these names; nothing if one is missing."""
    found = [getattr(module, name, None) for name in names]
    modules = [inner for inner in found if isinstance(inner, nn.Module)]
    return modules if len(modules) == len(found) else []


def tensor_of(output: Any) -> Tensor:
    """Return the first output of a module that returns one tensor or several."""
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


class _Splitter:
    def __init__(self, split: Callable[[], None]) -> None:
        self.split, self.layers = split, 0

    def layer_done(self) -> None:
        self.layers += 1
        if self.layers == FIRST_LAYERS:
            self.split()


_splitter: ContextVar[_Splitter | None] = ContextVar("splitter", default=None)


@contextmanager
def split_graph(split: Callable[[], None]) -> Iterator[None]:
    """Call `split` once, after the first layers: the stage that is captured continues in a second graph.

    The device starts a graph when the host has launched all of it, and a stage has hundreds of kernels. With a short
    first graph, the device works on it while the host launches the second.
    """
    before = _splitter.set(_Splitter(split))
    try:
        yield
    finally:
        _splitter.reset(before)


def layer_done() -> None:
    """Say that a decoder layer has run; see `split_graph`."""
    if (splitter := _splitter.get()) is not None:
        splitter.layer_done()
