"""The common logits processors as parts of a captured stage: fixed shapes, nothing asked of the device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as lp

from ..runtime.static_buffers import Buffers
from .scoring import Prefixes, Processor

BY_SCORES = (lp.TemperatureLogitsWarper, lp.TopKLogitsWarper, lp.TopPLogitsWarper, lp.MinPLogitsWarper)
BY_LENGTH = (lp.MinLengthLogitsProcessor, lp.MinNewTokensLengthLogitsProcessor)
BY_TOKENS = (lp.RepetitionPenaltyLogitsProcessor,)


def has_static_form(processor: Processor) -> bool:
    """Whether `StaticScorer` can stand in for this processor."""
    if type(processor) in BY_TOKENS:
        return not processor.prompt_ignore_length
    return type(processor) in (*BY_SCORES, *BY_LENGTH)


def signature(processor: Processor) -> Hashable:
    """Everything a captured stage bakes in of a processor that has a fixed form."""
    settings = dict(vars(processor))
    if type(processor) in BY_LENGTH:  # the length itself is in the desk's memory
        settings = {"eos_token_id": tuple(processor.eos_token_id.tolist())}
    return type(processor).__name__, tuple(sorted(settings.items()))


class StaticScorer:
    """Says what `ExactScorer` says.

    Args:
        processors: all of them with a fixed form.
        desk: where the memory comes from.
        name: whose scores these are; each user needs memory of its own.
        vocabulary: how many tokens are scored.
    """

    def __init__(self, processors: Sequence[Processor], buffers: Buffers, name: str, vocabulary: int) -> None:
        self.processors = list(processors)
        self.shortest: dict[int, Tensor] = {}  # [1] below which length a text may not end
        self.ends: dict[int, Tensor] = {}  # [V] the tokens it may not end with
        for index, processor in enumerate(processors):
            if type(processor) in BY_LENGTH:
                memory = buffers.tensor(f"{name}.shortest{index}", (1,))
                self.shortest[index] = memory.fill_(_shortest(processor))
                self.ends[index] = buffers.tensor(f"{name}.ends{index}", (vocabulary,), torch.bool)
                self.ends[index][processor.eos_token_id.to(buffers.device)] = True

    def __call__(self, logits: Tensor, prefixes: Callable[[], Prefixes]) -> Tensor:
        scores = logits
        for index, processor in enumerate(self.processors):
            if type(processor) in BY_LENGTH:
                too_short = (prefixes().length < self.shortest[index])[:, :, None]
                scores = scores.masked_fill(too_short & self.ends[index], float("-inf"))
            else:
                flat = scores.reshape(-1, scores.shape[-1])
                text = _repeated(prefixes()) if type(processor) in BY_TOKENS else flat.new_empty((0, 0))
                scores = processor(text, flat).view_as(logits)
        return scores


def _repeated(prefixes: Prefixes) -> Tensor:
    """[B * n, C]: each prefix, filled up with its own first token: the same set of tokens, in a fixed shape."""
    columns = torch.arange(prefixes.ids.shape[2], device=prefixes.ids.device)
    real = columns < prefixes.length[:, :, None]
    return torch.where(real, prefixes.ids, prefixes.ids[:, :, :1]).flatten(0, 1)


def _shortest(processor: Any) -> int:
    if type(processor) is lp.MinLengthLogitsProcessor:
        return int(processor.min_length)
    return int(processor.prompt_length_to_skip + processor.min_new_tokens)
