"""Prefill of short texts through a captured pass.

Python launches the kernels of an eager pass one by one. For a short text that takes longer than to compute them. So a
short text is padded to one of few lengths, and a pass is captured for each length.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .eager import EagerRunner

# Lengths are multiples of STEP, up to MOST. With a 7B model on an H200, the first token after a prompt of 129 tokens
# takes 22 ms if the prompt is padded to 256 tokens (28 ms to 512, 36 ms to 1,024). After a prompt of 1,000 tokens it
# takes 32 ms (46 ms in four passes, 58 ms if kernels are launched one by one).
STEP, MOST = 256, 1024


def fits_captured_prefill(tokens: Tensor) -> bool:
    """Return whether a text [B, P] is short enough for a captured prefill. Padding counts, and so do all rows."""
    rows, length = tokens.shape
    return 0 < rows * padded_length(length) <= MOST


def prefill_captured(runner: EagerRunner, tokens: Tensor, positions: Tensor) -> Tensor:
    """Prefill a text from its beginning, token `i` into slot `i`. Return logits [B, 1, V] after its last token.

    Padding goes before the text, so that the last token of the text is always the last of the pass. The padding is
    written to slots after the text. No query attends to these before their own tokens are written.

    Args:
        runner: the model and its cache.
        tokens: [B, P] without padding.
        positions: [B, P or more] positions of the tokens in the slots.
    """
    rows, length = tokens.shape
    padded = padded_length(length)
    runner.reserve(rows, padded)
    every = torch.arange(padded, device=tokens.device)
    slots = every.roll(padded - length)
    positions = positions[:, slots.clamp(max=length - 1)]  # padding repeats the last: a later one may not exist
    visible = (every <= slots[:, None]).expand(rows, -1, -1)
    tokens = pad(tokens, (padded - length, 0))
    return runner.forward(tokens, positions, slots.repeat(rows, 1), visible, **runner.last_logits_only).logits[:, -1:]


def can_read_in_spare_slots(runner: EagerRunner, tokens: Tensor, used: int) -> bool:
    """Return whether a text [1, L] fits into the slots after those in use."""
    return tokens.shape[1] <= STEP <= runner.cache.address.capacity - used


def read_in_spare_slots(runner: EagerRunner, tokens: Tensor) -> Tensor:
    """Return logits [1, L, V] after each token of a text [1, L] of at most `STEP` tokens.

    Its keys and values go to the last slots of the cache, so a generation under way is not disturbed.
    """
    length, capacity = tokens.shape[1], runner.cache.address.capacity
    order = torch.arange(STEP, device=tokens.device)
    visible = torch.zeros((1, STEP, capacity), dtype=torch.bool, device=tokens.device)
    visible[:, :, capacity - STEP :] = order <= order[:, None]
    positions = order[None] if runner.position_limit is None else order[None].clamp(max=runner.position_limit - 1)
    tokens = pad(tokens, (0, STEP - length))
    return runner.forward(tokens, positions, capacity - STEP + order[None], visible).logits[:, :length]


def padded_length(length: int) -> int:
    """Return the next length for which a pass is captured."""
    return -(-length // STEP) * STEP
