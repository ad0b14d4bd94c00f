"""Every example runs and shows what it promises."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, *arguments, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](*arguments)
    return capsys.readouterr().out


def test_minimal(capsys):
    said = run("minimal", 12, capsys=capsys)
    assert "12 tokens in" in said and "the same tokens as plain generate(): True" in said


def test_pipeline(capsys):
    said = run("pipeline", 6, capsys=capsys)
    assert "def add(a, b):" in said and "class Stack:" in said and "tokens a target pass:" in said


def test_streaming_chat_keeps_the_cache(capsys):
    said = run("streaming_chat", 6, capsys=capsys)
    assert said.startswith("[0 of ") and said.count("tokens are in the cache]") == 3 and said.count("[0 of ") == 1


def test_a_custom_hook_changes_the_work_and_not_the_text(capsys):
    said = run("custom_hook", 40, capsys=capsys)
    assert "the same text both times: True" in said
    without, with_hook = (line.split(": ")[1] for line in said.splitlines()[:2])
    assert without != with_hook


def test_constrained_output_obeys_its_processor(capsys):
    said = run("constrained_output", 5, capsys=capsys)
    numbers = said.splitlines()[0].removeprefix("primes = [").removesuffix("]").split(",")
    assert len(numbers) == 5 and all(number.isdigit() for number in numbers)
    assert "the same as plain generate(): True" in said


def test_a_head_is_trained_and_used(capsys):
    said = run("train_and_use_head", 6, 16, 2, capsys=capsys)
    assert "drafted lines recorded" in said and "with the head: " in said


def test_two_devices_or_what_there_is(capsys):
    said = run("two_devices", 8, capsys=capsys)
    assert "of the drafting was hidden" in said


@pytest.mark.slow
def test_benchmark_your_pair(capsys):
    said = run("benchmark_your_pair", ["--prompts", "1", "--new-tokens", "12"], capsys=capsys)
    assert "specbranch, no overlap" in said and "times as fast as the target" in said


def test_every_example_is_run_here():
    here = Path(__file__).read_text()
    scripts = {path.stem for path in EXAMPLES.glob("*.py")} - {"demo", "train_demo_pair"}  # these have their own tests
    assert all(f'run("{name}"' in here for name in scripts)
