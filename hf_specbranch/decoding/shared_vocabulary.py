"""A draft model with another tokenizer that proposes the tokens which both vocabularies share.

Its logits over shared tokens become logits over the target's vocabulary; all others are left out, and `q` is what
remains, renormalised. Tokens are chosen or drawn from that `q`, so this is a draft model like any other: it branches,
drafts ahead and sends tree leaves.

The draft reads each token of the target as its own token with the same bytes. A token that it does not have is read as
several: these take more slots of its cache than the text has columns. `extra` counts them, and every place that the
drafter names by column is moved by it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.rounds import ForwardInputs
from ..layers.shortlist import FILLER
from ..runtime.eager import make_spans
from ..vocabularies import Translation
from .draft_model import DraftModel
from .drafter import Drafter
from .resolve import DraftTokens, Feedback
from .text import Text

MOST_PIECES = 8  # the last tokens of the draft that one of the target is read as
NAME = "draft model, shared vocabulary"


def spare_columns(reach: int) -> int:
    """Return the room for tokens that the draft reads as several, beside a text of `reach` columns."""
    return reach + 2 * MOST_PIECES


class TranslatedDraftModel(DraftModel):
    """Runs a draft model in places and tokens of the target's text. Arguments as in `DraftModel`, and:

    Args:
        translation: between the two vocabularies.
        spare: how many more slots than columns there may be.
    """

    def __init__(self, *args: Any, translation: Translation, spare: int) -> None:
        super().__init__(*args)
        self.translation, self.spare, self.guide = translation, spare, None
        self.table, self.shared, self.shared_by_draft = translation.on(self.device)
        rows, capacity = self.positions.shape
        self.columns = torch.arange(capacity, device=self.device)
        self.extra = self.buffers.tensor("draft.extra", (rows, capacity))  # slots minus columns, up to each column
        self.begins = self.buffers.tensor("draft.begins", (rows, 1))  # the first column whose slot is known
        # The inputs of the pass that reads a token as several.
        self.piece_tokens = self.buffers.tensor("draft.pieces", (rows, MOST_PIECES))
        self.piece_slots = self.buffers.tensor("draft.piece_slots", (rows, MOST_PIECES))
        self.most_extra = 0  # the largest `extra`
        self.first_tokens: list[int] = []  # of each row, in the draft's vocabulary
        self.paddings: list[int] = []

    def read_texts(self, texts: list[list[int | None]], begins: list[int]) -> None:
        """Read texts by column: re-encoded up to the columns `begins`, and token by token from there on.

        Args:
            texts: the target's tokens, None where the prompt is padded.
            begins: for each row, the first column whose slot must be known.
        """
        read, places = [], []
        for text, begin in zip(texts, begins):
            tokens, ends = self.translation.prompt([token for token in text[:begin] if token is not None]), []
            for token in text[begin:]:
                tokens += self.translation.pieces(token or 0)[-MOST_PIECES:]
                ends.append(len(tokens) - 1)
            cut = max(0, len(tokens) - len(text) - self.spare // 2)  # a draft may need far more tokens for a text
            read.append(tokens[cut:])
            places.append([max(0, end - cut) for end in ends])
        longest = max(map(len, read))
        self.paddings = [longest - len(tokens) for tokens in read]
        self.first_tokens = [tokens[0] for tokens in read]
        self.set_padding(torch.tensor(self.paddings, device=self.device)[:, None], longest)
        filled = [[0] * count + tokens for count, tokens in zip(self.paddings, read)]
        self.prefill(torch.tensor(filled, device=self.device))
        self._place(begins, places)

    def _place(self, begins: list[int], places: list[list[int]]) -> None:
        """Note the slots of the columns from `begins` on: `places`, before padding."""
        extra = torch.zeros(self.extra.shape, dtype=torch.long)
        for row, (begin, ends) in enumerate(zip(begins, places)):
            end = begin + len(ends)
            extra[row, begin:end] = torch.tensor(ends) + self.paddings[row] - torch.arange(begin, end)
            extra[row, end:] = extra[row, end - 1]
        self.most_extra = int(extra.max())
        self.extra.copy_(extra)
        self.earliest = self.begins.copy_(torch.tensor(begins)[:, None])
        self._set_positions()

    def _set_positions(self) -> None:
        self.positions.copy_((self.columns + self.extra - self.first).clamp(min=0, max=self.last_position))

    def add_pieces(self, columns: dict[int, int], tokens: dict[int, list[int]]) -> None:
        """Make room for tokens that are read as several; `forward_pieces` reads all but the last of each.

        Args:
            columns: by row, the column of the token.
            tokens: by row, the token before it and its own, in the draft's vocabulary, but for the last.
        """
        rows = range(self.extra.shape[0])
        extra = self.extra[list(rows), [columns.get(row, 1) - 1 for row in rows]].tolist()
        filled, slots = [], []
        for row in rows:
            if row in tokens:
                first, own = columns[row] - 1 + extra[row], tokens[row]
            else:  # read the first token again: that changes nothing
                first, own = self.paddings[row], [self.first_tokens[row]]
            places = [first + index for index in range(len(own))]
            filled.append(own + own[-1:] * (MOST_PIECES - len(own)))
            slots.append(places + places[-1:] * (MOST_PIECES - len(own)))
        self.piece_tokens.copy_(torch.tensor(filled))
        self.piece_slots.copy_(torch.tensor(slots))
        more = torch.tensor([[len(tokens.get(row, [0])) - 1] for row in rows], device=self.device)
        at = torch.tensor([[columns.get(row, 0)] for row in rows], device=self.device)
        self.extra += torch.where(self.columns >= at, more, 0)
        self._set_positions()
        self.most_extra += max(len(own) - 1 for own in tokens.values())

    def forward_pieces(self, shown: int) -> None:
        """Read what `add_pieces` has made room for."""
        slots = self.piece_slots
        positions = (slots - self.first).clamp(min=0, max=self.last_position)
        inputs = ForwardInputs(self.piece_tokens, slots, positions, make_spans(self.first, slots + 1))
        super().forward(inputs, shown)

    # ---- places and tokens of the target in those of the draft

    def forward(self, inputs: ForwardInputs, shown: int) -> Tensor:
        first, end, own_first, own_end = inputs.spans.unbind(-1)
        own = own_end > 0
        spans = [
            first,
            self._slots(end - 1) + 1,
            torch.where(own, self._slots(own_first), 0),
            torch.where(own, self._slots(own_end - 1) + 1, 0),
        ]
        tokens = self.table[inputs.tokens.clamp(max=self.table.shape[0] - 1)]
        moved = torch.stack([each.to(inputs.spans.dtype) for each in spans], dim=-1)
        return super().forward(ForwardInputs(tokens, self._slots(inputs.slots), inputs.positions, moved), shown)

    def move(self, source: Tensor, destination: Tensor) -> None:
        super().move(self._slots(source), self._slots(destination))

    def _slots(self, places: Tensor) -> Tensor:
        """Return the slots of places [B, ...], which are columns of the text and what follows them."""
        index = places.long().clamp(min=0, max=self.extra.shape[1] - 1)
        return places.long() + self.extra.gather(1, index.flatten(1)).view_as(index)

    def own_tokens(self, tokens: Tensor) -> Tensor:
        return tokens  # they are the draft's already

    def _expanded(self, logits: Tensor) -> Tensor:
        """Return logits over the target's vocabulary, given those over the draft's."""
        full = logits.new_full((*logits.shape[:-1], self.vocabulary), FILLER)
        return full.index_copy_(-1, self.shared, logits.index_select(-1, self.shared_by_draft))


class TranslatedDrafter(Drafter):
    """Drafts with a `TranslatedDraftModel`. Arguments as in `Drafter`, and:

    Args:
        text: the committed text.
        attention: [B, P] bool, False where the prompt is padded.
    """

    model: TranslatedDraftModel

    def __init__(self, *args: Any, text: Text, attention: Tensor) -> None:
        super().__init__(*args)
        self.text, self.attention, self.name = text, attention, NAME
        self.same_every_round = False  # the host looks at each token that the target has added
        self.read: list[int] = []  # the length up to which each row's text was read

    def prefill(self, length: int) -> None:
        text, pending, seen = self.text, self.round.pending, self.attention.tolist()
        # The host waits here, as it does wherever a text is encoded.
        ids, lengths, starts = (each.tolist() for each in (text.ids, text.length, pending.start))
        texts = [
            [token if column >= len(real) or real[column] else None for column, token in enumerate(row[:end])]
            for row, real, end in zip(ids, seen, lengths)
        ]
        self.model.read_texts(texts, [max(0, start - 1) for start in starts])
        pending.cached.copy_(pending.start)
        self.read = list(text.lengths)

    def remember(self, tokens: list[int]) -> None: ...  # the runner remembers the prompt in the draft's tokens

    def propose(self, feedback: Feedback, reached: int) -> DraftTokens:
        self._read_pieces(reached)
        return super().propose(feedback, reached)

    def _read_pieces(self, reached: int) -> None:
        """Read the target's own token of each row, but for its last piece, where the draft has no such token.

        Such a token cannot have been drafted, so no draft is pending after it.
        """
        text, model, columns, tokens = self.text, self.model, dict[int, int](), dict[int, list[int]]()
        for row, length in enumerate(text.lengths):
            pieces = model.translation.pieces(text.new[row][-1])[-MOST_PIECES:]
            is_new, self.read[row] = length > self.read[row] and not text.done[row], length
            if is_new and len(pieces) > 1 and model.most_extra + MOST_PIECES < model.spare:
                before = model.translation.last_pieces[text.new[row][-2]]
                columns[row], tokens[row] = length - 1, [before, *pieces[:-1]]
        if tokens:
            model.add_pieces(columns, tokens)
            shown = self._slots_shown(reached)
            self.stats.draft_forwards += self.round.static_shapes  # otherwise the model counts
            self.buffers.run(("pieces", shown), lambda: model.forward_pieces(shown))

    def _slots_shown(self, reached: int) -> int:
        return super()._slots_shown(reached + max(0, self.model.most_extra))
