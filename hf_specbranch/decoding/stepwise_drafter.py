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
from .drafter import Drafter
from .resolve import Feedback

PRIOR_DRAFTS = 4  # that the typical number of steps counts for


class StepwiseDrafter(Drafter):
    """See `Drafter`.

    Args:
        parts: as there.
        worth: stops a draft whose next step is not worth its time; None: only hooks stop it.
        all_steps: take all steps, wherever the draft stops; for a warm-up, which captures them.
    """

    def __init__(self, *parts: Any, worth: StepWorth | None = None, all_steps: bool = False) -> None:
        super().__init__(*parts)
        self.worth, self.all_steps, self.flags = worth, all_steps, HostCopies(self.device)
        self.drafts, self.usual_steps = PRIOR_DRAFTS, self.gamma / 2  # to begin with, as if these had stopped half-way
        self.begun = False  # the first step of the next draft was taken
        self.chances: list[float] = []  # by row: that all of the draft so far is accepted, by its confidences

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
        while steps < self.gamma and self._goes_on():
            run(("step", shown), lambda: self._draft_step(1, shown), ours)
            steps += 1
        run(("send", features is None), lambda: self._send(features), ours)
        self.stats.draft_forwards += steps - 1
        self.stats.draft_positions += steps - 1
        self.drafts += 1
        self.usual_steps += (steps - self.usual_steps) / self.drafts

    def _take_first_step(self, feedback: Feedback, shown: int) -> None:
        key = "first step", feedback.moved, shown, self.model.reread
        self.buffers.run(key, lambda: self._adopt_and_draft(feedback, shown), self.only_our_kernels)

    def _adopt_and_draft(self, feedback: Feedback, shown: int) -> None:
        self.ops.adopt(feedback.result, feedback.moved)
        self._draft_step(0, shown)

    def _goes_on(self) -> bool:
        """Wait for the last step; return whether to take another one."""
        if self.all_steps:
            return True
        self.flags.send(self._more_steps() if self.ops.more_steps is None else self.ops.more_steps)
        found: list[int] = self.flags.read()  # type: ignore[assignment]
        if self.worth is None:
            return any(found)
        confidences = ((more - 1) / CONFIDENCE_UNITS if more else 0.0 for more in found)
        self.chances = [chance * confidence for chance, confidence in zip(self.chances, confidences)]
        return sum(self.chances) > self.worth.least_chance()

    def _more_steps(self) -> Tensor:
        """Compute what kernels would have written; see `DraftOps.more_steps`."""
        confidence = 1 + (self.round.last_confidence * CONFIDENCE_UNITS).long()
        return torch.where(self.round.goes_on, confidence, 0)
