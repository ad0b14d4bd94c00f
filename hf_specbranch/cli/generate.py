"""`hf-specbranch generate`: continue a prompt."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from . import options
from .printing import NO_STATISTICS, leaving_cleanly, note


@options.with_generation_options()
def generate(
    given: options.GenerationOptions,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue. Default: standard input.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no statistics.")] = False,
    as_json: options.Json = False,
) -> None:
    """Continue a prompt. The text streams to standard output; statistics go to standard error.

    Example: hf-specbranch generate "def add(a, b):" --max-new-tokens 64

    Example: cat main.py | hf-specbranch generate --policy vanilla --max-draft-length 4

    Example: hf-specbranch generate "Summarise: ..." --target org/large --draft lookup
    """
    with leaving_cleanly():
        text = prompt_from(prompt)
        settings, sampling = given.settings(), given.sampling()
        import torch
        from transformers import TextStreamer

        length_head = given.head()
        model, tokenizer = given.open_model()
        inputs = tokenizer(text, return_tensors="pt").to(model.device)
        torch.manual_seed(given.seed)
        streamer = None if as_json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        out = model.generate(
            **inputs,
            **sampling,
            specbranch=settings,
            length_head=length_head,
            **given.limits(),
            streamer=streamer,
            return_dict_in_generate=True,
        )
        stats = getattr(out, "stats", None)
        if as_json:
            new = out.sequences[0, inputs["input_ids"].shape[1] :]
            continuation = tokenizer.decode(new, skip_special_tokens=True)
            print(json.dumps({"prompt": text, "text": continuation, "stats": stats and stats.to_dict()}))
        elif not quiet:
            note(f"\n{stats or NO_STATISTICS}")


def prompt_from(prompt: str | None) -> str:
    """Return the prompt that was given as an argument or on standard input."""
    if prompt is None:
        if sys.stdin.isatty():
            raise ValueError('no prompt: hf-specbranch generate "def add(a, b):", or text on standard input')
        prompt = sys.stdin.read()
    if not prompt:
        raise ValueError("the prompt is empty: give at least one character")
    return prompt
