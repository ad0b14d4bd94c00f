"""The scheduler: which answers have a row of the running batch, and what batch that is.

Prompts that wait are read into free rows between rounds. The batch has one of few sizes, and where stages are captured
one of three kinds, since sampling takes time. A larger one is taken as soon as somebody waits for it, and a smaller one
when it has sufficed for a while; answers move with their keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple, Protocol

from transformers import PreTrainedModel

from ..runtime.eager import EagerRunner
from ..stats import SpecBranchStats
from .batch_call import BatchSettings
from .completion import Completion
from .prompt_reader import PASS, PromptReader, reader_runner
from .row_sampling import CUT_ROWS
from .running_batch import RunningBatch, add_logprobs

PATIENCE = 64  # rounds in a row that a smaller batch must suffice for, before the answers move to one
GROWTH = {True: 4, False: 2}  # each size over the next smaller one, by whether stages are captured for each


class Queue(Protocol):
    """Where answers wait."""

    def __len__(self) -> int: ...

    def kind(self) -> int:
        """Return what sampling the answers need that wait; see `row_sampling`."""
        ...

    def pop(self) -> Completion | None:
        """Return the next answer that somebody still waits for, if there is one."""
        ...


class Readers(NamedTuple):
    """Read the prompt of one answer after another."""

    target: PromptReader
    draft: PromptReader | None  # None: no model drafts


class Scheduler:
    """Runs the batch. A context: it holds runners of both models while it is open.

    Args:
        settings: of the engine.
        queue: where answers wait.
        sizes: the sizes of the batch, in order.
        captured: stages are captured, with what their rows may need.
        stats: where to count, over all answers.
    """

    def __init__(
        self, settings: BatchSettings, queue: Queue, sizes: list[int], captured: bool, stats: SpecBranchStats
    ) -> None:
        self.settings, self.queue, self.sizes, self.captured, self.stats = settings, queue, sizes, captured, stats
        self.reading: Completion | None = None  # the answer whose prompt is being read
        self.batch: RunningBatch | None = None
        self.moving: list[Completion] = []  # the answers of the batch that was closed last
        self.calm = 0  # rounds in a row that a smaller batch would have sufficed for

    def __enter__(self) -> Scheduler:
        settings = self.settings
        with ExitStack() as stack:

            def reader(model: PreTrainedModel, role: str) -> PromptReader:
                runner = reader_runner(model, role, settings.max_length, settings.config)
                return PromptReader(stack.enter_context(runner))

            draft = None if settings.draft is None else reader(settings.draft, "draft")
            self.readers = Readers(reader(settings.model, "target"), draft)
            self.exit = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._close_batch()
        self.exit.close()

    @property
    def running(self) -> list[Completion]:
        """The answers that have a row, or are about to get one."""
        active = self.moving if self.batch is None else self.batch.active
        return [*active, *([] if self.reading is None else [self.reading])]

    def step(self, must_stop: Callable[[], bool]) -> None:
        """Give free rows to prompts that wait, and run a round, or several while nothing changes.

        Args:
            must_stop: whether to return after the round that runs.
        """
        self._resize()
        self._fill_rows()
        if self.batch is not None and self.batch.active:
            self.batch.run(lambda: not (must_stop() or self.reading is not None or len(self.queue)))

    # ---- new answers

    def _fill_rows(self) -> None:
        """Read prompts into free rows: all of them while no answer is running, else so many tokens."""
        batch, read = self.batch, 0
        while batch is not None and (row := batch.free_row()) is not None:
            if self.reading is None:
                self.reading = self.queue.pop()
                if self.reading is None:
                    return
                self.readers.target.begin(self.reading.prompt)
            read += self.readers.target.read()
            if self.readers.target.is_done:
                self._add_first_token(self.reading)
                if not self.reading.finished:
                    draft = self._read_by_draft(self.reading) if batch.drafts else None
                    batch.place(row, self.reading, (self.readers.target.runner, 0), draft)
                self.reading = None
            if read >= PASS and batch.active:
                return

    def _add_first_token(self, completion: Completion) -> None:
        """Give an answer the token that follows its prompt, before the draft reads anything."""
        logits, settings = self.readers.target.logits, completion.settings
        assert logits is not None
        token = self.settings.first_token(completion.prompt, settings.sampling, logits)
        completion.add(token, is_last=len(completion.prompt) + 1 >= self.settings.max_length)
        add_logprobs(completion, logits[0])
        for stats in (completion.stats, self.stats):
            stats.new_tokens += 1
            stats.target_forwards += 1
        completion.update()

    # ---- the batch

    def _resize(self) -> None:
        needed, current = len(self.queue) + len(self.running), self.batch
        fitting = next((size for size in self.sizes if size >= needed), self.sizes[-1])
        kinds = [self.queue.kind(), *(each.settings.sampling.kind for each in self.running)]
        kind = max(kinds) if self.captured else CUT_ROWS
        if current is not None:
            suffices = fitting <= current.rows and kind <= current.kind
            is_too_much = suffices and (fitting, kind) != (current.rows, current.kind)
            self.calm = self.calm + 1 if is_too_much else 0
            if suffices and not (is_too_much and (self.calm >= PATIENCE or not self.running)):
                return
        if needed:
            self._move_to(fitting, kind)

    def _move_to(self, rows: int, kind: int) -> None:
        """Go on with a batch of so many rows, and of this kind."""
        if self.batch is not None:
            self.batch.stop()
        with ExitStack() as stack:
            new, old = stack.enter_context(RunningBatch(self.settings, rows, kind, self.stats)), self.batch
            for row, completion in enumerate([] if old is None else old.completions):
                if completion is not None and old is not None:
                    free = new.free_row()
                    assert free is not None
                    draft = self._read_by_draft(completion) if new.drafts else None
                    new.place(free, completion, (old.runner, row), draft)
            self._close_batch()
            self.batch, self.batch_exit, self.calm = new, stack.pop_all(), 0

    def _close_batch(self) -> None:
        if self.batch is not None:
            self.moving, self.batch = self.batch.active, None
            self.batch_exit.close()

    def _read_by_draft(self, completion: Completion) -> tuple[EagerRunner, int] | None:
        """Let the draft read all of an answer so far but the last token; return where its keys and values are."""
        reader = self.readers.draft
        if reader is None:
            return None
        reader.begin([*completion.prompt, *completion.tokens[:-1]])
        while not reader.is_done:
            reader.read()
        return reader.runner, 0


def sizes_up_to(rows: int, captured: bool) -> list[int]:
    """Return the sizes of a batch, `rows` the largest.

    Args:
        rows: the most rows.
        captured: stages are captured for each size, which takes time.

    Example:
        >>> sizes_up_to(16, captured=True), sizes_up_to(6, captured=False), sizes_up_to(1, captured=True)
        ([1, 4, 16], [1, 2, 4, 6], [1])
    """
    sizes = [1]
    while sizes[-1] * GROWTH[captured] < rows:
        sizes.append(sizes[-1] * GROWTH[captured])
    return sizes if rows == 1 else [*sizes, rows]
