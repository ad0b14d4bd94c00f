"""The target's hidden states by column, for a head that reads them.

An entry holds the state that the token in a column is read with (`TargetHead`): the target's, once it has read the
column before, or the head's own while the target has not. Entries are addressed like the slots of the head's KV cache:
columns of the text first, then the slots of side branches. So states roll back with the text, row by row: after a
rejection the entries up to the end of the text are the target's, and later ones are written again before they are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.utils import output_capturing

from ..kernels.rounds import ForwardInputs
from ..runtime.base import Step
from ..runtime.static_buffers import Buffers
from .text import Text

# From transformers 5.23 on, a selection of hidden states counts them from the embeddings, as all of them are counted.
# Before, it counted layers, and the states of the embeddings were not among those returned.
COUNTS_EMBEDDINGS = hasattr(output_capturing, "selected_hidden_states")


class TargetStates:
    """Holds the states of a batch, on the head's device.

    Args:
        buffers: where the memory comes from; those of the drafter.
        head: the `TargetHead`, which encodes the target's hidden states.
        text: the committed text.
        first: [B, 1] the first column that is not padding. Changed in place: the first column with a state.
        capacity: room for this many columns and slots.
        target_layers: of the target.
    """

    def __init__(
        self, buffers: Buffers, head: Any, text: Text, first: Tensor, capacity: int, target_layers: int
    ) -> None:
        self.head, self.text, self.first, self.capacity, self.serial = head, text, first, capacity, buffers.serial
        self.target_layers = target_layers
        self.device, rows = buffers.device, first.shape[0]
        # The last entry is scratch.
        self.entries = buffers.tensor("states", (rows, capacity + 2, head.state_size), head.dtype)
        self.rows = torch.arange(rows, out=buffers.tensor("states.rows", (rows,)))[:, None]
        self.order = torch.arange(capacity, out=buffers.tensor("states.order", (capacity,)))
        self.padded = torch.where(first > 0, first + 1, 0)  # the first token after padding has no state
        self.begin = capacity

    # ---- what the target has read

    @property
    def outputs(self) -> dict[str, Any]:
        """The arguments with which the target returns the hidden states of a prompt: few layers, if it can."""
        layers = self.head.state_layers
        if COUNTS_EMBEDDINGS:
            return {"output_hidden_states": layers}
        return {"output_hidden_states": tuple(layer - 1 for layer in layers) if min(layers) > 0 else True}

    def record_prompt(self, hidden: Sequence[Tensor], end: int, count: int | None = None) -> None:
        """Keep the states of the columns before column `end` of the prompt.

        What comes before them has no states, e.g. because its keys and values were given.

        Args:
            hidden: as the target returns them: of all layers after the embeddings, or of those asked for.
            end: the column after the last.
            count: how many of the last columns; by default all that were read.
        """
        with_embeddings = len(hidden) > self.target_layers and (COUNTS_EMBEDDINGS or hidden[0] is not None)
        by_layer = dict(enumerate(hidden, 0 if with_embeddings else 1))
        count = by_layer[self.head.state_layers[0]].shape[1] if count is None else count
        begin = max(0, end - count + 1)
        self.entries[:, begin : end + 1] = self._encoded(by_layer, end + 1 - begin)
        self.begin = min(self.begin, begin)
        self.first.copy_(self.padded.clamp(min=self.begin))

    def record_pass(self, step: Step, end: int, count: int) -> None:
        """The same for one of several passes over a prompt, in whose last `count` columns the text is."""
        assert isinstance(step.hidden_states, tuple)
        self.record_prompt(step.hidden_states, end, count)

    def record(self, step: Step, length: Tensor, accepted: Tensor, last_query: Tensor, count: int) -> None:
        """Keep the states of a pass over the last token of the text and the draft tokens.

        Args:
            step: the target's pass.
            length: [B] of the text before this round.
            accepted: [B] draft tokens that were accepted.
            last_query: [B] the query whose logits the last token was chosen from; it may be that of a tree leaf.
            count: how many draft tokens there were.
        """
        assert step.hidden_states is not None
        states = self._encoded(step.hidden_states)  # [B, N + 1 + W, S]
        length, accepted, last_query = (each.to(self.device)[:, None] for each in (length, accepted, last_query))
        self.entries[self.rows, length + self.order[: count + 1]] = states[:, : count + 1]
        after_last = length + accepted + (last_query > count)  # a leaf is one column further
        self.entries[self.rows, after_last] = states[self.rows, last_query]

    def _encoded(self, hidden: Mapping[int, Tensor] | Sequence[Tensor], last: int | None = None) -> Tensor:
        """Return states [B, N, S] for the columns after the last N, of all that was read by default."""
        layers = (hidden[layer] for layer in self.head.state_layers)
        shown = [(layer if last is None else layer[:, -last:]).to(self.device, self.head.dtype) for layer in layers]
        encoded: Tensor = self.head.encode(torch.cat(shown, dim=-1))
        return encoded

    # ---- what the head reads and writes

    def read(self, inputs: ForwardInputs) -> Tensor:
        """Return the states [B, Q, S] of tokens that the head is given.

        The first token of a side branch is in a slot of its own; its state is that of the column it may stand in.
        """
        _, end, own_first, own_end = inputs.spans.long().unbind(-1)
        return self.entries[self.rows, torch.where(own_end - own_first == 1, end, inputs.slots)]

    def write(self, inputs: ForwardInputs, states: Tensor) -> None:
        """Keep the head's own states [B, Q, S] for the tokens after these, where the target's are not known."""
        following = inputs.slots + 1
        is_open = following >= self.text.length.to(self.device)[:, None]
        self.entries[self.rows, torch.where(is_open, following, self.capacity + 1)] = states.to(self.entries.dtype)

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy the states for the tokens after `source` slots to those after `destination` slots, both [B, N]."""
        self.entries[self.rows, destination + 1] = self.entries[self.rows, source + 1]
