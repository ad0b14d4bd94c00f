"""The files of an offline job: prompts as JSON lines, and a file to which answers are appended line by line."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Job(NamedTuple):
    """A line of the file of prompts."""

    line: int  # counted from 1
    id: Any  # of the prompt, or None
    prompt: str | list[dict[str, str]]  # a text, or the messages of a chat

    @property
    def size(self) -> int:
        """The characters of the prompt."""
        return len(self.prompt) if isinstance(self.prompt, str) else sum(len(each["content"]) for each in self.prompt)


def read_jobs(path: Path) -> list[Job]:
    """Read prompts: one JSON object per line with a `prompt` or `messages`, and an `id` if it has one.

    Raises:
        ValueError: a line is something else.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected JSON lines with a prompt each")
    jobs = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                jobs.append(_job(path, number, line))
    if not jobs:
        raise ValueError(f'{path} holds no prompts: expected lines such as {{"id": "1", "prompt": "def add(a, b):"}}')
    return jobs


def _job(path: Path, number: int, line: str) -> Job:
    try:
        given = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
    prompt = given.get("prompt", given.get("messages")) if isinstance(given, dict) else None
    is_chat = isinstance(prompt, list) and all(_is_message(each) for each in prompt)
    if not prompt or not (isinstance(prompt, str) or is_chat):
        raise ValueError(
            f"{path}, line {number}: expected a prompt, which is a text, or messages with role and content"
        )
    return Job(number, given.get("id"), prompt)


def _is_message(given: Any) -> bool:
    return isinstance(given, dict) and all(isinstance(given.get(name), str) for name in ("role", "content"))


class AnswerFile:
    """Answers that are appended to a file, each as one line in one write. A context: it holds a lock on the file.

    A job that was killed is continued: what is in the file is not asked again, and half a line at its end, which a
    machine that lost power may leave, is removed.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[int, Any] = {}  # by line of the prompt: the id of its answer

    def __enter__(self) -> AnswerFile:
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            os.close(self.file)
            raise OSError(f"{self.path}: another process writes to it") from None
        except BaseException:
            os.close(self.file)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        os.fsync(self.file)
        os.close(self.file)

    def _read(self) -> None:
        whole = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                try:
                    answer = json.loads(line)
                    self.done[int(answer["line"])] = answer.get("id")
                except (ValueError, TypeError, KeyError):
                    raise ValueError(f"{self.path}, line {number}: not an answer; name another file") from None
        os.ftruncate(self.file, whole)

    def left(self, jobs: Iterable[Job]) -> list[Job]:
        """Return the jobs that have no answer yet.

        Raises:
            ValueError: the file holds answers to other prompts.
        """
        left = []
        for job in jobs:
            if job.line not in self.done:
                left.append(job)
            elif self.done[job.line] != job.id:
                raise ValueError(
                    f"{self.path} holds answers to other prompts: that to line {job.line} has the id "
                    f"{self.done[job.line]!r}, not {job.id!r}; name another file"
                )
        return left

    def append(self, answer: dict[str, Any]) -> None:
        """Write an answer."""
        line = (json.dumps(answer, ensure_ascii=False) + "\n").encode()
        written = os.write(self.file, line)
        if written != len(line):  # a full disk: half a line must not stay
            os.ftruncate(self.file, os.fstat(self.file).st_size - written)
            raise OSError(f"{self.path}: only {written} of {len(line)} bytes could be written")
