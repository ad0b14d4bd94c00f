"""Reading a text through replays of one captured pass.

Python launches the kernels of an eager pass one by one, and while a text is short that takes longer than to compute
them. Passes over few tokens are captured, so such a text is read some tokens at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..runners.eager import EagerRunner


def is_short(tokens: Tensor, chunk: int, most: int) -> bool:
    """Whether a text [B, P] is read so: with the last chunk filled up, it has at most `most` tokens in all rows."""
    rows, length = tokens.shape
    return 0 < rows * filled_up(length, chunk) <= most


def read_in_chunks(runner: EagerRunner, tokens: Tensor, positions: Tensor, chunk: int) -> Tensor:
    """Read a text from its beginning, token `i` into slot `i`; logits [B, 1, V] behind its last token.

    The last chunk is filled up with tokens that mean nothing. They write to slots behind the text, which nobody sees
    before the tokens that belong there are written to them.

    Args:
        runner: the model and its cache.
        tokens: [B, P] without padding.
        positions: [B, capacity] of what the slots hold; within what the model knows, behind the text too.
        chunk: how many tokens are read at a time.
    """
    rows, length = tokens.shape
    filled = filled_up(length, chunk)
    runner.reserve(rows, filled)
    tokens, slots = pad(tokens, (0, filled - length)), torch.arange(filled, device=tokens.device)
    visible = slots <= slots[:, None]  # [filled, filled]
    for first in range(0, filled, chunk):
        some = slice(first, first + chunk)
        own, sees = slots[some].repeat(rows, 1), visible[some].expand(rows, -1, -1)
        logits = runner.forward(tokens[:, some], positions[:, some], own, sees).logits
    last = (length - 1) % chunk
    return logits[:, last : last + 1]


def filled_up(length: int, chunk: int) -> int:
    """The next multiple of `chunk`."""
    return -(-length // chunk) * chunk
