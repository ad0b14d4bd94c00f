"""Explicit warm-up: builds kernels and captures CUDA graphs before the first request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from .decoding.call import warming_up
from .model_state import state_of
from .padding_check import reads_padding_as_plain
from .progress import TqdmProgress

PROMPT = 8  # tokens of the prompt that stages are captured with


class WarmUp(NamedTuple):
    """What a warm-up did."""

    seconds: float
    graphs_captured: int
    memory_bytes: int  # that KV caches, buffers and graphs of the target and the draft take now


def warm_up(
    model: Any,
    batch_sizes: Sequence[int] = (1,),
    max_length: int = 4096,
    assistant_model: Any = None,
    progress: bool = True,
    **generate_kwargs: Any,
) -> WarmUp:
    """Capture all stages that calls within these limits need. Afterwards such calls capture nothing.

    Stages are captured for the settings given here: sampling and logits processors count, lengths and texts do not. On
    a CPU, and for models that cannot be captured, it only checks the model once.

    Args:
        model: a model with SpecBranch attached.
        batch_sizes: numbers of rows. Greedy batches of a size in between run on the stages of the next larger one, if
            that has at most twice as many rows.
        max_length: the longest text, prompt included.
        assistant_model: as in `generate()`; by default the one that is attached. Without one, the target decodes alone.
        progress: show a bar on standard error.
        generate_kwargs: further arguments of the calls to come, such as `do_sample`, `temperature` or `specbranch`.

    Example:
        >>> from hf_specbranch import load_demo_pair, specbranch
        >>> target, draft, tokenizer = load_demo_pair()
        >>> model = specbranch(target, draft=draft)
        >>> model.warm_up_specbranch(batch_sizes=(1, 2), max_length=256, progress=False).graphs_captured  # on a CPU
        0
    """
    if not batch_sizes or any(isinstance(rows, bool) or not isinstance(rows, int) or rows < 1 for rows in batch_sizes):
        raise ValueError(f"batch_sizes={batch_sizes!r}: expected whole numbers above 0, such as (1, 2, 4)")
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length <= PROMPT + 1:
        raise ValueError(f"max_length={max_length!r}: expected a whole number above {PROMPT + 1}")
    draft = assistant_model if assistant_model is not None else model._specbranch_memory.draft
    began, captured = time.perf_counter(), 0
    with tqdm(unit="plan", desc="warm-up", disable=not progress) as bar:
        before = warming_up.set(TqdmProgress(bar))
        try:
            for rows in dict.fromkeys(batch_sizes):
                tokens = torch.zeros(
                    (rows, PROMPT), dtype=torch.long, device=model.get_input_embeddings().weight.device
                )
                model.generate(
                    tokens,
                    attention_mask=torch.ones_like(tokens),
                    max_length=max_length,
                    assistant_model=assistant_model,
                    **{"do_sample": False, **generate_kwargs},
                )
                stats, model.specbranch_stats = model.specbranch_stats, None
                captured += 0 if stats is None else stats.graphs_captured
        finally:
            warming_up.reset(before)
    if max(batch_sizes) > 1:
        reads_padding_as_plain(model)  # now, not before the first padded batch
        model.specbranch_stats = None
    models = [each for each in (model, draft) if isinstance(each, torch.nn.Module)]
    models += [copy for each in models for _, copies in state_of(each).copies.values() for copy in copies]
    held = sum(runner.num_bytes for each in models for runner in state_of(each).idle_runners)
    return WarmUp(time.perf_counter() - began, captured, held)
