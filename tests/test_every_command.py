"""Every command copes with a narrow terminal, a closed pipe, a wrong path, a wrong model and Ctrl-C."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
import typer
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration
from typer.testing import CliRunner

from hf_specbranch.cli import app, main, options

from .heads import random_head
from .models import VOCABULARY
from .tokens import letter_tokenizer

DOCUMENTED = Path(__file__).parent.parent / "docs/cli.md"
SHORT = {  # each command on the small pair, as quick as it gets
    "generate": ["abc", "--max-new-tokens", "8"],
    "chat": ["--max-new-tokens", "8"],
    "doctor": ["--max-new-tokens", "8", "--repeat", "1", "--num-prompts", "1", "--prompts", "{pair}/prompts.jsonl"],
    "tune": [
        "--max-new-tokens", "8", "--repeat", "1", "--finalists", "1", "--policy", "vanilla", "--out", "{out}/t.json",
        "--prompts", "{pair}/prompts.jsonl",
    ],
    "warmup": ["--batch-sizes", "1", "--max-length", "64"],
    "batch": ["{pair}/prompts.jsonl", "--out", "{out}/answers.jsonl", "--max-new-tokens", "150"],
    "trace": ["abc", "--max-new-tokens", "8", "--out", "{out}/trace"],
    "bench": [
        "--max-new-tokens", "4", "--methods", "autoregressive", "--prompts", "{pair}/prompts.jsonl",
    ],
    "head collect": ["--prompts", "{pair}/prompts.jsonl", "--out", "{out}/drafts", "--layers", "1"],
    "head eval": ["--head", "{pair}/head", "--prompts", "{pair}/prompts.jsonl", "--max-new-tokens", "8"],
}  # fmt: skip
PROGRESS = ("importing torch and transformers", "loading the models")
WITHOUT_A_PAIR = {"families", "shortlist", "head train", "head push", "head search"}


def all_commands():
    """Return the words of every command, groups included."""
    found = []

    def walk(command, words):
        found.append(words)
        for name, each in getattr(command, "commands", {}).items():
            walk(each, [*words, name])

    walk(typer.main.get_command(app), [])
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory, target, draft):
    """The small pair, a head and a prompt on disk."""
    where = tmp_path_factory.mktemp("pair")
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(where / name)
        letter_tokenizer(VOCABULARY).save_pretrained(where / name)
    random_head(target, draft).save_pretrained(where / "head")
    (where / "prompts.jsonl").write_text('{"id": "1", "prompt": "abcdefg"}\n')
    return where


def arguments(command, pair, out, target=None, draft=None):
    """Return the words of a command line."""
    models = ["--target", str(target or pair / "target"), "--draft", str(draft or pair / "draft")]
    return [*command.split(), *(part.format(pair=pair, out=out) for part in SHORT[command]), *models]


def run_main(capfd, monkeypatch, words):
    """Run `main` as a shell would; return the exit code and standard error."""
    monkeypatch.setattr(sys, "argv", ["hf-specbranch", *words])
    monkeypatch.setattr(sys, "stdin", open(os.devnull))
    with pytest.raises(SystemExit) as exit:
        main()
    return exit.value.code or 0, capfd.readouterr().err


def test_every_command_is_covered():
    leaves = {" ".join(words) for words in all_commands()} - {"", "head"}
    assert leaves == set(SHORT) | WITHOUT_A_PAIR | {"serve"}  # which runs until it is told to stop: test_serve.py


@pytest.mark.parametrize("words", all_commands(), ids=" ".join)
def test_help_fits_sixty_columns(words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    said = CliRunner().invoke(app, [*words, "--help"])
    assert said.exit_code == 0 and max(map(len, said.output.splitlines())) <= 60
    flat = " ".join(said.output.split())
    assert re.search(r"Example: hf-specbranch \w+", flat), said.output


@pytest.mark.parametrize("command", SHORT)
def test_ctrl_c_ends_with_130(command, pair, tmp_path, capfd, monkeypatch):
    if command == "chat":
        pytest.skip("at a terminal Ctrl-C stops the answer, not the chat")
    if command == "warmup":
        pytest.skip("without a GPU it is done too soon")
    calls = []

    def interrupt(*_):
        calls.append(1)
        if len(calls) == 400:
            signal.raise_signal(signal.SIGINT)

    hook = torch.nn.modules.module.register_module_forward_hook(interrupt)
    try:
        code, errors = run_main(capfd, monkeypatch, arguments(command, pair, tmp_path))
    finally:
        hook.remove()
    assert code == 130 and "Traceback" not in errors
    assert command == "bench" or errors.strip().splitlines()[-1] == "interrupted"


@pytest.mark.parametrize("command", ["generate", "trace", "bench", "head eval"])
def test_closed_pipe_is_no_error(command, pair, tmp_path, capfd, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        code, errors = run_main(capfd, monkeypatch, [*arguments(command, pair, tmp_path)])
    assert code == 0 and "Error" not in errors and "error" not in errors


@pytest.mark.parametrize("command", SHORT)
def test_wrong_path_is_one_line(command, pair, tmp_path, capfd, monkeypatch):
    code, errors = run_main(capfd, monkeypatch, arguments(command, pair, tmp_path, draft="/no/such/model"))
    assert code == 1 and errors == "error: --draft /no/such/model: no such folder\n"


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    """An encoder-decoder model."""
    where = tmp_path_factory.mktemp("translator")
    sizes = dict(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(where)
    letter_tokenizer(VOCABULARY).save_pretrained(where)
    return where


@pytest.mark.parametrize("command", SHORT)
def test_wrong_model_is_one_line(command, pair, translator, tmp_path, capfd, monkeypatch):
    code, errors = run_main(capfd, monkeypatch, arguments(command, pair, tmp_path, target=translator))
    shown = [line for line in errors.splitlines() if line not in PROGRESS]
    assert code == 1 and len(shown) == 1 and shown[0].startswith(f"error: --target {translator}: ")


def test_wrong_option_ends_with_2():
    assert CliRunner().invoke(app, ["generate", "--no-such-option"]).exit_code == 2


def test_exit_codes_are_documented():
    text = DOCUMENTED.read_text()
    for code in ("| 0 |", "| 1 |", "| 2 |", "| 3 |", "| 130 |", "| 143 |"):
        assert code in text


@pytest.mark.parametrize(("command", "option"), [("tune", "--out"), ("doctor", "--recording"), ("tune", "--png")])
def test_unwritable_files_are_refused(command, option, pair, tmp_path, monkeypatch):
    monkeypatch.setattr(options, "open_pair", lambda *_: pytest.fail("work has begun"))
    written = tmp_path / "written.json"
    written.write_text("kept")
    for path, reason in (
        (tmp_path, "expected a file in a folder that exists"),
        (tmp_path / "no" / "file", "expected a file in a folder that exists"),
        (tmp_path / ("a" * 300), "it cannot be written"),
    ):
        others = ["--out", str(tmp_path / "tuned.json")] if option == "--png" else []
        done = CliRunner().invoke(app, [command, *others, option, str(path)])
        assert f"{option} {path}: {reason}" in str(done.exception)
    options.check_file(option, written)
    options.check_file(option, tmp_path / "new.json")
    assert written.read_text() == "kept" and list(tmp_path.iterdir()) == [written]


@pytest.mark.parametrize("command", SHORT)
def test_unknown_dtype_is_refused_before_any_work(command, pair, tmp_path, capfd, monkeypatch):
    code, errors = run_main(capfd, monkeypatch, [*arguments(command, pair, tmp_path), "--dtype", "float23"])
    assert (code, errors) == (
        1, "error: --dtype float23: expected one of auto, float32, bfloat16, float16, float64\n",
    )  # fmt: skip


def test_commands_share_the_defaults_of_models():
    found = typer.main.get_command(app)
    for words in map(str.split, SHORT):
        command = found
        for word in words:
            command = command.commands[word]
        defaults = {option.name: option.default for option in command.params}
        assert {"device": "auto", "dtype": "auto", "threads": 0, "trust_remote_code": False}.items() <= defaults.items()


@pytest.mark.parametrize(("command", "folder"), [("head collect", "drafts"), ("trace", "trace")])
def test_unwritable_folders_are_refused(command, folder, pair, tmp_path, capfd, monkeypatch):
    (tmp_path / "file").touch()
    words = [word.replace(f"{tmp_path}/{folder}", f"{tmp_path}/file/x") for word in arguments(command, pair, tmp_path)]
    code, errors = run_main(capfd, monkeypatch, words)
    assert code == 1 and errors == f"error: --out {tmp_path}/file/x: it cannot be written in {tmp_path}/file\n"


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_revisions_and_trust_reach_the_loading(command, pair, tmp_path, monkeypatch):
    asked = []

    def refuse(name, **arguments):
        asked.append({key: arguments.get(key) for key in ("revision", "trust_remote_code")})
        raise OSError("not now")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    more = ["--revision", "v2", "--draft-revision", "v1", "--trust-remote-code"]
    CliRunner().invoke(app, [*arguments(command, pair, tmp_path), *more])
    assert asked == [{"revision": "v2", "trust_remote_code": True}]
    alone = CliRunner().invoke(app, ["generate", "abc", "--revision", "v2"])
    assert "--revision without --target" in str(alone.exception)


def test_max_time_ends_a_text(pair, tmp_path):
    done = CliRunner().invoke(app, [*arguments("generate", pair, tmp_path), "--max-time", "0.00001", "--json"])
    assert 1 <= json.loads(done.stdout)["stats"]["new_tokens"] < 8


@pytest.mark.slow
def test_pictures_and_recordings_are_written(pair, tmp_path):
    pytest.importorskip("matplotlib")
    files = [tmp_path / name for name in ("tuned.png", "rollback.png", "recording.json")]
    for command, option, path in zip(("tune", "head eval", "doctor"), ("--png", "--png", "--recording"), files):
        done = CliRunner().invoke(app, [*arguments(command, pair, tmp_path), option, str(path)])
        assert done.exit_code in (0, 3), done.output
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files[:2])
    assert json.loads(files[2].read_text())[0]["candidates"] == 9
    nowhere = CliRunner().invoke(app, [*arguments("tune", pair, tmp_path), "--png", "/no/folder/a.png"])
    assert "--png /no/folder/a.png: expected a file in a folder that exists" in str(nowhere.exception)
