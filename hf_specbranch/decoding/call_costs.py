"""What steps of both models cost in one call: predicted from their sizes, and corrected by what was measured before."""

from __future__ import annotations

import torch

from ..planning.calibrate import CostFactors
from ..planning.costs import StepCosts
from ..planning.knowledge import Knowledge, Situation, knowledge_of
from ..planning.product_time import first_factors
from ..planning.sizes import predicted_costs, sizes_of
from ..runtime.eager import EagerRunner


class CallCosts:
    """Step costs of one call.

    Args:
        runner: of the target.
        draft_runner: of the draft; None: there is none, and only the costs of the target's own passes are of use.
        rows: the batch size.
        prompt_length: tokens of the prompt.
        captured: stages are captured as CUDA graphs.
        measured: correct what is predicted. A sampled text must not depend on what was measured before.
    """

    def __init__(
        self,
        runner: EagerRunner,
        draft_runner: EagerRunner | None,
        rows: int,
        prompt_length: int,
        captured: bool,
        measured: bool,
    ) -> None:
        self.runner, self.draft_runner, self.rows, self.captured = runner, draft_runner, rows, captured
        self.prompt_length, self.measured = prompt_length, measured
        self.devices = 1 if draft_runner is None or runner.device == draft_runner.device else 2
        draft = runner.model if draft_runner is None else draft_runner.model
        # A sampled text must not depend on what was counted before the models were changed either.
        counted = self.knowledge.sizes if draft_runner is not None and measured else None
        self.sizes = counted or sizes_of(runner.model, draft)
        self.last: tuple[int, StepCosts] | None = None  # what `at` has returned

    @property
    def knowledge(self) -> Knowledge:
        """What the planner knows of the pair."""
        assert self.draft_runner is not None
        return knowledge_of(self.runner.model, self.draft_runner.model)

    @property
    def situation(self) -> Situation:
        """Everything that step costs depend on, except the length of the text."""
        return Situation(self.rows, self.runner.runtime, self.captured, threads_of(self.runner.device))

    def predicted(self, context: int) -> StepCosts:
        """Return the costs that the sizes of the models predict at a length of text."""
        return predicted_costs(*self.sizes, self.captured, self.rows, context, self.devices)

    def factors(self) -> CostFactors:
        """Return how measured costs compare with predicted ones."""
        return self.knowledge.factors_in(
            self.situation, lambda: first_factors(self.runner.model, self.predicted(self.prompt_length), self.rows)
        )

    def at(self, context: int) -> StepCosts:
        """Return the costs at a length of text. They change only once the text has grown."""
        if self.last is None or self.last[0] != context:
            costs = self.predicted(context)
            if self.measured and self.draft_runner is not None:
                costs = self.factors().costs(costs)
            self.last = context, costs
        return self.last[1]


def threads_of(device: torch.device) -> int:
    """Return the threads of a CPU, for the planner; 0 for another device."""
    return torch.get_num_threads() if device.type == "cpu" else 0
