"""Self-check of a whole pass: do our kernels compute what the model's own pass computes? Done once per model.

`layers/check.py` checks the replacement forwards one by one. Here they run together, as in decoding. The model
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
from threading import get_ident
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels.attention_interface import keys_must_be
from ..kernels.spans import SPANS
from ..layers.check import evaluating
from ..layers.fuse import fused
from .eager import SMALLEST, EagerRunner, MaskMaker, spans_to_mask

logger = logging.getLogger(__name__)

PREFIX = 64  # tokens of the prefill, or fewer where the model has learned fewer positions
# The pass: ten tokens in sequence, and branches of three after the second and the fifth of them. Up to sixteen
# tokens, products run through the same kernels as for one.
PARENTS = (None, *range(9), 1, 10, 11, 4, 13, 14)
BRANCHES = {10: 40, 13: 30}  # by their first query: where their slots begin, counted after the prefix
# Correct kernels are at 1 for every model. RMSNorm in place of LayerNorm in each of 32 layers is at 3.
MOST_NOISE = 1.5
# Kernels are refused if they exceed it on all of these texts: in a mixture of experts, rounding can switch experts.
TEXTS = 3


SHORTEST_WINDOW = 256  # of a sliding layer, for spans: branches must fit into it
KernelUse = Literal["spans", "masks", "none"]  # what our kernels are given, or that the model runs without them


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


def check_kernels(model: PreTrainedModel, masks: MaskMaker) -> KernelUse:
    """Return how a pass through the kernels is as close to the model's own as rounding allows.

    Spans are tried first. They reach our attention alone: a model that does more with its mask needs masks. Where
    neither is right, one warning says so.

    Args:
        model: the model, on one device.
        masks: makes its masks.
    """
    reason = f"its window of {masks.window} is too short"
    if masks.window is None or masks.window >= SHORTEST_WINDOW:
        reason = _why_not(model, masks, by_spans=True)
    if not reason:
        return "spans"
    logger.debug("%s runs under masks: with spans, %s", type(model).__name__, reason)
    if not (reason := _why_not(model, masks, by_spans=False)):
        return "masks"
    logger.warning("%s runs without our GPU kernels: %s", type(model).__name__, reason)
    return "none"


def _why_not(model: PreTrainedModel, masks: MaskMaker, by_spans: bool) -> str:
    ratio = math.inf
    try:
        for text in range(TEXTS):
            ratio = min(ratio, compare(model, masks, text, by_spans).ratio(model.dtype))
            if ratio <= MOST_NOISE:
                logger.debug("%s through our kernels: %.2f times the noise floor", type(model).__name__, ratio)
                return ""
        return f"a pass through them differs from its own by {ratio:.1f} times the rounding noise"
    except torch.OutOfMemoryError:  # the call frees memory and begins again
        raise
    except Exception as error:  # whatever it is, the model's own code remains
        return f"a pass through them raises {type(error).__name__}: {error}"


@torch.no_grad()
def compare(model: PreTrainedModel, masks: MaskMaker, text: int = 0, by_spans: bool = True) -> Comparison:
    """Run the pass three times: by the model itself, through the kernels, and by the model under rounding noise.

    Args:
        model: the model, on one device.
        masks: makes its masks.
        text: the index of the text.
        by_spans: the kernels are given spans, and not masks.
    """
    with evaluating(model):
        runner = EagerRunner(model, masks)
        _prefill(runner, text)
        own = _pass(runner, text)
        with fused(model), keys_must_be(layer.keys for _, layer in runner.cache.slot_layers()):
            ours = _pass(runner, text, by_spans)
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


def _pass(runner: EagerRunner, text: int, by_spans: bool = False) -> Tensor:
    """Return the logits [Q, V] in float32 of the tokens after the prefix, from one pass."""
    before, tokens = _text(runner, text)
    prefix = before.shape[1]
    positions: list[int] = []
    slots: list[int] = []
    spans: list[list[int]] = []
    parents = (None, *range(len(PARENTS) - 1)) if runner.is_recurrent else PARENTS  # a state has one continuation
    for query, parent in enumerate(parents):
        positions.append(prefix if parent is None else positions[parent] + 1)
        if query in BRANCHES and not runner.is_recurrent:
            assert parent is not None
            slots.append(prefix + BRANCHES[query])
            spans.append([0, prefix + parent + 1, slots[query], slots[query] + 1])
        elif parent is not None and spans[parent][3]:  # it continues a branch
            slots.append(slots[parent] + 1)
            spans.append([*spans[parent][:3], slots[query] + 1])
        else:
            slots.append(positions[query])
            spans.append([0, slots[query] + 1, 0, 0])
    visible = torch.tensor([spans], dtype=SPANS)
    if not by_spans:
        visible = spans_to_mask(visible, SMALLEST)
    where = runner.device
    step = runner.forward(
        tokens, torch.tensor([positions], device=where), torch.tensor([slots], device=where), visible.to(where)
    )
    return step.logits[0].float()


@contextmanager
def _rounding_noise(model: PreTrainedModel) -> Iterator[None]:
    """Move each element of the embeddings by about half a unit in the last place, up or down."""
    generator = torch.Generator(model.get_input_embeddings().weight.device).manual_seed(0)

    thread = get_ident()

    def move(_module: nn.Module, _args: object, states: Tensor) -> Tensor:
        if get_ident() != thread:  # which may run the model at the same time
            return states
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
