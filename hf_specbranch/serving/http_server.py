"""Runs the HTTP server in one process, until it is told to stop."""

from __future__ import annotations

import importlib.util
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from .engine import Engine
from .service import Limits, Service


def check_installed(*packages: str, extra: str) -> None:
    """Refuse before any work if some package is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise OSError(f"this needs {' and '.join(missing)}: pip install 'hf_specbranch[{extra}]'")


def serve_here(
    engine: Engine, name: str, host: str, port: int, keys: Sequence[str], limits: Limits, drain_seconds: float,
    announce: Callable[[str], None] = print,
) -> None:  # fmt: skip
    """Serve an engine over HTTP. On SIGTERM and SIGINT no more requests are taken, and those that run are finished.

    Args:
        engine: generates the answers.
        name: of the model.
        host: the address to listen on.
        port: 0 takes a free one.
        keys: requests must have one of them; none: everybody may ask.
        limits: on prompts and answers.
        drain_seconds: how long to wait for requests that run; those left then fail.
        announce: shows where the server listens.
    """
    import uvicorn

    from .http_app import make_app

    listening = listen(host, port)
    drain = max(1, round(drain_seconds))
    with engine, _without_death_by_sigterm():
        app = make_app(Service(engine, name, limits), keys)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=drain))
        announce(f"serving {name} on http://{host}:{listening.getsockname()[1]}/v1")
        try:
            server.run(sockets=[listening])
        finally:
            engine.close(drain=False)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; errors name the options."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise OSError(f"--host {host} --port {port}: {error.strerror or error}") from error
    listening.listen(2048)
    return listening


@contextmanager
def _without_death_by_sigterm() -> Iterator[None]:
    """Let uvicorn, which drains on SIGTERM and raises the signal again, return from that."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
