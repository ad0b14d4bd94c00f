"""Record one generation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..config import SpecBranchConfig
from .observer import TimelineObserver
from .recording import Recording


def record(model: Any, tokenizer: Any, prompt: str, **arguments: Any) -> Recording:
    """Continue a prompt and record every pass of both models, every drafted token and every verify result.

    Rounds are driven from the host, so that everything can be seen; on a GPU that is slower than an unobserved
    generation, whose stages are captured whole. Record once before the recording that counts: the first
    generation of a model also pays for everything that happens once.

    Args:
        model: a model with `specbranch` attached.
        tokenizer: its tokenizer.
        prompt: what to continue.
        arguments: of `model.generate()`, e.g. `assistant_model`, `specbranch`, `max_new_tokens`.

    Example:
        >>> from hf_specbranch import load_demo_pair, specbranch
        >>> target, draft, tokenizer = load_demo_pair()
        >>> recording = record(specbranch(target, draft), tokenizer, "def add(a, b):", max_new_tokens=8)
        >>> len(recording.committed)
        8
    """
    observer = TimelineObserver()
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    if "stop_strings" in arguments:
        arguments["tokenizer"] = tokenizer
    arguments |= {"return_dict_in_generate": True, "speculation_observer": observer}
    stats = getattr(model.generate(**inputs, **arguments), "stats", None)
    if stats is None:
        raise ValueError("nothing was recorded: transformers' own decoding ran, and a warning says why")
    log = observer.tokens
    tokens = {each.token for each in log.drafted} | {each.token for each in log.committed}
    texts = token_texts(tokenizer, tokens, anchor=int(inputs["input_ids"][0, -1]))
    blocks, result_times = observer.blocks(), observer.result_times()
    return Recording(stats.policy, prompt, log.drafted, log.committed, blocks, result_times, stats, texts)


def as_if_captured(config: SpecBranchConfig, device: torch.device, cheap: bool = True) -> SpecBranchConfig:
    """The settings with "auto" decided as an unobserved generation would, whose stages are captured on a GPU.

    Args:
        config: settings.
        device: of the target.
        cheap: the draft is small compared with its target.
    """
    captured = device.type == "cuda" and config.runtime != "eager"
    return config.decided(captured, cheap, alone=config.length_head is None)


def token_texts(tokenizer: Any, tokens: Iterable[int], anchor: int) -> dict[int, str]:
    """How each token reads in the middle of a text; some tokenizers drop a blank at the beginning.

    Args:
        anchor: a token to stand before it.
    """

    def read(*ids: int) -> str:
        return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    before, texts = read(anchor), {}
    for token in tokens:
        both = read(anchor, token)
        texts[token] = both[len(before) :] if both.startswith(before) and both != before else read(token)
    return texts
