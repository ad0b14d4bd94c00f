"""The pair a command works on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from ..demo_pair import load_demo_pair

EMBEDDED = ("good", "weak")


def load_pair(
    target: str | None, draft: str | None, device: str, dtype: str, revision: str | None = None
) -> tuple[PreTrainedModel, PreTrainedModel, Any]:
    """Target, draft and tokenizer by name; with no target, the embedded one with its "good" or "weak" draft.

    Raises:
        ValueError: only one of two names was given, a name of a dtype is unknown, or this is no causal model.
        OSError: there is no such folder or repository.
    """
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"dtype {dtype!r}: expected float32, bfloat16 or float16")
    logging.disable_progress_bar()  # a bar for each model would be most of what is seen
    if target is None:
        if draft is not None and draft not in EMBEDDED:
            raise ValueError(f"--draft {draft} without --target: name both, or leave both out for the embedded pair")
        embedded = cast(Literal["good", "weak"], draft or "good")
        return load_demo_pair(embedded, dtype=kind, device=device)
    if draft is None:
        raise ValueError(f"--target {target} without --draft: name both, or leave both out for the embedded pair")
    check_folder("--target", target)
    check_folder("--draft", draft)
    with told_of("--target", target):
        tokenizer = AutoTokenizer.from_pretrained(target, revision=revision)
        large = AutoModelForCausalLM.from_pretrained(target, dtype=kind, revision=revision)
    with told_of("--draft", draft):
        small = AutoModelForCausalLM.from_pretrained(draft, dtype=kind)
    return large.to(device).eval(), small.to(device).eval(), tokenizer


def check_folder(option: str, name: str) -> None:
    """Refuse what looks like a path and is none; anything else may be a repository."""
    if name.startswith(("/", ".", "~")) and not Path(name).expanduser().is_dir():
        raise FileNotFoundError(f"{option} {name}: no such folder")


@contextmanager
def told_of(option: str, name: str) -> Iterator[None]:
    """Errors of transformers say which option they are about, in one line; what torch says of it stays as it is."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise type(error)(f"{option} {name}: {reason}") from error
