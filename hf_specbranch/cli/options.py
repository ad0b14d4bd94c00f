"""Options that several commands share, and what they mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedModel

from ..config import POLICIES, RUNTIMES, SpecBranchConfig
from ..demo_pair import load_demo_pair
from ..plots import check_plots
from .pair import EMBEDDED, load_pair

Target = Annotated[str | None, typer.Option(help="Target model: folder or repository id. Default: the embedded one.")]
Draft = Annotated[str | None, typer.Option(help='Draft model; "good" or "weak" for the embedded target.')]
Head = Annotated[
    str | None, typer.Option(help='Length head: folder, repository id, "auto", or "embedded" for the embedded pair\'s.')
]
Policy = Annotated[str | None, typer.Option(help=f"One of {', '.join(POLICIES)}. Default: auto.")]
Gamma = Annotated[int | None, typer.Option(min=1, help="Longest draft.")]
Epsilon = Annotated[float | None, typer.Option(min=0, max=1, help="Stop drafting below this confidence.")]
Branches = Annotated[int | None, typer.Option(min=1, help="Most branches at a fork.")]
Runtime = Annotated[str | None, typer.Option(help=f"One of {', '.join(RUNTIMES)}.")]
Config = Annotated[Path | None, typer.Option(help="Settings as JSON, e.g. from `tune`; options given here win.")]
Device = Annotated[str, typer.Option(help="e.g. cpu or cuda; auto takes a GPU if there is one.")]
Dtype = Annotated[str, typer.Option(help="Of the weights; auto is bfloat16 on a GPU, float32 elsewhere.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 is greedy.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Sample from the k likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(min=0, max=1, help="Sample from the likeliest tokens of this mass.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same result.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Most tokens to generate.")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads for torch; 0 leaves it as it is.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def settings_from(
    config: Path | None,
    policy: str | None,
    gamma: int | None,
    epsilon: float | None,
    branches: int | None,
    runtime: str | None,
) -> SpecBranchConfig:
    """The settings in the file, if one is given, with the options that are given in place of its own."""
    options = {
        "policy": policy,
        "max_draft_length": gamma,
        "confidence_threshold": epsilon,
        "max_branches": branches,
        "runtime": runtime,
    }
    given = {name: value for name, value in options.items() if value is not None}
    return replace(read_settings(config) if config is not None else SpecBranchConfig(), **given)  # type: ignore[arg-type]


def read_settings(path: Path) -> SpecBranchConfig:
    """A `SpecBranchConfig` from a JSON file; whatever is wrong with the file is told with its name."""
    if not path.is_file():
        raise FileNotFoundError(f"--config {path}: no such file; `hf-specbranch tune --out {path}` writes one")
    return SpecBranchConfig.from_json_file(path)


def check_file(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before any work."""
    if path is None:
        return
    try:
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ValueError(f"{option} {path}: expected a file in a folder that exists")
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ValueError(f"{option} {path}: it cannot be written ({error.strerror})") from None


def check_picture(path: Path | None) -> None:
    """Refuse a picture that cannot be drawn or written, before any work."""
    check_file("--png", path)
    if path is not None:
        check_plots("--png")


def sampling_from(temperature: float, top_k: int | None, top_p: float | None) -> dict[str, Any]:
    """Arguments of `generate()` for this way of choosing tokens."""
    if temperature == 0:
        if top_k is not None or top_p is not None:
            raise ValueError("--top-k and --top-p choose among sampled tokens: add --temperature, e.g. 1.0")
        return {"do_sample": False}
    chosen = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0, "top_p": top_p}
    return {name: value for name, value in chosen.items() if value is not None}


def place(device: str, dtype: str) -> tuple[str, str]:
    """Device and dtype with "auto" resolved; a device that is not there is refused."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {device}: {reason}; leave it out to take what is there") from error
    return device, dtype if dtype != "auto" else "bfloat16" if kind == "cuda" else "float32"


def open_pair(
    target: str | None, draft: str | None, device: str, dtype: str, threads: int = 0
) -> tuple[PreTrainedModel, PreTrainedModel, Any]:
    """Target, draft and tokenizer, loaded without a progress bar for each."""
    if threads:
        torch.set_num_threads(threads)
    device, dtype = place(device, dtype)
    return load_pair(target, draft, device, dtype)


def head_from(name: str | None, target: str | None, draft: str | None, device: str) -> Any:
    """What `generate(length_head=...)` takes for this name."""
    if name != "embedded":
        return name
    if target is not None:
        raise ValueError(f"--head embedded with --target {target}: it was trained for the embedded pair, name another")
    kind = draft if draft in EMBEDDED else "good"
    return load_demo_pair(kind, device=place(device, "auto")[0], head=True)[3]  # type: ignore[call-overload]
