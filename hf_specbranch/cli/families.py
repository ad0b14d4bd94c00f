"""`hf-specbranch families`: check that speculation is exact on every architecture of the installed transformers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .printing import leaving_cleanly


def families(
    only: Annotated[list[str] | None, typer.Argument(help="Model types, e.g. llama qwen3_vl. Default: all.")] = None,
    output: Annotated[Path | None, typer.Option("--markdown", help="Write a table in Markdown.")] = None,
    threads: options.Threads = 1,
) -> None:
    """Build every architecture at a tiny size, and compare speculation with plain generate() token by token.

    Exit code: 0 if all are equal or refused before any work, 1 otherwise.

    Example: hf-specbranch families llama gemma3_text qwen2_vl
    """
    with leaving_cleanly():
        options.check_file("--markdown", output)
        import torch
        import transformers

        from ..families.check import ERROR, NEAR_TIE, WRONG
        from ..families.sweep import markdown, sweep

        torch.set_num_threads(threads or torch.get_num_threads())
        transformers.logging.set_verbosity_error()
        results, start = [], time.perf_counter()
        for result in sweep(only or ()):
            seconds = time.perf_counter() - start
            print(f"{result.family.name:26} {result.state:12} {seconds:5.1f} s  {result.note}"[:200], flush=True)
            results.append(result)
            start = time.perf_counter()
        if output is not None:
            output.write_text(markdown(results), encoding="utf-8")
    failed = [result.family.name for result in results if result.state in (WRONG, ERROR, NEAR_TIE)]
    print(f"{len(results)} architectures, {len(failed)} wrong" + (f": {', '.join(failed)}" if failed else ""))
    if failed:
        raise typer.Exit(1)
