"""`hf-specbranch serve`: an HTTP server with OpenAI's endpoints."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from . import options
from .names import check_sources
from .printing import leaving_cleanly, note

EMBEDDED_NAME = "hf-specbranch-demo"
KEYS = "HF_SPECBRANCH_API_KEYS"
REQUESTS = 16  # at a time per replica, if nothing says how many answers share a batch


def serve(
    target: options.Target = None,
    draft: options.Drafts = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    ray: Annotated[bool, typer.Option("--ray/--no-ray", help="Replicas on Ray Serve, or this process alone.")] = True,
    replicas: Annotated[int, typer.Option(min=1, help="Copies of the models, with --ray.")] = 1,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="Let Ray start more copies under load, up to so many.")
    ] = None,
    requests_per_replica: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Requests at a time per copy that --max-replicas aims at. Default: --rows, or {REQUESTS}."
        ),
    ] = None,
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
        check_scaling(ray, replicas, max_replicas, requests_per_replica)
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
            from ..serving.ray_serve import application, autoscaling, serve_on_ray

            gpus = int(options.place(device, dtype)[0].startswith("cuda"))
            copies: Any = replicas
            words = f"{replicas} replicas"
            if max_replicas is not None:
                copies = autoscaling(replicas, max_replicas, requests_per_replica or rows or REQUESTS)
                words = f"{replicas} to {max_replicas} replicas"
            app = application(
                given.open_model, settings, model_name, keys, limits, rows, max_length, copies, gpus, drain_seconds
            )
            serve_on_ray(app, model_name, host, port, words, note)
            return
        from ..serving.engine import Engine
        from ..serving.http_server import serve_here

        model, tokenizer = given.open_model()
        engine = Engine(model, tokenizer, rows or None, max_length, settings)
        serve_here(engine, model_name, host, port, keys, limits, drain_seconds, note)


def check_scaling(ray: bool, replicas: int, most: int | None, requests: int | None) -> None:
    """Refuse numbers of replicas that contradict each other."""
    if requests is not None and most is None:
        raise ValueError(f"--requests-per-replica {requests} without --max-replicas: the number of copies is fixed")
    if most is not None and not ray:
        raise ValueError(f"--max-replicas {most} with --no-ray: copies of the models need Ray")
    if most is not None and most < replicas:
        raise ValueError(f"--max-replicas {most}: expected at least --replicas, which is {replicas}")


def check_ray(instead: str, *more: str) -> None:
    """Refuse before any work if Ray, or what parts of it need, is not installed; `instead` is what to do without it."""
    from ..serving.http_server import check_installed

    try:
        check_installed("ray", *more, extra="ray")
    except OSError as error:
        raise OSError(f"{error}, or {instead}") from None
