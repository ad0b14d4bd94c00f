"""The commands, as a user calls them."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
import torch
from typer.testing import CliRunner

import hf_specbranch
from hf_specbranch import SpecBranchConfig, load_demo_pair, mixin, specbranch
from hf_specbranch.cli import app, main
from hf_specbranch.cli.conversation import Conversation
from hf_specbranch.cli.generate import prompt_from
from hf_specbranch.cli.options import GenerationOptions
from hf_specbranch.fallback import FallBack

from .models import slowly

PROMPT = "def add(a, b):"
TEMPLATE = "{% for m in messages %}# {{ m['role'] }}\n{{ m['content'] }}\n{% endfor %}{{ '# assistant\n' }}"


def run(*arguments, **kwargs):
    return CliRunner().invoke(app, [str(each) for each in arguments], **kwargs)


def run_main(capsys, monkeypatch, *arguments):
    """Run `main`, which turns errors into one line; return the exit code and standard error."""
    monkeypatch.setattr(sys, "argv", ["hf-specbranch", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit:
        main()
    return exit.value.code, capsys.readouterr().err


@pytest.fixture(scope="module")
def pair():
    return load_demo_pair()


def continuation(pair, prompt, count, **kwargs):
    target, _, tokenizer = pair
    inputs = tokenizer(prompt, return_tensors="pt")
    out = target.generate(**inputs, max_new_tokens=count, do_sample=False, **kwargs)
    return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


# ---- generate


def test_generate_prints_text_and_statistics(pair):
    said = run("generate", PROMPT, "--max-new-tokens", 12)
    assert said.exit_code == 0 and said.stdout.rstrip("\n") == continuation(pair, PROMPT, 12).rstrip("\n")
    assert re.search(r"12 tokens, [\d.]+ per second, policy auto", said.stderr)


def test_prompt_from_argument_or_standard_input(monkeypatch):
    assert prompt_from(PROMPT) == PROMPT
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert prompt_from(None) == PROMPT
    with pytest.raises(ValueError, match="the prompt is empty"):
        prompt_from("")


def test_generate_prints_json(pair):
    said = run("generate", PROMPT, "--max-new-tokens", 8, "--policy", "vanilla", "--max-draft-length", 3, "--json")
    answer = json.loads(said.stdout)
    assert answer["prompt"] == PROMPT and answer["text"] == continuation(pair, PROMPT, 8)
    assert answer["stats"]["policy"] == "vanilla" and len(answer["stats"]["acceptance_histogram"]) <= 4


def test_options_override_the_settings_file(tmp_path):
    SpecBranchConfig(policy="pearl", max_draft_length=2).to_json_file(tmp_path / "tuned.json")
    given = GenerationOptions(
        config=tmp_path / "tuned.json",
        policy="vanilla",
        confidence_threshold=0.3,
        max_rejection_branches=0,
        tree_leaves=2,
    )
    assert given.settings() == SpecBranchConfig(
        policy="vanilla", max_draft_length=2, confidence_threshold=0.3, max_rejection_branches=0, tree_leaves=2
    )


@pytest.mark.parametrize("option", [["--gamma", "3"], ["--gamma=3"]], ids=" ".join)
def test_old_option_is_accepted_with_a_warning(option):
    done = run("generate", PROMPT, "--max-new-tokens", 8, "--policy", "vanilla", *option, "--json")
    assert done.stderr == "warning: --gamma is now --max-draft-length; the next release will not accept --gamma\n"
    assert len(json.loads(done.stdout)["stats"]["acceptance_histogram"]) <= 4


def test_old_options_are_not_in_the_help():
    for command in ("generate", "chat", "trace", "bench"):
        shown = run(command, "--help", env={"COLUMNS": "200", "TERM": "dumb"}).output
        assert all(
            not re.search(rf"{old}\b", shown) for old in ("--gamma", "--epsilon", "--branches", "--ways", " --head")
        )


def test_removed_option_says_what_to_do():
    assert (
        str(run("generate", "--file", "x").exception) == "--file was removed: give the prompt on standard input, < FILE"
    )


def test_version_is_printed():
    assert run("--version").stdout.strip() == hf_specbranch.__version__


def test_generate_reads_settings(tmp_path):
    SpecBranchConfig(policy="pearl", max_draft_length=2).to_json_file(tmp_path / "tuned.json")
    said = run("generate", PROMPT, "--max-new-tokens", 4, "--json", "--config", tmp_path / "tuned.json")
    assert json.loads(said.stdout)["stats"]["policy"] == "pearl"


@pytest.mark.slow
def test_seed_decides_what_is_sampled():
    def sampled(seed):
        given = ["--temperature", 1, "--top-p", 0.95, "--max-new-tokens", 4, "--seed", seed, "--json"]
        return json.loads(run("generate", PROMPT, *given).stdout)["text"]

    assert sampled(1) == sampled(1) != sampled(2)


def test_embedded_head_by_name(pair):
    said = run("generate", PROMPT, "--draft", "weak", "--length-head", "embedded", "--max-new-tokens", 6, "--json")
    assert json.loads(said.stdout)["text"] == continuation(pair, PROMPT, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "/no/such", "--draft", "/none"], "error: --target /no/such: no such folder"),
        (["--target", "."], "error: --target .: "),
        (["--draft", "good,weak"], "error: --draft good,weak: expected a draft model, lookup"),
        (["--draft", "lookup", "--corpus", "nowhere"], "error: --corpus nowhere: no such file"),
        (["--draft", "org/small"], "error: --draft org/small without --target: name both"),
        (["--policy", "magic"], "error: policy='magic': expected one of"),
        (["--device", "nowhere"], "error: --device nowhere: "),
        (["--dtype", "float3"], "error: --dtype float3: expected one of auto, float32"),
        (["--config", "none.json"], "error: --config none.json: no such file"),
        (["--top-k", 5], "error: --top-k and --top-p choose among sampled tokens: add --temperature"),
        (["--length-head", "embedded", "--target", "."], "error: length head embedded with --target ."),
    ],
)
def test_error_is_one_line(arguments, message, capsys, monkeypatch):
    code, errors = run_main(capsys, monkeypatch, "generate", PROMPT, *arguments)
    assert code == 1 and errors.startswith(message) and errors.count("\n") == 1


def test_folder_without_a_model_is_one_line(capsys, monkeypatch, tmp_path):
    code, errors = run_main(capsys, monkeypatch, "generate", PROMPT, "--target", tmp_path, "--draft", tmp_path)
    assert code == 1 and str(tmp_path) in errors and errors.count("\n") == 1


def test_bad_settings_file_is_named(capsys, monkeypatch, tmp_path):
    (tmp_path / "broken.json").write_text('{"gamma": 3}')
    code, errors = run_main(capsys, monkeypatch, "generate", PROMPT, "--config", tmp_path / "broken.json")
    assert code == 1 and "broken.json: unknown SpecBranchConfig settings ['gamma']" in errors


def test_closed_pipe_is_no_error(monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        code, errors = run_main(capsys, monkeypatch, "generate", PROMPT, "--max-new-tokens", 200)
    assert code == 0 and errors == ""


def test_ctrl_c_ends_with_130(capsys, monkeypatch):
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    code, errors = run_main(capsys, monkeypatch, "generate", PROMPT, "--max-new-tokens", 3000)
    assert code == 130 and errors.strip() == "interrupted"


# ---- warmup


def test_warmup_prepares_and_reports():
    said = run("warmup", "--batch-sizes", "1,2", "--max-length", 64, "--device", "cpu", "--json")
    answer = json.loads(said.stdout)
    assert set(answer) == {"seconds", "graphs_captured", "memory_bytes"} and answer["seconds"] > 0
    assert answer["graphs_captured"] == 0  # there are none on a CPU


@pytest.mark.parametrize("sizes", ["", "0", "1,,2", "1,two"])
def test_warmup_refuses_batch_sizes(sizes, capsys, monkeypatch):
    code, errors = run_main(capsys, monkeypatch, "warmup", "--batch-sizes", sizes)
    assert code == 1 and errors.startswith(f"error: --batch-sizes {sizes}: expected whole numbers above 0")


@pytest.fixture
def left_to_transformers(monkeypatch):
    """Calls that transformers' own decoding takes, as it does where a model cannot be served."""

    def refuse(call):
        raise FallBack("a reason")

    monkeypatch.setattr(mixin, "speculate", refuse)


