"""Reads prompts in a cache of one row, from where their keys and values are copied to a row of the running batch.

A prompt is read in passes of a limited size, between rounds of the batch, so that a long one holds nobody up for long.
The beginning that it has in common with the last prompt is not read again: a system prompt is read once, and so is a
prompt that several answers are wanted for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..config import SpecBranchConfig
from ..runtime.eager import EagerRunner, Remembered, make_spans
from ..runtime.prefill import can_prefill, prefill
from ..runtime.selection import runner_for

PASS = 1024  # tokens of one pass


def reader_runner(
    model: PreTrainedModel, role: str, slots: int, config: SpecBranchConfig
) -> AbstractContextManager[EagerRunner]:
    """Provide the runner of one row that a `PromptReader` works with."""
    return runner_for(model, role, 1, slots, config.runtime, config.kernels, config.memory_budget)


class PromptReader:
    """Reads one prompt after another.

    Args:
        runner: a runner of one row.

    Attributes:
        logits: [1, 1, V] after the last token of the prompt, once it is read.
    """

    def __init__(self, runner: EagerRunner) -> None:
        self.runner = runner
        self.tokens: list[int] = []  # of the prompt
        self.cached = 0  # of these, how many have their keys and values in the cache
        self.logits: Tensor | None = None

    def begin(self, tokens: Sequence[int]) -> None:
        """Take up another prompt of at least one token; the last one is always read."""
        self.cached = min(self.cached, Remembered(self.tokens).common_prefix(tokens), len(tokens) - 1)
        self.tokens, self.logits = list(tokens), None

    @property
    def is_done(self) -> bool:
        return self.cached >= len(self.tokens)

    def read(self) -> int:
        """Read the next tokens in one pass; return how many."""
        start, runner = self.cached, self.runner
        end = min(start + PASS, len(self.tokens))
        if end <= start:
            return 0
        tokens = torch.tensor([self.tokens[:end]], device=runner.device).clamp(max=runner.vocabulary - 1)
        positions = torch.arange(end, device=runner.device)[None]
        if runner.position_limit is not None:  # of a draft with a shorter context; see `DraftModel`
            positions = positions.clamp(max=runner.position_limit - 1)
        first = torch.zeros_like(tokens[:, :1])
        runner.reserve(1, end)
        runner.slot_positions[:, :end] = positions
        if runner.captures and can_prefill(runner, tokens[:, start:], padded=False):
            logits = prefill(runner, tokens, positions, first, start)
        else:
            columns = torch.arange(start, end, device=runner.device)[None]
            seen = torch.ones((1, end), dtype=torch.bool, device=runner.device)
            visible = runner.visible(make_spans(first, columns + 1), end, seen)
            further = runner.last_logits_only
            logits = runner.forward_uncaptured(
                tokens[:, start:], positions[:, start:], columns, visible, **further
            ).logits
        self.cached, self.logits = end, logits[:, -1:]
        return end - start
