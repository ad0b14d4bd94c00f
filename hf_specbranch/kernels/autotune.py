"""Which way of computing a small product is fastest on this GPU: measured once for each shape, then remembered."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.constants import HF_HOME
from torch import Tensor

from .backend import runs, triton
from .gated import gated_product
from .linear import MOST_ROWS, PLANS, Parts, Plan, fits, linear_in_parts
from .norm import rms_norm
from .parallel_build import is_dry_run

logger = logging.getLogger(__name__)

MARGIN = 0.97  # a plan must beat torch by this much: measurements of a few microseconds scatter
Kind = Literal["in parts", "whole", "gated"]  # of products: see `linear_in_parts`, `linear`, `gated_product`
_CHOSEN: dict[str, Plan | None] = {}


def choose(weights: Sequence[Tensor], rows: int, kind: Kind) -> Plan | None:
    """The fastest plan for products with these weights, or None where torch's own is.

    The answer is kept in memory and in a JSON file under the Hugging Face cache, so a shape is measured once on each
    kind of GPU. Some answers come with the package: to measure one takes several compilations.

    Args:
        weights: all weights of one shape [N, K]; several of them keep caches from flattering the measurement.
        rows: of x; 1 to 16 share an answer, and so do 17 to 32.
        kind: what the product is for.

    Example:
        >>> choose([torch.randn(64, 64)], rows=9, kind="whole") is None  # on the CPU torch does it
        True
    """
    weight = weights[0]
    if not weight.is_cuda or not runs(weight) or weight.dtype == torch.float32 or not 0 < rows <= MOST_ROWS:
        return None
    key = _key(weight, rows, kind)
    if key not in _CHOSEN:
        stored = _stored()
        if key in stored:
            _CHOSEN[key] = stored[key]
        elif (known := _key(weight, rows, kind, versions=False)) in shipped():
            _CHOSEN[key] = shipped()[known]
        elif torch.cuda.is_current_stream_capturing():
            return None  # nothing can be measured now
        elif is_dry_run():
            _build_all(weight, rows, kind)
            return None
        else:
            _CHOSEN[key] = _fastest(weights, rows, kind)
            _store(key, _CHOSEN[key])
    return _CHOSEN[key]


def cache_file() -> Path:
    """Where answers are kept."""
    return Path(HF_HOME) / "hf_specbranch" / "products.json"


@lru_cache
def shipped() -> dict[str, Plan | None]:
    """Answers that were measured on some GPUs, for shapes of common models, whatever the versions of the libraries."""
    return _read(Path(__file__).with_name("products.json"))


def _product(kind: Kind, following: Plan | None, x: Tensor, weight: Tensor, plan: Plan | None) -> Tensor | Parts:
    """What is measured. Where gate and up are read, another product follows at once, and programs of both share the
    GPU for a while: it is measured too.
    """
    if kind == "gated":
        return linear_in_parts(gated_product(x, weight, None, "silu", plan), _down(weight), None, following)
    return linear_in_parts(x, weight, None, plan)


def _down(gate_up: Tensor) -> Tensor:
    """In place of the weights that follow [2 * I, K] of gate and up: [K, I], of the same memory."""
    return gate_up.reshape(-1, gate_up.shape[0] // 2)[: gate_up.shape[1]]


def _plans(weight: Tensor, rows: int, kind: Kind) -> list[Plan]:
    """Those that can be taken."""
    x = weight.new_empty((rows, weight.shape[1]))
    return [plan for plan in PLANS if fits(x, weight, None, plan) and (plan.splits == 1 or kind == "in parts")]


def _fastest(weights: Sequence[Tensor], rows: int, kind: Kind) -> Plan | None:
    following = choose([_down(weight) for weight in weights], rows, "in parts") if kind == "gated" else None
    product = partial(_product, kind, following)
    limit, best = 0.0, None
    for plan in (None, *_plans(weights[0], rows, kind)):
        try:
            seconds = _seconds(product, weights, rows, plan)
        except Exception as error:  # a plan that this GPU cannot run, for lack of shared memory, say
            logger.debug("%s does not run here: %s", plan, error)
            continue
        if plan is None:
            limit = seconds * MARGIN
        elif seconds < limit:
            limit, best = seconds, plan
    return best


@torch.no_grad()
def _seconds(
    product: Callable[[Tensor, Tensor, Plan | None], Tensor | Parts],
    weights: Sequence[Tensor],
    rows: int,
    plan: Plan | None,
) -> float:
    """Of a product and a norm before it: behind a small kernel it has time to set itself up, as in a layer.

    Weights are taken in turn, so that they come from memory rather than from a cache.
    """
    x = torch.randn((rows, weights[0].shape[1]), device=weights[0].device, dtype=weights[0].dtype)
    scale = torch.ones_like(x[0])
    calls = min(24, max(8, len(weights)))
    product(rms_norm(x, scale, 1e-6)[0], weights[0], plan)  # compiled outside the capture
    stream, graph = torch.cuda.Stream(x.device), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(x.device))
    times: list[float] = []
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for call in range(calls):
                product(rms_norm(x, scale, 1e-6)[0], weights[call % len(weights)], plan)
        finally:
            graph.capture_end()
        for _ in range(4):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end))
    torch.cuda.current_stream(x.device).wait_stream(stream)
    return min(times) / calls / 1e3


def _build_all(weight: Tensor, rows: int, kind: Kind) -> None:
    x = weight.new_zeros((rows, weight.shape[1]))
    rms_norm(x, torch.ones_like(x[0]), 1e-6)
    for plan in _plans(weight, rows, kind):
        _product(kind, None, x, weight, plan)


def _key(weight: Tensor, rows: int, kind: Kind, versions: bool = True) -> str:
    device, dtype = _name(weight.device, versions), str(weight.dtype).removeprefix("torch.")
    return f"{device}|{dtype}|{16 if rows <= 16 else 32}|{weight.shape[0]}x{weight.shape[1]}|{kind}"


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
