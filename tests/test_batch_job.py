"""`hf-specbranch batch`: every prompt is answered exactly once, however often the job is killed."""

import json
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hf_specbranch.cli import app
from hf_specbranch.serving.answer_file import AnswerFile, read_jobs

from .models import VOCABULARY
from .tokens import LETTERS, letter_tokenizer


def live(words):
    torch.set_num_threads(1)
    app(words, standalone_mode=False)


def live_and_die(words, out, deaths):
    """Run a job, kill it when so many answers are written, and run it again; the last run may end.

    Processes are forked, because imports take longer than the job; but not if threads may hold locks.
    """
    others = [each for each in threading.enumerate() if each.name not in ("MainThread", "tqdm_monitor")]
    context = multiprocessing.get_context("spawn" if others else "fork")
    for death in deaths:
        process = context.Process(target=live, args=(words,))
        process.start()
        while process.is_alive() and (not out.exists() or out.read_bytes().count(b"\n") < death):
            time.sleep(0.002)
        assert process.is_alive()
        process.kill()
        process.join()
    process = context.Process(target=live, args=(words,))
    process.start()
    process.join(400)
    assert process.exitcode == 0


@pytest.fixture(scope="module")
def pair(tmp_path_factory, target, draft):
    where = tmp_path_factory.mktemp("pair")
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(where / name)
        letter_tokenizer(VOCABULARY).save_pretrained(where / name)
    return where


def write_prompts(path, count):
    chance = random.Random(count)
    prompts = ["".join(chance.choices(LETTERS[:40], k=chance.randint(1, 30))) for _ in range(count)]
    path.write_text("".join(json.dumps({"id": f"p{at}", "prompt": each}) + "\n" for at, each in enumerate(prompts)))
    return prompts


def words_for(pair, prompts, out, *more):
    models = ["--target", str(pair / "target"), "--draft", str(pair / "draft"), "--policy", "vanilla", "--rows", "8"]
    return ["batch", str(prompts), "--out", str(out), "--max-new-tokens", "6", "--quiet", *models, *more]


def expected(target, prompts):
    tokenizer, found = letter_tokenizer(VOCABULARY), []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
        found.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return found


@pytest.mark.parametrize("count, kills", [(24, 2), pytest.param(2000, 10, marks=pytest.mark.slow)], ids=["few", "many"])
def test_killed_job_answers_every_prompt_once(count, kills, pair, target, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    texts = write_prompts(prompts, count)
    deaths = sorted(random.Random(1).sample(range(count * 9 // 10), kills))
    words = words_for(pair, prompts, out)
    live_and_die(words, out, deaths)
    answers = sorted(map(json.loads, out.read_text().splitlines()), key=lambda answer: answer["line"])
    assert [(answer["line"], answer["id"]) for answer in answers] == [(at + 1, f"p{at}") for at in range(count)]
    some = range(0, count, max(1, count // 40))
    assert [answers[at]["text"] for at in some] == expected(target, [texts[at] for at in some])
    before = out.read_bytes()
    again = CliRunner().invoke(app, words)  # there is nothing left to do
    assert again.exit_code == 0 and out.read_bytes() == before


def test_sampled_answers_do_not_depend_on_when_they_are_asked(pair, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    write_prompts(prompts, 6)
    texts = []
    for name in ("whole", "parts"):
        out = tmp_path / name
        if name == "parts":  # half a line at the end, and some answers are missing
            kept = (tmp_path / "whole").read_text().splitlines(keepends=True)
            out.write_text("".join(kept[:3]) + kept[4][:10])
        done = CliRunner().invoke(app, words_for(pair, prompts, out, "--temperature", "1", "--seed", "3"))
        assert done.exit_code == 0, done.output
        texts.append({each["id"]: each["text"] for each in map(json.loads, out.read_text().splitlines())})
    assert texts[0] == texts[1] and len(texts[0]) == len(out.read_text().splitlines()) == 6


def test_prompts_that_cannot_be_answered(pair, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    chat = {"messages": [{"role": "user", "content": "abc"}]}
    prompts.write_text("\n".join(map(json.dumps, [{"prompt": "a" * 300}, {"prompt": "abc"}, chat])))
    assert CliRunner().invoke(app, words_for(pair, prompts, out)).exit_code == 0
    answers = {each["line"]: each for each in map(json.loads, out.read_text().splitlines())}
    assert "300 tokens" in answers[1]["error"] and answers[2]["text"] == answers[3]["text"]


def test_files_are_checked(tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    for line in ("{", "[]", "{}", '{"prompt": ""}', '{"prompt": 3}', '{"messages": [{"role": "user"}]}'):
        prompts.write_text(f'{{"prompt": "a"}}\n{line}\n')
        with pytest.raises(ValueError, match="line 2"):
            read_jobs(prompts)
    prompts.write_text('{"id": 1, "prompt": "a"}\n')
    with AnswerFile(out) as file:
        file.append({"line": 1, "id": 2, "text": ""})
        with pytest.raises(OSError, match="another process"), AnswerFile(out):
            pass
    with AnswerFile(out) as file, pytest.raises(ValueError, match="other prompts"):
        file.left(read_jobs(prompts))
    out.write_text('{"text": "something else"}\n')
    with pytest.raises(ValueError, match="not an answer"), AnswerFile(out):
        pass


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Ray's own
def test_job_on_ray(pair, target, tmp_path):
    pytest.importorskip("ray", reason="ray is not installed: pip install 'hf_specbranch[ray]'")
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    texts = write_prompts(prompts, 40)
    command = [sys.executable, "-m", "hf_specbranch", *words_for(pair, prompts, out, "--ray", "--replicas", "2")]
    root = str(Path(__file__).parent.parent)
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}, timeout=500)
    answers = sorted(map(json.loads, out.read_text().splitlines()), key=lambda answer: answer["line"])
    assert [answer["text"] for answer in answers] == expected(target, texts)
