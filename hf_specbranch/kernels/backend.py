"""Where kernels run: Triton on CUDA, Triton's interpreter on the CPU if asked for, else the torch references."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from .parallel_build import Kernel

try:
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")
    cuda: Any = importlib.import_module("triton.language.extra.cuda")
except ImportError:  # torch for CPUs comes without Triton
    triton = tl = cuda = None

# Types of a kernel's arguments. Triton looks such names up, and accepts its own classes only.
if TYPE_CHECKING:
    Value: TypeAlias = Any
    constexpr: TypeAlias = Any
else:
    Value, constexpr = (tl.tensor, tl.constexpr) if tl is not None else (Any, Any)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HALF_PRECISION = (torch.bfloat16, torch.float16)
FLOATS = (*HALF_PRECISION, torch.float32)


def jit(function: Callable[..., Any]) -> Any:
    """A function that kernels call; as it is where there is no Triton (it is not called then)."""
    return function if triton is None else triton.jit(function)


def varying(*names: str) -> Callable[[Callable[..., None]], Any]:
    """A kernel, some of whose integers change from call to call.

    Triton compiles a kernel anew for integers that are 1 and for those that 16 divides; these are exempt.
    """
    return lambda kernel: kernel if triton is None else Kernel(triton.jit(kernel, do_not_specialize=names), names)


def runs(*tensors: Tensor | None) -> bool:
    """Whether a kernel can take these tensors: one device that Triton serves, one dtype that the kernels know."""
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
    """Whether Triton runs on this device, or is to be interpreted there."""
    return triton is not None and (device.type == "cuda" or (INTERPRETED and device.type == "cpu"))


@lru_cache
def early(device: torch.device) -> dict[str, bool]:
    """Options of a launch: where the GPU can, a kernel is set up while the one before it still runs.

    Such a kernel calls `start_next` first and `wait_for_last` or `wait_once_known` before it reads or writes anything
    that is not constant.
    """
    able = cuda is not None and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if able else {"EARLY": False}


@jit
def start_next(EARLY: constexpr) -> None:
    """Let the next kernel be set up as soon as all programs of this one have begun."""
    if EARLY:
        cuda.gdc_launch_dependents()


@jit
def wait_for_last(EARLY: constexpr) -> None:
    """Wait for all that earlier kernels write."""
    if EARLY:
        cuda.gdc_wait()


@jit
def wait_once_known(numbers: Value, EARLY: constexpr) -> None:
    """The same behind some arithmetic, of which these are results and none is -1.

    Written before a wait, arithmetic would still be put off until after it: the assembler is free to.
    """
    if EARLY:
        tl.inline_asm_elementwise(
            "{ .reg .pred known; setp.ne.s64 known, $1, -1; @known griddepcontrol.wait; mov.u32 $0, 0; }",
            "=r,l", [numbers.to(tl.int64)], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@jit
def ask_for(lines: Value) -> None:
    """Have the cache lines that these pointers are in come from memory; nothing waits for them. On CUDA only."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many thread blocks the device runs side by side, at one for each multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def power_of_two(size: int, smallest: int = 1) -> int:
    """The next power of two: lengths of blocks must be such."""
    return max(smallest, 1 << (size - 1).bit_length())
