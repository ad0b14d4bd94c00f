"""The server on a real Ray: replicas that die lose no request."""

import asyncio
import os
import signal
import socket
import time
import warnings
from pathlib import Path

import pytest
import torch

from hf_specbranch import SpecBranchConfig, specbranch

from .models import VOCABULARY, llama, noisy_copy
from .tokens import letter_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of Ray's own
]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray uses what others call deprecated
    for package in ("ray", "starlette", "uvicorn", "openai"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'hf_specbranch[ray,test]'")
    import openai
    import ray
    from ray import serve

    from hf_specbranch.serving.ray_serve import APP, application, autoscaling
    from hf_specbranch.serving.service import Limits

PROMPTS = ["abcdefghijklmnopqrstuvwxyz"[at % 16 : at % 16 + 1 + at % 4] for at in range(64)]


def load_and_note(where):
    """Load the small pair in a replica, and note its process id."""
    torch.set_num_threads(1)
    target = llama(seed=0)
    (Path(where) / str(os.getpid())).write_text("")
    return specbranch(target, noisy_copy(target, noise=0.25, seed=1)), letter_tokenizer(VOCABULARY)


def deploy(where, replicas):
    settings = SpecBranchConfig(policy="vanilla")
    app = application(lambda: load_and_note(where), settings, "tiny", ["key"], Limits(), rows=4, replicas=replicas)
    serve.run(app, name=APP, route_prefix="/")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a server with two replicas, and the folder where they note their process ids."""
    where = tmp_path_factory.mktemp("replicas")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=4, log_to_driver=False, include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    deploy(where, replicas=2)
    yield f"http://127.0.0.1:{port}/v1", where
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def alone():
    """What plain `generate()` says to each prompt."""
    target, tokenizer, found = llama(seed=0), letter_tokenizer(VOCABULARY), {}
    for prompt in set(PROMPTS):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=100)
        found[prompt] = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return found


def alive(where):
    return [int(each.name) for each in where.iterdir() if Path(f"/proc/{each.name}").exists()]


def wait_for_replicas(where, least=2, most=2):
    waited = time.monotonic() + 120
    while not least <= len(alive(where)) <= most:
        assert time.monotonic() < waited
        time.sleep(0.2)


async def one(client, prompt, stream):
    """Return the text of an answer; None if its stream ended with an error."""
    settings = dict(model="tiny", prompt=prompt, max_tokens=100, temperature=0)
    if not stream:
        return (await client.completions.create(**settings)).choices[0].text
    text = ""
    try:
        async for chunk in await client.completions.create(stream=True, **settings):
            text += chunk.choices[0].text
    except openai.InternalServerError:
        raise
    except openai.APIError as error:
        assert "replica" in str(error) and text
        return None
    return text


@pytest.mark.parametrize("kill", [False, True])
def test_no_request_is_lost(kill, server, alone):
    url, where = server
    wait_for_replicas(where)

    async def ask():
        async with openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0, timeout=200) as client:
            asked = [asyncio.create_task(one(client, each, at % 4 == 0)) for at, each in enumerate(PROMPTS)]
            if kill:
                await asyncio.sleep(1.5)
                assert not all(task.done() for task in asked)
                os.kill(alive(where)[0], signal.SIGKILL)
            return await asyncio.gather(*asked)

    answers = asyncio.run(ask())
    for at, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        assert answer == alone[prompt] or (kill and at % 4 == 0 and answer is None)
    assert kill or None not in answers
    wait_for_replicas(where)


def test_stop_strings_seeds_and_several_answers(server, alone):
    """Whichever replica answers: each has its own batch, and a seed gives the same text in any of them."""
    client, prompt = openai.OpenAI(base_url=server[0], api_key="key", max_retries=0), PROMPTS[3]
    stop = alone[prompt][10:12]
    settings = {"model": "tiny", "prompt": prompt, "max_tokens": 100}
    answer = client.completions.create(**settings, temperature=0, stop=[stop]).choices[0]
    assert answer.text == alone[prompt][: alone[prompt].index(stop)] and answer.finish_reason == "stop"
    sampled = {**settings, "max_tokens": 20, "temperature": 1.0}
    several = [each.text for each in client.completions.create(**sampled, n=3, seed=5).choices]
    assert len(set(several)) == 3
    for _ in range(6):
        assert [each.text for each in client.completions.create(**sampled, n=3, seed=5).choices] == several
    assert client.completions.create(**sampled, seed=6).choices[0].text == several[1]
    chunks = list(client.completions.create(**sampled, seed=5, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == several[0]


def test_errors_and_metrics_come_through(server):
    url, _ = server
    client = openai.OpenAI(base_url=url, api_key="key", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="abc", temperature=3)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="abc", temperature=3, stream=True)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()
    metrics = openai.OpenAI(base_url=url.removesuffix("/v1"), api_key="key").get("/metrics", cast_to=str)
    assert "hf_specbranch_generated_tokens_total{replica=" in metrics
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_replicas_follow_the_load(server, tmp_path):
    """The last test: it replaces the application of the others."""
    url, _ = server
    deploy(tmp_path, {**autoscaling(1, 2, 4), "upscale_delay_s": 1, "downscale_delay_s": 1, "look_back_period_s": 11})
    wait_for_replicas(tmp_path, 1, 1)

    async def ask_until_there_are_two():
        async with openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0, timeout=200) as client:
            waited = time.monotonic() + 120
            while len(alive(tmp_path)) < 2:
                assert time.monotonic() < waited
                answers = await asyncio.gather(*[one(client, prompt, False) for prompt in PROMPTS[:16]])
                assert all(answers)

    asyncio.run(ask_until_there_are_two())
    wait_for_replicas(tmp_path, 1, 1)  # the load has gone
    client = openai.OpenAI(base_url=url, api_key="key", max_retries=0)
    assert client.completions.create(model="tiny", prompt="abc", max_tokens=4).usage.completion_tokens > 0
