"""Reading a text through a captured pass.

Python launches the kernels of an eager pass one by one, and while a text is short that takes longer than to compute
them. So such a text is filled up to one of few lengths, for each of which a pass is captured.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .eager import EagerRunner

# Lengths are multiples of STEP, up to MOST. The first token of 7B on an H200 comes after 22 ms where 129 tokens are
# filled up to 256 (28 to 512, 36 to 1,024), and of 1,000 tokens after 32 (46 in four passes, 58 launched one by one).
STEP, MOST = 256, 1024


def fits_captured_prefill(tokens: Tensor) -> bool:
    """Whether a text [B, P] is read so; what fills it up counts, and all rows."""
    rows, length = tokens.shape
    return 0 < rows * padded_length(length) <= MOST


def prefill_captured(runner: EagerRunner, tokens: Tensor, positions: Tensor) -> Tensor:
    """Read a text from its beginning, token `i` into slot `i`; logits [B, 1, V] behind its last token.

    Tokens that mean nothing fill up the pass, before the text, so that its last token is always the last. They write
    to slots behind it, which nobody sees before the tokens that belong there are written to them.

    Args:
        runner: the model and its cache.
        tokens: [B, P] without padding.
        positions: [B, P or more] of what the slots hold.
    """
    rows, length = tokens.shape
    filled = padded_length(length)
    runner.reserve(rows, filled)
    every = torch.arange(filled, device=tokens.device)
    slots = every.roll(filled - length)
    positions = positions[:, slots.clamp(max=length - 1)]  # no further, or they might leave those a model knows
    visible = (every <= slots[:, None]).expand(rows, -1, -1)
    tokens = pad(tokens, (filled - length, 0))
    return runner.forward(tokens, positions, slots.repeat(rows, 1), visible, **runner.last_logits_only).logits[:, -1:]


def can_read_in_spare_slots(runner: EagerRunner, tokens: Tensor, used: int) -> bool:
    """Whether a text fits behind the slots in use."""
    return tokens.shape[1] <= STEP <= runner.cache.address.capacity - used


def read_in_spare_slots(runner: EagerRunner, tokens: Tensor) -> Tensor:
    """Logits [1, L, V] behind each token of a text [1, L] of at most a step, whatever else is under way: its keys and
    values go to the last slots there are.
    """
    length, capacity = tokens.shape[1], runner.cache.address.capacity
    order = torch.arange(STEP, device=tokens.device)
    visible = torch.zeros((1, STEP, capacity), dtype=torch.bool, device=tokens.device)
    visible[:, :, capacity - STEP :] = order <= order[:, None]
    positions = order[None] if runner.position_limit is None else order[None].clamp(max=runner.position_limit - 1)
    tokens = pad(tokens, (0, STEP - length))
    return runner.forward(tokens, positions, capacity - STEP + order[None], visible).logits[:, :length]


def padded_length(length: int) -> int:
    """The next length that a pass is captured for."""
    return -(-length // STEP) * STEP
