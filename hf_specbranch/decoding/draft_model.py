"""The draft model: it maps columns of the text to distributions over the target's vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.rounds import ForwardInputs
from ..model_state import state_of
from ..runtime.eager import NOTHING, EagerRunner, Remembered, leading_padding, make_spans
from ..runtime.prefill import can_prefill, prefill
from ..runtime.static_buffers import Buffers
from ..stats import SpecBranchStats
from .scoring import ExactScorer, Guide, Prefixes, Processor, Scorer, StaticScorer, can_guide

if TYPE_CHECKING:
    from ..layers.shortlist import Shortlist
    from ..target_heads.base import DraftVocabulary
    from .target_states import TargetStates

MOST_AHEAD = 1024  # tokens that a draft reads while the target does


class DraftModel:
    """Runs the draft on columns of the text and applies the user's processors to its logits.

    Args:
        buffers: where the memory comes from.
        runner: the model and its cache.
        attention: [B, P] bool, False where the prompt is padded.
        vocabulary: size of the target's vocabulary, which drafted tokens must fit.
        processors: the user's logits processors.
        capacity: the most columns the text can reach.
        stats: where to count forwards.
        ends: the end-of-sequence tokens, after which no stateful processor is called.

    Attributes:
        name: what has drafted, for the statistics.
        reread: how many of the last columns the next new draft begins with reading, at most.
        in_blocks: one pass drafts all tokens.
        known_tokens: returns the text of the one row, without padding, as the host knows it; None: the device is asked.
        states: the target's hidden states, if the model reads them (`HeadModel`).
        expands: `forward` returns logits of the whole vocabulary, where a shortlist scores only part of it.
    """

    in_blocks, expands = False, True
    name, reread = "draft model", 2  # the target's own token, and the one before it if the whole draft was accepted
    states: TargetStates | None = None
    known_tokens: Callable[[], list[int]] | None = None

    def __init__(
        self,
        buffers: Buffers,
        runner: EagerRunner,
        attention: Tensor,
        vocabulary: int,
        processors: Sequence[Processor],
        capacity: int,
        stats: SpecBranchStats,
        ends: frozenset[int] = frozenset(),
    ) -> None:
        self.buffers, self.runner, self.device, self.stats = buffers, runner, runner.device, stats
        rows, length = attention.shape
        self.seen = buffers.tensor("draft.seen", (rows, capacity), torch.bool).fill_(True)
        self.seen[:, :length] = attention
        self.first = buffers.tensor("draft.first", (rows, 1))  # the first column that is not padding
        self.first.copy_(leading_padding(attention))
        columns = torch.arange(capacity, device=self.device)
        # Positions past the draft's context are clamped to its end: drafts there are weak, but must not fail.
        self.last_position = None if runner.position_limit is None else runner.position_limit - 1
        padding = (~attention).sum(1, keepdim=True).to(self.device)
        self.positions = buffers.tensor("draft.positions", (rows, capacity))  # by column
        self.positions.copy_((columns - padding).clamp(min=0, max=self.last_position))
        self.shortlist: Shortlist | DraftVocabulary | None = state_of(runner.model).shortlist
        if self.shortlist is not None and length == 0:  # no text is read, and that of the last call must go
            self.shortlist.add_text([])
        self.vocabulary, self.own_vocabulary, self.processors = vocabulary, runner.vocabulary, processors
        # The first column that can be read again: for all rows, or [B, 1]. A recurrent state before it is not kept.
        self.earliest: int | Tensor = buffers.tensor("draft.earliest", (1,)) if runner.is_recurrent else 0
        self.scorer: Scorer | None = None
        if processors:
            if buffers.static_shapes:
                self.scorer = StaticScorer(processors, buffers, "draft", rows, vocabulary)
            else:
                self.scorer = ExactScorer(processors, self.device)
        # A guide follows one pending draft, from a prompt it has read; rows of a batch would each need their own state.
        guided = rows == 1 and length > 0 and any(can_guide(processor) for processor in processors)
        self.guide = Guide.for_draft(processors, length, ends, self.device) if guided else None

    def set_padding(self, padding: Tensor, length: int) -> None:
        """Note how many columns [B, 1] come before each row's text, in a prompt of `length` columns."""
        columns = torch.arange(self.seen.shape[1], device=self.device)
        self.first.copy_(padding)
        self.seen.copy_((columns >= padding) | (columns >= length))
        self.positions.copy_((columns - padding).clamp(min=0, max=self.last_position))

    def prefix_length(self, length: int, start: Tensor) -> int:
        """Return how many columns to prefill: what is read again from `start` [B] on must not be in a state yet."""
        return int(start.min()) if self.runner.is_recurrent else length

    def prefill(self, tokens: Tensor) -> None:
        """Read a text [B, P], except for its beginning if that is in the cache already."""
        remembered, self.runner.remembered = self.runner.remembered, NOTHING
        self.stats.draft_forwards += 1
        known = None if self.known_tokens is None else [self.known_tokens()[: tokens.shape[1]]]
        if self.shortlist is not None:
            self.shortlist.add_text(known or tokens.tolist())
        if self.runner.is_recurrent and isinstance(self.earliest, Tensor):
            self.earliest.fill_(tokens.shape[1])
        attention = self.seen[:, : tokens.shape[1]]
        mask = None if known or bool(attention.all()) else attention.long()
        start = 0
        if mask is None and self.guide is None and tokens.shape[0] == 1 and not self.runner.is_recurrent:
            self.runner.remembered = Remembered((known or tokens.tolist())[0])
            if self.runner.takes_spans or not self.buffers.static_shapes:  # under masks, it would be captured again
                start = remembered.common_prefix(self.runner.remembered.tokens, with_last=True)
        if start == tokens.shape[1]:
            return
        if self.buffers.static_shapes and can_prefill(self.runner, tokens, padded=mask is not None):
            prefill(self.runner, self.own_tokens(tokens), self.positions, self.first, start)
            return
        if start > 0:
            self._read(tokens, start)
            return
        self.runner.cache.forget()
        logits = self.runner.prefill(self.own_tokens(tokens), self.positions[:, : tokens.shape[1]], mask)
        if self.guide is not None:  # the guide must see every prefix, the prompt included
            self.next_distribution(tokens, torch.tensor([tokens.shape[1]]), self._expanded(logits[:, None]))

    def begin_without_text(self) -> None:
        """Give a recurrent draft the states before the first token, where the prompt has none (`inputs_embeds`).

        Its layers make their states in a first pass, over a token that is forgotten.
        """
        self.runner.remembered = NOTHING
        self.stats.draft_forwards += 1
        self.runner.cache.forget()
        self.runner.prefill(torch.zeros_like(self.positions[:, :1]), self.positions[:, :1], None)
        self.runner.cache.forget()
        self.runner.cache.mark(0)

    def _read(self, tokens: Tensor, start: int) -> None:
        """Read the columns of a text [1, P] from `start` on."""
        columns = torch.arange(start, tokens.shape[1], device=self.device)[None]
        self.runner.reserve(1, tokens.shape[1])
        visible = self.runner.visible(make_spans(self.first, columns + 1), tokens.shape[1], self.seen)
        positions = self.positions[:, start : tokens.shape[1]]
        # Of any length, so not worth a capture.
        self.runner.forward_uncaptured(self.own_tokens(tokens[:, start:]), positions, columns, visible)

    def forward(self, inputs: ForwardInputs, shown: int) -> Tensor:
        """Return logits [B, Q, V] of the draft.

        Args:
            inputs: what it reads.
            shown: how many slots it reads, with static shapes; otherwise as many as are in use.
        """
        tokens = self.own_tokens(inputs.tokens)
        if self.buffers.static_shapes:
            visible = self.runner.visible(inputs.spans, shown, self.seen)
            return self._expanded(
                self.runner.forward_uncaptured(tokens, inputs.positions, inputs.slots, visible).logits
            )
        self.stats.draft_forwards += 1
        self.stats.draft_positions += tokens.shape[1]
        shown = int(inputs.spans.max())
        self.runner.reserve(tokens.shape[0], shown)
        visible = self.runner.visible(inputs.spans, shown, self.seen)
        return self._expanded(self.runner.forward(tokens, inputs.positions, inputs.slots, visible).logits)

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy what belongs to `source` slots to `destination` slots, both [B, N]."""
        self.runner.move(source, destination)

    def _expanded(self, logits: Tensor) -> Tensor:
        """Return logits over the draft's vocabulary; a shortlist scores only part of it."""
        return logits if self.shortlist is None or not self.expands else self.shortlist.expand(logits)

    def distribution(self, logits: Tensor, prefixes: Callable[[], Prefixes], guides: list[Guide]) -> Tensor:
        """Return probabilities [B, n, V] over the target's vocabulary, after the processors.

        Args:
            logits: [B, n, V'] from the model.
            prefixes: the text before each position.
            guides: for a single row, one per position; otherwise none.
        """
        if not guides:
            return self.scores(logits, prefixes).softmax(-1)
        logits = fit_vocabulary(logits.to(self.device, torch.float32), self.vocabulary)
        texts = prefixes().exact()[0]
        scored = [guide.score(texts[j], logits[:, j]) for j, guide in enumerate(guides)]
        return torch.stack(scored, dim=1).softmax(-1)

    def scores(self, logits: Tensor, prefixes: Callable[[], Prefixes]) -> Tensor:
        """Return scores [B, n, V] over the target's vocabulary, after the processors."""
        logits = fit_vocabulary(logits.to(self.device, torch.float32), self.vocabulary)
        return logits if self.scorer is None else self.scorer(logits, prefixes)

    def next_distribution(self, ids: Tensor, end: Tensor, logits: Tensor) -> Tensor:
        """Return distributions [B, V] after each row's last column, given logits [B, Q, V] for its last `Q` columns."""
        if self.guide is None:
            return self.distribution(logits[:, -1:], lambda: Prefixes(ids[:, None], end[:, None]), [])[:, 0]
        for j in range(logits.shape[1]):
            length = int(end[0]) - logits.shape[1] + 1 + j
            if length == self.guide.seen:  # it has seen the earlier prefixes
                prefix = Prefixes(ids[:, None], end.new_full((1, 1), length))
                q = self.distribution(logits[:, j : j + 1], lambda prefix=prefix: prefix, [self.guide])  # type: ignore[misc]
        return q[:, 0]

    def own_tokens(self, tokens: Tensor) -> Tensor:
        """Replace tokens that the draft has no embedding for by its last one; that costs only acceptance."""
        return tokens if self.own_vocabulary >= self.vocabulary else tokens.clamp(max=self.own_vocabulary - 1)


def read_ahead(runner: EagerRunner, tokens: Tensor, known: list[int]) -> None:
    """Launch the passes over a prompt [1, P] without padding. The `DraftModel` that is made later reads no token again.

    Of a long prompt it does nothing: the target fills the device, and the first token would have to wait.

    Args:
        runner: the draft and its cache.
        tokens: the prompt.
        known: the same tokens on the host.
    """
    start, last = runner.remembered.common_prefix(known, with_last=True), runner.position_limit
    if len(known) - start > MOST_AHEAD:
        return
    runner.remembered = NOTHING
    if start < len(known):
        positions = torch.arange(len(known), device=runner.device)[None].clamp(max=None if last is None else last - 1)
        own = tokens.clamp(max=runner.vocabulary - 1)
        prefill(runner, own, positions, torch.zeros_like(positions[:, :1]), start)
    runner.remembered = Remembered(known)


def fit_vocabulary(logits: Tensor, size: int) -> Tensor:
    """Cut or pad [..., V] to the target's vocabulary; a padded token has probability 0."""
    missing = size - logits.shape[-1]
    if missing <= 0:
        return logits[..., :size]
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
