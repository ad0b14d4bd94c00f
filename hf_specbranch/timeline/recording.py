"""What a recorded generation consists of."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ..stats import SpecBranchStats

ACCEPTED, ROLLED_BACK, WASTED = "accepted", "rolled back", "wasted"
TARGET, DRAFT, BRANCHES = "target", "draft", "branches"
PROMPT = "read the prompt"  # the name of both models' first block


@dataclass
class DraftedToken:
    """A token that the draft model drafted, and what became of it."""

    token: int
    round: int  # in which it was drafted
    lane: str  # DRAFT: before the target's pass; BRANCHES: while it runs
    branch: int  # 0 in the pending draft, from 1 on in a side branch
    confidence: float | None = None  # the draft's largest probability there, where it is known
    fate: str = ""  # ACCEPTED, ROLLED_BACK or WASTED
    settled: int = -1  # the round that decided


class CommittedToken(NamedTuple):
    """A token of the text."""

    token: int
    round: int
    drafted: int | None  # which drafted token it is; None for a token of the target's own


class Block(NamedTuple):
    """One piece of work: a target pass, a propose stage or a branch stage."""

    lane: str  # TARGET, DRAFT or BRANCHES
    name: str  # e.g. "verify"
    round: int
    begin: float  # seconds since the loop began
    end: float
    rows: list[list[int]]  # drafted tokens by index: those verified, or those drafted, one row per branch
    forwards: int  # model passes in it
    gives: int | None = None  # of a target pass: which committed token is its own

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass
class Recording:
    """One generation, round by round.

    Args:
        policy: the method.
        prompt: the text it began with.
        drafted: every drafted token.
        committed: every new token of the text, in order.
        blocks: all work, by the time it began.
        result_times: for each round, when its verify result was known.
        stats: what the generation counted itself.
        texts: how each token reads.
    """

    policy: str
    prompt: str
    drafted: list[DraftedToken]
    committed: list[CommittedToken]
    blocks: list[Block]
    result_times: list[float]
    stats: SpecBranchStats
    texts: dict[int, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """From the beginning of the loop to the last verify result."""
        return self.result_times[-1] if self.result_times else 0.0

    @property
    def text(self) -> str:
        """The new text, token by token."""
        return "".join(self.texts[each.token] for each in self.committed)

    def fates(self) -> dict[str, int]:
        """How many drafted tokens ended in each way."""
        counts = {fate: 0 for fate in (ACCEPTED, ROLLED_BACK, WASTED)}
        for each in self.drafted:
            counts[each.fate] += 1
        return counts

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "policy": self.policy,
            "prompt": self.prompt,
            "seconds": self.seconds,
            "stats": self.stats.to_dict(),
            "drafted": [{**asdict(each), "text": self.texts[each.token]} for each in self.drafted],
            "committed": [{**each._asdict(), "text": self.texts[each.token]} for each in self.committed],
            "blocks": [block._asdict() for block in self.blocks],
            "result_times": self.result_times,
        }
