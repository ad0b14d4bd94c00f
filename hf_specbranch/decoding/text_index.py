"""Lookup on the host: where the end of a text occurred before, and how often such matches were right so far.

`TextIndex` finds the longest match of a text's end, token by token, without going through the text again.
`MatchConfidence` learns from every committed token, proposed or not: the match before it was either right
or wrong. From that, and from what wider passes cost, `best_length` decides how many tokens to propose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

SHORTEST = 1  # tokens that must match at least, where wider passes take about the same time
INDEXED = 2  # tokens of a match that are looked for in the index; a shorter one is where its token stood last
CANDIDATES = 16  # earlier occurrences that are compared, the latest first
LONGEST = 12  # tokens of a match that are compared; longer matches are hardly more reliable
# How often the next token is taken to be right, by length of the match, before anything was seen; and how many
# observations that counts for.
PRIOR = (0.0, 0.2, 0.3, 0.45, 0.6, 0.7, 0.75, 0.8, 0.85, 0.88, 0.9, 0.92, 0.94)
PRIOR_WEIGHT = 6.0
RUN, RUN_WEIGHT = 0.8, 5.0  # the same for the token after one that a match had right, whatever its length
MEMORY = 64.0  # observations of one kind; older ones count less


class Match(NamedTuple):
    """An earlier occurrence of a text's end."""

    length: int  # tokens that agree, up to `LONGEST`
    tokens: list[int]  # what followed there


NO_MATCH = Match(0, [])


class Reference(Protocol):
    """Texts besides the one that is generated in which a match may be found; see `hf_specbranch.corpus`."""

    def match(self, ending: Sequence[int], count: int) -> Match:
        """Return the longest match of a text's end, and up to `count` tokens after it."""
        ...


class TextIndex:
    """The positions of all tokens, and of all pairs of tokens, of a text that grows.

    Args:
        longest: the most tokens that a match is compared over.
        reference: further texts to look in.
        shortest: the fewest tokens that make a match.

    Example:
        >>> index = TextIndex()
        >>> index.extend([5, 6, 7, 8, 5, 6, 7])
        >>> index.match(3)
        Match(length=3, tokens=[8, 5, 6])
    """

    def __init__(self, longest: int = LONGEST, reference: Reference | None = None, shortest: int = SHORTEST) -> None:
        self.longest, self.indexed, self.reference, self.shortest = longest, min(INDEXED, longest), reference, shortest
        self.tokens: list[int] = []
        self.places: dict[tuple[int, ...], list[int]] = {}  # by the last tokens: where the next one stands
        self.last: dict[int, int] = {}  # by token: where the next one stands
        self.before = 0  # the same for the last token of the text, before its end; 0: it is new

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        known, places, indexed = self.tokens, self.places, self.indexed
        for token in tokens:
            known.append(token)
            if len(known) >= indexed:
                places.setdefault(tuple(known[-indexed:]), []).append(len(known))
            self.before = self.last.get(token, 0)
            self.last[token] = len(known)

    def match(self, count: int) -> Match:
        """Return the longest match of the end of the text, the latest of several, and `count` tokens after it.

        Where the match overlaps with the end, what follows is repeated: the text may be periodic.
        """
        tokens, end = self.tokens, len(self.tokens)
        found = self.places.get(tuple(tokens[-self.indexed :]), [])
        best, place = (min(1, self.before), self.before) if self.shortest == 1 else (0, 0)
        for start in found[-2 : -2 - CANDIDATES : -1]:  # the last one is the end itself
            length = self.indexed
            while length < min(self.longest, start) and tokens[start - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if length > best:
                best, place = length, start
            if best == self.longest:
                break
        if self.reference is not None and best < self.longest:
            other = self.reference.match(tokens[-self.longest :], count)
            if other.length > best:
                return other
        if not best:
            return NO_MATCH
        period = end - place
        return Match(best, [tokens[place + i % period] for i in range(count)])


class Share:
    """The share of observations that were right; old ones count less.

    Args:
        right: how many were right, before anything was seen.
        seen: of how many.
    """

    def __init__(self, right: float, seen: float) -> None:
        self.right, self.seen = right, seen

    def count(self, right: bool) -> None:
        if self.seen >= MEMORY:
            self.right, self.seen = self.right / 2, self.seen / 2
        self.right += right
        self.seen += 1

    @property
    def chance(self) -> float:
        return self.right / self.seen


class MatchConfidence:
    """How often the token after a match was right, by the length of the match, and how often the one after that.

    Long matches are reliable in texts that copy, but not where numbers repeat by chance. The second count shows that
    soon: how long runs of right tokens are in this text.

    Example:
        >>> confidence = MatchConfidence()
        >>> before = confidence.chance(4)
        >>> for _ in range(8):
        ...     confidence.observe(4, False)
        >>> confidence.chance(4) < before
        True
    """

    def __init__(self) -> None:
        self.by_length = [Share(PRIOR_WEIGHT * chance, PRIOR_WEIGHT) for chance in PRIOR]
        self.in_runs = Share(RUN_WEIGHT * RUN, RUN_WEIGHT)

    def observe(self, length: int, right: bool) -> None:
        """Count a match of this length."""
        self.by_length[min(length, LONGEST)].count(right)

    def observe_run(self, right: bool) -> None:
        """Count a token after one that a match had right."""
        self.in_runs.count(right)

    def chance(self, length: int) -> float:
        """Return how likely the token after a match of this length is right."""
        return self.by_length[min(length, LONGEST)].chance

    def expected(self, length: int, count: int) -> list[float]:
        """Return how many of the first 0, 1, ... `count` tokens after a match are expected to be accepted.

        Each token that is right makes the match longer by one. Whether the next one is right too is said by the length
        of the match and by runs in the text, which count the same.
        """
        total, reached, expected, in_runs = 0.0, 1.0, [0.0], self.in_runs.chance
        for further in range(count):
            chance = self.chance(length + further)
            reached *= chance if further == 0 else (chance + in_runs) / 2
            total += reached
            expected.append(total)
        return expected


def best_length(expected: Sequence[Sequence[float]], cost: Callable[[int], float], lengths: Sequence[int]) -> int:
    """Return how many tokens to propose in a pass over several rows: as many as give the most tokens per second.

    Args:
        expected: for each row how many of the first 0, 1, 2, ... tokens are expected to be accepted.
        cost: the time of a pass with so many draft tokens per row.
        lengths: the numbers to choose from; 0 is one more.

    Example:
        >>> best_length([[0.0, 0.9, 1.7, 2.4]], lambda count: 1 + 0.1 * count, (1, 2, 3))
        3
        >>> best_length([[0.0, 0.05, 0.05, 0.05]], lambda count: 1 + 0.1 * count, (1, 2, 3))
        0
    """

    def speed(count: int) -> float:
        tokens = sum(1 + row[min(count, len(row) - 1)] for row in expected)
        return tokens / cost(count)

    return max((0, *lengths), key=speed)
