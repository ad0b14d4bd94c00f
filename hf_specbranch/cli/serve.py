"""`hf-specbranch serve`: an HTTP server with OpenAI's endpoints."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from . import options
from .names import check_sources
from .printing import leaving_cleanly, note

EMBEDDED_NAME = "hf-specbranch-demo"
KEYS = "HF_SPECBRANCH_API_KEYS"


def serve(
    target: options.Target = None,
    draft: options.Drafts = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    ray: Annotated[bool, typer.Option("--ray/--no-ray", help="Replicas on Ray Serve, or this process alone.")] = True,
    replicas: Annotated[int, typer.Option(min=1, help="Copies of the models, with --ray.")] = 1,
    rows: Annotated[
        int, typer.Option(min=0, help="Most answers at a time per copy; 0: by the size of the models.")
    ] = 0,
    name: Annotated[str | None, typer.Option(help="Of the model, in requests. Default: that of the target.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help=f"Requests must have this key; may be repeated. Also in ${KEYS}.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(min=2, help="Longest text, prompt included.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Longest prompt.")] = None,
    max_output_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    max_waiting: Annotated[int, typer.Option(min=1, help="Answers that may wait; more get status 429.")] = 1024,
    drain_seconds: Annotated[float, typer.Option(min=0, help="How long running requests may take at the end.")] = 30.0,
    config: options.Config = None,
    policy: options.Policy = None,
    revision: options.Revision = None,
    draft_revision: options.DraftRevision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    threads: options.Threads = 0,
) -> None:
    """Serve the pair over HTTP, with the endpoints of OpenAI's API.

    Requests share a running batch: each one takes the first row that is free.

    Example: hf-specbranch serve --no-ray

    Example: hf-specbranch serve --target org/large --draft org/small --replicas 4 --host 0.0.0.0 --api-key secret
    """
    with leaving_cleanly():
        check_sources(target, draft)
        from ..serving.http_server import check_installed

        check_installed("starlette", "uvicorn", extra="serve")
        if ray:
            check_ray("serve from this process alone with --no-ray")
        given = options.GenerationOptions(
            target=target, draft=draft, revision=revision, draft_revision=draft_revision,
            trust_remote_code=trust_remote_code, config=config, policy=policy, device=device, dtype=dtype,
            threads=threads,
        )  # fmt: skip
        settings = given.settings()
        keys = [*(api_key or []), *filter(None, os.environ.get(KEYS, "").split(","))]
        from ..serving.service import Limits

        limits = Limits(max_prompt_tokens, max_output_tokens, max_waiting)
        model_name = name or target or EMBEDDED_NAME
        if ray:
            from ..serving.ray_serve import application, serve_on_ray

            gpus = int(options.place(device, dtype)[0].startswith("cuda"))
            app = application(
                given.open_model, settings, model_name, keys, limits, rows, max_length, replicas, gpus, drain_seconds
            )
            serve_on_ray(app, model_name, host, port, replicas, note)
            return
        from ..serving.engine import Engine
        from ..serving.http_server import serve_here

        model, tokenizer = given.open_model()
        engine = Engine(model, tokenizer, rows or None, max_length, settings)
        serve_here(engine, model_name, host, port, keys, limits, drain_seconds, note)


def check_ray(instead: str, *more: str) -> None:
    """Refuse before any work if Ray, or what parts of it need, is not installed; `instead` is what to do without it."""
    from ..serving.http_server import check_installed

    try:
        check_installed("ray", *more, extra="ray")
    except OSError as error:
        raise OSError(f"{error}, or {instead}") from None
