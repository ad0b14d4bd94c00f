"""The target's side of a round with its inputs made by one kernel; it does what `Target` does."""

from __future__ import annotations

from collections.abc import Callable

from ..kernels.rounds import verify_inputs
from ..runtime.base import Step
from .quick_drafter import empty_inputs
from .state import DraftTokens
from .target import Target


class QuickTarget(Target):
    """A target on the device where the text is, whose passes are captured."""

    only_our_kernels = True

    def _pass(self, draft_tokens: DraftTokens, shown: int, forward: Callable[..., Step]) -> Step:
        rows, count = draft_tokens.tokens.shape
        leaves = None if draft_tokens.leaves is None else (draft_tokens.leaves.tokens, draft_tokens.leaves.at)
        queries = count + 1 if leaves is None else count + 2 + leaves[0].shape[1]
        inputs = empty_inputs(rows, queries, min(shown, self.slots.shape[0]), self.device)
        text = self.text
        verify_inputs(
            text.ids,
            text.round_result,
            draft_tokens.tokens,
            leaves,
            self.first_position,
            self.last,
            self.seen,
            self.base,
            inputs,
        )
        step = forward(inputs.tokens, inputs.positions, inputs.slots, inputs.visible, **self.outputs)
        return step if leaves is None else self._without_first(step)
