"""Leaves a call to transformers' own decoding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from .model_state import every_parameter


class FallBack(Exception):
    """This call is left to transformers' own decoding; the message says why. Raised before the first token."""


@contextmanager
def seeded_from(generator: torch.Generator | None, model: PreTrainedModel) -> Iterator[None]:
    """Seed torch's global generators with a number drawn from `generator`, and restore them afterwards.

    These are the CPU's and those of the model's CUDA devices.
    """
    if generator is None:
        yield
        return
    devices = {weight.device for weight in every_parameter(model) if weight.device.type == "cuda"}
    shared = [torch.default_generator, *(torch.cuda.default_generators[device.index] for device in devices)]
    before = [each.get_state() for each in shared]
    seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device))
    try:
        for each in shared:
            each.manual_seed(seed)
        yield
    finally:
        for each, state in zip(shared, before):
            each.set_state(state)
