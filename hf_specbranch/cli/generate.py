"""`hf-specbranch generate`: continue a prompt."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import TextStreamer

from ..mixin import specbranch
from . import options
from .printing import leaving_cleanly, note, stats_lines


def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue. Default: standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from here.")] = None,
    target: options.Target = None,
    draft: options.Draft = None,
    head: options.Head = None,
    config: options.Config = None,
    policy: options.Policy = None,
    gamma: options.Gamma = None,
    epsilon: options.Epsilon = None,
    branches: options.Branches = None,
    runtime: options.Runtime = None,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    threads: options.Threads = 0,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt too.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No statistics.")] = False,
    as_json: options.Json = False,
) -> None:
    """Continue a prompt. The text goes to standard output as it comes, statistics to standard error.

    Example: hf-specbranch generate "def add(a, b):" --max-new-tokens 64

    Example: cat main.py | hf-specbranch generate --policy vanilla --gamma 4
    """
    with leaving_cleanly():
        text = prompt_from(prompt, file)
        settings = options.settings_from(config, policy, gamma, epsilon, branches, runtime)
        sampling = options.sampling_from(temperature, top_k, top_p)
        length_head = options.head_from(head, target, draft, device)
        large, small, tokenizer = options.open_pair(target, draft, device, dtype, threads)
        model = specbranch(large, draft=small)
        inputs = tokenizer(text, return_tensors="pt").to(large.device)
        torch.manual_seed(seed)
        streamer = None if as_json else TextStreamer(tokenizer, skip_prompt=not echo, skip_special_tokens=True)
        out = model.generate(
            **inputs,
            **sampling,
            specbranch=settings,
            length_head=length_head,
            max_new_tokens=max_new_tokens,
            streamer=streamer,
            return_dict_in_generate=True,
        )
        if as_json:
            new = out.sequences[0, inputs["input_ids"].shape[1] :]
            said = tokenizer.decode(new, skip_special_tokens=True)
            print(json.dumps({"prompt": text, "text": said, "stats": out.stats.to_dict()}))
        elif not quiet:
            note("\n" + "\n".join(stats_lines(out.stats)))


def prompt_from(prompt: str | None, file: Path | None) -> str:
    """The one prompt that was given: as an argument, in a file or on standard input."""
    if prompt is not None and file is not None:
        raise ValueError(f"a prompt and --file {file}: give one of them")
    if file is not None:
        if not file.is_file():
            raise FileNotFoundError(f"--file {file}: no such file")
        prompt = file.read_text(encoding="utf-8")
    elif prompt is None:
        if sys.stdin.isatty():
            raise ValueError(
                'no prompt: hf-specbranch generate "def add(a, b):", --file FILE, or text on standard input'
            )
        prompt = sys.stdin.read()
    if not prompt:
        raise ValueError("the prompt is empty: give at least one character")
    return prompt
