"""Stands between a loop and its parts, and notes what each did and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from ..decoding.acceptance import NONE
from ..decoding.accounting import Accounting
from ..decoding.drafter import Drafter, NoDrafter
from ..decoding.loop import Parts
from ..decoding.state import Branches, DraftTokens, Feedback, RowResult, VerifyResult
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
        >>> watch, inputs = Watch(), tokenizer("def add(a, b):", return_tensors="pt")
        >>> out = specbranch(target, draft).generate(**inputs, max_new_tokens=8, speculation_observer=watch)
        >>> len(watch.line.committed)
        8
    """

    def __init__(self) -> None:
        self.pending = TokenLog()
        self.notes: list[dict[str, Any]] = []  # blocks, with moments in place of seconds
        self.verdict_moments: list[Any] = []

    def __call__(self, parts: Parts) -> Parts:
        """The same parts, watched."""
        rows = len(parts.text.lengths)
        if rows != 1:
            raise ValueError(f"a timeline shows one text, this batch has {rows}: pass one prompt at a time")
        self.clock = Clock(parts.target.device, parts.drafter.device)
        self.stats = parts.accounting.stats
        return parts._replace(
            target=cast(Target, ObservedTarget(parts.target, self)),
            drafter=cast(Drafter, ObservedDrafter(parts.drafter, self)),
            accounting=cast(Accounting, ObservedAccounting(parts.accounting, self)),
        )

    @contextmanager
    def working(self, lane: str, name: str, device: torch.device, forwards: int | None = None) -> Iterator[list[Any]]:
        """Notes a block; the rows of tokens it is about are to be put into the list."""
        rows: list[Any] = []
        before, begin = self.stats.draft_forwards, self.clock.now()
        yield rows
        if device.type == "cuda" and not self.clock.by_events:  # the host's clock must wait for the work to be done
            torch.cuda.current_stream(device).synchronize()
        end = self.clock.now()
        count = self.stats.draft_forwards - before if forwards is None else forwards
        self.notes.append(
            {"lane": lane, "name": name, "round": self.pending.round, "begin": begin, "end": end, "rows": rows,
             "forwards": count}
        )  # fmt: skip

    def conclude(self, verify_result: VerifyResult, row_result: RowResult) -> None:
        """A round is over."""
        this = self.pending.round
        self.pending.settle(verify_result, row_result)
        self.verdict_moments.append(self.clock.now())
        for note in self.notes:
            if note["round"] == this and note["lane"] == TARGET and row_result.complete:
                note["gives"] = len(self.pending.committed) - 1

    def blocks(self) -> list[Block]:
        """All work, by the time it began."""
        seconds = self.clock.seconds
        blocks = [Block(**{**n, "begin": seconds(n["begin"]), "end": seconds(n["end"])}) for n in self.notes]
        return sorted((b for b in blocks if b.forwards), key=lambda block: block.begin)

    def verdicts(self) -> list[float]:
        """When each round ended."""
        return [self.clock.seconds(moment) for moment in self.verdict_moments]


class Observed:
    """A part of the loop, as it is, but for the methods that a subclass notes."""

    def __init__(self, part: Any, observer: TimelineObserver) -> None:
        self.part, self.observer = part, observer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)


class ObservedTarget(Observed):
    """Notes the target's passes."""

    def prefill(self) -> Step:
        with self.observer.working(TARGET, PROMPT, self.part.device, forwards=1):
            return cast(Step, self.part.prefill())

    def verify(self, draft_tokens: DraftTokens) -> Step:
        verified = self.observer.pending.pending[: int(draft_tokens.length[0])]
        with self.observer.working(TARGET, "verify", self.part.device, forwards=1) as rows:
            rows.append(verified)
            return cast(Step, self.part.verify(draft_tokens))


class ObservedDrafter(Observed):
    """Notes the draft's stages, and the tokens that each put down."""

    part: Drafter | NoDrafter

    def prefill(self, length: int) -> None:
        with self.observer.working(DRAFT, PROMPT, self.part.device):
            self.part.prefill(length)

    def draft(self, feedback: Feedback, reached: int) -> DraftTokens:
        with self.observer.working(DRAFT, "draft", self.part.device) as rows:
            draft_tokens = self.part.draft(feedback, reached)
        rows += [new for new in [self._new_on_line(DRAFT)] if new]
        return draft_tokens

    def branch(self, reached: int) -> Branches:
        with self.observer.working(BRANCHES, "draft ahead", self.part.device) as rows:
            branches = self.part.branch(reached)
        rows += [new for new in [self._new_on_line(BRANCHES)] if new]
        rows += self._siblings(branches)
        return branches

    def _new_on_line(self, lane: str) -> list[int]:
        if isinstance(self.part, NoDrafter):
            return []
        pending = self.part.pending
        start, end = int(pending.start[0]), int(pending.end[0])
        columns = torch.arange(start, end, device=pending.device)
        confidences = pending.confidence[0, columns % pending.ring].tolist()
        return self.observer.pending.extend(pending.ids[0, start:end].tolist(), confidences, lane)

    def _siblings(self, branches: Branches) -> list[list[int]]:
        """The tokens of every branch beside the main one, a row each."""
        if isinstance(self.part, NoDrafter):
            return []
        side_branches, ours = self.part.side_branches, self.observer.pending
        at = branches.at[0].tolist()
        for branch in (index for index in range(1, len(at)) if at[index] != NONE):
            tokens = side_branches.tokens[0, branch - 1].tolist()
            confidences = [None, *side_branches.confidence[0, branch - 1].tolist()]
            ours.side_branches[branch] = ours.put_down(tokens, confidences, BRANCHES, branch)
        return list(ours.side_branches.values())


class ObservedAccounting(Observed):
    """Notes the verdicts."""

    def note(self, results: list[VerifyResult], rejection_branches: list[RowResult]) -> None:
        self.part.note(results, rejection_branches)
        self.observer.conclude(results[0], rejection_branches[0])
