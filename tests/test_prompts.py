"""Prompt files are read in order, and a bad one is refused with its file and line."""

import ast
from pathlib import Path

import pytest

from hf_specbranch.bench import Prompt, python_prompts, read_prompts


def write(folder: Path, text: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_prompts_keep_file_order(tmp_path: Path) -> None:
    path = write(tmp_path, '{"id": "b", "prompt": "two\\n"}\n\n{"id": "a", "prompt": "one", "category": "x"}\n')
    assert read_prompts(path) == [Prompt("b", "two\n"), Prompt("a", "one", "x")]


def test_package_has_40_distinct_prompts() -> None:
    prompts = python_prompts()
    assert len(prompts) == len({p.prompt for p in prompts}) == 40


@pytest.mark.parametrize("prompt", python_prompts(), ids=lambda p: p.id)
def test_package_prompts_are_python(prompt: Prompt) -> None:
    indent = " " * (len(last := prompt.prompt.rstrip("\n").split("\n")[-1]) - len(last.lstrip()))
    deeper = "    " if last.endswith(":") else ""
    ast.parse(prompt.prompt + indent + deeper + "pass\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": "a", "prompt": "x"}\n{"id": "b", prompt}\n', "line 2: not JSON"),
        ('["a", "x"]\n', "line 1: found a JSON list"),
        ('\n{"id": "a"}\n', "line 2: field 'prompt' is missing"),
        ('{"prompt": "x"}\n', "line 1: field 'id' is missing"),
        ('{"id": 7, "prompt": "x"}\n', "line 1: field 'id' is 7: expected text"),
        ('{"id": "a", "prompt": ""}\n', "line 1: field 'prompt' is '': expected text that is not empty"),
        ('{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}\n', "line 2: id 'a' was used on line 1"),
        ("\n", "holds no prompts"),
    ],
)
def test_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read_prompts(write(tmp_path, text))
    assert "prompts.jsonl" in str(error.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no prompt file at .*nothing.jsonl"):
        read_prompts(tmp_path / "nothing.jsonl")
