"""The errors that the self-checks of a model's modules found, in their order.

The checks of one model always compare the same modules in the same order. So a new process can take the errors that an
earlier one has found, and need not compute anything; see `kept_checks` for when this is safe. The pass in which an
earlier process has recorded the calls of modules is not repeated either: their names are kept too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

Errors = dict[str, float]  # by name of the module


class KeptErrors:
    """Errors of one model's checks.

    Args:
        model: the model.
        earlier: what an earlier process has kept (`to_keep`); anything else is ignored.

    Attributes:
        called: the names of the modules whose calls the earlier process has recorded, in their order.
        found: the errors of all checks so far, which a later process may use.
        is_complete: no check has failed for another reason than its result, e.g. for a lack of memory.
    """

    def __init__(self, model: nn.Module, earlier: Any = None) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        usable = _is_valid(earlier) and set(earlier["called"]) <= set(self.names.values())
        self.earlier: list[Errors] = earlier["errors"] if usable else []
        self.called: list[str] = earlier["called"] if usable else []
        self.found: list[Errors] = []
        self.is_complete = True

    def look_up(self, modules: Iterable[nn.Module]) -> dict[nn.Module, float] | None:
        """Return the errors of the next check, if the earlier process has compared these modules in it.

        If it has not, nothing that it has found is used from here on.
        """
        modules = list(modules)
        known = self.earlier[len(self.found)] if len(self.found) < len(self.earlier) else {}
        if list(known) != [self.names.get(module) for module in modules]:
            self.earlier = []
            return None
        self.found.append(known)
        return dict(zip(modules, known.values()))

    def add(self, errors: dict[nn.Module, float]) -> None:
        """Add the errors of a check that was made now."""
        self.is_complete = self.is_complete and all(module in self.names for module in errors)
        self.found.append({self.names.get(module, ""): error for module, error in errors.items()})

    def to_keep(self, called: Iterable[nn.Module]) -> dict[str, Any]:
        """Return what a later process may use: the errors, and the names of the modules whose calls were recorded."""
        return {"errors": self.found, "called": [self.names[module] for module in called if module in self.names]}


def _is_valid(earlier: Any) -> bool:
    if not isinstance(earlier, dict) or not all(isinstance(earlier.get(name), list) for name in ("errors", "called")):
        return False
    numbers = all(isinstance(errors, dict) for errors in earlier["errors"])
    return (
        numbers
        and all(type(error) is float for errors in earlier["errors"] for error in errors.values())
        and all(isinstance(name, str) for name in earlier["called"])
    )


_current: ContextVar[KeptErrors | None] = ContextVar("kept_errors", default=None)


def current_errors() -> KeptErrors | None:
    """Return the errors that checks in this thread use and add to, if there are any."""
    return _current.get()


def error_of(module: nn.Module, find: Callable[[], float]) -> float:
    """Return the error of a check of one module: what an earlier process has found, or else what `find` returns."""
    kept = current_errors()
    if kept is not None and (known := kept.look_up([module])) is not None:
        return known[module]
    error = find()
    if kept is not None:
        kept.add({module: error})
    return error


@contextmanager
def using(errors: KeptErrors) -> Iterator[None]:
    """Let checks use these errors, and add to them, in this thread and while the context lasts."""
    before = _current.set(errors)
    try:
        yield
    finally:
        _current.reset(before)
