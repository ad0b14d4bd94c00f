"""Keeps on disk how a model passed its checks, so that a new process need not repeat them.

The checks (`mask_probe`, `self_check`) find out how the code of a model treats masks, and whether our kernels compute
the same. That depends on code, shapes and devices: on the versions of all libraries, the files of this package, the
model's classes and config, its shapes, dtypes and attention. All of these are in the name of the file, and some values
of the weights as well. Only results that a check has found right are kept, and only for models whose code is part of
transformers (`known_code`): code from elsewhere may change under the same name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from .kernels.attention_interface import original_attention
from .kernels.backend import triton
from .known_code import class_of, runs_known_code
from .machine import device_name, folder, sample_of, shapes_of, versions, write_whole
from .model_state import every_module, has_adapters


def load_check(model: PreTrainedModel, name: str) -> Any:
    """Return the result of a check that this model has passed in an earlier process, or None."""
    path = _file_of(model)
    return None if path is None else _read(path).get(name)


def save_check(model: PreTrainedModel, name: str, result: Any) -> None:
    """Keep the result of a check that a model has passed."""
    path = _file_of(model)
    if path is not None:
        write_whole(path, json.dumps({**_read(path), name: result}))


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _file_of(model: PreTrainedModel) -> Path | None:
    directory = folder("checks")
    # The ranks of a tensor parallel model must do the same, whatever each of them finds on its disk.
    parallel = getattr(model, "_tp_size", None) is not None
    if directory is None or model.device.type not in ("cuda", "cpu") or has_adapters(model) or parallel:
        return None
    try:
        attention = original_attention(model.config.get_text_config(decoder=True))
        if not runs_known_code(model, attention):
            return None
        about = [
            device_name(model.device), versions(), str(getattr(triton, "__version__", "")), _our_files(),
            shapes_of(model), _classes_of(model), attention, model.config.to_json_string(use_diff=False),
            hashlib.sha256(sample_of(model)).hexdigest(),
        ]  # fmt: skip
        return directory / (hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32] + ".json")
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # quantised weights, or an odd config
        return None


def _classes_of(model: PreTrainedModel) -> str:
    """Return a digest of the classes of all modules."""
    classes = ((kind.__module__, kind.__qualname__) for kind in map(class_of, every_module(model)))
    return hashlib.sha256(repr(list(classes)).encode()).hexdigest()


@lru_cache
def _our_files() -> str:
    """Return a digest of the names, sizes and times of the files of this package."""
    return hashlib.sha256(repr(sorted(files_in(str(Path(__file__).parent)))).encode()).hexdigest()


def files_in(directory: str, prefix: str = "") -> Iterator[tuple[str, int, int]]:
    """Yield name, size and time of the files of a package that decide what it computes: code, and plans of products."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from files_in(entry.path, f"{prefix}{entry.name}/")
            elif entry.name.endswith((".py", ".json")):
                yield prefix + entry.name, entry.stat().st_size, entry.stat().st_mtime_ns
