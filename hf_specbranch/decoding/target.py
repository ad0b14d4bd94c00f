"""The target's side of a round: one pass over the last committed token and the chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..runners.base import Step
from ..runners.eager import EagerRunner
from ..stats import SpecBranchStats
from .records import Chain
from .text import Text


class Target:
    """Verifies chains with one model for a batch of rows.

    Slot and column agree: a token in column `c` of the text has its keys and values in slot `base + c`, where
    `base` counts tokens that are in the cache but not in the text (a chat's first turn, or embedded inputs).

    Args:
        runner: the target model and its cache.
        text: the committed text.
        prefill: runs the prompt through the model's own generation path and returns its output.
        attention: [B, base + P] bool, False where padded.
        first_position: [B] position of slot 0; negative where padded.
        outputs: what else the forward must return, e.g. `{"output_hidden_states": True}`.
        stats: where to count.
    """

    def __init__(
        self,
        runner: EagerRunner,
        text: Text,
        prefill: Callable[[], Any],
        attention: Tensor,
        first_position: Tensor,
        outputs: dict[str, Any],
        stats: SpecBranchStats,
    ) -> None:
        self.runner, self.device = runner, runner.device
        self.text, self.run_prefill, self.outputs, self.stats = text, prefill, outputs, stats
        self.base = attention.shape[1] - text.prompt_length
        self.first_position = first_position.to(self.device)[:, None]
        capacity = self.base + text.ids.shape[1]
        self.seen = torch.ones((attention.shape[0], capacity), dtype=torch.bool, device=self.device)
        self.seen[:, : attention.shape[1]] = attention
        self.slots = torch.arange(capacity, device=self.device)

    def prefill(self) -> Step:
        """Read the prompt; logits [B, 1, V] for the first new token."""
        filled = self.base + self.text.prompt_length
        self.runner.place((self.slots[:filled] + self.first_position).clamp(min=0))
        self.runner.cache.append()
        output = self.run_prefill()
        self._count()
        return Step(output.logits[:, -1:], output.get("hidden_states"), output.get("attentions"))

    def verify(self, chain: Chain) -> Step:
        """Logits [B, N + 1, V]: at each chain position, and at the branch point behind it."""
        tokens, columns = self.text.with_chain(chain)  # [B, N + 1]
        slots = (columns + self.base).to(self.device)
        shown = self.base + max(self.text.lengths) + chain.tokens.shape[1]
        self.runner.reserve(slots.shape[0], shown)
        visible = (self.slots[:shown] <= slots[:, :, None]) & self.seen[:, None, :shown]
        # In a batch, rows with a short chain are filled up; the filling must not leave the context.
        last = self.base + self.text.stopper.max_length - 1
        positions = (slots.clamp(max=last) + self.first_position).clamp(min=0)
        step = self.runner.forward(tokens.to(self.device), positions, slots, visible, **self.outputs)
        self._count()
        return step

    def _count(self) -> None:
        self.stats.target_forwards += 1
        self.stats.row_passes += self.text.done.count(False)
