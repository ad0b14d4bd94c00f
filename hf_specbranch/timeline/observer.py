"""Stands between a loop and its parts, and notes what each did and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from ..decoding.acceptance import NONE
from ..decoding.accounting import Books
from ..decoding.drafter import Drafter, NoDrafter
from ..decoding.loop import Parts
from ..decoding.state import Branches, Chain, Feedback, Outcome, Report
from ..decoding.target import Target
from ..runtime.base import Step
from ..runtime.overlap import Clock
from .recording import BRANCHES, DRAFT, PROMPT, TARGET, Block
from .tokens import DraftedLine


class Watch:
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
        self.line = DraftedLine()
        self.notes: list[dict[str, Any]] = []  # blocks, with moments in place of seconds
        self.verdict_moments: list[Any] = []

    def __call__(self, parts: Parts) -> Parts:
        """The same parts, watched."""
        rows = len(parts.text.lengths)
        if rows != 1:
            raise ValueError(f"a timeline shows one text, this batch has {rows}: pass one prompt at a time")
        self.clock = Clock(parts.target.device, parts.drafter.device)
        self.stats = parts.books.stats
        return parts._replace(
            target=cast(Target, WatchedTarget(parts.target, self)),
            drafter=cast(Drafter, WatchedDrafter(parts.drafter, self)),
            books=cast(Books, WatchedBooks(parts.books, self)),
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
            {"lane": lane, "name": name, "round": self.line.round, "begin": begin, "end": end, "rows": rows,
             "forwards": count}
        )  # fmt: skip

    def conclude(self, report: Report, outcome: Outcome) -> None:
        """A round is over."""
        this = self.line.round
        self.line.settle(report, outcome)
        self.verdict_moments.append(self.clock.now())
        for note in self.notes:
            if note["round"] == this and note["lane"] == TARGET and outcome.complete:
                note["gives"] = len(self.line.committed) - 1

    def blocks(self) -> list[Block]:
        """All work, by the time it began."""
        seconds = self.clock.seconds
        blocks = [Block(**{**n, "begin": seconds(n["begin"]), "end": seconds(n["end"])}) for n in self.notes]
        return sorted((b for b in blocks if b.forwards), key=lambda block: block.begin)

    def verdicts(self) -> list[float]:
        """When each round ended."""
        return [self.clock.seconds(moment) for moment in self.verdict_moments]


class Watched:
    """A part of the loop, as it is, but for the methods that a subclass notes."""

    def __init__(self, part: Any, watch: Watch) -> None:
        self.part, self.watch = part, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)


class WatchedTarget(Watched):
    """Notes the target's passes."""

    def prefill(self) -> Step:
        with self.watch.working(TARGET, PROMPT, self.part.device, forwards=1):
            return cast(Step, self.part.prefill())

    def verify(self, chain: Chain) -> Step:
        verified = self.watch.line.line[: int(chain.length[0])]
        with self.watch.working(TARGET, "verify", self.part.device, forwards=1) as rows:
            rows.append(verified)
            return cast(Step, self.part.verify(chain))


class WatchedDrafter(Watched):
    """Notes the draft's stages, and the tokens that each put down."""

    part: Drafter | NoDrafter

    def prefill(self, length: int) -> None:
        with self.watch.working(DRAFT, PROMPT, self.part.device):
            self.part.prefill(length)

    def draft(self, feedback: Feedback, reached: int) -> Chain:
        with self.watch.working(DRAFT, "draft", self.part.device) as rows:
            chain = self.part.draft(feedback, reached)
        rows += [new for new in [self._new_on_line(DRAFT)] if new]
        return chain

    def branch(self, reached: int) -> Branches:
        with self.watch.working(BRANCHES, "draft ahead", self.part.device) as rows:
            branches = self.part.branch(reached)
        rows += [new for new in [self._new_on_line(BRANCHES)] if new]
        rows += self._siblings(branches)
        return branches

    def _new_on_line(self, lane: str) -> list[int]:
        if isinstance(self.part, NoDrafter):
            return []
        line = self.part.line
        start, end = int(line.start[0]), int(line.end[0])
        columns = torch.arange(start, end, device=line.device)
        confidences = line.confidence[0, columns % line.ring].tolist()
        return self.watch.line.extend(line.ids[0, start:end].tolist(), confidences, lane)

    def _siblings(self, branches: Branches) -> list[list[int]]:
        """The tokens of every branch beside the main one, a row each."""
        if isinstance(self.part, NoDrafter):
            return []
        siblings, ours = self.part.siblings, self.watch.line
        at = branches.at[0].tolist()
        for branch in (index for index in range(1, len(at)) if at[index] != NONE):
            tokens = siblings.tokens[0, branch - 1].tolist()
            confidences = [None, *siblings.confidence[0, branch - 1].tolist()]
            ours.siblings[branch] = ours.put_down(tokens, confidences, BRANCHES, branch)
        return list(ours.siblings.values())


class WatchedBooks(Watched):
    """Notes the verdicts."""

    def note(self, reports: list[Report], outcomes: list[Outcome]) -> None:
        self.part.note(reports, outcomes)
        self.watch.conclude(reports[0], outcomes[0])
