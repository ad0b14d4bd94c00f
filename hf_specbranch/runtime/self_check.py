"""Self-check of a whole pass: do our kernels compute what the model's own pass computes? Done once per model.

`kernels/module_check.py` checks the replacement forwards one by one. Here they run together, as in decoding. The model
itself prefills a text. One pass over draft tokens with branches then runs through the kernels, and its logits are
compared with those of the model's own pass over the same cache.

Two correct passes differ by rounding. How much depends on the model, so it is measured: the model's pass is repeated
with every element of the embeddings moved by at most one unit in the last place, after which all later operations
round differently. That difference is the noise floor.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels.fuse import fused
from ..kernels.module_check import evaluating
from .eager import SMALLEST, EagerRunner, MaskMaker

logger = logging.getLogger(__name__)

PREFIX = 64  # tokens of the prefill, or fewer where the model has learned fewer positions
# The pass: ten tokens in sequence, and branches of three after the second and the fifth of them. Up to sixteen
# tokens, products run through the same kernels as for one.
PARENTS = (None, *range(9), 1, 10, 11, 4, 13, 14)
SLOTS = tuple(7 * query % len(PARENTS) for query in range(len(PARENTS)))  # after the prefix, out of order
# Correct kernels are at 1 for every model. RMSNorm in place of LayerNorm in each of 32 layers is at 3.
MOST_NOISE = 1.5
# Kernels are refused if they exceed it on all of these texts: in a mixture of experts, rounding can switch experts.
TEXTS = 3


class Comparison(NamedTuple):
    """Root mean square differences of the logits from those of the model's own pass, and the spread of the latter."""

    kernels: Tensor  # [Q]
    noise: Tensor  # [Q]
    spread: Tensor  # [Q]

    def ratio(self, dtype: torch.dtype) -> float:
        """Return how far the kernels are above the noise floor: the geometric mean over the tokens.

        The floor is at least the rounding of the logits plus 64 units of float32, the accuracy of exponentials, roots
        and tanh in kernels.
        """
        least = torch.finfo(dtype).eps / 4 + 64 * torch.finfo(torch.float32).eps
        floor = torch.maximum(self.noise, least * self.spread)
        kernels = torch.maximum(self.kernels, least * self.spread)
        ratio = math.exp(float((kernels / floor).log().mean()))
        return ratio if math.isfinite(ratio) else math.inf


def kernels_agree(model: PreTrainedModel, masks: MaskMaker) -> bool:
    """Return whether a pass through the kernels is as close to the model's own as rounding allows.

    Where it is not, one warning says so.

    Args:
        model: the model, on one device.
        masks: makes its masks.
    """
    ratio = math.inf
    try:
        for text in range(TEXTS):
            ratio = min(ratio, compare(model, masks, text).ratio(model.dtype))
            if ratio <= MOST_NOISE:
                logger.debug("%s through our kernels: %.2f times the noise floor", type(model).__name__, ratio)
                return True
        reason = f"a pass through them differs from its own by {ratio:.1f} times the rounding noise"
    except Exception as error:  # whatever it is, the model's own code remains
        reason = f"a pass through them raises {type(error).__name__}: {error}"
    logger.warning("%s runs without our GPU kernels: %s", type(model).__name__, reason)
    return False


@torch.no_grad()
def compare(model: PreTrainedModel, masks: MaskMaker, text: int = 0) -> Comparison:
    """Run the pass three times: by the model itself, through the kernels, and by the model under rounding noise.

    Args:
        model: the model, on one device.
        masks: makes its masks.
        text: the index of the text.
    """
    with evaluating(model):
        runner = EagerRunner(model, masks)
        _prefill(runner, text)
        own = _pass(runner, text)
        with fused(model):
            ours = _pass(runner, text)
        with _rounding_noise(model):
            noisy_runner = EagerRunner(model, masks)
            _prefill(noisy_runner, text)
            noisy = _pass(noisy_runner, text)
    return Comparison(_rms(ours - own), _rms(noisy - own), own.std(-1))


def _text(runner: EagerRunner, text: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of the prefix and of the pass, [1, P] and [1, Q]."""
    count = len(PARENTS)
    prefix = PREFIX if runner.learned_positions is None else max(1, min(PREFIX, runner.learned_positions - count))
    numbers = torch.arange(prefix + count, device=runner.device)[None] + text * (PREFIX + count)
    tokens: Tensor = (numbers * 7 + 1) % runner.vocabulary
    return tokens[:, :prefix], tokens[:, prefix:]


def _prefill(runner: EagerRunner, text: int) -> None:
    runner.reserve(1, SMALLEST)
    tokens, _ = _text(runner, text)
    runner.prefill(tokens, torch.arange(tokens.shape[1], device=runner.device)[None], None)


def _pass(runner: EagerRunner, text: int) -> Tensor:
    """Return the logits [Q, V] in float32 of the tokens after the prefix, from one pass."""
    before, tokens = _text(runner, text)
    prefix = before.shape[1]
    visible = torch.zeros((len(PARENTS), SMALLEST), dtype=torch.bool)
    visible[:, :prefix] = True
    positions: list[int] = []
    for query, parent in enumerate(PARENTS):
        if parent is not None:
            visible[query] = visible[parent]
        visible[query, prefix + SLOTS[query]] = True
        positions.append(prefix if parent is None else positions[parent] + 1)
    step = runner.forward(
        tokens,
        torch.tensor([positions], device=runner.device),
        torch.tensor([SLOTS], device=runner.device) + prefix,
        visible[None].to(runner.device),
    )
    return step.logits[0].float()


@contextmanager
def _rounding_noise(model: PreTrainedModel) -> Iterator[None]:
    """Move each element of the embeddings by about half a unit in the last place, up or down."""
    generator = torch.Generator(model.get_input_embeddings().weight.device).manual_seed(0)

    def move(_module: nn.Module, _args: object, states: Tensor) -> Tensor:
        unit = torch.finfo(states.dtype).eps
        if states.dtype == torch.float32 and states.is_cuda and torch.get_float32_matmul_precision() != "highest":
            unit = 2.0**-10  # products are in TF32 then
        noise = torch.empty_like(states, dtype=torch.float64).uniform_(-unit, unit, generator=generator)
        return (states.double() * (1 + noise)).to(states.dtype)

    hook = model.get_input_embeddings().register_forward_hook(move)
    try:
        yield
    finally:
        hook.remove()


def _rms(difference: Tensor) -> Tensor:
    return difference.pow(2).mean(-1).sqrt()
