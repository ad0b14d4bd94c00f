"""The target's side of a round with its inputs made by one kernel; it does what `Target` does."""

from __future__ import annotations

from collections.abc import Callable

from ..kernels.rounds import with_chain
from ..runtime.base import Step
from .quick_drafter import empty_tips
from .state import Chain
from .target import Target


class QuickTarget(Target):
    """A target on the device where the text is, whose passes are captured."""

    in_kernels = True

    def _pass(self, chain: Chain, shown: int, forward: Callable[..., Step]) -> Step:
        rows, count = chain.tokens.shape
        leaves = None if chain.leaves is None else (chain.leaves.tokens, chain.leaves.at)
        queries = count + 1 if leaves is None else count + 2 + leaves[0].shape[1]
        tips = empty_tips(rows, queries, min(shown, self.slots.shape[0]), self.device)
        text = self.text
        with_chain(
            text.ids, text.told, chain.tokens, leaves, self.first_position, self.last, self.seen, self.base, tips
        )
        step = forward(tips.tokens, tips.positions, tips.slots, tips.visible, **self.outputs)
        return step if leaves is None else self._behind_the_first(step)
