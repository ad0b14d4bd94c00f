"""The engine: answers many prompts at a time, each as soon as there is a row for it, in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from ..runtime.overlap import cpu_threads
from ..stats import SpecBranchStats
from .batch_call import BatchSettings, batch_settings
from .completion import Completion, CompletionSettings
from .row_count import most_rows
from .row_sampling import GREEDY_ROWS
from .scheduler import Scheduler, sizes_up_to

logger = logging.getLogger(__name__)


class Engine:
    """Generates answers with a target and its draft in one running batch.

    Each answer is what `generate()` gives for its prompt alone: token for token if it is greedy, and else a draw from
    the same distribution, which depends on the seed and on nothing else in the batch (see `row_sampling`).

    Args:
        model: the target, as `specbranch(model, draft=...)` returned it. Its weights must not change while it runs.
        tokenizer: of the target.
        rows: the most answers at a time; by default as many as pay, by the sizes of the models.
        max_length: the longest text, prompt included; by default the target's context.
        settings: of SpecBranch, as `generate(specbranch=...)` takes them.

    Example:
        >>> from hf_specbranch import load_demo_pair, specbranch
        >>> target, draft, tokenizer = load_demo_pair()
        >>> with Engine(specbranch(target, draft), tokenizer) as engine:
        ...     answers = engine.complete(["def add(a, b):", "import"], CompletionSettings(max_tokens=8))
        >>> [len(answer.tokens) for answer in answers]
        [8, 8]
    """

    def __init__(
        self, model: Any, tokenizer: Any, rows: int | None = None, max_length: int | None = None, settings: Any = None
    ) -> None:
        if rows is not None and rows < 1:
            raise ValueError(f"rows={rows}: expected at least 1")
        self.settings: BatchSettings = batch_settings(model, tokenizer, max_length, settings)
        rows = rows or most_rows(self.settings.model, self.settings.draft, self.settings.max_length)
        self.captured = self.settings.model.device.type == "cuda" and self.settings.config.runtime != "eager"
        self.tokenizer, self.sizes = tokenizer, sizes_up_to(rows, self.captured)
        self.stats = SpecBranchStats(policy=self.settings.config.policy)  # over all answers
        self.queue = WaitingAnswers()
        self.closing, self.closed = False, False
        self.running = 0  # answers that have a row, or whose prompt is being read
        self.thread = threading.Thread(target=self._run, name="specbranch-engine", daemon=True)

    def __enter__(self) -> Engine:
        self.thread.start()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self.close(drain=kind is None)

    @property
    def max_length(self) -> int:
        """The longest text, prompt included."""
        return self.settings.max_length

    @property
    def ends(self) -> frozenset[int]:
        """The end-of-sequence tokens of the target."""
        return self.settings.ends

    @property
    def vocabulary(self) -> int:
        """How many tokens the target knows."""
        return int(self.settings.model.get_input_embeddings().weight.shape[0])

    def submit(self, completion: Completion) -> Completion:
        """Queue an answer; `completion.on_update` is called as it grows, in the engine's thread."""
        room = self.max_length - len(completion.prompt)
        if not completion.prompt or room < 1:
            given = f"a prompt of {len(completion.prompt)} tokens"
            raise ValueError(f"{given}: expected 1 to {self.max_length - 1}, with room for an answer")
        with self.queue.change:
            if self.closing:
                raise RuntimeError("the engine is closed")
            self.queue.push(completion)
        return completion

    def complete(self, prompts: Iterable[str], settings: CompletionSettings) -> list[Completion]:
        """Answer prompts, and wait until all of them have ended."""
        done = threading.Semaphore(0)

        def update(completion: Completion) -> None:
            if completion.finished:
                done.release()

        answers = []
        for prompt in prompts:
            ids = self.tokenizer(prompt).input_ids
            answers.append(self.submit(Completion(ids, settings, self.tokenizer, update)))
        for _ in answers:
            done.acquire()
        return answers

    def close(self, drain: bool = True) -> None:
        """Take no more prompts, and end the thread: once all answers are complete, or at once.

        Args:
            drain: wait for the answers that are queued or running; otherwise they fail.
        """
        with self.queue.change:
            self.closing, self.closed = True, self.closed or not drain
            self.queue.change.notify_all()
        if self.thread.is_alive():
            self.thread.join()

    # ---- the engine's thread

    def _run(self) -> None:
        while not self._is_over():
            scheduler = Scheduler(self.settings, self.queue, self.sizes, self.captured, self.stats)
            try:
                with torch.no_grad(), cpu_threads.limited(self.settings.model.device), scheduler:
                    while not self._is_over(scheduler):
                        scheduler.step(lambda: self.closed)
                        self.running = len(scheduler.running)
            except Exception as error:  # of a model or a device: those that were running fail, later ones may not
                logger.exception("the running batch has failed")
                self._fail(scheduler.running, f"{type(error).__name__}: {error}")
            self._fail(scheduler.running, "the engine is closed")
            self.running = 0
        self._fail(self.queue.pop_all(), "the engine is closed")

    def _is_over(self, scheduler: Scheduler | None = None) -> bool:
        """Wait until there is something to do; return whether there will be nothing."""
        is_busy = scheduler is not None and bool(scheduler.running)
        with self.queue.change:
            self.queue.change.wait_for(lambda: is_busy or len(self.queue) or self.closing)
            return self.closed or (self.closing and not is_busy and not len(self.queue))

    def _fail(self, completions: list[Completion], reason: str) -> None:
        for completion in completions:
            if completion.reported is None:  # it may have its last token, but nobody was told
                completion.fail(reason)


class WaitingAnswers:
    """Answers in the order in which they came.

    Attributes:
        change: notified when there are more.
    """

    def __init__(self) -> None:
        self.change = threading.Condition(threading.RLock())
        self.answers: deque[Completion] = deque()

    def __len__(self) -> int:
        return len(self.answers)

    def kind(self) -> int:
        """Return what sampling the answers need that wait."""
        with self.change:
            return max((each.settings.sampling.kind for each in self.answers), default=GREEDY_ROWS)

    def push(self, completion: Completion) -> None:
        with self.change:
            self.answers.append(completion)
            self.change.notify_all()

    def pop(self) -> Completion | None:
        """Return the next answer that somebody still waits for, if there is one."""
        while True:
            with self.change:
                if not self.answers:
                    return None
                completion = self.answers.popleft()
            if not completion.cancelled:
                return completion
            completion.end_cancelled()

    def pop_all(self) -> list[Completion]:
        """Return all answers that wait."""
        with self.change:
            answers, self.answers = list(self.answers), deque()
        return answers
