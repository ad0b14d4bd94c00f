"""Wraps the parts of the loop, and records what each did and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from ..decoding.draft_source import DraftSource
from ..decoding.drafter import Drafter
from ..decoding.loop import Parts
from ..decoding.resolve import NONE, Accounting, BranchStarts, DraftTokens, Feedback, RowResult, VerifyResult
from ..decoding.target import Target
from ..runtime.base import Step
from ..runtime.overlap import Clock
from .recording import BRANCHES, DRAFT, PROMPT, TARGET, Block
from .tokens import TokenLog


class TimelineObserver:
    """An observer for `generate(speculation_observer=...)`; `record` uses it.

    Example:
        >>> from hf_specbranch import load_demo_pair, specbranch
        >>> target, draft, tokenizer = load_demo_pair()
        >>> observer, inputs = TimelineObserver(), tokenizer("def add(a, b):", return_tensors="pt")
        >>> out = specbranch(target, draft).generate(**inputs, max_new_tokens=8, speculation_observer=observer)
        >>> len(observer.tokens.committed)
        8
    """

    def __init__(self) -> None:
        self.tokens = TokenLog()
        self.notes: list[dict[str, Any]] = []  # blocks, with moments in place of seconds
        self.result_moments: list[Any] = []
        self.clock: Clock | None = None

    def __call__(self, parts: Parts) -> Parts:
        """Return the same parts, observed. Called again whenever another plan takes over."""
        rows = len(parts.text.lengths)
        if rows != 1:
            raise ValueError(f"a timeline shows one text, this batch has {rows}: pass one prompt at a time")
        self.clock = self.clock or Clock(parts.target.device, parts.drafter.device)
        self.stats = parts.accounting.stats
        return parts._replace(
            target=cast(Target, ObservedTarget(parts.target, self)),
            drafter=cast(DraftSource, ObservedDrafter(parts.drafter, self)),
            accounting=cast(Accounting, ObservedAccounting(parts.accounting, self)),
        )

    @contextmanager
    def working(self, lane: str, name: str, device: torch.device, forwards: int | None = None) -> Iterator[list[Any]]:
        """Record a block; the caller puts the rows of tokens that it is about into the list."""
        assert self.clock is not None
        rows: list[Any] = []
        before, begin = self.stats.draft_forwards, self.clock.now()
        yield rows
        if device.type == "cuda" and not self.clock.by_events:  # the host's clock must wait for the work to be done
            torch.cuda.current_stream(device).synchronize()
        end = self.clock.now()
        count = self.stats.draft_forwards - before if forwards is None else forwards
        self.notes.append(
            {"lane": lane, "name": name, "round": self.tokens.round, "begin": begin, "end": end, "rows": rows,
             "forwards": count}
        )  # fmt: skip

    def finish_round(self, result: VerifyResult, row: RowResult, depth: int) -> None:
        """Record what a round meant."""
        assert self.clock is not None
        this = self.tokens.round
        self.tokens.resolve(result, row, result.resolve(row.committed, row.finished, depth))
        self.result_moments.append(self.clock.now())
        for note in self.notes:
            if note["round"] == this and note["lane"] == TARGET and row.complete:
                note["gives"] = len(self.tokens.committed) - 1

    def blocks(self) -> list[Block]:
        """Return all work, by the time it began."""
        assert self.clock is not None
        seconds = self.clock.seconds
        blocks = [Block(**{**n, "begin": seconds(n["begin"]), "end": seconds(n["end"])}) for n in self.notes]
        return sorted((b for b in blocks if b.forwards or any(b.rows)), key=lambda block: block.begin)

    def result_times(self) -> list[float]:
        """Return when each round ended."""
        assert self.clock is not None
        return [self.clock.seconds(moment) for moment in self.result_moments]


class Observed:
    """A part of the loop as it is, except for the methods that a subclass records."""

    def __init__(self, part: Any, observer: TimelineObserver) -> None:
        self.part, self.observer = part, observer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)


class ObservedTarget(Observed):
    """Records the target's passes."""

    def prefill(self) -> Step:
        with self.observer.working(TARGET, PROMPT, self.part.device, forwards=1):
            return cast(Step, self.part.prefill())

    def verify(self, draft_tokens: DraftTokens) -> Step:
        verified = self.observer.tokens.pending[: int(draft_tokens.length[0])]
        with self.observer.working(TARGET, "verify", self.part.device, forwards=1) as rows:
            rows.append(verified)
            return cast(Step, self.part.verify(draft_tokens))

    def read_skipped_token(self) -> None:
        if self.part.text.skips:
            with self.observer.working(TARGET, "read a leaf", self.part.device, forwards=1):
                self.part.read_skipped_token()


class ObservedDrafter(Observed):
    """Records the draft's stages, and the tokens that each of them drafts."""

    def prefill(self, length: int) -> None:
        with self.observer.working(DRAFT, PROMPT, self.part.device):
            self.part.prefill(length)

    def propose(self, feedback: Feedback, reached: int) -> DraftTokens:
        with self.observer.working(DRAFT, "draft", self.part.device) as rows:
            draft_tokens: DraftTokens = self.part.propose(feedback, reached)
        if self._drafter is None:
            sent = draft_tokens.tokens[0, : int(draft_tokens.length[0])].tolist()
            rows += [new for new in [self.observer.tokens.extend(sent, [None] * len(sent), DRAFT)] if new]
        else:
            rows += [new for new in [self._new_pending(DRAFT)] if new]
        return draft_tokens

    def branch(self, reached: int) -> BranchStarts:
        with self.observer.working(BRANCHES, "draft ahead", self.part.device) as rows:
            branches: BranchStarts = self.part.branch(reached)
        rows += [new for new in [self._new_pending(BRANCHES)] if new]
        rows += self._side_branches(branches)
        return branches

    @property
    def _drafter(self) -> Drafter | None:
        """The draft model, if it has made the last proposal."""
        part = getattr(self.part, "current", self.part)
        return part if isinstance(part, Drafter) else None

    def _new_pending(self, lane: str) -> list[int]:
        if (drafter := self._drafter) is None:
            return []
        pending = drafter.round.pending
        start, end = int(pending.start[0]), int(pending.end[0])
        columns = torch.arange(start, end, device=pending.device)
        confidences = pending.confidence[0, columns % pending.ring].tolist()
        return self.observer.tokens.extend(pending.ids[0, start:end].tolist(), confidences, lane)

    def _side_branches(self, branches: BranchStarts) -> list[list[int]]:
        """Return the tokens of every side branch, one row each."""
        if (drafter := self._drafter) is None:
            return []
        side, log = drafter.round.side, self.observer.tokens
        at = branches.at[0].tolist()
        for branch in (index for index in range(1, len(at)) if at[index] != NONE):
            tokens = side.tokens[0, branch - 1].tolist()
            confidences = [None, *side.confidence[0, branch - 1].tolist()]
            log.side[branch] = log.add(tokens, confidences, BRANCHES, branch)
        return list(log.side.values())


class ObservedAccounting(Observed):
    """Records what each round meant."""

    def add(self, results: list[VerifyResult], rows: list[RowResult], source: str = "") -> None:
        self.part.add(results, rows, source)
        self.observer.finish_round(results[0], rows[0], self.part.depth)

    def close(self) -> None:
        self.part.close()
        self.observer.tokens.roll_back()
