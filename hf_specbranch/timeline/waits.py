"""The bubbles: when each model had nothing to do, because it waited for the other."""

from __future__ import annotations

from typing import NamedTuple

from .recording import DRAFT, PROMPT, TARGET, Block, Recording


class Wait(NamedTuple):
    """A time during which one model waited for the other."""

    lane: str  # who waited: TARGET or DRAFT
    begin: float  # seconds since the loop began
    end: float


def waits(recording: Recording) -> list[Wait]:
    """Return the gaps in the work of each model, from the first round after the prompt to the end of the last.

    Without a draft model there are no waits. A lookup runs no model: its block has no forwards.
    """
    rounds = [block for block in recording.blocks if block.name != PROMPT and block.forwards]
    if all(block.lane == TARGET for block in rounds):
        return []
    begin, end = min(block.begin for block in rounds), max(block.end for block in rounds)
    return [
        Wait(lane, *gap)
        for lane in (TARGET, DRAFT)
        for gap in gaps([block for block in rounds if (block.lane == TARGET) == (lane == TARGET)], begin, end)
    ]


def gaps(blocks: list[Block], begin: float, end: float) -> list[tuple[float, float]]:
    """Return the times from `begin` to `end` that no block covers.

    Args:
        blocks: in any order; they may overlap.
        begin: seconds.
        end: seconds.
    """
    found, reached = [], begin
    for block in sorted(blocks, key=lambda block: block.begin):
        if block.begin > reached:
            found.append((reached, block.begin))
        reached = max(reached, block.end)
    return found + ([(reached, end)] if end > reached else [])
