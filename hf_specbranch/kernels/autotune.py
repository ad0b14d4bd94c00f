"""Autotunes small products: which plan is fastest for a shape on this GPU. Measured once per shape, then remembered."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.constants import HF_HOME
from torch import Tensor

from ..machine import write_whole
from .backend import can_run, power_of_two, triton
from .gated import gated_product
from .linear import MOST_ROWS, PLANS, Partials, Plan, fits, linear_split_k
from .norm import Norm, normalise
from .parallel_build import is_dry_run

logger = logging.getLogger(__name__)

MARGIN = 0.97  # a plan must beat torch by this factor: measurements of a few microseconds scatter
# Of products: see `linear_split_k`, `linear`, `gated_product`; the last two compute a norm of their input as well.
Kind = Literal["split-k", "whole", "gated", "normed", "normed-gated"]
Measured = Callable[[Tensor, Norm, Any, Plan | None], Tensor | Partials]  # x, norm, weight, plan -> norm(x) W^T
DEQUANTISE = Plan(splits=1, stages=0)  # stored where many rows are multiplied faster by a weight that we dequantise


class PlanCache:
    """The autotuned plan of each product: in memory, in a JSON file, and as shipped with the package.

    Args:
        file: where new results are kept.
        shipped_file: results for common models on some GPUs; they hold for any version of the libraries.
        most: results kept in memory; the oldest go.
    """

    def __init__(self, file: Path, shipped_file: Path, most: int = 4096) -> None:
        self.file, self.shipped_file, self.most = file, shipped_file, most
        self._in_memory: dict[str, Plan | None] = {}

    @cached_property
    def shipped(self) -> dict[str, Plan | None]:
        """The results of `shipped_file`."""
        return read_plans(self.shipped_file)

    def find(self, key: str) -> tuple[bool, Plan | None]:
        """Return whether a product has been autotuned, and its plan (None: torch is fastest)."""
        if key not in self._in_memory:
            stored = read_plans(self.file)
            if key in stored:
                self._remember(key, stored[key])
            elif (shipped_key := without_versions(key)) in self.shipped:
                self._remember(key, self.shipped[shipped_key])
            else:
                return False, None
        return True, self._in_memory[key]

    def store(self, key: str, plan: Plan | None) -> None:
        """Keep a result in memory and on disk."""
        self._remember(key, plan)
        entries = {**read_plans(self.file), key: plan}
        write_whole(self.file, json.dumps(entries, indent=1))

    def _remember(self, key: str, plan: Plan | None) -> None:
        self._in_memory[key] = plan
        for oldest in list(self._in_memory)[: -self.most]:
            del self._in_memory[oldest]


def read_plans(file: Path) -> dict[str, Plan | None]:
    """Read plans by key; nothing from a file that is missing, broken or of another version."""
    try:
        entries: dict[str, Any] = json.loads(file.read_text())
        return {key: None if plan is None else Plan(*plan) for key, plan in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def without_versions(key: str) -> str:
    """Return the key of a shipped plan: that of a product without the versions of torch and Triton.

    Example:
        >>> without_versions("NVIDIA H200|torch 2.11|triton 3.6|bfloat16|16|4096x4096|whole")
        'NVIDIA H200|bfloat16|16|4096x4096|whole'
    """
    gpu, _torch, _triton, *product = key.split("|")
    return "|".join((gpu, *product))


plans = PlanCache(Path(HF_HOME) / "hf_specbranch" / "products.json", Path(__file__).with_name("products.json"))


def autotune(weights: Sequence[Tensor], rows: int, kind: Kind) -> Plan | None:
    """Return the fastest plan for products with these weights, or None where torch's own product is fastest.

    A shape is measured once per kind of GPU and version of the libraries. Shipped plans save the compilations that a
    measurement takes.

    Args:
        weights: all weights of one shape [N, K]; with several of them, caches do not flatter the measurement.
        rows: of x; 1 to 16 share a plan, and so do 17 to 32.
        kind: what the product is for.

    Example:
        >>> autotune([torch.randn(64, 64)], rows=9, kind="whole") is None  # the CPU leaves products to torch
        True
    """
    weight = weights[0]
    found, plan = known_plan(weight, rows, kind)
    if found or torch.cuda.is_current_stream_capturing():  # nothing can be measured during a capture
        return plan
    if is_dry_run():
        _build_all(weight, rows, kind)
        return None
    plan = _fastest(weights, rows, kind)
    plans.store(_key(weight, rows, kind), plan)
    return plan


def known_plan(weight: Tensor, rows: int, kind: Kind) -> tuple[bool, Plan | None]:
    """Return whether the plan for a product is known without a measurement, and the plan; see `autotune`."""
    if not weight.is_cuda or not can_run(weight) or weight.dtype == torch.float32 or not 0 < rows <= MOST_ROWS:
        return True, None
    return plans.find(_key(weight, rows, kind))


def _product(
    kind: Kind, following: Plan | None, x: Tensor, norm: Norm, weight: Tensor, plan: Plan | None
) -> Tensor | Partials:
    """Compute what is measured.

    The down product follows gate and up at once, and programs of both share the GPU for a while: it is measured too.
    """
    x = normalise(x, norm)
    if kind == "gated":
        return linear_split_k(gated_product(x, weight, None, "silu", plan), _down(weight), None, following)
    return linear_split_k(x, weight, None, plan)


def _down(gate_up: Tensor) -> Tensor:
    """Return a substitute for the down weights that follow gate and up [2 * I, K]: [K, I], in the same memory."""
    return gate_up.reshape(-1, gate_up.shape[0] // 2)[: gate_up.shape[1]]


def _candidates(weight: Tensor, rows: int, kind: Kind) -> list[Plan]:
    x = weight.new_empty((rows, weight.shape[1]))
    return [plan for plan in PLANS if fits(x, weight, None, plan) and (plan.splits == 1 or kind == "split-k")]


def _fastest(weights: Sequence[Tensor], rows: int, kind: Kind) -> Plan | None:
    following = autotune([_down(weight) for weight in weights], rows, "split-k") if kind == "gated" else None
    product = partial(_product, kind, following)
    x = torch.randn((rows, weights[0].shape[1]), device=weights[0].device, dtype=weights[0].dtype)
    seconds = seconds_of_each(product, weights, x, [None, *_candidates(weights[0], rows, kind)])
    seconds[None] = seconds.get(None, 0.0) * MARGIN
    return min(seconds, key=lambda plan: seconds[plan])


def autotune_quantised(
    product: Measured,
    find_weights: Callable[[], Sequence[Any]],
    candidates: Callable[[Tensor, Sequence[Any], Kind], Sequence[Plan]],
    x: Tensor,
    name: str,
    shape: tuple[int, int],
    kind: Kind,
) -> Plan | None:
    """Return the fastest plan for products with quantised weights, or None where no plan runs.

    Args:
        product: computes norm(x) W^T for one of the weights, by a plan.
        find_weights: returns all weights of one shape and format; called only if a plan is measured.
        candidates: returns the plans to measure for x [rows, K], these weights and this kind.
        x: the input, or any tensor of as many rows; some share a plan, see `alike_rows`.
        name: of the format; part of the key.
        shape: [N, K].
        kind: what the product is for.
    """
    rows, (columns, depth) = x.numel() // x.shape[-1], shape
    key = f"{gpu_and_versions(x.device)}|{name_of(x.dtype)} {name}|{alike_rows(rows)} rows|{columns}x{depth}|{kind}"
    found, plan = plans.find(key)
    if found or torch.cuda.is_current_stream_capturing():
        return plan
    weights, x = find_weights(), x.new_ones((rows, depth))
    if is_dry_run():
        for each in candidates(x, weights, kind):
            product(x, unit_norm(x), weights[0], each)
        return None
    seconds = seconds_of_each(product, weights, x, candidates(x, weights, kind))
    plan = min(seconds, key=lambda each: seconds[each]) if seconds else None
    plans.store(key, plan)
    return plan


@torch.no_grad()
def faster_dequantised(
    product: Callable[[Tensor], Tensor], own: Callable[[Tensor], Tensor], x: Tensor, name: str, columns: int
) -> bool:
    """Return whether many rows are multiplied faster by a dequantised weight than by the layers' own forward.

    Args:
        product: dequantises the weight and computes x W^T.
        own: computes the same by the layers' own forward, which may need a package that is missing.
        x: [rows, K]; numbers of rows up to the same power of two share the answer.
        name: of the format; part of the key.
        columns: N.
    """
    rows, depth = x.shape
    key = f"{gpu_and_versions(x.device)}|{name_of(x.dtype)} {name}|{power_of_two(rows)}|{columns}x{depth}|whole"
    found, plan = plans.find(key)
    if not found and is_dry_run():
        product(x)
    elif not found and not torch.cuda.is_current_stream_capturing():
        plan = DEQUANTISE if _eager_seconds(product, x) < MARGIN * _eager_seconds(own, x) else None
        plans.store(key, plan)
    return plan is not None


def _eager_seconds(product: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Measure a product that may be impossible to capture; infinity where it cannot run."""
    times: list[float] = []
    try:
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(3):
                product(x)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 3e3)
    except (ImportError, OSError) as error:  # kernels of other packages
        logger.debug("a product does not run here: %s", error)
        return float("inf")
    return min(times)


