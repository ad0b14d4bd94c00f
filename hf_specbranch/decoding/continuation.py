"""A draft that a lookup continues: tokens that followed where the end of the draft occurred before.

They fill the places in the target's pass that a draft leaves, and take no step of the draft model. A step then brings
something only where the lookup is wrong about the next token, so a draft beside good matches stops early.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from .draft_state import DraftRound
from .lookup import LookupDraft
from .text_index import NO_MATCH, Match

READ = 8  # tokens that the next draft begins with reading, in about the time of one
MOST = READ - 3  # of them that were looked up: the last token before these, and two after them, may be unread too
LEAST_TOKENS = 0.1  # that a lookup must be expected to bring: to look up and to read more takes about as long as this


class Continuation:
    """Continues greedy drafts. The host decides whether to, the device finds the tokens.

    Args:
        lookup: where tokens are looked up.
    """

    def __init__(self, lookup: LookupDraft) -> None:
        self.lookup = lookup
        self.drafted: list[list[int]] = []  # tokens of each row
        self.matches: list[Match] = []  # of their ends

    def begin(self) -> None:
        """Note that a new draft begins."""
        rows = len(self.lookup.lookup.indices)  # none before the host has read the prompt
        self.drafted, self.matches = [[] for _ in range(rows)], [NO_MATCH] * rows

    def follow(self, tokens: Sequence[int]) -> None:
        """Take over the token that each row has drafted, and look for the end of the draft."""
        for row, (drafted, token) in enumerate(zip(self.drafted, tokens)):
            drafted.append(token)
            self.matches[row] = self.lookup.lookup.after(row, drafted)

    def chances_without(self, chances: Sequence[float]) -> list[float]:
        """Return for each row how likely its draft is right, and the token that was looked up after it is wrong."""
        confidence = self.lookup.lookup.confidence
        right = [confidence.chance(match.length) if match.length else 0.0 for match in self.matches]
        return [chance * (1 - other) for chance, other in zip(chances, right or [0.0] * len(chances))]

    def key(self, gamma: int) -> Hashable:
        """Return the key of the stage that continues drafts of up to `gamma` tokens."""
        return "continue", self.lookup.key(gamma)

    def pays(self, chances: Sequence[float], room: int, gamma: int) -> bool:
        """Return whether to continue drafts that are right with these chances by up to `room` of `gamma` tokens."""
        lookup, room = self.lookup.lookup, min(room, MOST)
        expected = sum(
            chance * lookup.confidence.expected(match.length, room)[-1]
            for chance, match in zip(chances, self.matches)
            if match.length
        )
        if expected < LEAST_TOKENS:
            return False
        seconds = lookup.times.seconds(0) * expected / max(1, len(self.matches))
        return self.lookup.may_run(self.key(gamma), seconds)

    def append(self, round: DraftRound) -> None:
        """Append what is found to the pending draft of each row; a stage on the device."""
        pending = round.pending
        found = self.lookup.found(pending.ids, pending.end, round.gamma)
        room = torch.minimum(round.gamma - pending.length, round.room - 1 - pending.length).clamp(min=0, max=MOST)
        count = torch.where(pending.length > 0, torch.minimum(found.length, room), 0)
        offsets = pending.offsets[: round.gamma]
        columns = torch.where(offsets < count[:, None], pending.end[:, None] + offsets, pending.capacity)
        pending.ids.scatter_(1, columns, found.tokens)
        pending.end += count
        round.count += count
