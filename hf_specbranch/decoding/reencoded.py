"""A draft model with another tokenizer that continues the text in its own tokens; the text is encoded for the target.

The draft may use all of its vocabulary, and the target is given what its own tokenizer makes of the text. The tokens
are no draws from a distribution over the target's vocabulary: they are compared with the target's choices.

The draft's model and cache work on the device, in one stage per round; the host encodes text before and after it.
"""

from __future__ import annotations

from itertools import count

import torch
from torch import Tensor

from ..kernels.rounds import ForwardInputs
from ..runtime.eager import EagerRunner, make_spans
from ..runtime.static_buffers import Buffers
from ..stats import SpecBranchStats
from ..vocabularies import Translation
from .draft_model import DraftModel
from .reencoded_text import ReencodedText
from .resolve import NONE, BranchStarts, DraftTokens, Feedback
from .text import Text

NAME = "draft model, re-encoded text"
READ = (4, 16)  # tokens that a captured pass reads before the first is drafted
LOOKBEHIND = 10  # tokens of the draft that are encoded again at most; as transformers has it
EXPANSION = 3  # the draft's tokens for one of the target, at most, over a whole text


class ReencodedDraft:
    """The draft source of a model with another tokenizer. See `DraftSource`.

    Args:
        runner: runs the draft.
        buffers: where its stages run.
        text: the committed text.
        attention: [B, P] bool, False where the prompt is padded.
        translation: between the two vocabularies.
        gamma: the most tokens to draft, and to send.
        epsilon: drafts end before the first token that is less likely.
        lookbehind: the most tokens of the draft that are encoded again.
        stats: where to count.
        capacity: the most columns of the draft's own text.
    """

    depth, same_every_round, keeps_drafts, reads_early = 0, False, False, False
    begin_next = None

    def __init__(
        self,
        runner: EagerRunner,
        buffers: Buffers,
        text: Text,
        attention: Tensor,
        translation: Translation,
        gamma: int,
        epsilon: float,
        lookbehind: int,
        stats: SpecBranchStats,
        capacity: int,
    ) -> None:
        self.runner, self.buffers, self.text, self.attention, self.stats = runner, buffers, text, attention, stats
        self.translation, self.gamma, self.epsilon, self.lookbehind = translation, gamma, epsilon, lookbehind
        self.device, self.name = buffers.device, NAME
        self.capacity, rows = capacity, text.ids.shape[0]
        no_prompt = torch.ones((rows, 0), dtype=torch.bool, device=self.device)
        self.model = DraftModel(buffers, runner, no_prompt, translation.draft.size, (), capacity, stats)
        self.window = buffers.tensor("reencoded.window", (2, rows, max(READ)))  # tokens to read, and their columns
        self.drafted_tokens = buffers.tensor("reencoded.tokens", (rows, gamma))
        self.confidence = buffers.tensor("reencoded.confidence", (rows, gamma), torch.float32)
        self.sent_tokens = buffers.tensor("reencoded.sent", (rows, gamma))
        self.sent = buffers.tensor("reencoded.length", (rows,))
        absent = buffers.tensor("reencoded.at", (rows, 1)).fill_(NONE)
        self.no_branch = BranchStarts(buffers.tensor("reencoded.branch", (rows, 1)), absent)
        self.rows: list[ReencodedText] = []
        self.padding: list[int] = []  # columns before each row's text
        self.cached: list[int] = []  # tokens of each row whose keys and values the draft has
        self.followed: list[int] = []  # new tokens of the target that each row has followed

    def prefill(self, length: int) -> None:
        text, seen = self.text, self.attention.tolist()
        ids, lengths = text.ids.tolist(), text.length.tolist()  # the host waits, as wherever it encodes text
        self.rows = []
        for row, real, end in zip(ids, seen, lengths):
            tokens = [token for column, token in enumerate(row[:end]) if column >= len(real) or real[column]]
            self.rows.append(ReencodedText(self.translation, tokens, self.lookbehind, self.capacity // 2))
        self.cached = [len(row.tokens) for row in self.rows]
        self.followed = [len(new) for new in text.new]
        longest = max(self.cached)
        self.padding = [longest - count for count in self.cached]
        self.model.set_padding(torch.tensor(self.padding, device=self.device)[:, None], longest)
        filled = [[0] * count + row.tokens for count, row in zip(self.padding, self.rows)]
        self.model.prefill(torch.tensor(filled, device=self.device))

    def remember(self, tokens: list[int]) -> None: ...  # the runner remembers the prompt in the draft's tokens

    def propose(self, feedback: Feedback, reached: int) -> DraftTokens:
        texts = [self._follow(row) for row in range(len(self.text.lengths))]
        drafted = self._draft()
        sent = [
            self._translated(row, tokens) if is_open else [] for row, is_open, tokens in zip(count(), texts, drafted)
        ]
        sent += [[]] * (len(self.rows) - len(sent))  # padding rows
        width = self.gamma if self.buffers.static_shapes else max(map(len, sent))
        filled = [tokens + [0] * (self.gamma - len(tokens)) for tokens in sent]
        self.sent_tokens.copy_(torch.tensor(filled))
        self.sent.copy_(torch.tensor(list(map(len, sent))))
        memory = self.buffers.serial if self.buffers.static_shapes else -1
        return DraftTokens(self.sent_tokens[:, :width], self.sent, memory=memory)

    def branch(self, reached: int) -> BranchStarts:
        return self.no_branch

    def drafted(self) -> Tensor:
        none = torch.zeros_like(self.sent)
        return torch.stack([self.sent, none, none, none, none, self.sent], dim=1)

    # ---- on the host

    def _room(self, row: int) -> int:
        """Return how many draft tokens a row may be sent: the target adds one of its own."""
        return 0 if self.text.done[row] else self.text.stopper.max_length - self.text.lengths[row] - 1

    def _follow(self, row: int) -> bool:
        """Let the draft's text follow that of the target; return whether the row drafts."""
        text, new = self.rows[row], self.text.new[row][self.followed[row] :]
        room = self.padding[row] + len(text.tokens) + EXPANSION * len(new) + 2 * self.gamma < self.capacity
        if self._room(row) <= 0 or not room:
            return False
        self.cached[row] = min(self.cached[row], text.follow(new))
        self.followed[row] += len(new)
        return True

    def _translated(self, row: int, drafted: list[int]) -> list[int]:
        return self.rows[row].propose(drafted)[: min(self.gamma, self._room(row))]

    # ---- on the device

    def _draft(self) -> list[list[int]]:
        """Read what is new in each row, and draft; return the tokens before the first unlikely one."""
        starts = [min(cached, len(row.tokens) - 1) for cached, row in zip(self.cached, self.rows)]
        ends = [len(row.tokens) for row in self.rows]
        slots = max(padding + end for padding, end in zip(self.padding, ends)) + self.gamma
        self.runner.reserve(len(self.rows), slots)
        static, shown = self.buffers.static_shapes, self.runner.bucket(slots)
        unread = max(end - start for start, end in zip(starts, ends))
        while static and unread > max(READ):
            self._fill(starts, [min(start + max(READ), end) for start, end in zip(starts, ends)], max(READ))
            self._count(1, max(READ))
            self.buffers.run(("reencoded read", shown), lambda: self._read_more(shown))
            starts = [min(start + max(READ), end - 1) for start, end in zip(starts, ends)]
            unread = max(end - start for start, end in zip(starts, ends))
        width = next(size for size in READ if size >= unread) if static else unread
        self._fill(starts, ends, width)
        self._count(self.gamma, width + self.gamma - 1)
        self.buffers.run(("reencoded", width, shown), lambda: self._read_and_draft(width, shown))
        tokens, confidence = self.drafted_tokens.tolist(), self.confidence.tolist()  # the host waits here
        steps = sum(any(row[step] > 0 for row in confidence) for step in range(self.gamma))
        self.cached = [end + max(0, steps - 1) for end in ends]
        return [
            row[: next((step for step in range(steps) if likely[step] < self.epsilon), steps)]
            for row, likely in zip(tokens, confidence)
        ]

    def _count(self, forwards: int, positions: int) -> None:
        if self.buffers.static_shapes:  # otherwise the model counts
            self.stats.draft_forwards += forwards
            self.stats.draft_positions += positions

    def _fill(self, starts: list[int], ends: list[int], width: int) -> None:
        """Write the tokens to be read, `starts` to `ends` of each row, and their columns; the last ones come last."""
        tokens, columns = [], []
        for row, padding, start, end in zip(self.rows, self.padding, starts, ends):
            places = [max(start, end - width + index) for index in range(width)]  # some are read again
            tokens.append([row.tokens[place] for place in places])
            columns.append([min(padding + place, self.capacity - 1) for place in places])
        if not self.buffers.static_shapes:
            self.window = torch.tensor([tokens, columns], device=self.device)
            return
        self.window[:, :, :width] = torch.tensor([tokens, columns], device=self.device)

    def _read_more(self, shown: int) -> None:
        self._read(max(READ), shown)

    def _read(self, width: int, shown: int) -> Tensor:
        """Return the logits [B, V] after what was written by `_fill`."""
        tokens, columns = self.window[:, :, :width]
        return self._forward(tokens, columns, shown)

    def _forward(self, tokens: Tensor, columns: Tensor, shown: int) -> Tensor:
        positions, spans = self.model.positions.gather(1, columns), make_spans(self.model.first, columns + 1)
        logits = self.model.forward(ForwardInputs(tokens, columns, positions, spans), shown)
        return logits[:, -1, : self.translation.draft.size].float()

    def _read_and_draft(self, width: int, shown: int) -> None:
        self.confidence.zero_()
        logits, end = self._read(width, shown), self.window[1, :, width - 1 : width] + 1
        for step in range(self.gamma):
            confidence, token = logits.softmax(-1).max(-1)
            self.drafted_tokens[:, step], self.confidence[:, step] = token, confidence
            if step + 1 == self.gamma or self._all_unlikely(step):
                break
            logits = self._forward(token[:, None], (end + step).clamp(max=self.capacity - 1), shown)

    def _all_unlikely(self, step: int) -> bool:
        """Whether no row goes on, where the device may be asked."""
        if self.buffers.static_shapes or not self.epsilon:
            return False
        return bool((self.confidence[:, : step + 1] < self.epsilon).any(1).all())
