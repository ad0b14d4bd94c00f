"""The bubbles: how long plain speculation would have kept each model waiting.

Plain speculation drafts a chain while the target waits, and verifies it while the draft waits. With the recorded chains
and times its rounds can be laid out one after the other: a chain of `n` tokens takes `n` draft steps, then the pass
takes as long as it did. The draft would have put down the same tokens, since it stood behind the same text.
"""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from .recording import BRANCHES, DRAFT, PROMPT, TARGET, Block, Recording


class Wait(NamedTuple):
    """A stretch during which one model can only wait for the other."""

    lane: str  # who waits: TARGET or DRAFT
    round: int
    begin: float  # seconds since the loop began, in the plain layout
    end: float


def plain_waits(recording: Recording) -> list[Wait]:
    """The rounds of plain speculation as they would have been: in turns, target and draft wait for each other."""
    step = draft_step(recording.blocks)
    passes = [block for block in recording.blocks if block.lane == TARGET and block.rows]
    if step is None or not passes:
        return []
    now, waits = min(block.begin for block in recording.blocks if block.name != PROMPT), []
    for each in passes:
        drafting = step * len(each.rows[0])
        if drafting:
            waits.append(Wait(TARGET, each.round, now, now + drafting))
        now += drafting
        waits.append(Wait(DRAFT, each.round, now, now + each.seconds))
        now += each.seconds
    return waits


def draft_step(blocks: list[Block]) -> float | None:
    """Seconds for one step of the draft: while the target stands still, if that was recorded."""
    for lane in (DRAFT, BRANCHES):
        steps = [block.seconds / block.forwards for block in blocks if block.lane == lane and block.rows]
        if steps:
            return median(steps)
    return None


def recorded_waits(recording: Recording) -> dict[str, float]:
    """Seconds during which each model really had nothing to do, from the first round behind the prompt to the last."""
    rounds = [block for block in recording.blocks if block.name != PROMPT]
    if not rounds:
        return {TARGET: 0.0, DRAFT: 0.0}
    whole = max(block.end for block in rounds) - min(block.begin for block in rounds)
    busy = {lane: sum(b.seconds for b in rounds if (b.lane == TARGET) == (lane == TARGET)) for lane in (TARGET, DRAFT)}
    return {lane: max(0.0, whole - seconds) for lane, seconds in busy.items()}
