"""Prompt sets: files of JSON lines with an `id` and a `prompt` each, and perhaps a `kind`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path


@dataclass(frozen=True)
class Prompt:
    """One prompt of a set.

    Args:
        id: unique within its file.
        prompt: the text to continue.
        kind: what it is about, such as "code" or "translation"; figures are also shown per kind.
    """

    id: str
    prompt: str
    kind: str = ""


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a JSON-lines prompt file. Blank lines are ignored, and fields other than `id`, `prompt` and
    `kind` (or `category`).

    Args:
        path: the file.

    Returns:
        The prompts in file order, at least one.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not a JSON object with texts `id` and `prompt`, an id occurs twice, or there is no prompt.

    Example:
        >>> from hf_specbranch.bench import python_prompts
        >>> len(python_prompts())
        40
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no prompt file at {path}: give a JSON-lines file with an id and a prompt on each line"
        )
    prompts: list[Prompt] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        prompt = parse_prompt(line, where=f"{path}, line {number}")
        if prompt.id in line_of:
            raise ValueError(
                f"{path}, line {number}: id {prompt.id!r} was used on line {line_of[prompt.id]}: ids must be unique"
            )
        line_of[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f'{path} holds no prompts: expected lines such as {{"id": "1", "prompt": "def add(a, b):"}}')
    return prompts


def parse_prompt(line: str, where: str) -> Prompt:
    """Parse one line of a prompt file; `where` names it in errors."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}): expected one JSON object per line") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: found a JSON {type(record).__name__}: expected an object with id and prompt")
    for field in ("id", "prompt"):
        if field not in record:
            raise ValueError(f"{where}: field {field!r} is missing, found {sorted(record)}: add it")
        if not isinstance(record[field], str) or not record[field]:
            raise ValueError(f"{where}: field {field!r} is {record[field]!r}: expected text that is not empty")
    kind = record.get("kind", record.get("category", ""))
    return Prompt(record["id"], record["prompt"], kind if isinstance(kind, str) else "")


def read_sets(paths: Sequence[Path]) -> list[Prompt]:
    """Read one file of prompts, or several, whose prompts without a kind have the name of their file as their kind."""
    sets = {path: read_prompts(path) for path in paths}
    if len(sets) == 1:
        return next(iter(sets.values()))
    return [replace(each, kind=each.kind or path.stem) for path, prompts in sets.items() for each in prompts]


def in_turn(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return `count` prompts, one of each kind in turn.

    Example:
        >>> some = [Prompt("1", "a", "x"), Prompt("2", "b", "x"), Prompt("3", "c", "y")]
        >>> [each.id for each in in_turn(some, 2)]
        ['1', '3']
    """
    kinds = {kind: [each for each in prompts if each.kind == kind] for kind in dict.fromkeys(p.kind for p in prompts)}
    turns = [each for turn in zip_longest(*kinds.values()) for each in turn if each is not None]
    return turns[:count]


def python_prompts() -> list[Prompt]:
    """Return the 40 Python-completion prompts that come with the package."""
    return read_prompts(Path(str(files("hf_specbranch.bench").joinpath("python40.jsonl"))))
