"""Measure what the server on Ray adds to the time to the first token of one request.

    python examples/benchmarks/first_token_on_ray.py --requests 100 --threads 1

Four times are taken in turns, each from the request to its first token: that of `generate()` in this process, that of
an empty deployment of Ray Serve, which sends one event, that of one which asks another one for the event, as the
server's gateway asks a replica, and that of the server. Needs `hf_specbranch[ray]` and httpx.
"""

from __future__ import annotations

import functools
import socket
import sys
import time
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import ray
import torch
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

from hf_specbranch import SpecBranchConfig, specbranch
from hf_specbranch.serving.ray_serve import APP, application
from hf_specbranch.serving.service import Limits

sys.path.insert(0, str(Path(__file__).parent))
from lab import finish, inputs_of, load, overrides, parser_for  # noqa: E402

NEW_TOKENS = 8
EVENT = 'data: {"choices": []}\n\n'


class FirstToken:
    """A streamer that notes when the first new token comes, after the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


class Empty:
    """A deployment that answers every request with one event."""

    async def __call__(self, request: Request) -> StreamingResponse:
        await request.json()

        async def event() -> AsyncIterator[str]:
            yield EVENT

        return StreamingResponse(event(), media_type="text/event-stream")


class Source:
    """A deployment that has the event."""

    async def events(self, body: Any) -> AsyncIterator[str]:
        yield EVENT


class Asking:
    """A deployment that asks another one.

    Args:
        source: the handle of the other one.
    """

    def __init__(self, source: Any) -> None:
        self.source = source.options(stream=True)

    async def __call__(self, request: Request) -> StreamingResponse:
        return StreamingResponse(self.source.events.remote(await request.json()), media_type="text/event-stream")


def of_generate(model: Any, inputs: dict[str, torch.Tensor]) -> float:
    """Return the seconds until `generate()` has a token."""
    streamer, began = FirstToken(), time.perf_counter()
    model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS, streamer=streamer)
    return streamer.times[1] - began


def of_request(client: httpx.Client, url: str, prompt: list[int]) -> float:
    """Return the seconds until a streamed answer has its first event; the rest is read too."""
    body = {"model": "pair", "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": True}
    began = time.perf_counter()
    with client.stream("POST", url, json=body) as response:
        response.raise_for_status()
        events = (line for line in response.iter_lines() if line.startswith("data:"))
        next(events)
        seconds = time.perf_counter() - began
        for _ in events:
            pass
    return seconds


def open_model(args: Any) -> tuple[Any, Any]:
    """Load the pair in a replica."""
    pair = load(args)
    return specbranch(pair.target, pair.draft), pair.tokenizer


def main(argv: list[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--requests", type=int, default=100, help="of each kind (default: %(default)s)")
    args = parser.parse_args(argv)
    pair, ours = load(args), overrides(args)
    settings = SpecBranchConfig(runtime=ours.runtime, kernels=ours.kernels)
    inputs = [each for _, each in inputs_of(args, pair)]
    model = specbranch(pair.target, pair.draft, **settings.to_dict())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=8, log_to_driver=False, include_dashboard=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        gpus = int(args.device.startswith("cuda"))
        app = application(functools.partial(open_model, args), settings, "pair", [], Limits(), gpus=gpus)
        serve.run(app, name=APP, route_prefix="/")
        serve.run(serve.deployment(Empty).bind(), name="empty", route_prefix="/empty")
        serve.run(serve.deployment(Asking).bind(serve.deployment(Source).bind()), name="asking", route_prefix="/asking")
        found: dict[str, list[float]] = {"generate": [], "empty": [], "asking": [], "server": []}
        with httpx.Client(timeout=120, base_url=f"http://127.0.0.1:{port}") as client:
            for turn in range(-10, args.requests):  # the first ones are a warm-up
                given = inputs[turn % len(inputs)]
                prompt = given["input_ids"][0].tolist()
                taken = {
                    "generate": of_generate(model, given),
                    "empty": of_request(client, "/empty", prompt),
                    "asking": of_request(client, "/asking", prompt),
                    "server": of_request(client, "/v1/completions", prompt),
                }
                for name, seconds in taken.items() if turn >= 0 else ():
                    found[name].append(1000 * seconds)
    finally:
        serve.shutdown()
        ray.shutdown()
    middle = {name: median(each) for name, each in found.items()}
    over, of_hop = middle["server"] - middle["generate"] - middle["empty"], middle["asking"] - middle["empty"]
    lines = [
        f"{name}: first token after {middle[name]:.1f} ms (quartiles {low:.1f} and {high:.1f})"
        for name, (low, _, high) in ((name, quantiles(each)) for name, each in found.items())
    ]
    lines.append(
        f"the server takes {over:.1f} ms more than generate() and an empty deployment; to ask another deployment takes "
        f"{of_hop:.1f} ms"
    )
    finish(args, {"median_ms": middle, "over_ms": over, "hop_ms": of_hop}, lines)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray uses what others call deprecated
        main()
