"""Which way of computing a small product is fastest on this GPU: measured once for each shape, then remembered."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HOME
from torch import Tensor

from .backend import runs, triton
from .linear import MOST_ROWS, PLANS, Plan, linear, measure
from .rehearsal import rehearsing

logger = logging.getLogger(__name__)

MARGIN = 0.97  # a plan must beat torch by this much: measurements of a few microseconds scatter
_CHOSEN: dict[str, Plan | None] = {}


def choose(weights: Sequence[Tensor], rows: int) -> Plan | None:
    """The fastest plan for products with these weights, or None where torch's own is.

    The answer is kept in memory and in a JSON file under the Hugging Face cache, so a shape is measured once on each
    kind of GPU. Some answers come with the package: to measure one takes a compilation of every plan.

    Args:
        weights: all weights of one shape [N, K]; several of them keep caches from flattering the measurement.
        rows: of x; 1 to 16 share an answer, and so do 17 to 32.

    Example:
        >>> choose([torch.randn(64, 64)], rows=9) is None  # on the CPU torch does it
        True
    """
    weight = weights[0]
    if not weight.is_cuda or not runs(weight) or weight.dtype == torch.float32 or rows > MOST_ROWS:
        return None
    key = _key(weight, rows)
    if key not in _CHOSEN:
        stored = _stored()
        if key in stored:
            _CHOSEN[key] = stored[key]
        elif (known := _key(weight, rows, versions=False)) in shipped():
            _CHOSEN[key] = shipped()[known]
        elif torch.cuda.is_current_stream_capturing():
            return None  # nothing can be measured now
        elif rehearsing():
            _build_all(weight, rows)
            return None
        else:
            _CHOSEN[key] = _fastest(weights, rows)
            _store(key, _CHOSEN[key])
    return _CHOSEN[key]


def cache_file() -> Path:
    """Where answers are kept."""
    return Path(HF_HOME) / "hf_specbranch" / "products.json"


@lru_cache
def shipped() -> dict[str, Plan | None]:
    """Answers that were measured on some GPUs, for shapes of common models, whatever the versions of the libraries."""
    return _read(Path(__file__).with_name("products.json"))


def _fastest(weights: Sequence[Tensor], rows: int) -> Plan | None:
    limit = measure(weights, rows, None) * MARGIN
    best: Plan | None = None
    for plan in PLANS:
        try:
            seconds = measure(weights, rows, plan)
        except Exception as error:  # a plan that this GPU cannot run, for lack of shared memory, say
            logger.debug("%s does not run here: %s", plan, error)
            continue
        if seconds < limit:
            limit, best = seconds, plan
    return best


def _build_all(weight: Tensor, rows: int) -> None:
    x = weight.new_zeros((rows, weight.shape[1]))
    for plan in PLANS:
        linear(x, weight, None, plan)


def _key(weight: Tensor, rows: int, versions: bool = True) -> str:
    device, dtype = _name(weight.device, versions), str(weight.dtype).removeprefix("torch.")
    return f"{device}|{dtype}|{16 if rows <= 16 else 32}|{weight.shape[0]}x{weight.shape[1]}"


@lru_cache
def _name(device: torch.device, versions: bool) -> str:
    name: str = torch.cuda.get_device_name(device)
    return f"{name}|torch {torch.__version__}|triton {triton.__version__}" if versions else name


def _stored() -> dict[str, Plan | None]:
    return _read(cache_file())


def _read(file: Path) -> dict[str, Plan | None]:
    try:
        entries: dict[str, Any] = json.loads(file.read_text())
        return {key: None if plan is None else Plan(*plan) for key, plan in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # not there yet, or not ours: measured again


def _store(key: str, plan: Plan | None) -> None:
    entries = {**_stored(), key: plan}
    try:
        cache_file().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=cache_file().parent, delete=False) as file:
            json.dump(entries, file, indent=1)
        os.replace(file.name, cache_file())
    except OSError as error:
        logger.debug("the choice of products is not kept: %s", error)
