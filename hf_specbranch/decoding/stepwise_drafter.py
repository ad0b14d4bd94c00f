"""A captured draft that stops for real: the host waits for each step, and launches the next one if it pays.

A stage that drafts gamma tokens runs all of its steps, also those after the draft has become uncertain. Where a step
takes much longer than the host needs to hear of it, each step is a stage of its own. On an H200 that costs 15 us per
step; a step of a draft with 0.5B parameters takes 370 to 600.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.rounds import CONFIDENCE_UNITS
from ..planning.step_worth import StepWorth
from ..runtime.static_buffers import HostCopies
from .continuation import READ, Continuation
from .drafter import Drafter
from .resolve import Feedback

PRIOR_DRAFTS = 4  # that the typical number of steps counts for


class StepwiseDrafter(Drafter):
    """See `Drafter`.

    Args:
        parts: as there.
        worth: stops a draft whose next step is not worth its time; None: only hooks stop it.
        all_steps: take all steps, wherever the draft stops; for a warm-up, which captures them.

    Attributes:
        continuation: continues drafts; None: nothing does.
    """

    def __init__(self, *parts: Any, worth: StepWorth | None = None, all_steps: bool = False) -> None:
        super().__init__(*parts)
        self.worth, self.all_steps, self.flags = worth, all_steps, HostCopies(self.device)
        self.drafts, self.usual_steps = PRIOR_DRAFTS, self.gamma / 2  # to begin with, as if these had stopped half-way
        self.begun = False  # the first step of the next draft was taken
        self.chances: list[float] = []  # by row: that all of the draft so far is accepted, by its confidences
        self.continuation: Continuation | None = None
        self.was_continued = False  # the last draft

    def begin(self, feedback: Feedback, reached: int) -> None:
        """Take the first step of the next draft while the host waits for the result of the last one.

        If no draft follows, the step has read the text that the result adds.
        """
        self._take_first_step(feedback, self._slots_shown(reached))
        self.begun = True
        self._count_steps(1)

    def _run_propose(self, feedback: Feedback, is_new: bool, shown: int) -> None:
        if not is_new:
            super()._run_propose(feedback, is_new, shown)
            return
        run, features, ours = self.buffers.run, feedback.features, self.only_our_kernels
        if not self.begun:
            self._take_first_step(feedback, shown)
            self._count_steps(1)
        self.begun, steps = False, 1
        self.chances = [1.0] * self.round.pending.count
        if self.continuation is not None:
            self.continuation.begin()
        while steps < self.gamma and self._goes_on():
            run(("step", shown), lambda: self._draft_step(1, shown), ours)
            steps += 1
        run(("send", features is None), lambda: self._send(features), ours)
        self._continue_draft(self.gamma - steps)
        self.stats.draft_forwards += steps - 1
        self.stats.draft_positions += steps - 1
        self.drafts += 1
        self.usual_steps += (steps - self.usual_steps) / self.drafts

    def _take_first_step(self, feedback: Feedback, shown: int) -> None:
        model, usual = self.model, self.model.reread
        if self.was_continued:
            model.reread = READ
        try:
            key = "first step", feedback.moved, shown, model.reread
            self.buffers.run(key, lambda: self._adopt_and_draft(feedback, shown), self.only_our_kernels)
        finally:
            model.reread = usual

    def _adopt_and_draft(self, feedback: Feedback, shown: int) -> None:
        self.ops.adopt(feedback.result, feedback.moved)
        self._draft_step(0, shown)

    def _goes_on(self) -> bool:
        """Wait for the last step; return whether to take another one."""
        if self.all_steps:
            return True
        pending, rows = self.round.pending, self.round.pending.count
        if self.ops.more_steps is None:
            pending.more_steps.copy_(self._more_steps())
        self.flags.send(pending.report)
        tokens, found = (each[:rows] for each in self.flags.read())
        confidences = ((more - 1) / CONFIDENCE_UNITS if more else 0.0 for more in found)
        self.chances = [chance * confidence for chance, confidence in zip(self.chances, confidences)]
        if self.continuation is not None:
            self.continuation.follow(tokens)
        if self.worth is None:
            return any(found)
        chances = self.chances if self.continuation is None else self.continuation.chances_without(self.chances)
        return sum(chances) > self.worth.least_chance()

    def _continue_draft(self, room: int) -> None:
        """Let a lookup continue the draft, by up to `room` tokens, if that pays."""
        further, self.was_continued = self.continuation, False
        if further is None or not (self.all_steps or (room and further.pays(self.chances, room, self.gamma))):
            return
        self.buffers.run(further.key(self.gamma), lambda: self._append(further))
        self.was_continued = True

    def _append(self, further: Continuation) -> None:
        further.append(self.round)
        self.ops.send(None if self.ops.cuts_by_confidence else self.round.pending.length)
        self.ops.release()

    def _more_steps(self) -> Tensor:
        """Compute what kernels would have written; see `DraftOps.more_steps`."""
        confidence = 1 + (self.round.last_confidence * CONFIDENCE_UNITS).long()
        return torch.where(self.round.goes_on, confidence, 0)
