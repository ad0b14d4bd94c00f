"""Running ahead of the host: rounds that were launched, and whose results the host has not read yet."""

from __future__ import annotations

from collections import deque

from ..runtime.base import Step
from .draft_source import DraftSource
from .text import Text


class RoundsInFlight:
    """The rounds between the device and the host, the oldest first.

    One round may be in flight while the next one starts, if the device knows how to go on by itself: the verifier has
    written on the device what its result means, a single row continues in any case unless it ends, and the drafter
    launches the same work whatever the result was. A round that was started after the end of the text is discarded.

    Args:
        text: the committed text.
        drafter: proposes draft tokens.
    """

    def __init__(self, text: Text, drafter: DraftSource) -> None:
        self.text, self.steps = text, deque[Step]()
        self.most_per_round = drafter.max_tokens_per_round
        knows = text.resolved_on_device and len(text.lengths) == 1 and not text.stopper.called
        self.limit = int(knows and drafter.same_every_round)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def tokens(self) -> int:
        """The most tokens that these rounds can add."""
        return len(self.steps) * self.most_per_round

    def must_finish_one(self) -> bool:
        """Whether the host must read a result before another round may start."""
        return bool(self.steps) and (len(self.steps) > self.limit or self.text.may_finish(self.tokens))

    def announce(self) -> None:
        """Tell the text how many tokens may have been added by now."""
        self.text.in_flight = self.tokens

    def push(self, step: Step) -> None:
        self.steps.append(step)

    def pop(self) -> Step:
        return self.steps.popleft()

    def close(self) -> None:
        self.text.in_flight = 0
