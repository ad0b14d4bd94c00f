"""Reading a text through replays of one captured pass.

Python launches the kernels of an eager pass one by one, and while a text is short that takes longer than to compute
them. Passes over few tokens are captured, so such a text is read some tokens at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..runners.eager import EagerRunner

# Tokens read at a time, and tokens of the longest texts read so. A 7B model on an H200 reads 129 tokens in 14.6, 11.9
# and 7.8 ms in chunks of 64, 128 and 256, and in 24 launched one by one; 512 tokens in 38.6, 23.4, 14.9, and 22.7.
CHUNK, MOST = 256, 512


def is_short(tokens: Tensor) -> bool:
    """Whether a text [B, P] is read so; the last chunk is filled up, and all rows count."""
    rows, length = tokens.shape
    return 0 < rows * filled_up(length) <= MOST


def read_in_chunks(runner: EagerRunner, tokens: Tensor, positions: Tensor) -> Tensor:
    """Read a text from its beginning, token `i` into slot `i`; logits [B, 1, V] behind its last token.

    The last chunk is filled up with tokens that mean nothing. They write to slots behind the text, which nobody sees
    before the tokens that belong there are written to them.

    Args:
        runner: the model and its cache.
        tokens: [B, P] without padding.
        positions: [B, P or more] of what the slots hold; within what the model knows, behind the text too.
    """
    rows, length = tokens.shape
    filled = filled_up(length)
    runner.reserve(rows, filled)
    tokens, slots = pad(tokens, (0, filled - length)), torch.arange(filled, device=tokens.device)
    visible = slots <= slots[:, None]  # [filled, filled]
    for first in range(0, filled, CHUNK):
        some = slice(first, first + CHUNK)
        own, sees = slots[some].repeat(rows, 1), visible[some].expand(rows, -1, -1)
        known = positions[:, slots[some].clamp(max=positions.shape[1] - 1)]
        logits = runner.forward(tokens[:, some], known, own, sees).logits
    last = (length - 1) % CHUNK
    return logits[:, last : last + 1]


def can_read_aside(runner: EagerRunner, tokens: Tensor, used: int) -> bool:
    """Whether a text fits behind the slots in use."""
    return tokens.shape[1] <= CHUNK <= runner.cache.address.capacity - used


def read_aside(runner: EagerRunner, tokens: Tensor) -> Tensor:
    """Logits [1, L, V] behind each token of a text [1, L] of at most a chunk, whatever else is under way: its keys and
    values go to the last slots there are.
    """
    length, capacity = tokens.shape[1], runner.cache.address.capacity
    order = torch.arange(CHUNK, device=tokens.device)
    visible = torch.zeros((1, CHUNK, capacity), dtype=torch.bool, device=tokens.device)
    visible[:, :, capacity - CHUNK :] = order <= order[:, None]
    positions = order[None] if runner.position_limit is None else order[None].clamp(max=runner.position_limit - 1)
    tokens = pad(tokens, (0, CHUNK - length))
    return runner.forward(tokens, positions, capacity - CHUNK + order[None], visible).logits[:, :length]


def filled_up(length: int) -> int:
    """The next multiple of a chunk."""
    return -(-length // CHUNK) * CHUNK
