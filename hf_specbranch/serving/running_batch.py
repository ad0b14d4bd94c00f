"""A running batch: one generation whose rows take one text after another, between rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ..decoding.engine import assembled
from ..decoding.loop import Parts, decode
from ..decoding.outputs import Recorder
from ..decoding.policies import POLICIES
from ..decoding.resolve import Accounting, Feedback, RowResult, VerifyResult, count_round
from ..decoding.row_takeover import copy_row, take_over_row, vacate_row
from ..runtime.base import Step
from ..runtime.eager import EagerRunner
from ..runtime.overlap import cpu_threads
from ..stats import SpecBranchStats
from .batch_call import BatchSettings
from .completion import Completion, TokenLogprobs
from .row_sampling import GREEDY, RowSampling


class RunningBatch:
    """Generates the answers in its rows. A context: it holds runners of both models while it is open.

    Args:
        settings: of the engine.
        rows: how many answers it generates at a time.
        kind: what sampling the answers may need; see `row_sampling`.
        stats: where to count, over all answers.
    """

    def __init__(self, settings: BatchSettings, rows: int, kind: int, stats: SpecBranchStats) -> None:
        self.rows, self.kind, self.stats, self.sampling = rows, kind, stats, RowSampling(rows, kind)
        self.call = settings.call(rows, self.sampling)
        assert self.call.row_stopper is not None
        self.completions = self.call.row_stopper.completions  # by row; None: it is free

    def __enter__(self) -> RunningBatch:
        with ExitStack() as stack:
            self.assembly = assembly = stack.enter_context(assembled(self.call, self.stats))
            parts = assembly.parts()
            plan = assembly.plans[0]
            if len(assembly.plans) > 1:
                plan = assembly.planner(parts.text).first_choice().plan
            parts = assembly.with_drafter(plan, parts)
            self.plan = plan
            accounting = RowAccounting(self.stats, parts.drafter.depth, self.completions, parts.text.static_shapes)
            self.parts: Parts = parts._replace(accounting=accounting)
            self.streams = stack.enter_context(ExitStack())  # may be closed first
            self.overlap = self.streams.enter_context(assembly.overlap())
            self.overlap.enabled = plan.overlap and POLICIES[plan.policy].drafts_ahead
            result = parts.text.result.to(parts.drafter.device)
            self.feedback = Feedback(result, features=None, moved=False, draft_ended=True)
            for row in range(rows_of(parts)):
                self.feedback = vacate_row(self.parts, self.feedback, row)
            self.exit = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.exit.close()

    def stop(self) -> None:
        """Run no more rounds. Answers may move to another batch, until this one is closed."""
        self.parts.accounting.close()  # what is pending is rolled back
        self.streams.close()  # streams must be left in the opposite order

    @property
    def runner(self) -> EagerRunner:
        """The runner of the target."""
        return self.assembly.runner

    @property
    def draft_runner(self) -> EagerRunner | None:
        """The runner of the draft, if the plan drafts with one."""
        return self.assembly.draft_runner

    @property
    def drafts(self) -> bool:
        """Whether a model drafts."""
        return self.draft_runner is not None and POLICIES[self.plan.policy].drafts

    def free_row(self) -> int | None:
        """Return a row that is free; None if there is none."""
        return next((row for row, completion in enumerate(self.completions) if completion is None), None)

    @property
    def active(self) -> list[Completion]:
        """The answers that are being generated."""
        return [completion for completion in self.completions if completion is not None]

    def place(
        self, row: int, completion: Completion, target: tuple[EagerRunner, int], draft: tuple[EagerRunner, int] | None
    ) -> None:
        """Let a free row go on with an answer.

        Args:
            row: which row.
            completion: the answer; it may have tokens already.
            target: the runner, and its row, from which the target's keys and values of all tokens but the last are
                taken.
            draft: the same for the draft.
        """
        tokens = [*completion.prompt, *completion.tokens]
        for source, runner in ((target, self.runner), (draft, self.draft_runner)):
            if source is not None and runner is not None and len(tokens) > 1:
                copy_row(*source, runner, row, self.rows, len(tokens) - 1)
        self.feedback = take_over_row(self.parts, self.feedback, row, tokens)
        self.sampling.set_row(row, completion.settings.sampling)
        self.completions[row] = completion

    def vacate(self, row: int) -> None:
        """Free a row."""
        self.feedback = vacate_row(self.parts, self.feedback, row)
        self.sampling.set_row(row, GREEDY)
        self.completions[row] = None

    def run(self, go_on: Callable[[], bool]) -> None:
        """Run a round, or more of them for as long as no answer ends and `go_on` says so; free rows that have ended."""
        recorder = None
        if any(each.settings.logprobs is not None for each in self.active):
            recorder = LogprobRecorder(self.completions)
        parts = self.parts._replace(recorder=recorder)
        self.feedback = decode(parts, self.overlap, self.feedback, cpu_threads.watch(self._rounds(go_on)))
        self.overlap.spans = {what: [] for what in self.overlap.spans}  # nobody reads the times
        for row, completion in enumerate(self.completions):
            if completion is not None and completion.finished:
                self.vacate(row)

    def _rounds(self, go_on: Callable[[], bool]) -> Iterator[int]:
        yield 0
        # Where stages are captured the next round starts before the host has read this one.
        while self.parts.text.static_shapes and go_on() and not any(each.finished for each in self.active):
            yield 0


def rows_of(parts: Parts) -> int:
    """Return how many rows a batch has."""
    return len(parts.text.lengths)


class RowAccounting(Accounting):
    """Counts rounds for the batch and for each answer, and tells answers that they have grown.

    Args:
        stats: of the batch.
        depth: tokens of a side branch after its first.
        completions: by row.
        later: tell them while the device runs the next round.
    """

    def __init__(
        self, stats: SpecBranchStats, depth: int, completions: list[Completion | None], later: bool = False
    ) -> None:
        super().__init__(stats, depth)
        self.completions, self.later = completions, later

    def add(self, results: list[VerifyResult], rows: list[RowResult], source: str = "") -> None:
        super().add(results, rows, source)
        self.grown = [
            (completion, at) for at, completion in enumerate(self.completions) if completion and rows[at].committed
        ]
        if not self.later:
            self.flush()

    def flush(self) -> None:
        if not self.uncounted:
            return
        for completion, row in self.grown:
            stats, (_, result, *_) = completion.stats, self.uncounted[row]
            count_round(stats, *self.uncounted[row])
            stats.new_tokens += result.committed
            stats.target_forwards += 1
            self.stats.new_tokens += result.committed
            completion.update()
        super().flush()

    def close(self) -> None:
        running = [completion for completion in self.completions if completion is not None]
        for completion, pending in zip(running, self.pending):
            completion.stats.rollback_tokens += pending
        super().close()


class LogprobRecorder(Recorder):
    """Gives answers the log-probabilities that they ask for.

    Args:
        completions: by row.
    """

    keeps_scores = False

    def __init__(self, completions: list[Completion | None]) -> None:
        self.completions = completions

    def scores_so_far(self, scores: Tensor | None) -> None:
        return None

    def add(self, step: Step, scores: Tensor | None, queries: Sequence[range]) -> None:
        for row, completion in enumerate(self.completions):
            if completion is None or completion.settings.logprobs is None or not len(queries[row]):
                continue
            add_logprobs(completion, step.logits[row, : len(queries[row])])


def add_logprobs(completion: Completion, logits: Tensor) -> None:
    """Give an answer the log-probabilities of its last tokens, by the logits [n, V] at their positions."""
    if completion.settings.logprobs is None:
        return
    logprobs: Any = logits.float().log_softmax(-1)
    tokens = completion.tokens[len(completion.logprobs) :]
    own = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
    best = logprobs.topk(max(1, completion.settings.logprobs), dim=-1)
    for token, value, ids, values in zip(tokens, own, best.indices.tolist(), best.values.tolist()):
        top = list(zip(ids, values))[: completion.settings.logprobs]
        completion.logprobs.append(TokenLogprobs(token, value, top))
