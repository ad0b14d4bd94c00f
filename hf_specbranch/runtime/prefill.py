"""Prefill through captured passes.

Python launches the kernels of an eager pass one by one. For a short text that takes longer than to compute them. So a
text is read in passes of few sizes, each of which is captured once. Only the first pass may have padding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from .eager import EagerRunner, make_spans

# With a 7B model on an H200, the first token after a prompt of 129 tokens takes 22 ms if the prompt is padded to 256
# tokens (28 ms to 512, 36 ms to 1,024). After a prompt of 1,000 tokens it takes 32 ms (58 ms if kernels are launched
# one by one).
STEP, MOST = 256, 1024  # without spans, a text is read in one pass: a multiple of STEP tokens, up to MOST
SIZES = 256, 512, 1024  # with spans, passes have these sizes


def fits_captured_prefill(runner: EagerRunner, tokens: Tensor) -> bool:
    """Return whether a text [B, P] can be read in captured passes. Padding counts, and so do all rows."""
    rows, length = tokens.shape
    if length == 0:
        return False
    return (runner.takes_spans and rows == 1) or rows * padded_length(length) <= MOST


def prefill_captured(runner: EagerRunner, tokens: Tensor, positions: Tensor, start: int = 0) -> Tensor:
    """Prefill a text, token `i` into slot `i`. Return logits [B, 1, V] after its last token.

    Args:
        runner: the model and its cache.
        tokens: [B, P] without padding.
        positions: [B, P or more] positions of the tokens in the slots.
        start: how many tokens have their keys and values in the cache already.
    """
    rows, length = tokens.shape
    in_one = [(padded_length(length - start), length - start)]
    for size, count in passes(length - start) if runner.takes_spans and rows == 1 else in_one:
        logits = _read(runner, tokens[:, start : start + count], positions, start, size)
        start += count
    return logits


def passes(count: int) -> Iterator[tuple[int, int]]:
    """Yield the size of each pass over so many tokens, and how many of these it reads; the rest is padding.

    Example:
        >>> list(passes(2400))
        [(512, 352), (1024, 1024), (1024, 1024)]
    """
    full, rest = divmod(count, SIZES[-1])
    if rest:
        yield next(size for size in SIZES if rest <= size), rest
    for _ in range(full):
        yield SIZES[-1], SIZES[-1]


def _read(runner: EagerRunner, tokens: Tensor, positions: Tensor, start: int, size: int) -> Tensor:
    """Read tokens [B, N] into the slots from `start` on, in one pass of `size` tokens; return the last logits.

    Padding goes before the text, so that the last token of the text is always the last of the pass. The padding is
    written to slots after the text. No query of the text attends to these before their own tokens are written.
    """
    rows, count = tokens.shape
    runner.reserve(rows, start + size)
    order = torch.arange(size, device=tokens.device)
    slots = (start + order.roll(size - count)).expand(rows, -1)
    positions = positions[
        :, slots[0].clamp(max=start + count - 1)
    ]  # padding repeats the last: a later one may not exist
    seen = torch.ones((rows, start + size), dtype=torch.bool, device=tokens.device)
    visible = runner.visible(make_spans(torch.zeros_like(slots), slots + 1), start + size, seen)
    tokens = pad(tokens, (size - count, 0))
    return runner.forward(tokens, positions, slots, visible, **runner.last_logits_only).logits[:, -1:]


def can_read_in_spare_slots(runner: EagerRunner, tokens: Tensor, used: int) -> bool:
    """Return whether a text [1, L] fits into the slots after those in use."""
    return tokens.shape[1] <= STEP <= runner.cache.address.capacity - used


def read_in_spare_slots(runner: EagerRunner, tokens: Tensor) -> Tensor:
    """Return logits [1, L, V] after each token of a text [1, L] of at most `STEP` tokens.

    Its keys and values go to the last slots of the cache, so a generation under way is not disturbed.
    """
    length, capacity = tokens.shape[1], runner.cache.address.capacity
    order = torch.arange(STEP, device=tokens.device)[None]
    slots = capacity - STEP + order
    seen = torch.ones((1, capacity), dtype=torch.bool, device=tokens.device)
    visible = runner.visible(make_spans(slots[:, :1], slots + 1), capacity, seen)
    positions = order if runner.position_limit is None else order.clamp(max=runner.position_limit - 1)
    tokens = pad(tokens, (0, STEP - length))
    return runner.forward(tokens, positions, slots, visible).logits[:, :length]


def padded_length(length: int) -> int:
    """Return the next length for which a pass is captured under masks."""
    return -(-length // STEP) * STEP
