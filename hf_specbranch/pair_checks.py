"""Check a pair before anything is measured: cheap checks first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from .checks import FAILED, OK, WARNING, Check
from .model_state import weight_bytes
from .other_tokenizer import describe_sharing
from .runtime.mask_probe import mask_maker_for
from .runtime.selection import check_model, check_pair, why_not_captured
from .vocabularies import translation_for

CACHE_TOKENS = 4096  # the context length for which the size of the KV caches is reported


def check_everything(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any, draft_tokenizer: Any
) -> Iterator[Check]:
    """Run all checks that need no text, and yield each result when it is known; those that run a model come last."""
    sizes = [model.config.get_text_config(decoder=True).vocab_size for model in (target, draft)]
    millions = [model.num_parameters() / 1e6 for model in (target, draft)]
    described = f"{type(target).__name__}, {millions[0]:,.1f}M; draft {type(draft).__name__}, {millions[1]:,.1f}M"
    models = _try("models", lambda: _check_models(target, draft), described)
    vocabulary = _try("vocabulary", lambda: check_pair(target, draft, None, None), f"{sizes[0]} and {sizes[1]} entries")
    if draft_tokenizer is None:
        tokenizers = Check("tokenizers", WARNING, "the draft has none: it is assumed to use the target's")
    else:
        tokenizers = _tokenizers(target, draft, tokenizer, draft_tokenizer)
        if vocabulary.state != OK and tokenizers.state != FAILED:
            same = tokenizers.state == OK  # with equal tokens, different sizes are padding
            vocabulary = Check("vocabulary", OK, "padded differently" if same else f"{sizes[0]} and {sizes[1]} entries")
    yield from (models, vocabulary, tokenizers, _devices(target, draft), _memory(target, draft))
    if all(check.state != FAILED for check in (models, vocabulary, tokenizers)):
        yield _capture(target, draft)
        attention = target.config.get_text_config(decoder=True)._attn_implementation
        yield _try("attention", lambda: _probe(target, draft), f"{attention}, obeys explicit masks")


def _tokenizers(target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any, draft_tokenizer: Any) -> Check:
    try:
        translation = translation_for(target, draft, tokenizer, draft_tokenizer)
    except ValueError as error:
        return Check("tokenizers", FAILED, str(error))
    if translation is None:
        return Check("tokenizers", OK, "the same entries in both")
    return Check("tokenizers", WARNING, describe_sharing(translation))


def _try(name: str, check: Callable[[], Any], found: str) -> Check:
    try:
        check()
    except (TypeError, ValueError) as error:
        return Check(name, FAILED, str(error))
    return Check(name, OK, found)


def _check_models(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    check_model(target, "target")
    check_model(draft, "draft")


def _probe(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    mask_maker_for(target, "target")
    mask_maker_for(draft, "draft")


def _devices(target: PreTrainedModel, draft: PreTrainedModel) -> Check:
    where = f"{target.device} ({_short(target.dtype)}), draft {draft.device} ({_short(draft.dtype)})"
    kinds = {target.device.type, draft.device.type}
    if "cpu" in kinds and len(kinds) > 1:
        return Check("devices", WARNING, f"{where}: one model is on the CPU")
    if kinds == {"cpu"}:
        return Check("devices", WARNING, f"{where}: no GPU, so a pass over several tokens takes longer than over one")
    return Check("devices", OK, where)


def _capture(target: PreTrainedModel, draft: PreTrainedModel) -> Check:
    """Return whether CUDA graphs are possible, as far as that is known without running the models."""
    for role, model in (("target", target), ("draft", draft)):
        if reason := why_not_captured(model):
            on_cpu = target.device.type == "cpu"  # then nobody expects graphs
            return Check("capture", OK if on_cpu else WARNING, f"no CUDA graphs for the {role}: {reason}")
    return Check("capture", OK, "CUDA graphs for both models")


def _memory(target: PreTrainedModel, draft: PreTrainedModel) -> Check:
    weights = weight_bytes(target) + weight_bytes(draft)
    per_token = [_cache_bytes(model) for model in (target, draft)]
    found, cache = f"weights {_gib(weights)}", 0
    if None not in per_token:
        cache = sum(each or 0 for each in per_token) * CACHE_TOKENS
        found += f"; KV caches of {CACHE_TOKENS} tokens {_gib(cache)}"
    if target.device.type == "cuda":
        free = torch.cuda.mem_get_info(target.device)[0]
    elif "SC_AVPHYS_PAGES" in os.sysconf_names:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return Check("memory", OK, found)
    return Check("memory", OK if free > cache else WARNING, f"{found}; free {_gib(free)}")


def _cache_bytes(model: PreTrainedModel) -> int | None:
    """Return the bytes of keys and values per token, over all layers; None if layers differ or have no attention."""
    config = model.config.get_text_config(decoder=True)
    try:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * config.num_hidden_layers * heads * width * model.dtype.itemsize)
    except (AttributeError, TypeError, RuntimeError):
        return None


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
