"""The pair a command works on."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ..demo_pair import load_demo_pair

EMBEDDED = ("good", "weak")


def load_pair(
    target: str | None, draft: str | None, device: str, dtype: str, revision: str | None = None
) -> tuple[PreTrainedModel, PreTrainedModel, Any]:
    """Target, draft and tokenizer by name; with no target, the embedded one with its "good" or "weak" draft.

    Raises:
        ValueError: only one of two names was given, or a name of a dtype is unknown.
    """
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"dtype {dtype!r}: expected float32, bfloat16 or float16")
    if target is None:
        if draft is not None and draft not in EMBEDDED:
            raise ValueError(f"--draft {draft} without --target: name both, or leave both out for the embedded pair")
        embedded = cast(Literal["good", "weak"], draft or "good")
        return load_demo_pair(embedded, dtype=kind, device=device)
    if draft is None:
        raise ValueError(f"--target {target} without --draft: name both, or leave both out for the embedded pair")
    load = AutoModelForCausalLM.from_pretrained
    large = load(target, dtype=kind, revision=revision).to(device).eval()
    small = load(draft, dtype=kind).to(device).eval()
    return large, small, AutoTokenizer.from_pretrained(target, revision=revision)