def test_text_of_transformers_own_decoding_has_no_statistics(pair, left_to_transformers, tmp_path):
    expected = continuation(pair, PROMPT, 6)
    said = run("generate", PROMPT, "--max-new-tokens", 6)
    assert said.exit_code == 0 and expected.strip() in said.stdout and "transformers' own decoding ran" in said.stderr
    said = run("generate", PROMPT, "--max-new-tokens", 6, "--json")
    assert json.loads(said.stdout) == {"prompt": PROMPT, "text": expected, "stats": None}
    said = run("chat", "--max-new-tokens", 6, input=f"{PROMPT}\n/stats\n")
    assert said.exit_code == 0 and expected.strip() in said.stdout and "transformers' own decoding ran" in said.stderr
    said = run("trace", PROMPT, "--max-new-tokens", 6, "--out", tmp_path)
    assert "nothing was recorded" in str(said.exception)


# ---- chat


def test_chat_answers_and_runs_commands(pair):
    lines = [PROMPT, "/stats", "/nonsense", "/reset", "/stats", PROMPT, "/quit", "never read"]
    said = run("chat", "--max-new-tokens", 6, input="\n".join(lines))
    answer = continuation(pair, PROMPT, 6)
    assert said.exit_code == 0 and said.stdout.count(answer.strip()) == 2
    for expected in ("no chat template", "policy auto", "no such command", "new conversation", "no answer has ended"):
        assert expected in said.stderr


