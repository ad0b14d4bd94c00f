"""The user's logits processors, applied to many positions at once, each with the text that plain `generate()` shows it.

There are four kinds of processor:

- *pointwise*: reads the scores alone (temperature, top-p). It runs once over all positions.
- *prefix*: also reads one row's text, and keeps no state (repetition penalty). It runs at any position, in any order,
  on the target's scores and on the draft's.
- *per row*: has settings of its own for each row, and reads the scores and the lengths of the texts alone
  (`RowProcessor`). It comes after all others.
- *opaque*: everything else, that is, a user's own class, or one with state. It is called on the target's scores alone,
  in order, for exactly the prefixes that plain `generate()` would show it. If it has `fork()` (an independent copy in
  the same state) and `rollback(n)` (undo the last `n` calls), a fork of it guides the draft as well.

Some pointwise and prefix processors also have a *static form*, which a captured stage may contain: static shapes, and
no device synchronisation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers.generation import logits_process as lp

from ..runtime.static_buffers import Buffers

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

# With a static form: what they read.
BY_SCORES = (lp.TemperatureLogitsWarper, lp.TopKLogitsWarper, lp.TopPLogitsWarper, lp.MinPLogitsWarper)
BY_LENGTH = (lp.MinLengthLogitsProcessor, lp.MinNewTokensLengthLogitsProcessor)
BY_TOKENS = (lp.RepetitionPenaltyLogitsProcessor,)


class RowProcessor:
    """A processor with settings of its own for each row of a batch.

    Attributes:
        kind: what captured stages depend on, besides the settings of the rows.
    """

    kind: Hashable = None

    def settings_in(self, buffers: Buffers, name: str) -> Any:
        """Return the settings of all rows in memory of these buffers, where captured stages read them."""
        raise NotImplementedError

    def score(self, scores: Tensor, length: Tensor, settings: Any = None) -> Tensor:
        """Return the scores [B, n, V] of tokens that follow texts of these lengths [B, n].

        Args:
            scores: [B, n, V] float32; not changed.
            length: [B, n] tokens before each position.
            settings: what `settings_in` returned; None: the stage is not captured.
        """
        raise NotImplementedError


Processor = Any  # a transformers LogitsProcessor: (input_ids [B, L], scores [B, V]) -> scores [B, V]


class Prefixes(NamedTuple):
    """The text before each of `n` positions of each row."""

    ids: Tensor  # [B, n, C]; of each, the first `length` count
    length: Tensor  # [B, n]

    def exact(self) -> list[list[Tensor]]:
        """Return `[b][j]`: the text [1, L] before position `j` of row `b`. Here the host waits for the lengths."""
        lengths = self.length.tolist()
        return [[self.ids[b, j : j + 1, :length] for j, length in enumerate(row)] for b, row in enumerate(lengths)]


class Scorer(Protocol):
    """Applies processors to logits [B, n, V] (float32, not changed) at many positions."""

    def __call__(self, logits: Tensor, prefixes: Callable[[], Prefixes]) -> Tensor: ...


class ExactScorer:
    """Calls each processor with exactly the text that it sees in plain `generate()`.

    Args:
        processors: the user's; opaque ones are left out.
        device: where the logits are; the draft may be on another device than the target.
    """

    def __init__(self, processors: Sequence[Processor], device: torch.device) -> None:
        given = stateless(processors)
        self.processors = [copied_to(device, each) for each in given if not isinstance(each, RowProcessor)]
        self.by_row = [processor for processor in given if isinstance(processor, RowProcessor)]
        self.reads_text = any(type(processor) in PREFIX for processor in self.processors)

    def __call__(self, logits: Tensor, prefixes: Callable[[], Prefixes]) -> Tensor:
        scores = score_positions(self.processors, prefixes().exact() if self.reads_text else [], logits)
        for processor in self.by_row:
            scores = processor.score(scores, prefixes().length)
        return scores


def is_opaque(processor: Processor) -> bool:
    """Return whether a processor may only be called in order, as plain `generate()` does."""
    return type(processor) not in (*POINTWISE, *PREFIX) and not isinstance(processor, RowProcessor)


def can_guide(processor: Processor) -> bool:
    """Return whether an opaque processor can follow drafts: it has `fork` and `rollback`."""
    offers = (getattr(processor, "fork", None), getattr(processor, "rollback", None))
    return is_opaque(processor) and all(map(callable, offers))


def stateless(processors: Sequence[Processor]) -> list[Processor]:
    """Return the processors that may be called at any position in any order."""
    return [processor for processor in processors if not is_opaque(processor)]


def copied_to(device: torch.device, processor: Processor) -> Processor:
    """Return a copy of a stateless processor whose tensors, also those that it makes later, are on this device."""
    copied = copy.copy(processor)
    for name, value in vars(processor).items():
        if isinstance(value, Tensor):
            setattr(copied, name, value.to(device))
    return copied


def score_positions(processors: Sequence[Processor], prefixes: list[list[Tensor]], logits: Tensor) -> Tensor:
    """Return scores [B, Q, V]: stateless processors applied at every position of every row.

    Args:
        processors: pointwise and prefix processors.
        prefixes: `prefixes[b][j]` is the text [1, L] before position `j` of row `b`; may be empty if no processor
            reads it.
        logits: [B, Q, V] float32; not changed.
    """
    scores = logits
    for processor in processors:
        if type(processor) in POINTWISE:
            flat = scores.reshape(-1, scores.shape[-1])
            scores = processor(torch.empty((flat.shape[0], 0), dtype=torch.long), flat).view_as(logits)
        else:
            rows = []
            for b, row in enumerate(prefixes):
                own = for_row(processor, b)
                rows.append(torch.cat([own(prefix, scores[b, j : j + 1]) for j, prefix in enumerate(row)]))
            scores = torch.stack(rows)
    return scores


# ---- The repetition penalty ignores so many columns of each row: None or an integer, or, from transformers 5.23 on, a
# tensor [B] with the padding of each row. Nothing else depends on which it is.


def ignored_columns(processor: Processor) -> Tensor | None:
    """[B] the columns at the beginning of each row that a processor ignores; None if rows do not differ."""
    ignored = processor.prompt_ignore_length if type(processor) in BY_TOKENS else None
    return ignored if isinstance(ignored, Tensor) else None


def for_row(processor: Processor, row: int) -> Processor:
    """Return a processor as it is called with the text [1, L] of one row."""
    ignored = ignored_columns(processor)
    return processor if ignored is None else _ignoring(processor, ignored[row : row + 1])


def with_copies_of_first_row(processor: Processor, more: int) -> Processor:
    """Return a processor for a batch in which copies of the first row follow the last."""
    ignored = ignored_columns(processor)
    return processor if ignored is None else _ignoring(processor, torch.cat([ignored, ignored[:1].expand(more)]))


def _ignoring(processor: Processor, ignored: Tensor | None) -> Processor:
    copied = copy.copy(processor)
    copied.prompt_ignore_length = ignored
    return copied


def has_static_form(processor: Processor) -> bool:
    """Return whether `StaticScorer` can apply this processor."""
    if type(processor) in BY_TOKENS:
        return ignored_columns(processor) is not None or not processor.prompt_ignore_length
    return type(processor) in (*BY_SCORES, *BY_LENGTH) or isinstance(processor, RowProcessor)


def signature(processor: Processor) -> Hashable:
    """Return the settings of a processor that a captured stage depends on."""
    if isinstance(processor, RowProcessor):  # its settings are in static buffers
        return type(processor).__name__, processor.kind
    settings = dict(vars(processor))
    if type(processor) in BY_LENGTH:  # the length itself is in a static buffer
        settings = {"eos_token_id": tuple(processor.eos_token_id.tolist())}
    if type(processor) in BY_TOKENS:  # so are the columns that it ignores
        settings = {"penalty": processor.penalty}
    return type(processor).__name__, tuple(sorted(settings.items()))


class StaticScorer:
    """Returns the same scores as `ExactScorer`, with static shapes.

    Args:
        processors: each has a static form.
        buffers: where the memory comes from.
        name: names the memory, which every scorer has of its own.
        rows: how many rows are scored.
        vocabulary: how many tokens are scored.
    """

    def __init__(
        self, processors: Sequence[Processor], buffers: Buffers, name: str, rows: int, vocabulary: int
    ) -> None:
        self.processors = list(processors)
        self.shortest: dict[int, Tensor] = {}  # [1] the text may not end below this length
        self.ends: dict[int, Tensor] = {}  # [V] bool: the end-of-sequence tokens
        self.ignored: dict[int, Tensor] = {}  # [B] columns at the beginning of each row that do not count
        for index, processor in enumerate(processors):
            if type(processor) in BY_LENGTH:
                memory = buffers.tensor(f"{name}.shortest{index}", (1,))
                self.shortest[index] = memory.fill_(_shortest(processor))
                self.ends[index] = buffers.tensor(f"{name}.ends{index}", (vocabulary,), torch.bool)
                ends = processor.eos_token_id.to(buffers.device, torch.long).flatten()
                self.ends[index].index_fill_(0, ends, True)  # waits for nothing
            elif type(processor) in BY_TOKENS:
                self.ignored[index] = buffers.tensor(f"{name}.ignored{index}", (rows,))
                if (ignored := ignored_columns(processor)) is not None:
                    self.ignored[index].copy_(ignored)
                    self.processors[index] = _ignoring(processor, None)
        self.by_row = {
            index: processor.settings_in(buffers, f"{name}.rows{index}")
            for index, processor in enumerate(processors)
            if isinstance(processor, RowProcessor)
        }

    def __call__(self, logits: Tensor, prefixes: Callable[[], Prefixes]) -> Tensor:
        scores = logits
        for index, processor in enumerate(self.processors):
            if type(processor) in BY_LENGTH:
                too_short = (prefixes().length < self.shortest[index])[:, :, None]
                scores = scores.masked_fill(too_short & self.ends[index], float("-inf"))
            elif index in self.by_row:
                scores = processor.score(scores, prefixes().length, self.by_row[index])
            elif index in self.ignored:
                scores = _penalised(processor, scores, prefixes(), self.ignored[index])
            else:
                flat = scores.reshape(-1, scores.shape[-1])
                scores = processor(flat.new_empty((0, 0)), flat).view_as(logits)
        return scores


def _penalised(processor: Processor, scores: Tensor, prefixes: Prefixes, ignored: Tensor) -> Tensor:
    """Return the scores [B, n, V] after a processor that reads which tokens are in the text, in a static shape.

    Columns that do not count hold one token more than there are, and its score is dropped.

    Args:
        processor: it ignores no columns of its own.
        scores: [B, n, V].
        prefixes: the text before each position.
        ignored: [B] columns at the beginning of each row that do not count.
    """
    columns, vocabulary = torch.arange(prefixes.ids.shape[2], device=prefixes.ids.device), scores.shape[2]
    counts = (columns >= ignored[:, None, None]) & (columns < prefixes.length[:, :, None])
    text = torch.where(counts, prefixes.ids, vocabulary).flatten(0, 1)  # [B * n, C]
    processed: Tensor = processor(text, torch.nn.functional.pad(scores, (0, 1)).flatten(0, 1))
    return processed[:, :vocabulary].reshape(scores.shape)


def _shortest(processor: Any) -> int:
    if type(processor) is lp.MinLengthLogitsProcessor:
        return int(processor.min_length)
    return int(processor.prompt_length_to_skip + processor.min_new_tokens)


class Guide:
    """Forks of the user's stateful processors, which follow one draft of one row.

    Each must see every prefix of the draft once and in order, up to the first drafted end-of-sequence token: plain
    `generate()` never shows a text that has ended.

    Args:
        processors: pointwise and prefix processors, and forks of the user's own.
        prompt: tokens of the prompt, in which an end-of-sequence token ends nothing.
        ends: the end-of-sequence tokens.
    """

    def __init__(self, processors: list[Processor], prompt: int, ends: frozenset[int] = frozenset()) -> None:
        self.processors, self.prompt, self.ends = processors, prompt, ends
        self.seen = prompt  # the length of the next prefix
        self.called = prompt  # the same for the forks; shorter once the draft has ended

    @classmethod
    def for_draft(
        cls, processors: Sequence[Processor], prompt: int, ends: frozenset[int], device: torch.device
    ) -> Guide:
        """Return a guide with forks of the opaque processors that can be forked; the others must not see drafts."""
        usable = [p for p in processors if not is_opaque(p) or can_guide(p)]
        return cls([p.fork() if is_opaque(p) else copied_to(device, p) for p in usable], prompt, ends)

    def score(self, prefix: Tensor, logits: Tensor) -> Tensor:
        """Return scores [1, V] for the token after `prefix` [1, L]; `L` must not skip a length."""
        assert prefix.shape[1] == self.seen, (prefix.shape[1], self.seen)
        ended = self.called < self.seen or (self.seen > self.prompt and int(prefix[0, -1]) in self.ends)
        for processor in self.processors:
            if not (ended and is_opaque(processor)):
                logits = processor(prefix, logits)
        self.seen += 1
        self.called += not ended
        return logits

    def fork(self) -> Guide:
        """Return an independent guide in the same state."""
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
