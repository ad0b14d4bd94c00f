"""A head of the target in the place of the draft model: it also reads the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.rounds import ForwardInputs
from ..runtime.base import Step
from ..runtime.eager import NOTHING, EagerRunner, make_spans
from ..runtime.static_buffers import Buffers
from ..stats import SpecBranchStats
from ..target_heads.base import DraftVocabulary
from .draft_model import DraftModel
from .scoring import Processor
from .target_states import TargetStates
from .text import Text

CHUNK = 1024  # columns of the prompt that are read in one pass


class HeadModel(DraftModel):
    """Runs a head on columns of the text, each with its state. See `DraftModel` for the other arguments.

    Columns that were drafted are read again once the target has read them: its states take the place of the head's own.

    Args:
        text: the committed text.
        gamma: the most draft tokens.
        target_layers: of the target.
    """

    states: TargetStates

    def __init__(
        self,
        buffers: Buffers,
        runner: EagerRunner,
        attention: Tensor,
        vocabulary: int,
        processors: Sequence[Processor],
        capacity: int,
        stats: SpecBranchStats,
        ends: frozenset[int],
        text: Text,
        gamma: int,
        target_layers: int,
    ) -> None:
        super().__init__(buffers, runner, attention, vocabulary, processors, capacity, stats, ends)
        self.name, self.reread = runner.model.source, gamma + 2
        self.states = TargetStates(buffers, runner.model, text, self.first, capacity, target_layers)
        if (tokens := runner.model.token_ids) is not None:
            self.shortlist = DraftVocabulary(tokens, runner.model.config.vocab_size)
        self.earliest = self.first  # columns before it have no state

    def prefill(self, tokens: Tensor) -> None:
        """Read a text [B, P]. Nothing is reused: the states are of this call."""
        self.runner.remembered = NOTHING
        self.stats.draft_forwards += 1
        self.runner.cache.forget()
        for begin in range(0, tokens.shape[1], CHUNK):
            columns = torch.arange(begin, min(begin + CHUNK, tokens.shape[1]), device=self.device)
            columns = torch.maximum(columns, self.first)  # [B, N]
            reached = max(begin + columns.shape[1], int(columns.max()) + 1)
            inputs = self._inputs(tokens, columns)
            self.runner.reserve(tokens.shape[0], reached)
            step = self._run(inputs, reached, **self.runner.last_logits_only)
        if self.guide is not None:  # the guide must see every prefix, the prompt included
            end = torch.tensor([tokens.shape[1]])
            self.next_distribution(tokens, end, self._expanded(step.logits[:, -1:]))

    def forward(self, inputs: ForwardInputs, shown: int) -> Tensor:
        if not self.buffers.static_shapes:
            self.stats.draft_forwards += 1
            self.stats.draft_positions += inputs.tokens.shape[1]
            shown = int(inputs.spans.max())
            self.runner.reserve(inputs.tokens.shape[0], shown)
        step = self._run(inputs, shown)
        assert step.hidden_states is not None
        self.states.write(inputs, step.hidden_states[0])
        return self._expanded(step.logits)

    def _inputs(self, tokens: Tensor, columns: Tensor) -> ForwardInputs:
        read = tokens.gather(1, columns.clamp(max=tokens.shape[1] - 1))
        return ForwardInputs(read, columns, self.positions.gather(1, columns), make_spans(self.first, columns + 1))

    def _run(self, inputs: ForwardInputs, shown: int, **extra: int) -> Step:
        visible = self.runner.visible(inputs.spans, shown, self.seen)
        states = self.states.read(inputs)
        # Its inputs are more than a captured forward is given; stages are captured as a whole.
        return self.runner.forward_uncaptured(
            self.own_tokens(inputs.tokens), inputs.positions, inputs.slots, visible, states=states, **extra
        )

    def move(self, source: Tensor, destination: Tensor) -> None:
        super().move(source, destination)
        self.states.move(source, destination)
