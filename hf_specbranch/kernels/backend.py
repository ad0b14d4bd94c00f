"""Where kernels run: Triton on CUDA, Triton's interpreter on the CPU (`TRITON_INTERPRET=1`), else torch references."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from .parallel_build import Kernel

logger = logging.getLogger(__name__)

try:
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")
    cuda: Any = importlib.import_module("triton.language.extra.cuda")
except ImportError:  # CPU builds of torch come without Triton
    triton = tl = cuda = None

# Types of kernel arguments. Triton resolves these annotations and accepts its own classes only.
if TYPE_CHECKING:
    Value: TypeAlias = Any
    constexpr: TypeAlias = Any
else:
    Value, constexpr = (tl.tensor, tl.constexpr) if tl is not None else (Any, Any)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HALF_PRECISION = (torch.bfloat16, torch.float16)
FLOATS = (*HALF_PRECISION, torch.float32)


def jit(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call; return it unchanged without Triton, where nothing calls it."""
    return function if triton is None else triton.jit(function)


def varying(*names: str) -> Callable[[Callable[..., None]], Any]:
    """Declare a kernel, and which of its integer arguments change from call to call.

    Triton compiles a separate version for an integer that is 1 or divisible by 16. The named ones are exempt.
    """
    return lambda kernel: kernel if triton is None else Kernel(triton.jit(kernel, do_not_specialize=names), names)


def can_run(*tensors: Tensor | None) -> bool:
    """Return whether kernels can take these tensors: one device that Triton supports, one supported dtype, no grad."""
    given = [tensor for tensor in tensors if tensor is not None]
    first = given[0]
    return (
        serves(first.device)
        and first.dtype in FLOATS
        and all(
            type(tensor) in (Tensor, torch.nn.Parameter)
            and tensor.device == first.device
            and tensor.dtype == first.dtype
            and not (tensor.requires_grad and torch.is_grad_enabled())
            for tensor in given
        )
    )


def serves(device: torch.device) -> bool:
    """Return whether Triton runs on this device, natively or interpreted."""
    if triton is None or _references_only.get():
        return False
    return (device.type == "cuda" or (INTERPRETED and device.type == "cpu")) and _compiles(triton.__version__)


@lru_cache
def _compiles(version: str) -> bool:
    """Return whether this version of Triton compiles our kernels; say so once if it does not."""
    if _is_from(version, 3, 4):
        return True
    logger.warning("hf_specbranch runs without its GPU kernels: they need Triton 3.4 (torch 2.8), this is %s", version)
    return False


def _is_from(version: str, *least: int) -> bool:
    """Return whether a version of Triton is at least this one.

    Example:
        >>> _is_from("3.5.1", 3, 4), _is_from("3.3.1+git", 3, 4)
        (True, False)
    """
    return tuple(int(part) for part in version.split(".")[: len(least)]) >= least


_references_only: ContextVar[bool] = ContextVar("references_only", default=False)


@contextmanager
def references_only() -> Iterator[None]:
    """Run the torch references in place of the kernels while the context lasts: nothing is compiled."""
    before = _references_only.set(True)
    try:
        yield
    finally:
        _references_only.reset(before)


# When the next kernel may start; values of PDL, where 0 stands for a launch without.
EARLY = 1  # when all programs of this one have started
LATE = 2  # when all have waited for the kernel before: before it waits, the next one can read what that has written
AT_END = 3  # when all have ended: the next one is set up before that, but takes no registers from this one


@lru_cache
def dependent_launch(device: torch.device, next: int = EARLY) -> dict[str, bool | int]:
    """Return the launch options for programmatic dependent launch (PDL), where the GPU has it (compute capability 9).

    The next kernel is then set up while this one still runs. A kernel calls `launch_dependents` first, and
    `wait_for_dependencies` or `wait_after` before it reads or writes anything that is not constant. Before Triton 3.5
    kernels with these instructions do not compile.

    Args:
        device: of the kernel.
        next: when the next kernel may start: `EARLY`, `LATE` or `AT_END`.
    """
    supported = device.type == "cuda" and triton is not None and _is_from(triton.__version__, 3, 5)
    supported = supported and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": next, "launch_pdl": True} if supported else {"PDL": 0}


@jit
def launch_dependents(PDL: constexpr) -> None:
    """Let the next kernel be set up as soon as all programs of this one have started; if `LATE`, have waited."""
    if PDL == 1:  # EARLY
        cuda.gdc_launch_dependents()


@jit
def wait_for_dependencies(PDL: constexpr) -> None:
    """Wait until everything that earlier kernels write is visible."""
    if PDL:
        cuda.gdc_wait()
    if PDL == 2:  # LATE
        cuda.gdc_launch_dependents()


@jit
def wait_after(numbers: Value, PDL: constexpr) -> None:
    """Wait for dependencies after the arithmetic that computes `numbers`, none of which is -1.

    The assembler may move arithmetic past a plain wait. A wait that reads the result keeps it in front.
    """
    if PDL:
        tl.inline_asm_elementwise(
            "{ .reg .pred known; setp.ne.s64 known, $1, -1; @known griddepcontrol.wait; mov.u32 $0, 0; }",
            "=r,l", [numbers.to(tl.int64)], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    if PDL == 2:  # LATE
        cuda.gdc_launch_dependents()


@jit
def zero_after_wait(PDL: constexpr) -> Value:
    """Return 0, which is known only after the wait: assembly whose address includes it cannot load before."""
    if PDL:
        return tl.inline_asm_elementwise("mov.b64 $0, 0;", "=l", [], tl.int64, is_pure=False, pack=1)
    else:
        return tl.cast(0, tl.int64)


@jit
def prefetch(pointers: Value) -> None:
    """Prefetch the cache lines of these pointers into L2 without waiting for them. On CUDA only."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@lru_cache
def converts_float8(device: torch.device) -> bool:
    """Return whether the device converts FP8 numbers: CUDA devices do from compute capability 8.9 on."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


@lru_cache
def multiplies_tiles(device: torch.device) -> bool:
    """Return whether the device has the instructions of `tile_fragments.py`: CUDA devices, not ROCm's, from 8.0 on."""
    return device.type != "cuda" or (
        torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)
    )


@lru_cache
def fewest_columns() -> int:
    """Return the fewest columns of the right operand that `tl.dot` takes: 8 from Triton 3.5 on, 16 before."""
    return 8 if _is_from(triton.__version__, 3, 5) else 16


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors: thread blocks that run at once, at one each."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def power_of_two(size: int, smallest: int = 1) -> int:
    """Return the next power of two, at least `smallest`: Triton's block sizes must be powers of two."""
    return max(smallest, 1 << (size - 1).bit_length())
