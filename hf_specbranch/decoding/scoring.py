"""Applying the user's logits processors to many positions at once, without showing them anything untrue.

Three kinds of processor:

- *pointwise*: looks at the scores alone (temperature, top-p). Runs once over all positions.
- *prefix*: looks at one row's text too, and keeps no state (repetition penalty). Runs at any position, in any
  order, on the target's scores and on the draft's.
- *opaque*: everything else: a user's own class, or one with state. It is called on the target's scores alone,
  for exactly the prefixes that plain `generate()` would show it, in order. If it has `fork()` (an independent
  copy in the same state) and `rollback(n)` (undo the last `n` calls), a fork of it guides the draft as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers.generation import logits_process as lp

POINTWISE = (
    lp.TemperatureLogitsWarper,
    lp.TopKLogitsWarper,
    lp.TopPLogitsWarper,
    lp.TopHLogitsWarper,
    lp.MinPLogitsWarper,
    lp.TypicalLogitsWarper,
    lp.EpsilonLogitsWarper,
    lp.EtaLogitsWarper,
    lp.InfNanRemoveLogitsProcessor,
    lp.LogitNormalization,
    lp.SuppressTokensLogitsProcessor,
)
PREFIX = (
    lp.MinLengthLogitsProcessor,
    lp.MinNewTokensLengthLogitsProcessor,
    lp.RepetitionPenaltyLogitsProcessor,
    lp.NoRepeatNGramLogitsProcessor,
    lp.SequenceBiasLogitsProcessor,
    lp.NoBadWordsLogitsProcessor,
    lp.ForcedBOSTokenLogitsProcessor,
    lp.ForcedEOSTokenLogitsProcessor,
    lp.ExponentialDecayLengthPenalty,
    lp.SuppressTokensAtBeginLogitsProcessor,
)

Processor = Any  # a transformers LogitsProcessor: (input_ids [B, L], scores [B, V]) -> scores [B, V]


class Prefixes(NamedTuple):
    """The text before each of `n` positions of each row."""

    ids: Tensor  # [B, n, C]; of each, the first `length` count
    length: Tensor  # [B, n]

    def exact(self) -> list[list[Tensor]]:
        """`[b][j]`: the text [1, L] before position `j` of row `b`; asks the device for the lengths."""
        lengths = self.length.tolist()
        return [[self.ids[b, j : j + 1, :length] for j, length in enumerate(row)] for b, row in enumerate(lengths)]


class Scorer(Protocol):
    """Applies processors to logits [B, n, V] (float32, not changed) at many positions."""

    def __call__(self, logits: Tensor, prefixes: Callable[[], Prefixes]) -> Tensor: ...


class ExactScorer:
    """Calls each processor with exactly the text it would see in plain `generate()`."""

    def __init__(self, processors: Sequence[Processor]) -> None:
        self.processors = stateless(processors)
        self.reads_text = any(type(processor) in PREFIX for processor in self.processors)

    def __call__(self, logits: Tensor, prefixes: Callable[[], Prefixes]) -> Tensor:
        return score_positions(self.processors, prefixes().exact() if self.reads_text else [], logits)


def is_opaque(processor: Processor) -> bool:
    return type(processor) not in POINTWISE and type(processor) not in PREFIX


def can_guide(processor: Processor) -> bool:
    """Whether an opaque processor offers what it takes to follow drafts."""
    offers = (getattr(processor, "fork", None), getattr(processor, "rollback", None))
    return is_opaque(processor) and all(map(callable, offers))


def stateless(processors: Sequence[Processor]) -> list[Processor]:
    """The processors that may be called at any position in any order."""
    return [processor for processor in processors if not is_opaque(processor)]


def score_positions(processors: Sequence[Processor], prefixes: list[list[Tensor]], logits: Tensor) -> Tensor:
    """Apply stateless processors at every position of every row.

    Args:
        processors: pointwise and prefix processors.
        prefixes: `prefixes[b][j]` is the text [1, L] before position `j` of row `b`; may be empty if no
            processor looks at it.
        logits: [B, Q, V] float32; not changed.
    """
    scores = logits
    for processor in processors:
        if type(processor) in POINTWISE:
            flat = scores.reshape(-1, scores.shape[-1])
            scores = processor(torch.empty((flat.shape[0], 0), dtype=torch.long), flat).view_as(logits)
        else:
            rows = [
                torch.cat([processor(prefix, scores[b, j : j + 1]) for j, prefix in enumerate(row)])
                for b, row in enumerate(prefixes)
            ]
            scores = torch.stack(rows)
    return scores


class Guide:
    """Forks of the user's stateful processors, walking along one drafted line of one sequence.

    Each must see every prefix of its line once and in order, up to the first drafted end-of-sequence token: plain
    `generate()` never shows a text that has ended.

    Args:
        processors: pointwise and prefix processors, and forks of the user's own.
        prompt: tokens of the prompt, in which an end-of-sequence token ends nothing.
        ends: the end-of-sequence tokens.
    """

    def __init__(self, processors: list[Processor], prompt: int, ends: frozenset[int] = frozenset()) -> None:
        self.processors, self.prompt, self.ends = processors, prompt, ends
        self.seen = prompt  # the length of the next prefix
        self.called = prompt  # of the next that the forks have not seen; shorter once the line has ended

    @classmethod
    def for_draft(cls, processors: Sequence[Processor], prompt: int, ends: frozenset[int] = frozenset()) -> Guide:
        """Fork the forkable ones; leave out the rest, which must not see drafts."""
        usable = [p for p in processors if not is_opaque(p) or can_guide(p)]
        return cls([p.fork() if is_opaque(p) else p for p in usable], prompt, ends)

    def score(self, prefix: Tensor, logits: Tensor) -> Tensor:
        """Scores [1, V] for the token after `prefix` [1, L]; `L` must not skip a length."""
        assert prefix.shape[1] == self.seen, (prefix.shape[1], self.seen)
        ended = self.called < self.seen or (self.seen > self.prompt and int(prefix[0, -1]) in self.ends)
        for processor in self.processors:
            if not (ended and is_opaque(processor)):
                logits = processor(prefix, logits)
        self.seen += 1
        self.called += not ended
        return logits

    def fork(self) -> Guide:
        guide = Guide([p.fork() if is_opaque(p) else p for p in self.processors], self.prompt, self.ends)
        guide.seen, guide.called = self.seen, self.called
        return guide

    def rewind(self, length: int) -> None:
        """Forget every prefix longer than `length`."""
        surplus = self.called - (length + 1)
        if surplus > 0:
            for processor in self.processors:
                if is_opaque(processor):
                    processor.rollback(surplus)
            self.called = length + 1
        self.seen = min(self.seen, length + 1)
