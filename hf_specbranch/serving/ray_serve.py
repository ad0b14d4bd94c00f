"""The server on Ray Serve: replicas of the models, behind a gateway that takes HTTP requests.

A replica has the models, an engine and a `Service`. The gateway has the HTTP server, and asks the replicas: Ray chooses
one, starts new ones in place of those that die, and drains them at the end. If a replica dies, a request that has sent
nothing to its client yet is asked again of another one; a stream that has begun ends with an error event.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import RayServeException

from ..config import SpecBranchConfig
from .api_errors import ApiError
from .api_request import Endpoint
from .service import Event, Limits

logger = logging.getLogger(__name__)

APP, MODEL, BOARD = "hf_specbranch", "Replica", "Board"
ATTEMPTS = 4  # to answer a request, on replicas that die
REPORT_SECONDS = 1.0  # between two reports of a replica
BUSY = 100_000  # requests that Ray may give to a replica at a time: the engine queues and refuses them itself


class Replica:
    """One copy of the models.

    Args:
        load: returns the model with its draft attached, and the tokenizer.
        settings: of SpecBranch.
        name: of the model.
        limits: on prompts and answers.
        rows: the most answers at a time; 0: by the size of the models.
        max_length: the longest text.
        board: where metrics are reported.
    """

    def __init__(
        self, load: Callable[[], tuple[Any, Any]], settings: SpecBranchConfig, name: str, limits: Limits, rows: int,
        max_length: int | None, board: Any,
    ) -> None:  # fmt: skip
        from .engine import Engine
        from .service import Service

        model, tokenizer = load()
        self.engine = Engine(model, tokenizer, rows or None, max_length, settings).__enter__()
        self.service, self.board = Service(self.engine, name, limits), board
        self.identity = serve.get_replica_context().replica_id.unique_id
        self.reporting = asyncio.get_running_loop().create_task(self._report())

    async def _report(self) -> None:
        while True:
            await self.board.put.remote(self.identity, await self.service.metrics())
            await asyncio.sleep(REPORT_SECONDS)

    async def check_health(self) -> None:
        if not await self.service.healthy():
            raise RuntimeError("the engine has ended")

    async def events(self, endpoint: Endpoint, body: Any) -> AsyncIterator[Event]:
        """Yield the events of a request; an error is one of them, since it crosses processes."""
        try:
            async for event in self.service.events(endpoint, body):
                yield event
        except ApiError as error:
            yield {"error": error}


class Board:
    """Collects the metrics of all replicas."""

    def __init__(self) -> None:
        self.reports: dict[str, tuple[float, str]] = {}

    async def put(self, replica: str, text: str) -> None:
        now = asyncio.get_running_loop().time()
        self.reports[replica] = now, text
        self.reports = {name: each for name, each in self.reports.items() if now - each[0] < 30 * REPORT_SECONDS}

    async def text(self) -> str:
        return merged_metrics({name: text for name, (_, text) in self.reports.items()})


def merged_metrics(reports: dict[str, str]) -> str:
    """Return the metrics of several replicas as one text, in which each value names its replica.

    Example:
        >>> print(merged_metrics({"a": "# TYPE n gauge\\nn 1\\n", "b": '# TYPE n gauge\\nn{x="y"} 2\\n'}), end="")
        # TYPE n gauge
        n{replica="a"} 1
        n{x="y",replica="b"} 2
    """
    comments: dict[str, None] = {}
    values: dict[str, list[str]] = {}
    for replica, text in reports.items():
        metric = ""
        for line in text.splitlines():
            if line.startswith("#"):
                metric = line.split()[2]
                comments[line] = None
                continue
            name, _, value = line.rpartition(" ")
            own = f'{name[:-1]},replica="{replica}"}}' if name.endswith("}") else f'{name}{{replica="{replica}"}}'
            values.setdefault(metric, []).append(f"{own} {value}")
    lines = []
    for metric, found in values.items():
        lines += [line for line in comments if line.split()[2] == metric] + found
    return "".join(f"{line}\n" for line in lines)


class RayBackend:
    """Asks the replicas. See `Backend`.

    Args:
        name: of the model.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.replicas: Any = None  # a handle finds out where replicas are, so it is made once

    async def models(self) -> list[str]:
        return [self.name]

    async def metrics(self) -> str:
        return str(await serve.get_deployment_handle(BOARD, APP).text.remote())

    async def healthy(self) -> bool:
        status = serve.status().applications[APP].deployments[MODEL]
        return str(status.status.value) in ("HEALTHY", "UPDATING", "UPSCALING", "DOWNSCALING")

    async def events(self, endpoint: Endpoint, body: Any) -> AsyncIterator[Event]:
        streams = isinstance(body, dict) and bool(body.get("stream"))
        for attempt in range(1, ATTEMPTS + 1):
            collected: list[Event] = []  # nothing of an answer that is not streamed is sent before its end
            begun, answering = False, self._ask(endpoint, body)
            try:
                async for event in answering:
                    if isinstance(error := event.get("error"), ApiError):
                        raise error
                    if streams:
                        begun = True
                        yield event
                    else:
                        collected.append(event)
                for event in collected:
                    yield event
                return
            except (RayActorError, RayServeException) as error:
                logger.warning("a replica has failed: %s", str(error).splitlines()[0])
                if begun or attempt == ATTEMPTS:
                    raise ApiError(500, "the replica that generated this answer has failed: ask again") from error
            except RayTaskError as error:
                raise ApiError(500, str(error.cause or error)) from error
            finally:
                await answering.aclose()
            await asyncio.sleep(0.1 * attempt)

    async def _ask(self, endpoint: Endpoint, body: Any) -> Any:
        if self.replicas is None:
            self.replicas = serve.get_deployment_handle(MODEL, APP).options(stream=True)
        response = self.replicas.events.remote(endpoint, body)
        try:
            async for event in response:
                yield event
        finally:  # if the client has gone away; no matter if all was read
            response.cancel()