def seconds_of_each(
    product: Measured,
    weights: Sequence[Any],
    x: Tensor,
    candidates: Sequence[Plan | None],
) -> dict[Plan | None, float]:
    """Return the seconds of a norm and a product for each plan that runs, measured in a captured graph.

    Args:
        product: computes both, in one launch or more.
        weights: all weights of one shape and format.
        x: [rows, K].
        candidates: the plans.
    """
    seconds: dict[Plan | None, float] = {}
    for plan in candidates:
        try:
            seconds[plan] = _seconds(product, weights, x, plan)
        except Exception as error:  # a plan that this GPU cannot run, for lack of shared memory, say
            logger.debug("%s does not run here: %s", plan, error)
    return seconds


@torch.no_grad()
def _seconds(product: Measured, weights: Sequence[Any], x: Tensor, plan: Plan | None) -> float:
    """Measure a norm and a product: after a small kernel the product has time to set up, as in a layer.

    The weights alternate, so that they come from memory rather than from a cache.
    """
    norm = unit_norm(x)
    calls = min(24, max(8, len(weights)))
    product(x, norm, weights[0], plan)  # compiled outside the capture
    stream, graph = torch.cuda.Stream(x.device), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(x.device))
    times: list[float] = []
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for call in range(calls):
                product(x, norm, weights[call % len(weights)], plan)
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
    """Build the kernels that a measurement would run, in a dry run."""
    x = weight.new_zeros((rows, weight.shape[1]))
    for plan in _candidates(weight, rows, kind):
        _product(kind, None, x, unit_norm(x), weight, plan)


def unit_norm(x: Tensor) -> Norm:
    """Return a norm of x whose weights are 1."""
    return Norm(torch.ones_like(x[0]), 1e-6)


def _key(weight: Tensor, rows: int, kind: Kind) -> str:
    device, dtype = gpu_and_versions(weight.device), name_of(weight.dtype)
    return f"{device}|{dtype}|{16 if rows <= 16 else 32}|{weight.shape[0]}x{weight.shape[1]}|{kind}"


def alike_rows(rows: int) -> int:
    """Return the most rows of x that share a plan with so many: 1, 2 to 4, 5 to 8, 9 to 16, or 17 to 32.

    Example:
        >>> [alike_rows(rows) for rows in (1, 2, 4, 5, 8)]
        [1, 4, 4, 8, 8]
    """
    return next(most for most in (1, 4, 8, 16, MOST_ROWS) if rows <= most)


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype in keys."""
    return str(dtype).removeprefix("torch.")


@lru_cache
def gpu_and_versions(device: torch.device) -> str:
    """Return the beginning of a key: results hold for one kind of GPU and versions of the libraries."""
    return f"{torch.cuda.get_device_name(device)}|torch {torch.__version__}|triton {triton.__version__}"
