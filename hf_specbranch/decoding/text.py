"""The committed text: its tokens, where each row ends, and streaming."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.generation import stopping_criteria as sc

from ..runtime.static_buffers import Buffers, DeviceCopy, HostCopies
from .acceptance import NO_TOKEN, Acceptance
from .resolve import NONE, DraftTokens, RoundResult, RowResult, VerifyResult
from .scoring import Prefixes

ScoresSoFar = Callable[[int], tuple[Tensor, ...]]


class Text:
    """Prompt and committed tokens of a batch.

    Args:
        buffers: where the memory comes from.
        prompt: [B, P] token ids, left-padded.
        capacity: room for this many columns.
        stopper: decides where a row ends.
        pad_token: fills rows that ended before the others.
        in_step: every row gains the same number of tokens in a round.
        streamer: a transformers streamer, or None.
        ended: rows that are complete already.
        padding: the last rows of the prompt that fill up the batch. Every pass reads them, and they are known on the
            device alone, where they are finished from the start: the lists below are about the other rows.
    """

    def __init__(
        self,
        buffers: Buffers,
        prompt: Tensor,
        capacity: int,
        stopper: Stopper,
        pad_token: int,
        in_step: bool,
        streamer: Any = None,
        ended: Sequence[bool] = (),
        padding: int = 0,
    ) -> None:
        rows, self.prompt_length = prompt.shape
        self.buffers, self.static_shapes, self.serial = buffers, buffers.static_shapes, buffers.serial
        self.ids = buffers.tensor("text.ids", (rows, capacity))
        self.ids[:, : self.prompt_length] = prompt
        self.columns = torch.arange(capacity, out=buffers.tensor("text.columns", (capacity,)))
        self.result = RoundResult(buffers.tensor("text.result", (len(RoundResult.FIELDS), rows)))
        self.result.continuation.fill_(NONE)
        self.result.length.fill_(self.prompt_length)
        self.device_copy = DeviceCopy(self.result.packed)
        self.padding_rows = [RowResult(0, 0, 0, NONE, NONE, finished=True)] * padding
        rows -= padding
        self.lengths = [self.prompt_length] * rows
        self.fired = [False] * rows  # some criterion has ended the row
        self.done = list(ended) or [False] * rows  # the row gains nothing more
        self.stopper, self.pad_token, self.in_step, self.streamer = stopper, pad_token, in_step, streamer
        self.new: list[list[int]] = [[] for _ in range(rows)]  # tokens added, on the host
        self.prompt_tokens: list[int] | None = None  # of the first row, on the host, once they are needed
        self.prompt_copy = HostCopies(self.ids.device)
        self.prompt_copy.send(self.ids[:1, : self.prompt_length])
        self.appended = [0] * rows  # of these, how many await `commit`; only for rows in step
        self.streamed = 0  # of these, how many columns the streamer has got
        self.gained = 0  # tokens added, over all rows
        self.skips = False  # the last round has added a tree leaf, whose keys and values are not in their place
        self.first_gain = 0.0  # when the first was
        # The verifier writes `result` itself, as if nothing but the longest length ended a row.
        self.resolved_on_device = False
        self.in_flight = 0  # the most tokens that rounds in flight may have added
        self.others_in_flight = 0  # rounds that were launched after the one that is committed

    @property
    def finished(self) -> bool:
        return all(self.done) and not any(self.appended)

    @property
    def reach(self) -> int:
        """The longest any row can be by now."""
        return max(self.lengths) + self.in_flight

    def may_finish(self, in_flight: int) -> bool:
        """Whether so many more tokens could take some row to its longest length."""
        return max(self.lengths) + in_flight >= self.stopper.max_length

    def row_tokens(self) -> list[int]:
        """The final tokens of the first row, prompt included, on the host. The prompt arrives with the first token."""
        if self.prompt_tokens is None:
            (self.prompt_tokens,) = self.prompt_copy.read()
        return self.prompt_tokens + self.new[0]

    def ended_rows(self, pause: int | None) -> tuple[bool, ...]:
        """Which rows are complete, and do not merely wait at this length."""
        at_end = (not self.stopper.eos.isdisjoint(tokens[-1:]) for tokens in self.new)
        return tuple(done and (n != pause or end) for done, n, end in zip(self.done, self.lengths, at_end))

    @property
    def length(self) -> Tensor:
        """[B] columns of each row, on the device."""
        return self.result.length

    # ---- views

    def last_and_draft(self, draft_tokens: DraftTokens) -> tuple[Tensor, Tensor]:
        """Return the last committed token followed by the draft tokens, and their columns: both [B, N + 1]."""
        last = self.length[:, None] - 1
        columns = last + self.columns[: draft_tokens.tokens.shape[1] + 1]
        tokens = torch.cat([self.ids.gather(1, last), draft_tokens.tokens.to(self.ids.device)], dim=1)
        return tokens, columns

    def before_last(self) -> tuple[Tensor, Tensor]:
        """Return a token to be read again, and its column: both [B, 1].

        A tree leaf that became text was read in a scratch slot; it stands before the leaf continuation. Elsewhere the
        last token is read twice.
        """
        column = self.length[:, None] - 1 - (self.result.continuation >= 0)[:, None].long()
        return self.ids.gather(1, column), column

    def leaf_prefixes(self, draft_tokens: DraftTokens) -> Prefixes:
        """Return the text up to each tree leaf, the leaf included."""
        assert draft_tokens.leaves is not None
        leaves, at = draft_tokens.leaves.tokens, draft_tokens.leaves.at.clamp(min=0)
        columns = self.length[:, None] + self.columns[: draft_tokens.tokens.shape[1]]
        ids = self.ids.scatter(1, columns, draft_tokens.tokens)[:, None].repeat(1, leaves.shape[1], 1)  # [B, W, C]
        places = self.length[:, None] + at
        return Prefixes(ids.scatter(2, places[:, :, None], leaves[:, :, None]), places + 1)

    def prefixes(self, draft_tokens: DraftTokens) -> Prefixes:
        """Return the text before each draft position and before the branch point."""
        count = draft_tokens.tokens.shape[1]
        columns = self.length[:, None] + self.columns[:count]
        ids = self.ids.scatter(1, columns, draft_tokens.tokens)  # [B, C]
        return Prefixes(ids[:, None].expand(-1, count + 1, -1), self.length[:, None] + self.columns[: count + 1])

    def before_round(self) -> tuple[Tensor, Tensor]:
        """Return the text [B, longest], and the length [B] each row had before the last round."""
        return self.ids[:, : max(self.lengths)], self.length - self.result.committed

    def so_far(self) -> Tensor:
        """[B, L] the text of rows in step."""
        return self.ids[:, : self.lengths[0]].clone(memory_format=torch.contiguous_format)

    def padded(self, draft_tokens: DraftTokens) -> DraftTokens:
        """Return the draft tokens as plain `generate()` would feed them to rows in step.

        Finished rows read padding, and so does a row after a drafted end-of-sequence token.
        """
        if not self.in_step or not self.stopper.eos or not draft_tokens.tokens.shape[1]:
            return draft_tokens
        tokens = draft_tokens.tokens
        ends = torch.isin(tokens, torch.tensor(sorted(self.stopper.eos), device=tokens.device)).long()
        over = (ends.cumsum(1) > ends) | torch.tensor(self.done, device=tokens.device)[:, None]
        return draft_tokens._replace(tokens=tokens.masked_fill(over, self.pad_token))

    def sequences(self) -> Tensor:
        """[B, longest] the whole text, padded on the right."""
        longest = max(self.lengths)
        for b, length in enumerate(self.lengths):
            self.ids[b, length:longest] = self.pad_token
        return self.ids[: len(self.lengths), :longest].clone()

    # ---- committing

    def offer(self, acceptance: Acceptance, continuation: Tensor, draft_tokens: DraftTokens) -> None:
        """Write what is accepted after the text; `commit` decides how much of it stays."""
        if self.in_step:
            return
        own = acceptance.token.clamp(min=0)[:, None]
        if draft_tokens.is_empty:
            self.ids.scatter_(1, self.length[:, None], own)
            return
        extra = continuation.clamp(min=0)[:, None]
        tokens = torch.cat([draft_tokens.tokens.to(self.ids.device), own, extra], dim=1)  # [B, N + 2]
        tokens = tokens.scatter(1, acceptance.accepted[:, None], own).scatter(
            1, acceptance.accepted[:, None] + 1, extra
        )
        self.ids.scatter_(1, self.length[:, None] + self.columns[: tokens.shape[1]], tokens)

    def commit(self, results: list[VerifyResult], scores: ScoresSoFar | None = None) -> list[RowResult]:
        """Add what the verify results allow, token by token, as far as the stopping criteria let each row go.

        Args:
            results: one per row.
            scores: what stopping criteria are shown after `n` tokens of this round, if scores are recorded.
        """
        offered = [result.offered for result in results]
        if not self.in_step:
            gained = self._advance(offered, scores)
        else:
            if not any(self.appended):  # otherwise the verifier has done so already
                self._advance_in_step(offered, [result.accepted for result in results], scores)
            gained, self.appended = self.appended, [0] * len(results)
        self.first_gain = self.first_gain or time.perf_counter()
        self.gained += sum(gained)
        self.skips = any(result.has_continuation for result in results)
        rows = [
            RowResult(count, result.accepted, result.token, result.survivor, result.continuation, done)
            for count, result, done in zip(gained, results, self.done)
        ]
        is_news = not self.resolved_on_device or any(self.done) or not all(row.complete for row in rows)
        if is_news and not self.others_in_flight:  # otherwise it is sent after the rounds in flight
            lengths = self.lengths + [self.prompt_length] * len(self.padding_rows)
            self.device_copy.send([list(map(int, field)) for field in (*zip(*rows, *self.padding_rows), lengths)])
        return rows

    def _advance(self, offered: list[list[int]], scores: ScoresSoFar | None) -> list[int]:
        gained = [0] * len(offered)
        for b, tokens in enumerate(offered):
            if self.done[b]:
                continue
            row = self.ids[b : b + 1]
            for token in tokens:
                self._check_token(b, token)
                self.lengths[b] += 1
                self.new[b].append(token)
                gained[b] += 1
                shown = None if scores is None else scores(gained[b])
                if self.stopper.row_ends(row, self.lengths[b], token, shown, b):
                    self.done[b] = True
                    break
        return gained

    def _advance_in_step(self, offered: list[list[int]], accepted: list[int], scores: ScoresSoFar | None) -> None:
        for j in range(max(map(len, offered))):
            tokens = [self.pad_token if done else offered[b][j] for b, done in enumerate(self.done)]
            if not self.append(tokens, [j < count for count in accepted], scores):
                break

    def append(self, tokens: list[int], agreed: list[bool], scores: ScoresSoFar | None) -> bool:
        """Add one column to rows in step, padding in finished rows, and ask the stopping criteria.

        Args:
            tokens: one per row.
            agreed: whether each is the drafted one.
            scores: as in `commit`.

        Returns:
            Whether the target's pass covers what follows: no row has left its draft, or has ended where the draft does
            not continue with padding.
        """
        for b, token in enumerate(tokens):
            self._check_token(b, token)
        running = [b for b, done in enumerate(self.done) if not done]
        column = [self.pad_token if done else token for token, done in zip(tokens, self.done)]
        self.ids[:, self.lengths[0]] = torch.tensor(column, device=self.ids.device)
        self.lengths = [length + 1 for length in self.lengths]
        for new, token in zip(self.new, column):
            new.append(token)
        self.appended = [count + (not done) for count, done in zip(self.appended, self.done)]
        shown = None if scores is None else scores(max(self.appended))
        ends = self.stopper.rows_end(self.so_far(), column, shown)
        self.fired = [fired or end for fired, end in zip(self.fired, ends)]
        self.done = list(self.fired) if self.stopper.pads else [all(self.fired)] * len(self.fired)
        on_course = (agreed[b] and (not self.done[b] or column[b] in self.stopper.eos) for b in running)
        return not all(self.done) and all(on_course)

    def _check_token(self, row: int, token: int) -> None:
        """Refuse to go on where nothing can be drawn, as `torch.multinomial` does in plain `generate()`."""
        if token == NO_TOKEN:
            raise RuntimeError(
                f"no token can be drawn for row {row} at new token {len(self.new[row])}: after the logits processors "
                f"every token is masked (-inf), or some score is infinite or NaN"
            )

    def queries_of(self, rows: list[RowResult]) -> list[range]:
        """Return which queries of the last pass became text, row by row; in step, finished rows read padding there."""
        longest = max(row.committed for row in rows)
        return [range(longest if self.in_step else row.committed) for row in rows]

    def stream_out(self) -> None:
        """Give the streamer every column that is final in all rows."""
        if self.streamer is None:
            return
        counts = [len(tokens) for tokens in self.new]
        final = max(counts) if self.finished else min(n for n, done in zip(counts, self.done) if not done)
        for column in range(self.streamed, final):
            tokens = [row[column] if column < len(row) else self.pad_token for row in self.new]
            self.streamer.put(torch.tensor(tokens))
        self.streamed = max(self.streamed, final)


ROWWISE = (sc.StopStringCriteria, sc.MaxTimeCriteria)  # their answer for a row does not depend on the other rows


class Stopper:
    """Decides where rows end. Length and end-of-sequence tokens are checked here; other criteria are called.

    Args:
        criteria: a `StoppingCriteriaList`.
        max_length: the longest text, prompt included.
    """

    def __init__(self, criteria: Sequence[Any], max_length: int) -> None:
        self.max_length = max_length
        self.ends = [criterion.eos_token_id for criterion in criteria if type(criterion) is sc.EosTokenCriteria]
        self.called: list[Any] = []
        for criterion in criteria:
            if type(criterion) is sc.MaxLengthCriteria:
                self.max_length = min(self.max_length, criterion.max_length)
            elif type(criterion) is not sc.EosTokenCriteria:
                self.called.append(criterion)
        # Plain `generate()` pads finished rows only if there is an end-of-sequence token.
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)

    @cached_property
    def eos(self) -> set[int]:
        """The end-of-sequence tokens. They may be on the device, so they are read when needed."""
        return {token for tokens in self.ends for token in tokens.flatten().tolist()}

    @property
    def needs_rows_in_step(self) -> bool:
        """Return whether some criterion may depend on the whole batch, so that rows must grow together."""
        return any(type(criterion) not in ROWWISE for criterion in self.called) or bool(self.called and not self.pads)

    def row_ends(self, ids: Tensor, length: int, token: int, scores: Any, row: int = 0) -> bool:
        """Return whether a row that just gained `token` is complete; its text is the first `length` of ids [1, C]."""
        ends = [fired(criterion, ids[:, :length], scores)[0] for criterion in self.called]
        return any(ends) or token in self.eos or length >= self.max_length

    def rows_end(self, text: Tensor, tokens: list[int], scores: Any) -> list[bool]:
        """Return the same for all rows [B, L] at once."""
        ends = [token in self.eos or text.shape[1] >= self.max_length for token in tokens]
        for criterion in self.called:
            ends = [end or also for end, also in zip(ends, fired(criterion, text, scores))]
        return ends


def fired(criterion: Any, text: Tensor, scores: Any) -> list[bool]:
    """Return for each row of the text [B, L] whether a criterion fires.

    A criterion may return one value per row or a single bool for all rows, as in `StoppingCriteriaList`.
    """
    none = torch.zeros(text.shape[0], dtype=torch.bool, device=text.device)
    ends: list[bool] = (none | criterion(text, scores)).tolist()
    return ends
