"""Prefix reuse: a prompt that begins with the last text need not be read again from the start.

A turn of a chat and a shared system prompt begin like the text before them, whose keys and values are still in the KV
cache. They are used again only if the weights are bit by bit what they were when these keys and values were computed:
a checksum of all weights and buffers is taken after a long text, and compared before its beginning is reused. That
finds changes in place too, even those through `parameter.data`, of which torch keeps no count. Everything else that
keys and values depend on (dtype, attention implementation, autocast and other modes) is in the runner's fingerprint.
Every set of adapters has runners of its own.

Drafts need no such care: a draft from stale keys is only a worse draft.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from ..kernels.checksum import checksum
from ..model_state import walk_in_use
from ..plain_tensors import plain_tensors
from .eager import NOTHING, Remembered

logger = logging.getLogger(__name__)

# A checksum of a 7B model takes 4 ms, as long as to read about 120 tokens of a prompt.
SHORTEST_TEXT = 1024  # a shorter text is not worth a checksum after each call
FEWEST_TOKENS = 512  # a shorter common beginning is not worth one before a call


def remember(model: PreTrainedModel, tokens: list[int]) -> Remembered:
    """Return what to keep of a text that a target has read."""
    if len(tokens) < SHORTEST_TEXT:
        return NOTHING
    try:
        return Remembered(tokens, _checksum(model))
    except (TypeError, ValueError) as error:  # tensors of other types, or on several devices
        logger.debug("no prefix of %s is reused: %s", type(model).__name__, error)
        return NOTHING


def reusable_tokens(remembered: Remembered, model: PreTrainedModel, prompt: Sequence[int]) -> int:
    """Return how many tokens of a prompt a target need not read again."""
    common = remembered.common_prefix(prompt)
    if common < FEWEST_TOKENS or remembered.weights is None:
        return 0
    return common if bool((remembered.weights == _checksum(model)).all()) else 0  # waits for the device


def _checksum(model: PreTrainedModel) -> Tensor:
    return checksum(plain_tensors(walk_in_use(model).tensors()))
