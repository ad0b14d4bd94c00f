"""Lookup drafts: what followed where the end of the text occurred before, in the text itself or in a corpus.

A lookup takes no forward of a model, and its tokens are no random draws: the target's tokens are chosen first and
compared with them (`acceptance.accept_choices`), so greedy and sampled texts stay exact.

In every round the host decides how many tokens to propose (`Lookup.choose`): by the length of the match, by how often
such matches were right so far, and by what a wider pass costs. Without a promising match the target's pass reads one
token, as if there were no lookup. Where stages are captured, the tokens are found on the device, since the host has not
read the last round yet; elsewhere the host has them already.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from ..corpus import LookupCorpus
from ..runtime.static_buffers import Buffers
from .lookup_match import find_in_corpus, find_in_text, longer_of
from .resolve import BranchStarts, Drafted, DraftTokens, Feedback
from .text import Text
from .text_index import LONGEST, NO_MATCH, SHORTEST, Match, MatchConfidence, TextIndex, best_length

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 11, 15)  # tokens to propose, where stages are not captured
CAPTURE_SECONDS = 0.05  # that must have been missed before the stages of a lookup are captured
SAMPLES = 5  # times of rounds that are kept for each length
NAME = "lookup"
LIKELY, ABSENT = 0.5, -1  # the chance from which on a match counts as likely, for the planner; no such match


def lengths_up_to(most: int) -> tuple[int, ...]:
    """Return the numbers of tokens to propose that are worth a choice where stages are not captured.

    Example:
        >>> lengths_up_to(4)
        (1, 2, 3, 4)
    """
    return *(length for length in LENGTHS if length < most), most


def _agreeing(said: Sequence[int], text: Sequence[int]) -> int:
    """Return how many tokens agree before the first that does not."""
    return next((at for at, (one, other) in enumerate(zip(said, text)) if one != other), min(len(said), len(text)))


class PassTimes:
    """The time of a round by the number of its draft tokens: predicted, and measured where that is known.

    Args:
        predicted: seconds of a pass with so many draft tokens per row.
        measures: learn from the clock. A sampled text must depend on its seed, not on the speed of the machine.
    """

    def __init__(self, predicted: Callable[[int], float], measures: bool) -> None:
        self.predicted, self.measures = predicted, measures
        self.samples: dict[int, list[float]] = {}
        self.running: tuple[int, float] | None = None  # the round that has begun

    def begin(self, count: int) -> None:
        """Note that a round with so many draft tokens begins, and the one before has ended."""
        if not self.measures:
            return
        now = time.perf_counter()
        if self.running is not None:
            samples = self.samples.setdefault(self.running[0], [])
            samples.append(now - self.running[1])
            del samples[:-SAMPLES]
        self.running = count, now

    def pause(self) -> None:
        """Note that the time from now on belongs to something else."""
        self.running = None

    def seconds(self, count: int) -> float:
        """Return the time of a round with so many draft tokens."""
        if count in self.samples:
            return median(self.samples[count])
        measured = [median(times) / self.predicted(width) for width, times in self.samples.items()]
        return self.predicted(count) * (median(measured) if measured else 1.0)


@dataclass
class FollowedRow:
    """What the host knows about the text of one row."""

    index: TextIndex
    read: int = 0  # new tokens that the index has
    match: Match = NO_MATCH  # of the text's end
    run: int | None = None  # the next token by the match before the last token, where that was right
    history: list[list[int]] = field(default_factory=list)  # before each new token: by a likely match, or nothing


class Lookup:
    """The host's part of lookup: follows the text, and decides how many tokens to propose.

    Args:
        text: the committed text.
        attention: [B, P] bool, False where the prompt is padded; None: there is one row without padding.
        lengths: the numbers of tokens to choose from.
        longest: the most tokens that a match is compared over.
        corpus: further texts to look in.
        times: what rounds take.
        shortest: the fewest tokens that make a match.

    Attributes:
        forced: propose so many tokens whatever they promise; for a warm-up.
    """

    def __init__(
        self,
        text: Text,
        attention: Tensor | None,
        lengths: Sequence[int],
        longest: int,
        corpus: LookupCorpus | None,
        times: PassTimes,
        shortest: int = SHORTEST,
    ) -> None:
        self.text, self.attention, self.lengths, self.corpus, self.times = text, attention, lengths, corpus, times
        self.shortest = shortest
        self.longest = min(longest, LONGEST)
        self.forced: int | None = None
        self.most = max(lengths)
        self.confidence = MatchConfidence()
        self.rows: list[FollowedRow] = []

    def prepare(self) -> None:
        """Read the prompt, once."""
        if self.rows:
            return
        text = self.text
        if self.attention is None:
            prompts = [text.row_tokens()[: text.prompt_length]]
        else:
            rows = zip(text.ids[: len(text.new), : text.prompt_length].tolist(), self.attention.tolist())
            prompts = [[token for token, real in zip(*row) if real] for row in rows]
        self.rows = [self.new_row(prompt) for prompt in prompts]

    def new_row(self, prompt: Sequence[int]) -> FollowedRow:
        """Return a row whose text is a prompt."""
        row = FollowedRow(TextIndex(self.longest, self.corpus, self.shortest))
        row.index.extend(prompt)
        return row

    def follow(self) -> None:
        """Take over the tokens that were committed, and find out whether the matches before them were right."""
        self.prepare()
        confidence = self.confidence
        for row, text in zip(self.rows, self.text.new):
            for token in text[row.read :]:
                match = row.match
                row.history.append(match.tokens if match.length and confidence.chance(match.length) >= LIKELY else [])
                if row.run is not None:
                    confidence.observe_run(row.run == token)
                right = match.tokens[:1] == [token]
                row.run = match.tokens[1] if right and len(match.tokens) > 1 else None
                if match.length:
                    confidence.observe(match.length, right)
                row.index.extend((token,))
                row.match = row.index.match(self.most)
            row.read = len(text)

    def recorded(self, row: int, count: int) -> tuple[int, ...]:
        """Return how many tokens a lookup would have got right before each of the last `count` tokens of a row.

        ABSENT where no match was likely enough; nothing while so many tokens were not followed. See `Agreement`.
        """
        self.follow()
        followed, new = self.rows[row].history, self.text.new[row]
        history, first = followed[-count:], len(followed) - count
        if first < 0:
            return ()
        return tuple(_agreeing(said, new[first + at :]) if said else ABSENT for at, said in enumerate(history))

    def choose(self) -> int:
        """Return how many tokens to propose in the next round; 0: none."""
        self.follow()
        if self.forced is not None:
            return self.forced
        return self.best(self.lengths)

    def best(self, lengths: Sequence[int]) -> int:
        """Return which of these numbers of tokens promises most; 0: none."""
        matches = self._matches()
        if not any(match.length for match in matches):
            return 0
        expected = [self.confidence.expected(each.length, len(each.tokens)) for each in matches]
        return best_length(expected, self.times.seconds, lengths)

    def expected(self, count: int) -> float:
        """Return how many of so many proposed tokens are expected to be accepted, per row."""
        matches = self._matches()
        expected = (self.confidence.expected(each.length, min(count, len(each.tokens)))[-1] for each in matches)
        return sum(expected) / max(1, len(matches))

    def _matches(self) -> list[Match]:
        """Return the matches of the rows that go on."""
        return [row.match for row, done in zip(self.rows, self.text.done) if not done]

    def saved_seconds(self, count: int) -> float:
        """Return the time that a round with so many proposed tokens is expected to save per row."""
        return (1 + self.expected(count)) * self.times.seconds(0) - self.times.seconds(count)

    def room(self, row: int) -> int:
        """Return how many draft tokens a row may be sent: the target adds one of its own."""
        return 0 if self.text.done[row] else max(0, self.text.stopper.max_length - self.text.lengths[row] - 1)


class LookupDraft:
    """The draft source that looks tokens up. See `DraftSource`.

    Args:
        buffers: where stages run; those of the text.
        lookup: decides how many tokens to propose.
        first: [B, 1] the first column that is not padding.
        nothing: no draft tokens and no branches.
        patient: capture a stage once it would have saved the time that this takes. A sampled text must not depend on
            what was captured before.
    """

    depth, same_every_round, keeps_drafts, reads_early = 0, True, False, False
    begin_next = None

    def __init__(
        self,
        buffers: Buffers,
        lookup: Lookup,
        first: Tensor,
        nothing: tuple[DraftTokens, BranchStarts],
        patient: bool = False,
    ) -> None:
        self.buffers, self.lookup, self.nothing, self.patient, text = buffers, lookup, nothing, patient, lookup.text
        self.device, self.name, rows = text.ids.device, NAME, text.ids.shape[0]
        self.first = buffers.tensor("lookup.first", (rows, 1)).copy_(first)
        self.limit = buffers.tensor("lookup.limit", (1,)).fill_(text.stopper.max_length)
        self.length = buffers.tensor("lookup.length", (rows,))
        self.tokens = {count: buffers.tensor(f"lookup.tokens{count}", (rows, count)) for count in lookup.lengths}
        self.none = buffers.tensor("lookup.none", (rows, len(Drafted._fields)))
        self.tables = None if lookup.corpus is None else lookup.corpus.on(self.device)
        self.sent: Tensor | None = None  # [B] the length of the last proposal

    def prefill(self, length: int) -> None:
        if not self.buffers.static_shapes:  # otherwise the host does so while the target's first round runs
            self.lookup.prepare()

    def remember(self, tokens: list[int]) -> None: ...

    def propose(self, feedback: Feedback, reached: int) -> DraftTokens:
        count = self.choose()
        self.lookup.times.begin(count)
        return self.look_up(count) if count else self.propose_nothing()

    def choose(self) -> int:
        """Return how many tokens to propose.

        0 in the first round. What would have to be captured and has not paid yet is not proposed.
        """
        lookup, missed = self.lookup, self.buffers.missed
        if self.buffers.static_shapes and not lookup.rows and lookup.forced is None:
            return 0
        count = lookup.choose()
        if not count or lookup.forced is not None or self._is_ready(count):
            return count
        instead = lookup.best([length for length in lookup.lengths if self._is_ready(length)])
        key, saved = self._key(count), lookup.saved_seconds(count) - lookup.saved_seconds(instead)
        missed[key] = missed.get(key, 0.0) + saved
        return count if missed[key] > CAPTURE_SECONDS else instead

    def _is_ready(self, count: int) -> bool:
        """Whether so many tokens may be proposed without a capture, or captured at once."""
        return not self.patient or self.buffers.has_run(self._key(count))

    @property
    def at_hand(self) -> int:
        """The tokens to propose without a likely match: those of a captured stage that need not be captured first."""
        count = min(self.lookup.lengths)
        return count if self.buffers.static_shapes and self.lookup.rows and self._is_ready(count) else 0

    def _key(self, count: int) -> Hashable:
        """Return the key of the stage that looks up so many tokens."""
        corpus = self.lookup.corpus
        return "lookup", count, self.lookup.longest, None if corpus is None else corpus.serial

    def propose_nothing(self) -> DraftTokens:
        self.sent = None
        return self.nothing[0]

    def look_up(self, count: int) -> DraftTokens:
        """Return up to `count` tokens per row, from the longest match of its end."""
        if self.buffers.static_shapes:
            self.buffers.run(self._key(count), lambda: self._find(count))
            self.sent = self.length
            return DraftTokens(self.tokens[count], self.length, memory=self.buffers.serial)
        lookup = self.lookup
        found = [each.match.tokens[: min(count, lookup.room(row))] for row, each in enumerate(lookup.rows)]
        longest = max(map(len, found))
        if not longest:
            return self.propose_nothing()
        tokens = torch.tensor([each + [0] * (longest - len(each)) for each in found], device=self.device)
        self.sent = torch.tensor(list(map(len, found)), device=self.device)
        return DraftTokens(tokens, self.sent)

    def _find(self, count: int) -> None:
        text, longest = self.lookup.text, self.lookup.longest
        asked = text.ids, text.length, self.first, longest, count
        found = find_in_text(*asked)
        if self.tables is not None:
            found = longer_of(found, find_in_corpus(*asked, self.tables))
        room = torch.where(text.result.finished, 0, self.limit - text.length - 1)
        self.tokens[count].copy_(found.tokens)
        self.length.copy_(torch.minimum(found.length, room).clamp(min=0))

    def branch(self, reached: int) -> BranchStarts:
        self.lookup.prepare()
        return self.nothing[1]

    def drafted(self) -> Tensor:
        if self.sent is None:
            return self.none
        sent, none = self.sent, torch.zeros_like(self.sent)
        return torch.stack([sent, none, none, none, none, sent], dim=1)
