"""Keeps a digest of Triton's own files on disk, which Triton computes in each process before it finds a first kernel.

Among these files is a library of 400 MB. To read it takes 0.3 s, about a third of a first generation. The digest is
kept under the names, sizes and times of the files, so that another Triton has another one.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..machine import folder, write_whole
from .backend import triton

FUNCTION = "triton_key"  # of `triton.runtime.cache`, from Triton 3.5 on
DIGEST = r"[0-9a-f]{64}"
FILES = ("runtime/cache.py", "compiler", "backends", "language", "_C")  # of Triton, that its digest is about


def keep_triton_key() -> None:
    """Let Triton use the digest that an earlier process has computed; without one, compute and keep it.

    It may be called from any thread. A Triton without this function, or with another one, is left alone.
    """
    cache: Any = getattr(getattr(triton, "runtime", None), "cache", None)
    compute: Any = getattr(cache, FUNCTION, None)
    if hasattr(compute, "cache_info"):  # not replaced yet
        key = kept_key(Path(cache.__file__).parents[1], compute)
        setattr(cache, FUNCTION, lambda: key)


def kept_key(root: Path, compute: Callable[[], Any]) -> str:
    """Return the digest of the files of a Triton.

    Args:
        root: where it is installed.
        compute: computes the digest.
    """
    directory = folder("triton")
    if directory is None:
        return str(compute())
    try:
        files = _files(root)
    except OSError:  # such as a link to a file that is gone
        return str(compute())
    path = directory / (hashlib.sha256(repr((str(root), files)).encode()).hexdigest()[:32] + ".txt")
    try:
        key = path.read_text()
    except (OSError, ValueError):
        key = ""
    if not re.fullmatch(rf"[\w.+]+{DIGEST}(-{DIGEST})+", key):
        key = str(compute())
        write_whole(path, key)
    return key


def _files(root: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of each file. Where Triton is being developed, its backends are linked folders."""
    found = []
    for name in FILES:
        place = root / name
        walked = os.walk(place, followlinks=True)  # nothing for a file
        inside = [place] if place.is_file() else [Path(at, file) for at, _, files in walked for file in files]
        for file in inside:
            if "__pycache__" not in file.parts:
                status = file.stat()
                found.append((str(file.relative_to(root)), status.st_size, status.st_mtime_ns))
    return sorted(found)
