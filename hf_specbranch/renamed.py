"""Names of earlier releases, accepted for one more release with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import wraps
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type[Any])


def with_old_names(**new_names: str) -> Any:
    """A class decorator: keyword arguments and attributes are also found under their old names.

    Example:
        >>> @with_old_names(colour="color")
        ... class Pen:
        ...     def __init__(self, color):
        ...         self.color = color
        >>> Pen(color="red").color
        'red'
    """

    def decorate(cls: Class) -> Class:
        original = cls.__init__

        @wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **renamed(cls.__name__, kwargs, new_names))

        def read(self: Any, name: str) -> Any:  # called where ordinary lookup finds nothing
            if name not in new_names:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            warn(cls.__name__, name, new_names[name])
            return getattr(self, new_names[name])

        cls.__init__ = init
        cls.__getattr__ = read
        return cls

    return decorate


def renamed(owner: str, given: Mapping[str, Any], new_names: Mapping[str, str]) -> dict[str, Any]:
    """The same settings under their new names."""
    settings = dict(given)
    for old in set(settings) & set(new_names):
        new = new_names[old]
        if new in settings:
            raise ValueError(f"{owner} was given both {old} and {new}, which is its new name: pass {new} only")
        warn(owner, old, new)
        settings[new] = settings.pop(old)
    return settings


def warn(owner: str, old: str, new: str) -> None:
    warnings.warn(f"{owner}.{old} is now called {new}; the old name goes with the next release", FutureWarning, 4)
