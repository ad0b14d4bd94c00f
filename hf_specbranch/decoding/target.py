"""The target's side of a round: one pass over the last committed token and the draft tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from ..config import BLOCK_SIZE
from ..fallback import FallBack
from ..kernels.rounds import ForwardInputs, verify_inputs
from ..runtime.base import Step
from ..runtime.eager import NOTHING, EagerRunner, Remembered, leading_padding, make_spans
from ..runtime.prefill import can_prefill, prefill
from ..runtime.prefix_reuse import remember, reusable_tokens
from ..runtime.static_buffers import Buffers
from ..stats import SpecBranchStats
from .model_inputs import ModelInputs
from .pass_memory import PassMemory
from .resolve import DraftTokens, TreeLeaves
from .target_states import TargetStates
from .text import Text


class Target:
    """Runs the target over draft tokens, for a batch of rows.

    Slot and column agree: a token in column `c` of the text has its keys and values in slot `base + c`, where
    `base` counts tokens that are in the cache but not in the text (a chat's first turn, or embedded inputs).

    Args:
        buffers: where the memory comes from and the pass runs.
        runner: the target model and its cache.
        text: the committed text.
        prefill: runs the prompt through the model's own generation path and returns its output.
        attention: [B, base + P] bool, False where padded.
        first_position: [B] position of slot 0; negative where padded.
        capacity: the most slots a row can take.
        outputs: what else the forward must return, e.g. `{"output_hidden_states": True}`.
        feature_layers: the hidden states that hooks want to read.
        stats: where to count.
        tokens_alone: stages are captured, and the prompt is nothing but tokens that may be read in any way. What is in
            the cache is the beginning of the text.
        further: what else the forward is given after the prompt.
        axes: [axes, B, 1] what to add to a position of the text for each of a model's axes, if it has several.
        in_triton: make the inputs of a pass in one kernel.
        reuses_prefix: a prompt that begins like the last text is not read again from the start.
        ranks: the processes of a tensor parallel model, which run the same passes; see `parallel_ranks`.
        unpadded: nothing is hidden by `attention`; None: the device is asked.
    """

    def __init__(
        self,
        buffers: Buffers,
        runner: EagerRunner,
        text: Text,
        prefill: Callable[[TargetStates | None], Any],
        attention: Tensor,
        first_position: Tensor,
        capacity: int,
        outputs: dict[str, Any],
        feature_layers: tuple[int, ...],
        stats: SpecBranchStats,
        tokens_alone: bool = False,
        further: ModelInputs | None = None,
        axes: Tensor | None = None,
        in_triton: bool = False,
        reuses_prefix: bool = False,
        ranks: Any = None,
        unpadded: bool | None = None,
    ) -> None:
        self.reuses_prefix, self.ranks = reuses_prefix, ranks
        self.together = nullcontext if ranks is None else ranks.together
        self.unpadded = bool(attention.all()) if unpadded is None else unpadded
        self.buffers, self.runner, self.device = buffers, runner, runner.device
        self.text, self.run_prefill, self.outputs, self.stats, self.in_triton = text, prefill, outputs, stats, in_triton
        self.tokens_alone, self.further = tokens_alone, further or ModelInputs()
        self.has_further = bool(self.further.names)
        rows, filled = attention.shape
        self.base = filled - text.prompt_length
        self.base_on_device = buffers.tensor("target.base", (1,)).fill_(self.base)
        self.first_position = buffers.tensor("target.first_position", (rows, 1))
        self.first_position.copy_(first_position[:, None])
        self.axes = axes if axes is not None and bool(axes.any()) else None  # text alone has the same on all axes
        if runner.rotary:
            runner.lag = self.first_position.max() - self.first_position
        # Draft tokens, and padding of short drafts, must not leave the context.
        last = self.base + text.stopper.max_length - 1
        if runner.learned_positions is not None:
            last = min(last, runner.learned_positions - 1 - int(first_position.max()))
        self.last, self.room = buffers.tensor("target.last", (1,)).fill_(last), last + 2 - self.base
        self.seen = buffers.tensor("target.seen", (rows, capacity), torch.bool).fill_(True)
        self.seen[:, :filled] = attention
        self.first = buffers.tensor("target.first", (rows, 1))  # the first slot that is not padding
        self.first.copy_(leading_padding(attention))
        # A pass over the last token of rows of one length needs no mask.
        optional = runner.masks.optional and ranks is None
        self.nothing_hidden = not buffers.static_shapes and optional and self.unpadded
        self.slots = torch.arange(capacity, out=buffers.tensor("target.slots", (capacity,)))
        self.feature_layers, self.last_width = feature_layers, 0
        self.states: TargetStates | None = None  # keeps the hidden states of the prompt, if a head drafts
        self.started: Step | None = None  # the pass that reads the prompt, if it was launched already

    def start_prefill(self) -> None:
        """Launch the pass that reads the prompt, so that the device works while the host prepares a draft."""
        self.started = self._prefill()

    def prefill(self) -> Step:
        """Read the prompt; logits [B, 1, V] for the first new token."""
        step, self.started = self.started or self._prefill(), None
        return step

    def _prefill(self) -> Step:
        if self.ranks is not None:
            self.ranks.order_prefill(self.runner, self.seen.shape[1])
        with self.together():
            return self._read_prompt()

    def _read_prompt(self) -> Step:
        self._count()
        # However the prompt is read, what was in the cache is overwritten from now on.
        remembered, self.runner.remembered = self.runner.remembered, NOTHING
        prompt = self.text.ids[:, : self.text.prompt_length]
        padded = not self.unpadded and bool(self.first.any())
        if self.tokens_alone and can_prefill(self.runner, prompt, padded):
            positions = self._positions(self.slots[None])  # [B, capacity]
            given = max((layer.appended for _, layer in self.runner.cache.slot_layers()), default=0)
            # Padding shifts positions, and keys and values from the caller may come from other weights.
            self.reuses_prefix = self.reuses_prefix and not padded and not given
            self.stats.reused_tokens += (reused := self._reusable_tokens(remembered, prompt))
            keep, outputs = None, {}
            if self.states is not None:
                keep, outputs = self.states.record_pass, self.states.outputs
            logits = prefill(self.runner, prompt, positions, self.first, given or reused, keep, **outputs)
            return Step(self.buffers.keep("target.logits1", logits))
        filled = self.base + self.text.prompt_length
        # Not clamped: a token before others that are hidden leaves a window after as many slots as any other.
        self.runner.place(self.slots[:filled] + self.first_position)
        self.runner.cache.append()
        output = self.run_prefill(self.states)
        layers = self.runner.cache.slot_layers()
        if (read := {layer.appended for _, layer in layers}) != {filled} and (layers or not self.runner.is_recurrent):
            # Images without tokens in their place, or layers that attend to something else than the text.
            raise FallBack(f"{type(self.runner.model).__name__} keeps {sorted(read)} tokens of a prompt of {filled}")
        self.runner.cache.mark(filled)
        logits = output.logits[:, -1:]
        hidden = output.get("hidden_states")
        if self.states is not None:
            self.states.record_prompt(hidden, self.text.prompt_length)
            hidden = None if any(layer is None for layer in hidden) else hidden  # only what the head reads
        if self.buffers.static_shapes:
            return Step(self.buffers.keep("target.logits1", logits))
        return Step(logits, hidden, output.get("attentions"))

    @cached_property
    def memory(self) -> PassMemory:
        """The memory of captured passes."""
        return PassMemory(self.buffers, self.seen.shape[0], self.feature_layers)

    def verify(self, draft_tokens: DraftTokens, width: int = 0) -> Step:
        """Return logits [B, N + 1 + W, V]: at each draft position, at the branch point, and after each tree leaf.

        In captured stages, one writes the inputs of the pass, and another one is the pass itself, which takes most of
        the time of a capture. So plans share it: with tree leaves, one row always reads a block of tokens.

        Args:
            draft_tokens: what to verify.
            width: the fewest tokens that a captured pass with tree leaves reads.
        """
        again = draft_tokens.leaves is not None
        leaves = 0 if draft_tokens.leaves is None else draft_tokens.leaves.tokens.shape[1]
        rows, count = draft_tokens.tokens.shape
        shown, queries = self.base + self.text.reach + count + leaves, count + 1 + leaves
        self.runner.reserve(rows, shown)
        self._count()
        self.stats.target_positions += again + queries
        if not self.buffers.static_shapes:
            return self._pass(draft_tokens, shown)
        width = max(again + queries, width, BLOCK_SIZE if again and rows == 1 else 0)
        self.last_width = width
        shown, inputs = self.runner.bucket(shown), self.memory.inputs(width)
        written = ("verify inputs", width, again, count, leaves, draft_tokens.memory)
        self.buffers.run(written, lambda: self._write(draft_tokens, inputs), only_our_kernels=self.in_triton)
        key = ("verify", width, again, shown)
        if self.ranks is not None:
            self.ranks.order_stage(self.buffers, key, width, shown)
        only_ours = self.in_triton and self.ranks is None
        with self.together():
            self.buffers.run(key, lambda: self._read(inputs, again, shown), only_our_kernels=only_ours)
        return self.memory.kept(width - again, queries)

    def _reusable_tokens(self, remembered: Remembered, prompt: Tensor) -> int:
        """Return how many tokens of the prompt [B, P] are in the cache."""
        if not self.reuses_prefix or not remembered.tokens:
            return 0
        return reusable_tokens(remembered, self.runner.model, prompt[0].tolist())

    def remember(self, tokens: list[int]) -> None:
        """Keep in mind a text of one row, whose keys and values are in the cache but for the last two tokens.

        The last token is never read, and a tree leaf before it may not be in its place.
        """
        if self.reuses_prefix and self.tokens_alone and self.runner.takes_spans:
            self.runner.remembered = remember(self.runner.model, tokens[:-2])

    def check_room(self) -> None:
        """Refuse to go on after the last position that the model has learned, as it does itself."""
        if max(self.text.lengths) > self.room:
            raise ValueError(
                f"the text has outgrown the {self.runner.learned_positions} positions that "
                f"{type(self.runner.model).__name__} has learned: ask for fewer new tokens"
            )

    def leave_rotary(self) -> None:
        """Leave frequencies that depend on length as plain `generate()` would; it does not feed the last token."""
        if self.runner.rotary:
            fed = self.base + max(self.text.lengths) - 1 + int(self.first_position.max())
            like = self.runner.model.get_input_embeddings().weight
            self.runner.rotary.advance(fed, torch.empty(1, dtype=like.dtype, device=like.device))

    def read_skipped_token(self) -> None:
        """Read a tree leaf that has become text, so that its keys and values are in their place.

        Rounds with tree leaves do so by themselves; this is for another plan that takes over. It replays the pass of
        the last round.
        """
        if self.text.skips:
            rows = self.text.ids[:, :0]
            self.verify(DraftTokens(rows, self.text.length, leaves=TreeLeaves(rows, rows)), self.last_width)

    def read_columns(self, first: int, last: int) -> Step:
        """Read text that is final, columns `first` to `last` (exclusive); logits [B, last - first, V].

        Rows that have read some of these columns read them again. With recurrent layers they cannot: such a row begins
        at its last column, and what it reads too far is never used. Its logits for earlier columns mean nothing.
        """
        rows, count = self.text.ids.shape[0], last - first
        columns = self.slots[None, first:last].expand(rows, -1)
        if self.runner.is_recurrent:
            begin = torch.tensor(self.text.lengths, device=self.device)[:, None] - 1
            columns = begin.clamp(min=first) + self.slots[:count]
        shown = self.base + int(columns.max()) + 1
        self.runner.reserve(rows, shown)
        self._count()
        slots = self.base + columns
        spans = make_spans(self.first, slots + 1)
        tokens = self.text.ids.to(self.device).gather(1, columns.clamp(max=self.text.ids.shape[1] - 1))
        further, positions = self.further.of(count), self._positions(slots)
        if self.ranks is not None:
            self.ranks.order_pass(ForwardInputs(tokens, slots, positions, spans), shown)
        with self.together():
            visible, positions = self.runner.visible(spans, shown, self.seen), self._on_all_axes(positions)
            # Of any length, so not worth a capture.
            step = self.runner.forward_uncaptured(tokens, positions, slots, visible, **self.outputs, **further)
        return step if not self.runner.is_recurrent else step.aligned((first - columns[:, :1]) + self.slots[:count])

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, visible: Tensor | int, **outputs: Any) -> Step:
        """A pass outside captured stages; one that is given something else is not captured either."""
        positions = self._on_all_axes(positions)
        if not self.has_further and self.axes is None and self.ranks is None:
            return self.runner.forward(tokens, positions, slots, visible, **outputs)
        outputs |= self.further.of(tokens.shape[1])
        return self.runner.forward_uncaptured(tokens, positions, slots, visible, **outputs)

    def _pass(self, draft_tokens: DraftTokens, shown: int) -> Step:
        """Run a pass eagerly."""
        if self.nothing_hidden and draft_tokens.is_empty and len(set(self.text.lengths)) == 1:
            tokens, columns = self.text.last_and_draft(draft_tokens)
            slots = columns.to(self.device) + self.base_on_device
            return self.forward(tokens.to(self.device), self._positions(slots), slots, shown, **self.outputs)
        inputs = self._inputs_in_torch(draft_tokens)
        if self.ranks is not None:
            self.ranks.order_pass(inputs, shown)
        step = self.run(inputs, shown, self.forward)
        return step if draft_tokens.leaves is None else self._without_first(step)

    def _write(self, draft_tokens: DraftTokens, inputs: ForwardInputs) -> None:
        """The stage before a captured pass: write its inputs."""
        if self.in_triton:
            self._inputs_in_triton(draft_tokens, inputs)
        else:
            for memory, values in zip(inputs, self._inputs_in_torch(draft_tokens)):
                memory.copy_(values[:, :1])  # what is not needed is the first token once more
                memory[:, : values.shape[1]] = values

    def _read(self, inputs: ForwardInputs, again: bool, shown: int) -> None:
        """The stage of a captured pass: read its inputs, and keep the results."""
        if self.ranks is not None:
            self.ranks.share_inputs(inputs)
        step = self.run(inputs, shown, self.runner.forward_uncaptured)
        self.memory.keep(self._without_first(step) if again else step)

    def run(self, inputs: ForwardInputs, shown: int, forward: Callable[..., Step]) -> Step:
        """Run a pass over these inputs, which reads so many slots."""
        with self.together():
            visible = self.runner.visible(inputs.spans, shown, self.seen)
            return forward(inputs.tokens, inputs.positions, inputs.slots, visible, **self.outputs)

    # ---- one operation, in torch and in Triton

    def _inputs_in_torch(self, draft_tokens: DraftTokens) -> ForwardInputs:
        """Return what the target reads: the last token and the draft; with leaves also the token before, and these."""
        tokens, columns = self.text.last_and_draft(draft_tokens)  # [B, N + 1]
        leaves = draft_tokens.leaves
        if leaves is None:
            slots = columns.to(self.device) + self.base_on_device
            spans = make_spans(self.first, slots + 1)
            return ForwardInputs(tokens.to(self.device), slots, self._positions(slots), spans)
        again, before = self.text.before_last()
        tokens = torch.cat([again, tokens, leaves.tokens.to(tokens.device)], dim=1).to(self.device)
        slots = torch.cat([before, columns], dim=1).to(self.device) + self.base_on_device  # [B, N + 2]
        # A leaf sees the draft tokens before its position, and itself, in a slot after the draft.
        places = slots[:, 1:2] + 1 + leaves.at.clamp(min=0).to(self.device)  # [B, W]
        own = slots[:, -1:] + 1 + self.slots[: leaves.at.shape[1]]  # [B, W]
        spans = torch.cat([make_spans(self.first, slots + 1), make_spans(self.first, places, own, own + 1)], dim=1)
        positions = self._positions(torch.cat([slots, places], dim=1))
        return ForwardInputs(tokens, torch.cat([slots, own], dim=1), positions, spans)

    def _inputs_in_triton(self, draft_tokens: DraftTokens, inputs: ForwardInputs) -> None:
        """The same in one kernel, into given memory."""
        leaves = None if draft_tokens.leaves is None else (draft_tokens.leaves.tokens, draft_tokens.leaves.at)
        verify_inputs(
            self.text.ids, self.text.result.packed, draft_tokens.tokens, leaves, self.first_position, self.last,
            self.first, self.base_on_device, inputs,
        )  # fmt: skip

    # ----

    def _without_first(self, step: Step) -> Step:
        """Drop the token that was read again."""
        states = cast("tuple[Tensor, ...] | None", step.hidden_states)
        return Step(step.logits[:, 1:], None if states is None else tuple(state[:, 1:] for state in states))

    def _on_all_axes(self, positions: Tensor) -> Tensor:
        """[B, Q], or [axes, B, Q]."""
        return positions if self.axes is None else positions + self.axes

    def _positions(self, slots: Tensor) -> Tensor:
        return (torch.minimum(slots, self.last) + self.first_position).clamp(min=0)

    def _count(self) -> None:
        self.stats.target_forwards += 1
        self.stats.row_passes += self.text.done.count(False)
