"""Which attention a model asks for by itself, whatever it asks for at the moment.

While a model runs through our kernels its config names our attention. Others may look at it meanwhile, in another
thread, and several may have changed it: the first remembers what it was, and the last puts it back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

_LOCK = Lock()
_OWN: dict[int, tuple[str, int]] = {}  # by a config's identity: its own attention, and how many have changed it


@contextmanager
def overriding_attention(config: Any, attention: str) -> Iterator[None]:
    """For the moment, let a config ask for this attention.

    Example:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(_attn_implementation="sdpa", _attn_implementation_internal="sdpa")
        >>> with asking_for(config, "specbranch"):
        ...     config._attn_implementation_internal, own_attention(config)
        ('specbranch', 'sdpa')
    """
    with _LOCK:
        own, changed = _OWN.get(id(config), (config._attn_implementation, 0))
        _OWN[id(config)] = own, changed + 1
        config._attn_implementation_internal = attention
    try:
        yield
    finally:
        with _LOCK:
            own, changed = _OWN.pop(id(config))
            if changed > 1:
                _OWN[id(config)] = own, changed - 1
            else:
                config._attn_implementation_internal = own


def original_attention(config: Any) -> str:
    """What a config asks for when nobody has changed it."""
    with _LOCK:
        own: str = _OWN[id(config)][0] if id(config) in _OWN else config._attn_implementation
        return own
