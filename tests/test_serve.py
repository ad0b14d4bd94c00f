"""The server over real HTTP, asked by the official client."""

import asyncio
import copy
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from typer.testing import CliRunner

from hf_specbranch import specbranch
from hf_specbranch.cli import app

from .models import VOCABULARY
from .tokens import letter_tokenizer

for package in ("starlette", "uvicorn", "openai", "httpx"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install 'hf_specbranch[test]'")

import httpx  # noqa: E402
import openai  # noqa: E402
import uvicorn  # noqa: E402

from hf_specbranch.serving.completion import Completion, CompletionSettings, TokenLogprobs  # noqa: E402
from hf_specbranch.serving.engine import Engine  # noqa: E402
from hf_specbranch.serving.http_app import make_app  # noqa: E402
from hf_specbranch.serving.http_server import listen  # noqa: E402
from hf_specbranch.serving.service import Limits, Service  # noqa: E402

MODEL, KEY = "tiny", "secret"
LONG = 120  # tokens


class Server:
    """A server in a thread of this process."""

    def __init__(self, target, draft):
        self.plain, self.tokenizer = target, letter_tokenizer(VOCABULARY)
        self.engine = Engine(specbranch(copy.deepcopy(target), draft), self.tokenizer, rows=8)
        app = make_app(Service(self.engine, MODEL, Limits(prompt_tokens=100, output_tokens=150, waiting=100)), [KEY])
        self.uvicorn = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        socket = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        self.thread = threading.Thread(target=self.uvicorn.run, args=([socket],), daemon=True)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    def __enter__(self):
        self.engine.__enter__()
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.uvicorn.should_exit = True
        self.thread.join()
        self.engine.close()

    def complete(self, prompt="abcabc", **settings):
        return self.client.completions.create(model=MODEL, prompt=prompt, **{"max_tokens": 12, **settings})

    def chat(self, content="abcabc", **settings):
        messages = [{"role": "user", "content": content}]
        return self.client.chat.completions.create(
            model=MODEL, messages=messages, **{"max_tokens": 12, "temperature": 0, **settings}
        )

    def expected(self, prompt, count=12):
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids
        out = self.plain.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
        return self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

    def metric(self, name):
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"hf_specbranch_{name} "))

    def post(self, body, path="completions", key=KEY, **arguments):
        headers = {"authorization": f"Bearer {key}"}
        given = {"content": body} if isinstance(body, (str, bytes)) else {"json": body}
        return httpx.post(f"{self.url}/v1/{path}", headers=headers, **given, **arguments)


@pytest.fixture(scope="module")
def server(target, draft):
    with Server(target, draft) as server:
        yield server


def test_greedy_answers_are_those_of_generate(server):
    found = server.complete(["abcabc", "zyx", "q"], temperature=0)
    assert [choice.text for choice in found.choices] == [server.expected(each) for each in ("abcabc", "zyx", "q")]
    assert found.usage.prompt_tokens == 10
    answer = server.chat()
    assert answer.choices[0].message.content == server.expected("abcabc")
    assert answer.usage.completion_tokens == found.usage.completion_tokens / 3 == 12
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + answer.usage.specbranch["target_passes"] >= 12
    assert [model.id for model in server.client.models.list()] == [MODEL]
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


def test_streams_have_the_same_text(server):
    for stop in (None, [server.expected("abcabc", LONG)[20:22]]):
        settings = {"max_tokens": LONG, "temperature": 0, "stop": stop, "logprobs": True, "top_logprobs": 2}
        whole = server.chat(**settings).choices[0]
        chunks = list(server.chat(stream=True, stream_options={"include_usage": True}, **settings))
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert len(choices) > 5 or stop
        assert "".join(choice.delta.content for choice in choices) == whole.message.content
        assert choices[-1].finish_reason == whole.finish_reason == ("stop" if stop else "length")
        assert [each.logprob for choice in choices for each in choice.logprobs.content] == pytest.approx(
            [each.logprob for each in whole.logprobs.content], abs=1e-3
        )
        assert all(len(each.top_logprobs) == 2 for each in whole.logprobs.content)
        assert chunks[-1].usage.completion_tokens == len(whole.logprobs.content)
    text = "".join(chunk.choices[0].text for chunk in server.complete(temperature=0, stream=True))
    assert text == server.complete(temperature=0).choices[0].text


def test_answer_ends_with_all_of_its_log_probabilities(server):
    """The round that ends a text adds them after the token; whoever follows the answer may wake up in between."""

    async def follow():
        grown = asyncio.Queue()
        settings = CompletionSettings(1, logprobs=1)
        answer = Completion([5], settings, server.tokenizer, lambda _: grown.put_nowait(0))
        events = Service(server.engine, MODEL)._follow([answer], grown)
        assert answer.add(7, is_last=True)
        grown.put_nowait(0)  # an update of the round before
        first = await anext(events)
        answer.logprobs.append(TokenLogprobs(7, -0.5))
        answer.update()
        return [first, *[event async for event in events]]

    first, last = asyncio.run(follow())
    assert first["finish_reason"] is None and last["finish_reason"] == "length"
    assert len(first["logprobs"]) + len(last["logprobs"]) == 1


def test_seed_and_number_of_answers(server):
    several = [choice.text for choice in server.complete(n=3, seed=5, temperature=1.0, top_p=0.9).choices]
    assert several == [choice.text for choice in server.complete(n=3, seed=5, top_p=0.9).choices]
    assert several[1] == server.complete(seed=6, top_p=0.9).choices[0].text  # answer i has the seed + i
    assert len(set(several)) == 3
    assert len({server.complete().choices[0].text for _ in range(4)}) > 1


