"""Warm-up: builds the kernels that every generation needs while the first model is still being checked.

The first kernel of a process is slow even if it is on disk, since Triton is initialised with it. That need not wait
until it is known which kernels a model can use.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import serves
from .checksum import checksum
from .parallel_build import build_in_background
from .rounds import empty_inputs, verify_draft, verify_inputs


def warm_up_in_background(device: torch.device) -> None:
    """Initialise Triton and build the first kernels in the background, once per process.

    Example:
        >>> warm_up_in_background(torch.device("cpu"))  # nothing is built there
    """
    if device.type == "cuda" and serves(device):
        build_in_background(lambda: _kernels_of_every_model(device), device)


def _kernels_of_every_model(device: torch.device) -> None:
    """Launch the kernels that the first round needs, whatever the model; in a dry run only."""

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
