"""Loads the pair that a command works on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from ..attach import specbranch
from ..bench.grow_head import grow_head
from ..bench.methods import Pair
from ..bench.twin import check_name, check_twin, make_twin
from ..demo_pair import load_demo_pair
from ..heads import LengthHead
from ..target_heads.loading import load_head
from .names import EMBEDDED, NEWEST, Loading, check_names


def load_pair(
    target: str | None, draft: str | None, device: str, dtype: str, loading: Loading = NEWEST
) -> tuple[PreTrainedModel, PreTrainedModel, Any]:
    """Load target, draft and tokenizer by name; without a target, the embedded one with its "good" or "weak" draft.

    Raises:
        ValueError: only one of two names was given, the dtype is unknown, or a model is not a causal one.
        OSError: there is no such folder or repository.
    """
    check_names(target, draft)
    kind = dtype_of(dtype)
    logging.disable_progress_bar()  # one bar per model would be most of what is seen
    if target is None:
        return load_demo_pair(cast(Literal["good", "weak"], draft or "good"), dtype=kind, device=device)
    assert draft is not None
    large, tokenizer = load_target(target, device, dtype, loading)
    with naming_option("--draft", draft):
        small = load_head(large, draft)
        if small is None:
            small = AutoModelForCausalLM.from_pretrained(draft, dtype=kind, **loading.draft)
    return large, small.to(device).eval(), tokenizer


def load_target(target: str, device: str, dtype: str, loading: Loading = NEWEST) -> tuple[PreTrainedModel, Any]:
    """Load a target and its tokenizer by name."""
    kind = dtype_of(dtype)
    logging.disable_progress_bar()
    with naming_option("--target", target):
        tokenizer = AutoTokenizer.from_pretrained(target, **loading.target)
        large = AutoModelForCausalLM.from_pretrained(target, dtype=kind, **loading.target)
    return large.to(device).eval(), tokenizer


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of this name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name!r}: expected float32, bfloat16 or float16")
    return dtype


@contextmanager
def naming_option(option: str, name: str) -> Iterator[None]:
    """Make errors of transformers one line that names the option."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise type(error)(f"{option} {name}: {reason}") from error


# ---- the pair of a benchmark


class PairNames(NamedTuple):
    """The pair of a benchmark, as the user named it."""

    target: str | None
    draft: str | None
    grow: str | None
    length_head: str | None
    device: str
    dtype: str
    loading: Loading = NEWEST


def load_bench_pair(names: PairNames) -> Pair:
    """Load a pair with SpecBranch attached, grown if requested, with a length head if there is one that fits."""
    device = device_of(names.device)
    shapes = _shapes(names.grow)
    logging.disable_progress_bar()
    head = _small_head(names)
    if shapes is None:
        target, draft, tokenizer = load_pair(names.target, names.draft, names.device, names.dtype, names.loading)
    else:
        small, small_draft, tokenizer = load_pair(names.target, names.draft, "cpu", "float32", names.loading)
        dtype = dtype_of(names.dtype)
        for model, shape in zip((small, small_draft), shapes):
            check_twin(cast(Any, model), shape)
        target = make_twin(cast(Any, small), shapes[0], dtype, device)
        draft = make_twin(cast(Any, small_draft), shapes[1], dtype, device)
        if head is not None:
            head.check_pair(small, small_draft, tokenizer)
            head = grow_head(head, target, draft)
    if head is not None:
        head.check_pair(target, draft, tokenizer)
    return Pair(specbranch(target), draft, tokenizer, head)


def _small_head(names: PairNames) -> LengthHead | None:
    """Return the named head, or the one of the embedded pair."""
    if names.length_head is not None:
        return LengthHead.from_pretrained(names.length_head)
    if names.target is not None or names.draft not in (None, *EMBEDDED):
        return None
    return load_demo_pair(cast(Literal["good", "weak"], names.draft or "good"), head=True)[3]


def device_of(name: str) -> torch.device:
    """Return the device of this name, if it is there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: expected cpu, cuda or cuda:0") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch sees no CUDA device here; use --device cpu")
    return device


def _shapes(given: str | None) -> tuple[str, str] | None:
    if given is None:
        return None
    parts = given.split(":")
    if len(parts) != 2:
        raise ValueError(f"--grow {given}: expected the target's shape and the draft's, e.g. 7b:68m")
    for part in parts:
        check_name(part)
    return parts[0], parts[1]