def test_many_requests_at_a_time(server):
    prompts = ["abcdefghijklmnopqrstuvwxyz"[at % 16 : at % 16 + 1 + at % 4] for at in range(64)]
    alone = {each: server.expected(each, 6) for each in set(prompts)}

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            asked = (
                client.completions.create(model=MODEL, prompt=each, max_tokens=6, temperature=0) for each in prompts
            )
            return await asyncio.gather(*asked)

    answers = asyncio.run(ask())
    assert [answer.choices[0].text for answer in answers] == [alone[each] for each in prompts]


MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    "path, change, param",
    [
        ("completions", {"prompt": None}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": [[1], "a", 2]}, "prompt"),
        ("completions", {"prompt": [1, 10**6]}, "prompt"),
        ("completions", {"prompt": "a" * 101}, "prompt"),
        ("completions", {"max_tokens": 151}, "max_tokens"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"max_tokens": True}, "max_tokens"),
        ("completions", {"temperature": 2.5}, "temperature"),
        ("completions", {"temperature": "hot"}, "temperature"),
        ("completions", {"top_p": 0}, "top_p"),
        ("completions", {"n": 0}, "n"),
        ("completions", {"stop": ["a", ""]}, "stop"),
        ("completions", {"seed": 1.5}, "seed"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"echo": True}, "echo"),
        ("completions", {"best_of": 3}, "best_of"),
        ("completions", {"frequency_penalty": 1.0}, "frequency_penalty"),
        ("completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("completions", {"model": None}, "model"),
        ("completions", {"no_such_field": 1}, "no_such_field"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"role": "tool", "content": "a"}]}, "messages[0]"),
        ("chat/completions", {"messages": [*MESSAGES, {"role": "user"}]}, "messages[1]"),
        ("chat/completions", {"messages": MESSAGES, "tools": [{}]}, "tools"),
        ("chat/completions", {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"messages": MESSAGES, "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_refused(path, change, param, stream, server):
    body = {"model": MODEL, "stream": stream, **({"prompt": "a"} if path == "completions" else {}), **change}
    if param == "stream_options":
        body["stream"] = False
    answer = server.post(body, path)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and error["message"] and error["type"] == "invalid_request_error"


def test_other_errors(server):
    good = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    assert server.post(good).status_code == 200
    assert server.post(good, key="wrong").json()["error"]["code"] == "invalid_api_key"
    assert server.post("{").status_code == server.post([1]).status_code == 400
    assert server.post({**good, "model": "other"}).status_code == 404
    assert server.post({**good, "n": 101}).status_code == 429
    assert server.post(b" " * (17 << 20)).status_code == 413
    assert server.post(good, "no_such_path").status_code == 404
    with pytest.raises(openai.NotFoundError, match="other"):
        server.client.models.retrieve("other")


def test_client_that_goes_away_frees_its_row(server, monkeypatch):
    model = server.engine.settings.model
    forward = model.forward
    # However fast the machine is, the client does not wait for the answer.
    monkeypatch.setattr(model, "forward", lambda *given, **named: (time.sleep(0.01), forward(*given, **named))[1])
    for stream in (True, False):
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 140, "n": 20, "stream": stream, "temperature": 0}
        headers = {"authorization": f"Bearer {KEY}"}
        if stream:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                server.post(body, timeout=0.2)
        waited = time.monotonic() + 20
        while server.metric("running_answers") or server.metric("waiting_answers"):
            assert time.monotonic() < waited
            time.sleep(0.02)
    assert server.complete(temperature=0).choices[0].text == server.expected("abcabc")


def test_failure_ends_a_stream_with_an_error(server, monkeypatch):
    stream = iter(server.complete(max_tokens=140, temperature=0, stream=True))
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(server.engine.settings.model, "forward", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(openai.APIError, match="ZeroDivisionError"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="ZeroDivisionError"):
            server.complete()
    assert server.complete(temperature=0).choices[0].text == server.expected("abcabc")


def test_command_refuses_what_cannot_work(monkeypatch):
    """Before any model is loaded."""

    def said(*words):
        return str(CliRunner().invoke(app, ["serve", *words]).exception)

    assert said("--draft", "/no/such/model") == "--draft /no/such/model without --target: name both, or leave both " + (
        "out for the embedded pair"
    )
    assert "expected at least --replicas, which is 3" in said("--replicas", "3", "--max-replicas", "2")
    assert "copies of the models need Ray" in said("--no-ray", "--max-replicas", "2")
    assert "without --max-replicas" in said("--requests-per-replica", "4")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'hf_specbranch[serve]'" in said("--no-ray")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else name)
    assert "pip install 'hf_specbranch[ray]'" in said() and "--no-ray" in said()


@pytest.mark.slow
def test_command_drains_on_sigterm():
    """The embedded pair in a process of its own: what has begun is finished, and nothing else is taken."""
    command = [sys.executable, "-m", "hf_specbranch", "serve", "--no-ray", "--port", "0", "--api-key", KEY]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        line = next(each for each in process.stderr if each.startswith("serving"))
        url = line.split()[-1]
        client = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)
        name = line.split()[1]
        stream = client.completions.create(model=name, prompt="def", max_tokens=150, temperature=0, stream=True)
        first = next(iter(stream)).choices[0].text
        process.send_signal(signal.SIGTERM)
        chunks = [chunk.choices[0] for chunk in stream]
        assert first and chunks[-1].finish_reason == "length"
        assert process.wait(60) == 0
        with pytest.raises(openai.APIConnectionError):
            client.models.list()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_chunks_are_server_sent_events(server):
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 5, "temperature": 0, "stream": True}
    lines = [line for line in server.post(body).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]]
    assert "".join(texts) == server.expected("abc", 5)
