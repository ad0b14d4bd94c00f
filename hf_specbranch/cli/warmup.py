"""`hf-specbranch warmup`: prepare this machine for a pair."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from . import options
from .printing import leaving_cleanly
from .progress import showing_progress


@options.with_model_options()
def warmup(
    given: options.ModelOptions,
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated numbers of rows.")] = "1,2,4",
    max_length: Annotated[int, typer.Option(min=1, help="Longest text, prompt included, in tokens.")] = 4096,
    as_json: options.Json = False,
) -> None:
    """Build the GPU kernels of a pair and keep them on disk: later processes start quickly.

    What is kept: built kernels and autotuned matrix products, per kind of GPU. Run it once on a
    new machine, or when an image is built. CUDA graphs live in a process and are not kept; a server captures them at
    its start with model.warm_up_specbranch().

    Example: hf-specbranch warmup --target org/large --draft org/small --batch-sizes 1,4 --max-length 8192
    """
    with leaving_cleanly():
        sizes = _sizes(batch_sizes)
        given.check()
        with showing_progress(quiet=as_json) as progress:
            progress.doing("importing torch and transformers")
            from ..attach import specbranch

            progress.doing("loading the models")
            large, small, _ = given.open_pair()
        model = specbranch(large, draft=small)
        done = model.warm_up_specbranch(batch_sizes=sizes, max_length=max_length, progress=not as_json)
        found = {name: getattr(done, name) for name in ("seconds", "graphs_captured", "memory_bytes")}
        if as_json:
            print(json.dumps(found))
        else:
            print(
                f"Ready after {done.seconds:.1f} s: {done.graphs_captured} CUDA graphs were captured, "
                f"{done.memory_bytes / 2**30:.2f} GiB."
            )


def _sizes(given: str) -> tuple[int, ...]:
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"--batch-sizes {given}: expected whole numbers above 0 with commas between them, e.g. 1,2,4")
    return tuple(int(part) for part in parts)
