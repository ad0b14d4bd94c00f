"""The result of a check, and the check that needs no model."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata

from . import __version__

OK, WARNING, FAILED = "ok", "warn", "FAIL"


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    state: str  # OK, WARNING or FAILED
    found: str


def versions() -> Check:
    """Return which versions are installed, without importing them."""
    names = ("hf_specbranch", "torch", "transformers", "triton")
    found = [f"{name} {version}" for name in names if (version := _version(name))]
    return Check("versions", OK, ", ".join([f"Python {platform.python_version()}", *found]))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return __version__ if name == "hf_specbranch" else ""
