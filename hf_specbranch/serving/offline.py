"""Offline jobs: answers all prompts of a file, on this machine or with Ray Data on many."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..config import SpecBranchConfig
from ..progress import Progress
from .answer_file import AnswerFile, Job
from .api_errors import ApiError
from .completion import Completion, CompletionSettings
from .engine import Engine
from .row_sampling import Sampling
from .service import chat_tokens

AHEAD = 2  # prompts in the queue of the engine, over its rows
BLOCK = 256  # prompts that an engine on Ray takes at a time

Answer = dict[str, Any]


@dataclass(frozen=True)
class OfflineSettings:
    """How all prompts of a job are answered.

    Args:
        max_new_tokens: the most tokens of an answer.
        temperature: 0 is greedy.
        top_p: sample from the likeliest tokens of this mass.
        seed: line `i` of the prompts has the seed `seed + i`, whenever it is answered.
        stop: strings that end an answer.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()

    def of(self, job: Job, engine: Engine) -> CompletionSettings:
        """Return the settings of one answer."""
        sampling = Sampling(self.temperature, self.top_p, (self.seed + job.line) % (1 << 63))
        return CompletionSettings(self.max_new_tokens, sampling, self.stop, engine.ends)


def answers_of(engine: Engine, jobs: Iterable[Job], settings: OfflineSettings) -> Iterator[Answer]:
    """Yield answers in the order in which they end. A prompt that cannot be answered gets an answer that says why."""
    ended: queue.SimpleQueue[tuple[Job, Completion]] = queue.SimpleQueue()
    jobs, running = iter(jobs), 0

    def submit(job: Job) -> None:
        def update(completion: Completion) -> None:
            if completion.finished:
                ended.put((job, completion))

        tokens = _tokens(engine, job)
        engine.submit(Completion(tokens, settings.of(job, engine), engine.tokenizer, update))

    while True:
        for job in jobs:
            try:
                submit(job)
            except (ValueError, ApiError) as error:
                yield {"line": job.line, "id": job.id, "error": str(error)}
                continue
            running += 1
            if running >= AHEAD * engine.sizes[-1]:
                break
        if not running:
            return
        job, completion = ended.get()
        running -= 1
        if completion.finish_reason == "error":  # of the engine, not of this prompt
            raise RuntimeError(f"line {job.line}: {completion.error}")
        yield {
            "line": job.line,
            "id": job.id,
            "text": completion.text(),
            "finish_reason": completion.finish_reason,
            "prompt_tokens": len(completion.prompt),
            "completion_tokens": len(completion.tokens),
        }


def _tokens(engine: Engine, job: Job) -> list[int]:
    if isinstance(job.prompt, str):
        return list(engine.tokenizer(job.prompt).input_ids)
    return chat_tokens(engine.tokenizer, job.prompt)


def by_length(jobs: Iterable[Job]) -> list[Job]:
    """Return jobs with the longest prompt first: neighbours share a batch, and the last ones end soon."""
    return sorted(jobs, key=lambda job: (-job.size, job.line))


def write_answers(answers: Iterable[Answer], file: AnswerFile, count: int, progress: Progress) -> dict[str, int]:
    """Append answers as they come, and show how many tokens are generated per second and how long it takes.

    Args:
        answers: the answers that are left.
        file: where they go.
        count: how many there will be.
        progress: shows them.

    Returns:
        How many answers, tokens and errors there were.
    """
    done = {"answers": 0, "tokens": 0, "errors": 0}
    began = time.monotonic()
    progress.doing(f"0 of {count} answers")
    for answer in answers:
        file.append(answer)
        done["answers"] += 1
        done["errors"] += "error" in answer
        done["tokens"] += answer.get("completion_tokens", 0)
        seconds = time.monotonic() - began
        left = seconds / done["answers"] * (count - done["answers"])
        progress.advance()
        progress.doing(f"{done['tokens'] / seconds:.0f} tokens/s, {_duration(left)} left")
    return done


def _duration(seconds: float) -> str:
    """Return a time for humans.

    Example:
        >>> _duration(42), _duration(3700)
        ('42 s', '1:01:40')
    """
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


# ---- on many machines


def answers_on_ray(
    load: Callable[[], tuple[Any, Any]], config: SpecBranchConfig, rows: int, max_length: int | None, jobs: list[Job],
    settings: OfflineSettings, replicas: int, gpus: float,
) -> Iterator[Answer]:  # fmt: skip
    """Yield answers from engines on a Ray cluster, each of which takes blocks of prompts; see `application`."""
    import ray
    from ray.data import ActorPoolStrategy

    class Answering:
        def __init__(self) -> None:
            self.engine = Engine(*load(), rows or None, max_length, config).__enter__()

        def __call__(self, block: dict[str, Any]) -> Iterator[dict[str, list[str]]]:
            given = [Job(*json.loads(job)) for job in block["job"]]
            for answer in answers_of(self.engine, given, settings):
                yield {"answer": [json.dumps(answer)]}

    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    written = [{"job": json.dumps(job)} for job in jobs]
    found = ray.data.from_items(written, override_num_blocks=-(-len(jobs) // BLOCK)).map_batches(
        Answering, batch_size=BLOCK, compute=ActorPoolStrategy(size=replicas), num_gpus=gpus, num_cpus=0 if gpus else 1
    )
    for row in found.iter_rows():
        yield json.loads(row["answer"])