def test_chat_ends_with_its_input():
    said = run("chat", "--max-new-tokens", 3, "--json", input=f"{PROMPT}\n\n")
    assert said.exit_code == 0 and json.loads(said.stdout)["stats"]["new_tokens"] == 3


@pytest.mark.parametrize("template", [None, slowly(TEMPLATE)], ids=["without a template", "with a template"])
def test_later_turns_reuse_the_cache(template):
    target, draft, tokenizer = load_demo_pair()
    tokenizer.chat_template = template
    arguments = {"max_new_tokens": 5, "do_sample": False}
    chat = Conversation(specbranch(target, draft=draft), tokenizer, arguments)
    for turn, line in enumerate([PROMPT, "def sub(a, b):", "class Stack:"]):
        before, length = chat.text.shape[1], None
        answer = chat.answer(line)
        length = chat.text.shape[1] - chat.stats[-1].new_tokens
        alone = target.generate(
            chat.text[:, :length], attention_mask=torch.ones((1, length)), specbranch=False, **arguments
        )
        assert torch.equal(alone, chat.text) and answer
        assert turn == 0 or before - 2 <= chat.kept < length


def test_an_interrupted_answer_of_transformers_leaves_no_cache_behind(left_to_transformers):
    """It is interrupted after the prompt has been read, before the first token."""
    target, draft, tokenizer = load_demo_pair()
    arguments = {"max_new_tokens": 12, "do_sample": False}
    chat = Conversation(specbranch(target, draft=draft), tokenizer, arguments)
    chat.answer(PROMPT)

    def interrupt(input_ids, scores):
        raise KeyboardInterrupt

    chat.arguments = arguments | {"logits_processor": [interrupt]}
    with pytest.raises(KeyboardInterrupt):
        chat.answer("numbers = [7, 7, 7]")
    chat.arguments = arguments
    chat.answer("def is_even(n):")
    alone = target.generate(chat.text[:, :-12], attention_mask=torch.ones((1, chat.text.shape[1] - 12)), **arguments)
    assert torch.equal(alone, chat.text)


@pytest.mark.parametrize("template", [slowly(None), TEMPLATE], ids=["without a template", "with a template"])
def test_interrupted_answer_is_kept_so_far(template):
    target, draft, tokenizer = load_demo_pair()
    tokenizer.chat_template = template
    arguments = {"max_new_tokens": 24, "do_sample": False}

    class Impatient:
        seen = 0

        def put(self, tokens):
            self.seen += len(tokens) if tokens.dim() == 1 else 0  # not the prompt
            if self.seen > 4:
                raise KeyboardInterrupt

    chat, whole = (Conversation(specbranch(target, draft=draft), tokenizer, arguments) for _ in range(2))
    for each in (chat, whole):
        each.answer(PROMPT)
    streamer = Impatient()
    with pytest.raises(KeyboardInterrupt):
        chat.answer("class Stack:", streamer)
    answer = whole.answer("class Stack:")
    said = chat.messages[-1]["content"]
    assert said and answer.startswith(said) and len(said) < len(answer)
    chat.answer("def sub(a, b):")
    length = chat.text.shape[1] - chat.stats[-1].new_tokens
    mask = torch.ones((1, length))
    alone = target.generate(chat.text[:, :length], attention_mask=mask, specbranch=False, **arguments)
    assert torch.equal(alone, chat.text) and said in tokenizer.decode(chat.text[0])


@pytest.mark.parametrize(("module", "command"), [("rich", "--help"), ("torch", "bench")])
def test_ctrl_c_during_imports_prints_no_traceback(module, command, tmp_path):
    (tmp_path / f"{module}.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    words = [sys.executable, "-c", "from hf_specbranch.__main__ import main; main()", command]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr.strip() == "interrupted"
