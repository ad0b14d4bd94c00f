"""The committed text: tokens, where each row ends, and who is told."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .records import Chain, Outcome
from .stopping import Stopper
from .verify import Verdict

ScoresSoFar = Callable[[int], tuple[Tensor, ...]]


class Text:
    """Prompt and committed tokens of a batch.

    Args:
        prompt: [B, P] token ids, left-padded.
        capacity: room for this many columns.
        stopper: decides where a row ends.
        pad_token: fills rows that ended before the others.
        in_step: every row gains the same number of tokens in a round.
        streamer: a transformers streamer, or None.
    """

    def __init__(
        self,
        prompt: Tensor,
        capacity: int,
        stopper: Stopper,
        pad_token: int,
        in_step: bool,
        streamer: Any = None,
    ) -> None:
        rows, self.prompt_length = prompt.shape
        self.ids = torch.zeros((rows, capacity), dtype=torch.long, device=prompt.device)
        self.ids[:, : self.prompt_length] = prompt
        self.lengths = [self.prompt_length] * rows
        self.fired = [False] * rows  # some criterion has ended the row
        self.done = [False] * rows  # the row gains nothing more
        self.stopper, self.pad_token, self.in_step, self.streamer = stopper, pad_token, in_step, streamer
        self.streamed = self.prompt_length  # columns already handed to the streamer
        self.columns = torch.arange(capacity, device=prompt.device)
        self.gained = 0  # tokens added, over all rows
        self.first_gain = 0.0  # when the first was

    @property
    def finished(self) -> bool:
        return all(self.done)

    def room(self) -> list[int]:
        """How many tokens each row may still gain; 0 where it is finished."""
        return [
            0 if done else max(1, self.stopper.max_length - length) for done, length in zip(self.done, self.lengths)
        ]

    # ---- views

    def with_chain(self, chain: Chain) -> tuple[Tensor, Tensor]:
        """The last committed token followed by the chain, and their columns: both [B, N + 1]."""
        count = chain.tokens.shape[1]
        last = torch.tensor(self.lengths, device=self.ids.device)[:, None] - 1
        columns = last + self.columns[: count + 1]
        tokens = torch.cat([self.ids.gather(1, last), chain.tokens.to(self.ids.device)], dim=1)
        return tokens, columns

    def prefixes(self, chain: Chain) -> list[list[Tensor]]:
        """`[b][j]`: the text [1, L] before chain position `j` of row `b`."""
        full = [torch.cat([self.ids[b, :length], chain.tokens[b]])[None] for b, length in enumerate(self.lengths)]
        count = chain.tokens.shape[1] + 1
        return [[full[b][:, : length + j] for j in range(count)] for b, length in enumerate(self.lengths)]

    def step_prefix(self, chain: Chain, j: int) -> Tensor:
        """The text [B, L] before chain position `j`, for rows of equal length."""
        return torch.cat([self.ids[:, : self.lengths[0]], chain.tokens[:, :j]], dim=1)

    def sequences(self) -> Tensor:
        """[B, longest] the whole text, padded on the right."""
        longest = max(self.lengths)
        for b, length in enumerate(self.lengths):
            self.ids[b, length:longest] = self.pad_token
        return self.ids[:, :longest].clone()

    # ---- committing

    def commit(self, verdict: Verdict, chain: Chain, scores: ScoresSoFar | None = None) -> list[Outcome]:
        """Add what a verdict allows, token by token, as far as the stopping criteria let each row go.

        Args:
            verdict: what the target said of the chain.
            chain: the chain it judged.
            scores: what stopping criteria are shown after `n` tokens of this round, if scores are recorded.
        """
        device = self.ids.device
        words = torch.cat([torch.stack(verdict, 1).to(device), chain.tokens.to(device)], dim=1)
        plan = words.tolist()  # the round's one wait for the device
        offered = [row[3 : 3 + row[0]] + [row[1]] for row in plan]
        gained = self._advance_in_step(offered, scores) if self.in_step else self._advance(offered, scores)
        self.first_gain = self.first_gain or time.perf_counter()
        self.gained += sum(gained)
        self._stream()
        return [
            Outcome(count, accepted, token, survivor, done)
            for count, (accepted, token, survivor, *_), done in zip(gained, plan, self.done)
        ]

    def _advance(self, offered: list[list[int]], scores: ScoresSoFar | None) -> list[int]:
        gained = [0] * len(offered)
        for b, tokens in enumerate(offered):
            if self.done[b]:
                continue
            start = self.lengths[b]
            self.ids[b, start : start + len(tokens)] = torch.tensor(tokens, device=self.ids.device)
            for token in tokens:
                self.lengths[b] += 1
                gained[b] += 1
                shown = None if scores is None else scores(gained[b])
                if self.stopper.row_ends(self.ids[b : b + 1, : self.lengths[b]], token, shown):
                    self.done[b] = True
                    break
        return gained

    def _advance_in_step(self, offered: list[list[int]], scores: ScoresSoFar | None) -> list[int]:
        running = [b for b, done in enumerate(self.done) if not done]
        gained = [0] * len(offered)
        for j in range(min(len(offered[b]) for b in running)):
            column = [self.pad_token if done else offered[b][j] for b, done in enumerate(self.done)]
            self.ids[:, self.lengths[0]] = torch.tensor(column, device=self.ids.device)
            self.lengths = [length + 1 for length in self.lengths]
            gained = [count + (not done) for count, done in zip(gained, self.done)]
            shown = None if scores is None else scores(j + 1)
            ends = self.stopper.rows_end(self.ids[:, : self.lengths[0]].contiguous(), column, shown)
            self.fired = [fired or end for fired, end in zip(self.fired, ends)]
            self.done = self.fired if self.stopper.pads else [all(self.fired)] * len(self.fired)
            if all(self.done):
                break
        return gained

    def _stream(self) -> None:
        """Hand out every column that is final in all rows."""
        if self.streamer is None:
            return
        final = (
            max(self.lengths)
            if self.finished
            else min(length for length, done in zip(self.lengths, self.done) if not done)
        )
        for column in range(self.streamed, final):
            tokens = [
                int(self.ids[b, column]) if column < self.lengths[b] else self.pad_token for b in range(len(self.done))
            ]
            self.streamer.put(torch.tensor(tokens))
        self.streamed = max(self.streamed, final)
