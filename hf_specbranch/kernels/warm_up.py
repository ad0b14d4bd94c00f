"""Warm-up: loads the kernels that every generation needs while the first model is still being checked.

The first kernel of a process is slow even if it is on disk, since Triton is initialised with it. That need not wait
until it is known which kernels a model can use. Kernels of torch are loaded when they are first used too.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .backend import serves
from .checksum import checksum
from .parallel_build import build_in_background
from .rounds import empty_inputs, verify_draft, verify_inputs
from .triton_key import keep_triton_key

ROWS, SIZE = 256, 64  # of a product that makes torch load its library


def warm_up_in_background(device: torch.device, dtype: torch.dtype) -> None:
    """Initialise Triton and load the first kernels in the background, once per process.

    Args:
        device: of a model.
        dtype: of a model.

    Example:
        >>> warm_up_in_background(torch.device("cpu"), torch.float32)  # nothing is loaded there
    """
    if device.type == "cuda" and serves(device):
        build_in_background(
            partial(_kernels_of_every_model, device), device, then=partial(_kernels_of_torch, device, dtype)
        )


def _kernels_of_torch(device: torch.device, dtype: torch.dtype) -> None:
    """Compute a product, and set memory to zero as `StaticBuffers` does from the second generation on."""
    with torch.no_grad():
        torch.nn.functional.linear(*(torch.zeros((size, SIZE), dtype=dtype, device=device) for size in (ROWS, SIZE)))
        for zeroed in (torch.long, torch.bool, torch.int32, torch.float32, dtype):
            torch._foreach_zero_([torch.zeros(1, dtype=zeroed, device=device) for _ in range(2)])


def _kernels_of_every_model(device: torch.device) -> None:
    """Launch the kernels that the first round needs, whatever the model; in a dry run only."""
    keep_triton_key()

    def numbers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.long, device=device)

    one, ids, draft_tokens, round_result = numbers(1), numbers(1, 1), numbers(1, 0), numbers(7, 1)
    verify_draft(
        ids,
        (draft_tokens, one),
        (draft_tokens, draft_tokens),
        None,
        None,
        numbers(1, 6),
        ids,
        round_result,
        one,
        numbers(1, 10),
        one,
    )
    checksum([ids])
    verify_inputs(ids, round_result, draft_tokens, None, ids, one, ids, one, empty_inputs(1, 1, device))
