"""A head that drafts a block of tokens in one pass, in the place of the draft model (DFlash)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.rounds import ForwardInputs
from ..runtime.base import Step
from ..runtime.eager import make_spans
from .drafter import TorchDraftOps
from .head_model import HeadModel


class BlockModel(HeadModel):
    """Runs a block once per draft, and returns its logits step by step. See `HeadModel`.

    The distributions of a block do not depend on the tokens drafted in it, so drawn tokens stay exact: each is drawn
    from a distribution that is known before, and tested against it.

    Attributes:
        step: how many tokens of the draft there are.
    """

    in_blocks = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.step, self.drafted = 0, torch.empty(0)  # [B, block - 1, V'] logits of the last block
        self.order = torch.arange(self.runner.model.block, device=self.device)

    def forward(self, inputs: ForwardInputs, shown: int) -> Tensor:
        if self.step == 0:
            if not self.buffers.static_shapes:
                self.stats.draft_forwards += 1
                self.stats.draft_positions += len(self.order)
                shown = int(inputs.spans.max()) + len(self.order)
                self.runner.reserve(inputs.tokens.shape[0], shown)
            self.drafted = self._expanded(self._block(inputs, shown, len(self.order)).logits)[:, 1:]
        return self.drafted[:, self.step : self.step + 1]

    def _run(self, inputs: ForwardInputs, shown: int, **extra: int) -> Step:
        """Read part of the prompt; a block of one token goes with it."""
        return self._block(inputs, shown, 1)

    def _block(self, inputs: ForwardInputs, shown: int, count: int) -> Step:
        """Read the states of the columns before these tokens, and the block that begins with the last of the tokens."""
        last, order = inputs.slots[:, -1:], self.order[:count]
        block = (last + order).clamp(max=self.positions.shape[1] - 1)  # [B, N]
        tokens = torch.where(order == 0, inputs.tokens[:, -1:], self.runner.model.mask_token)
        columns = torch.cat([(inputs.slots - 1).clamp(min=0), block], dim=1)
        spans = make_spans((self.first - 1).clamp(min=0), block[:, -1:].expand_as(block) + 1)
        return self.runner.forward_uncaptured(
            tokens, self.positions.gather(1, columns), columns, self.runner.visible(spans, shown, self.seen),
            states=self.states.read(inputs),
        )  # fmt: skip


class BlockDraftOps(TorchDraftOps):
    """See `DraftOps`: says which token of a block is wanted."""

    model: BlockModel

    def draft_inputs(self, step: int) -> ForwardInputs | None:
        self.model.step = step
        return super().draft_inputs(step)

    def release(self) -> None:
        self.model.step, self.model.drafted = 0, self.model.drafted[:0]
