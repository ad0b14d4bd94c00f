"""One answer that is being generated: what was asked, its tokens so far, and how it ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..stats import SpecBranchStats
from .detokenizer import Detokenizer
from .row_sampling import GREEDY, Sampling

logger = logging.getLogger(__name__)

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class CompletionSettings:
    """What one request asks for.

    Args:
        max_tokens: the most new tokens.
        sampling: temperature, top-p and seed.
        stop: strings that end the text, and are not part of it.
        ends: end-of-sequence tokens.
        logprobs: return the log-probabilities of the tokens, and of so many likelier ones; None: of none.
    """

    max_tokens: int
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    ends: frozenset[int] = frozenset()
    logprobs: int | None = None


@dataclass
class TokenLogprobs:
    """The log-probability of a token under the target, before temperature and top-p, and the likeliest tokens."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


class Completion:
    """An answer to a prompt. The engine's thread adds tokens; `on_update` is called there after each round.

    Args:
        prompt: the tokens of the prompt, at least one.
        settings: what is asked for.
        tokenizer: turns tokens into text.
        on_update: called when there is more to `take`, and once at the end.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        settings: CompletionSettings,
        tokenizer: Any,
        on_update: Callable[[Completion], None] = lambda completion: None,
    ) -> None:
        self.prompt, self.settings, self.on_update = list(prompt), settings, on_update
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.detokenizer = Detokenizer(tokenizer, settings.stop)
        self.stats = SpecBranchStats()
        self.finish_reason: FinishReason | None = None
        self.reported: FinishReason | None = None  # the same, once log-probabilities and statistics are complete too
        self.error = ""  # why, if the reason is "error"
        self.cancelled = False  # nobody waits for it any more
        self.submitted = time.perf_counter()
        self.decoded = 0  # tokens that the detokenizer was given

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def add(self, token: int, is_last: bool) -> bool:
        """Take the next token; return whether the answer is complete.

        Args:
            token: the token.
            is_last: there is no room for another one.
        """
        self.stats.total_seconds = time.perf_counter() - self.submitted
        self.stats.time_to_first_token = self.stats.time_to_first_token or self.stats.total_seconds
        self.tokens.append(token)
        ended = token in self.settings.ends
        if self.settings.stop:  # otherwise whoever takes the text decodes it
            self.decoded += 1
            ended = self.detokenizer.add(token) or ended
        if self.cancelled:
            self.finish_reason = "cancelled"
        elif ended:
            self.finish_reason = "stop"
        elif is_last or len(self.tokens) >= self.settings.max_tokens:
            self.finish_reason = "length"
        return self.finished

    def fail(self, reason: str) -> None:
        """End the answer with an error."""
        self.finish_reason, self.error = "error", reason
        self.update()

    def end_cancelled(self) -> None:
        """End an answer that was cancelled before it began."""
        self.finish_reason = "cancelled"
        self.update()

    def update(self) -> None:
        """Say that there is more to take, all of it. Another thread may look at the answer at any other time too."""
        self.reported = self.finish_reason
        try:
            self.on_update(self)
        except Exception:  # of whoever waits for this answer; the rest of the batch goes on
            logger.exception("an answer could not be delivered")
            self.cancel()

    def cancel(self) -> None:
        """Say that nobody waits for the answer: its row is free after the round that is running."""
        self.cancelled = True

    def text(self) -> str:
        """Return the text so far, up to where it is final: a stop string may have begun after it.

        One thread may call this, while another one adds tokens.
        """
        finished, count = self.finished, len(self.tokens)
        if not self.settings.stop and count > self.decoded:
            self.detokenizer.add(*self.tokens[self.decoded : count])
            self.decoded = count
        if finished:
            self.detokenizer.finish()
            return self.detokenizer.text
        return self.detokenizer.final_text()
