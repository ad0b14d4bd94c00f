"""A bounded cache: the least recently used entry is dropped first."""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping
from threading import Lock
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LeastRecentlyUsed(Generic[Key, Value]):
    """Keep the `limit` entries that were used last.

    Args:
        limit: the largest number of entries.
        weak_keys: an entry also goes when its key is garbage collected.

    Example:
        >>> cache = LeastRecentlyUsed(limit=2)
        >>> for key in "aba":
        ...     _ = cache.get(key, str.upper)
        >>> cache.get("c", str.upper), sorted(cache.keys())
        ('C', ['a', 'c'])
    """

    def __init__(self, limit: int, weak_keys: bool = False) -> None:
        self.limit = limit
        self._entries: MutableMapping[Key, Value] = WeakKeyDictionary() if weak_keys else {}  # oldest first
        self._lock = Lock()

    def get(
        self, key: Key, make: Callable[[Key], Value], is_current: Callable[[Value], bool] = lambda value: True
    ) -> Value:
        """Return the entry of `key`; make it if it is missing or no longer current."""
        with self._lock:
            if key in self._entries:
                value = self._entries.pop(key)
                if is_current(value):
                    self._entries[key] = value
                    return value
        value = make(key)  # may take long: other threads need not wait
        with self._lock:
            self._entries[key] = value
            while len(self._entries) > self.limit:
                self._entries.pop(next(iter(self._entries)))
        return value

    def keys(self) -> list[Key]:
        """Return the keys, the least recently used first."""
        return list(self._entries)
