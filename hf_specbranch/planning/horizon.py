"""How long texts get, and so whether it pays to let a draft read one."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

FEWEST_TEXTS = 4  # with fewer, only the longest length of a text is known
FEWEST_LATER = 8  # texts that a pair is still used for, at least
STARTS = (8, 16, 32, 64, 128)  # tokens of a text after which a draft may begin


def expected_tokens(lengths: Sequence[float], done: float, most: float) -> float:
    """Return how many tokens a text still gets, given the lengths of the last ones.

    Args:
        lengths: tokens of the last texts.
        done: tokens that this text has already.
        most: the most that may still come.

    Example:
        >>> expected_tokens([10, 10, 100, 120], done=50, most=500)
        60.0
    """
    longer = [length - done for length in lengths if length > done]
    if len(lengths) < FEWEST_TEXTS or not longer:
        return most
    return min(most, sum(longer) / len(longer))


def later_tokens(lengths: Sequence[float]) -> float:
    """Return how many tokens later texts are expected to get: a pair is used for as many texts again as so far.

    Args:
        lengths: tokens of the last texts. Without any, nothing is expected: one text says too little about a draft.

    Example:
        >>> later_tokens([100]), later_tokens([10, 20, 30, 20, 20])
        (800.0, 160.0)
    """
    return sum(lengths) / len(lengths) * max(FEWEST_LATER, len(lengths)) if lengths else 0.0


def best_start(lengths: Sequence[float], most: float, saved: float, reading: float) -> tuple[float, float]:
    """Return after how many tokens of a text a draft should begin, and the seconds per text that this saves.

    The start is infinite if a draft does not pay. What is saved is compared with a draft that begins at once.

    Short texts end before a draft that begins late has cost anything. A long text saves a little less then.

    Args:
        lengths: tokens of the last texts.
        most: the most tokens of this text.
        saved: seconds that drafting saves per token.
        reading: seconds that the draft needs to read the text.

    Example:
        >>> best_start([10, 10, 100, 120], most=128, saved=0.0002, reading=0.01)[0]
        16
        >>> best_start([100, 120, 100, 120], most=128, saved=0.0002, reading=0.01)
        (0, 0.0)
        >>> best_start([10, 12, 14, 20], most=128, saved=0.0002, reading=0.01)[0]
        inf
    """
    texts = [min(length, most) for length in lengths] if len(lengths) >= FEWEST_TEXTS else [most]

    def gain(start: float) -> float:
        return sum((length - start) * saved - reading for length in texts if length > start)

    start = max((0, inf, *STARTS), key=gain)
    return start, (gain(start) - gain(0)) / len(texts) if start else 0.0
