"""The HTTP server: OpenAI's endpoints, health and metrics, around a `Backend`."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from .api_errors import ApiError
from .api_request import Endpoint
from .responses import Response as ApiResponse
from .service import Backend, Event

logger = logging.getLogger(__name__)

LARGEST_BODY = 16 << 20  # bytes
GONE = 499  # the status of a request whose client went away; nobody reads it


def make_app(
    backend: Backend,
    keys: Sequence[str] = (),
    lifespan: Callable[[Any], AbstractAsyncContextManager[None]] | None = None,
) -> Starlette:
    """Return the ASGI application.

    Args:
        backend: answers requests.
        keys: requests must have one of them (`Authorization: Bearer KEY`); none: everybody may ask.
        lifespan: runs around the server.
    """
    handlers = Handlers(backend, keys)
    routes = [
        Route("/v1/chat/completions", handlers.guarded(handlers.chat), methods=["POST"]),
        Route("/v1/completions", handlers.guarded(handlers.completions), methods=["POST"]),
        Route("/v1/models", handlers.guarded(handlers.models)),
        Route("/v1/models/{model:path}", handlers.guarded(handlers.model)),
        Route("/health", handlers.health),
        Route("/metrics", handlers.metrics),
    ]
    errors: dict[Any, Any] = {ApiError: _refused, HTTPException: _unknown_route, Exception: _failed}
    return Starlette(routes=routes, exception_handlers=errors, lifespan=lifespan)


class Handlers:
    """What the endpoints do.

    Args:
        backend: answers requests.
        keys: of those who may ask.
    """

    def __init__(self, backend: Backend, keys: Sequence[str]) -> None:
        self.backend, self.keys = backend, [key.encode() for key in keys]
        self.started = int(time.time())

    def guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler for requests with a valid key."""

        async def handle(request: Request) -> Response:
            given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
            if self.keys and not any([hmac.compare_digest(given, key) for key in self.keys]):
                raise ApiError(401, "no valid key: send the header Authorization: Bearer KEY", None, "invalid_api_key")
            return await handler(request)

        return handle

    async def chat(self, request: Request) -> Response:
        return await self._answer("chat", request)

    async def completions(self, request: Request) -> Response:
        return await self._answer("completions", request)

    async def models(self, request: Request) -> Response:
        found = [self._described(name) for name in await self.backend.models()]
        return JSONResponse({"object": "list", "data": found})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name not in await self.backend.models():
            raise ApiError(404, f"the model {name!r} does not exist", "model", "model_not_found")
        return JSONResponse(self._described(name))

    async def health(self, request: Request) -> Response:
        healthy = await self.backend.healthy()
        return JSONResponse({"status": "ok" if healthy else "unavailable"}, 200 if healthy else 503)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(await self.backend.metrics(), media_type="text/plain; version=0.0.4")

    def _described(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self.started, "owned_by": "hf_specbranch"}

    async def _answer(self, endpoint: Endpoint, request: Request) -> Response:
        body = await _json_body(request)
        events = self.backend.events(endpoint, body)
        if not (isinstance(body, dict) and body.get("stream")):
            response = ApiResponse(endpoint, str(body.get("model")) if isinstance(body, dict) else "")
            collected = await _until_disconnect(request, _collected(events))
            return Response(status_code=GONE) if collected is None else JSONResponse(response.whole(collected))
        # Nothing is sent before the first event, so a request that is refused gets its status.
        first = await _until_disconnect(request, _first(events))
        if first is None:
            return Response(status_code=GONE)
        options = body.get("stream_options") or {}
        response = ApiResponse(endpoint, body["model"], bool(options.get("include_usage")))
        return StreamingResponse(_server_sent(response, first, events), media_type="text/event-stream")


async def _json_body(request: Request) -> Any:
    size = request.headers.get("content-length", "0")
    if size.isdigit() and int(size) > LARGEST_BODY:
        raise ApiError(413, f"the body has {size} bytes: expected {LARGEST_BODY} at most")
    parts, read = [], 0
    async for part in request.stream():
        parts.append(part)
        read += len(part)
        if read > LARGEST_BODY:
            raise ApiError(413, f"the body has more than {LARGEST_BODY} bytes")
    try:
        return json.loads(b"".join(parts))
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error


async def _collected(events: AsyncIterator[Event]) -> list[Event]:
    async with aclosing(events):  # type: ignore[type-var]
        return [event async for event in events]


async def _first(events: AsyncIterator[Event]) -> list[Event]:
    """Return the first event; if there is none, or the task is cancelled, end the request."""
    try:
        return [await anext(events)]
    except BaseException:
        await events.aclose()  # type: ignore[attr-defined]
        raise


async def _until_disconnect(request: Request, work: Any) -> list[Event] | None:
    """Return the result of some work; if the client goes away, cancel the work and return None."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return None
        result: list[Event] = working.result()
        return result
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


async def _server_sent(response: ApiResponse, first: list[Event], events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    """Yield the chunks of a stream as server-sent events. An error after the first chunk is an event too."""
    async with aclosing(events):  # type: ignore[type-var]
        try:
            for event in first:
                for chunk in response.chunks(event):
                    yield _data(json.dumps(chunk))
            async for event in events:
                for chunk in response.chunks(event):
                    yield _data(json.dumps(chunk))
        except ApiError as error:
            yield _data(json.dumps(error.body()))
        except Exception as error:
            logger.exception("a stream has failed")
            yield _data(json.dumps(ApiError(500, f"{type(error).__name__}: {error}").body()))
    yield _data("[DONE]")


def _data(line: str) -> bytes:
    return f"data: {line}\n\n".encode()


async def _refused(request: Request, error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status)


async def _unknown_route(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, message).body(), error.status_code, headers=error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=GONE)
    return JSONResponse(ApiError(500, f"{type(error).__name__}: {error}").body(), 500)