def autoscaling(least: int, most: int, requests: int) -> dict[str, Any]:
    """Return the settings of Ray Serve under which the number of replicas follows the load.

    Args:
        least: replicas without load.
        most: replicas at any load.
        requests: that each replica has at a time, running or waiting; Ray starts and ends replicas to get there.

    Example:
        >>> autoscaling(1, 4, 16)
        {'min_replicas': 1, 'max_replicas': 4, 'target_ongoing_requests': 16}
    """
    return {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": requests}


def application(
    load: Callable[[], tuple[Any, Any]], settings: SpecBranchConfig, name: str, keys: Sequence[str], limits: Limits,
    rows: int = 0, max_length: int | None = None, replicas: int | dict[str, Any] = 1, gpus: float = 0,
    drain_seconds: float = 30.0,
) -> Any:  # fmt: skip
    """Return the Ray Serve application; see `Replica` for the arguments.

    Args:
        keys: requests must have one of them.
        replicas: how many copies of the models; or an `autoscaling_config` of Ray Serve, see `autoscaling`.
        gpus: that each of them takes.
        drain_seconds: how long running requests may take at the end.
    """

    def gateway_app() -> Any:
        from .http_app import make_app

        return make_app(RayBackend(name), keys)

    class Gateway:
        def __init__(self, model: Any, board: Any) -> None: ...  # both are found by name

    shared = {"max_ongoing_requests": BUSY, "graceful_shutdown_timeout_s": drain_seconds}
    board = serve.deployment(Board, name=BOARD, ray_actor_options={"num_cpus": 0}, **shared).bind()
    copies = {"autoscaling_config": replicas} if isinstance(replicas, dict) else {"num_replicas": replicas}
    model = serve.deployment(
        Replica, name=MODEL, health_check_period_s=2,
        ray_actor_options={"num_gpus": gpus, "num_cpus": 0 if gpus else 1}, **copies, **shared,
    ).bind(load, settings, name, limits, rows, max_length, board)  # fmt: skip
    gateway = serve.deployment(serve.ingress(gateway_app)(Gateway), ray_actor_options={"num_cpus": 0}, **shared)
    return gateway.bind(model, board)


def serve_on_ray(
    app: Any, name: str, host: str, port: int, replicas: str, announce: Callable[[str], None] = print
) -> None:
    """Run an application until SIGTERM or Ctrl-C, then drain it. RAY_ADDRESS names a cluster; else one is started.

    Args:
        app: what `application` returned.
        name: of the model.
        host: the address to listen on.
        port: the port.
        replicas: how many there are, in words, for the announcement.
        announce: shows where the server listens.
    """
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    serve.start(http_options={"host": host, "port": port})
    serve.run(app, name=APP, route_prefix="/")
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    announce(f"serving {name} on http://{host}:{port}/v1 with {replicas} on Ray")
    while not ended.wait(1):  # a wait without an end would hold back signals
        pass
    serve.delete(APP)  # waits for requests that run
    serve.shutdown()
