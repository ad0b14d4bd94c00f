"""`hf-specbranch batch`: answer all prompts of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .names import check_sources
from .printing import leaving_cleanly, note, terminable


def batch(
    prompts: Annotated[Path, typer.Argument(help="JSON lines with a prompt, or messages, and an id each.")],
    out: Annotated[Path, typer.Option(help="Answers as JSON lines; those that are in it are not asked again.")],
    target: options.Target = None,
    draft: options.Drafts = None,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = None,
    seed: options.Seed = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends an answer; may be repeated.")] = None,
    rows: Annotated[int, typer.Option(min=0, help="Most answers at a time; 0: by the size of the models.")] = 0,
    max_length: Annotated[int | None, typer.Option(min=2, help="Longest text, prompt included.")] = None,
    ray: Annotated[bool, typer.Option("--ray", help="On a Ray cluster, with Ray Data.")] = False,
    replicas: Annotated[int, typer.Option(min=1, help="Copies of the models, with --ray.")] = 1,
    config: options.Config = None,
    policy: options.Policy = None,
    revision: options.Revision = None,
    draft_revision: options.DraftRevision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    threads: options.Threads = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Answer all prompts of a file. A job that was killed continues where it was.

    Example: hf-specbranch batch prompts.jsonl --out answers.jsonl

    Example: hf-specbranch batch prompts.jsonl --out answers.jsonl --ray --replicas 8
    """
    with leaving_cleanly(), terminable():
        check_sources(target, draft)
        from ..serving.answer_file import AnswerFile, read_jobs

        jobs = read_jobs(prompts)
        options.check_file("--out", out)
        given = options.GenerationOptions(
            target=target, draft=draft, revision=revision, draft_revision=draft_revision,
            trust_remote_code=trust_remote_code, config=config, policy=policy, device=device, dtype=dtype,
            threads=threads,
        )  # fmt: skip
        settings = given.settings()
        if ray:
            from .serve import check_ray

            check_ray("leave out --ray", "pandas", "pyarrow")
        with AnswerFile(out) as file:
            left = file.left(jobs)
            if len(left) < len(jobs):
                note(f"{len(jobs) - len(left)} of {len(jobs)} prompts are answered already")
            if not left:
                return
            from ..serving.engine import Engine
            from ..serving.offline import OfflineSettings, answers_of, answers_on_ray, by_length, write_answers
            from .progress import showing_progress

            wanted = OfflineSettings(
                max_new_tokens, temperature, 1.0 if top_p is None else top_p, seed, tuple(stop or ())
            )
            if ray:
                gpus = int(options.place(device, dtype)[0].startswith("cuda"))
                answers = answers_on_ray(
                    given.open_model, settings, rows, max_length, by_length(left), wanted, replicas, gpus
                )
                with showing_progress(len(left), quiet) as progress:
                    done = write_answers(answers, file, len(left), progress)
            else:
                with showing_progress(quiet=quiet) as progress:
                    progress.doing("loading the models")
                    model, tokenizer = given.open_model()
                with (
                    Engine(model, tokenizer, rows or None, max_length, settings) as engine,
                    showing_progress(len(left), quiet) as progress,
                ):
                    done = write_answers(answers_of(engine, by_length(left), wanted), file, len(left), progress)
        note(f"{done['answers']} answers with {done['tokens']} tokens; {done['errors']} prompts could not be answered")
