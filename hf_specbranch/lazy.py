"""Import what is used, when it is used: torch and transformers take seconds, and `--help` needs neither."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def lazily(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package that imports its public names on first use (PEP 562).

    Submodules are found as attributes too, as if the package had imported them.

    Args:
        package: the package, `__name__`.
        homes: for each public name the submodule that defines it.

    Example:
        >>> from hf_specbranch.lazy import lazily
        >>> find, _ = lazily("hf_specbranch", {"SpecBranchConfig": "config"})
        >>> find("SpecBranchConfig").__module__
        'hf_specbranch.config'
    """

    def find(name: str) -> Any:
        if name in homes:
            value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        elif not name.startswith("__") and importlib.util.find_spec(f"{package}.{name}") is not None:
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)  # found without this function from now on
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return find, names


def after_import(name: str, action: Callable[[], object]) -> None:
    """Call `action` once the module `name` is imported: now if it is already, otherwise right after its import."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _AfterImport(name, action))


class _AfterImport:
    """Finds one module as Python would, and calls an action after the module has run."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self.name, self.action = name, action

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == self.name else None
        if spec is None or spec.loader is None:
            return None  # the finders after this one are asked
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:  # once
                sys.meta_path.remove(self)
                self.action()

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec
