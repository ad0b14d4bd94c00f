"""Every example runs and prints what it promises."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, *arguments, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](*arguments)
    return capsys.readouterr().out


def test_minimal(capsys):
    printed = run("minimal", 12, capsys=capsys)
    assert "12 tokens in" in printed and "the same tokens as plain generate(): True" in printed


def test_pipeline(capsys):
    printed = run("pipeline", 6, capsys=capsys)
    assert "def add(a, b):" in printed and "class Stack:" in printed and "tokens per target pass:" in printed


def test_streaming_chat_keeps_the_cache(capsys):
    printed = run("streaming_chat", 6, capsys=capsys)
    assert (
        printed.startswith("[0 of ") and printed.count("tokens are in the cache]") == 3 and printed.count("[0 of ") == 1
    )


def test_custom_hook_accepts_more_at_the_same_rollback(capsys):
    printed = run("custom_hook", 3, 24, capsys=capsys)
    assert "the same text each time: True" in printed
    rows = {line.split(": ")[0]: re.findall(r"[\d.]+", line.split(": ")[1]) for line in printed.splitlines()[:3]}
    (tokens, rolled_back, _), (hooked, hooked_back, _) = rows["epsilon 0.35"], rows["entropy hook"]
    assert float(hooked) > float(tokens) and int(hooked_back) <= int(rolled_back)


def test_constrained_output(capsys):
    printed = run("constrained_output", 5, capsys=capsys)
    numbers = printed.splitlines()[0].removeprefix("primes = [").removesuffix("]").split(",")
    assert len(numbers) == 5 and all(number.isdigit() for number in numbers)
    assert "the same as plain generate(): True" in printed


@pytest.mark.slow
def test_train_and_use_head(capsys):
    printed = run("train_and_use_head", 6, 16, 2, 4, capsys=capsys)
    rolled_back = dict(re.findall(r"^(.*): (\d+)% rolled back", printed, re.MULTILINE))
    assert "drafts recorded" in printed and "trained here" in rolled_back
    assert int(rolled_back["the embedded pair's head"]) < int(rolled_back["no head"])


@pytest.mark.slow
def test_train_eagle3(capsys, tmp_path):
    printed = run("train_eagle3", str(tmp_path), 8, 1, 0, 1, 4, capsys=capsys)
    assert "EAGLE-3: " in printed and "tokens per pass" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_two_devices(capsys):
    printed = run("two_devices", 8, capsys=capsys)
    assert "of the drafting was hidden" in printed


def test_grpo(capsys):
    printed = run("grpo", 1, 4, capsys=capsys)
    assert printed.count("s in generate()") == 2 and "target passes for 48 tokens" in printed


@pytest.mark.slow
def test_benchmark_your_pair(capsys):
    printed = run("benchmark_your_pair", ["--num-prompts", "1", "--max-new-tokens", "12"], capsys=capsys)
    assert "specbranch, no overlap" in printed and "times as fast as the target" in printed


def test_every_example_is_covered():
    here = Path(__file__).read_text()
    scripts = {path.stem for path in EXAMPLES.glob("*.py")} - {
        "demo",
        "train_demo_pair",
        "publish_to_hub",
    }  # tested elsewhere
    assert all(f'run("{name}"' in here for name in scripts)
