"""The bubbles: how long plain speculation would have kept each model waiting.

Plain speculation drafts while the target waits, and verifies while the draft waits. With the recorded drafts and times
its rounds can be laid out one after the other: `n` draft tokens take `n` draft steps, then the pass takes as long as it
did. The draft model would have drafted the same tokens, since the text before them was the same.
"""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from .recording import BRANCHES, DRAFT, PROMPT, TARGET, Block, Recording


class Wait(NamedTuple):
    """A time during which one model can only wait for the other."""

    lane: str  # who waits: TARGET or DRAFT
    round: int
    begin: float  # seconds since the loop began, in the plain layout
    end: float


def plain_waits(recording: Recording) -> list[Wait]:
    """Return the rounds of plain speculation as they would have been: target and draft wait for each other in turns."""
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
    """Seconds during which each model really had nothing to do, from the first round after the prompt to the last."""
    rounds = [block for block in recording.blocks if block.name != PROMPT]
    if not rounds:
        return {TARGET: 0.0, DRAFT: 0.0}
    whole = max(block.end for block in rounds) - min(block.begin for block in rounds)
    busy = {lane: sum(b.seconds for b in rounds if (b.lane == TARGET) == (lane == TARGET)) for lane in (TARGET, DRAFT)}
    return {lane: max(0.0, whole - seconds) for lane, seconds in busy.items()}
