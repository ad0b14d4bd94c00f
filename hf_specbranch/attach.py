"""Attach SpecBranch to a model, and name what drafts for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar, cast

import torch
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.generation import CandidateGenerator

from .attachment import Attachment, restore_class
from .config import SpecBranchConfig
from .corpus import LookupCorpus
from .decoding.candidates import check_generator
from .kernels import warm_up_in_background
from .mixin import SpecBranchMixin
from .model_state import draft_model, transformers_model
from .runtime.ranks import follows
from .runtime.selection import check_model, check_pair
from .target_heads.calls import what_drafts
from .target_heads.loading import load_head
from .vocabularies import load_tokenizer, translation_for, usable_tokens

Model = TypeVar("Model", bound=torch.nn.Module)
_TEMPORARY_CALLS = Lock()


LOOKUP = "lookup"


def specbranch(
    model: Model,
    draft: Any = None,
    head: Any = None,
    corpus: LookupCorpus | str | Path | None = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    **settings: Any,
) -> Model:
    """Attach SpecBranch to a loaded model.

    The same object is returned, with the same weights, class name and methods; only its `generate()` now takes
    `assistant_model` as the draft of SpecBranch. Without a draft it decodes faster too, and drafts by lookup where that
    pays. Attaching again is harmless and may name another draft, head, corpus or settings; `model.detach_specbranch()`
    undoes it.

    Args:
        model: a decoder-only transformers model, or a PEFT model around one. Adapters may be switched between calls.
        draft: what drafts where `generate()` is given no assistant: a smaller model; its folder or repository id, which
            is loaded to the target's device in its dtype, or that of an EAGLE-3 draft; "mtp", the target's own layers
            for multi-token prediction; "lookup"; a list of one of these and "lookup"; or a `CandidateGenerator` of
            transformers. By default, lookup drafts are used where they pay.
        head: a length head (a `LengthHead`, a folder, a repository id or "auto"), used where `generate()` is given
            none.
        corpus: texts in which lookup drafts are found besides the text itself: a `LookupCorpus`, or its file.
        tokenizer: the target's, if the draft has another one. For a draft that is named, both are loaded too.
        assistant_tokenizer: the draft's.
        settings: those of `SpecBranchConfig`, such as `policy="vanilla"`, where `generate()` is given none.

    Example:
        >>> from hf_specbranch import load_demo_pair, specbranch
        >>> target, draft, tokenizer = load_demo_pair()
        >>> model = specbranch(target, draft=[draft, "lookup"], max_draft_length=4)
        >>> model is target
        True
    """
    check_model(target := transformers_model(model), "target")
    config = SpecBranchConfig.from_dict(settings) if settings else None
    if isinstance(corpus, (str, Path)):
        texts: LookupCorpus | None = LookupCorpus.load(corpus)
    elif corpus is None or isinstance(corpus, LookupCorpus):
        texts = corpus
    else:
        raise TypeError(f"corpus={type(corpus).__name__}: expected a LookupCorpus, or its file")
    if texts is not None:
        texts.check_tokens(usable_tokens(target))
    candidates = _candidates(draft)
    tokenizers = _given_tokenizers(tokenizer, assistant_tokenizer)
    warm_up_in_background(target.device, target.dtype)  # while a draft that is named is loaded
    own_draft, looks_up, tokenizers = _sources(target, None if candidates is not None else draft, tokenizers)
    before = (attached := attach(target))._specbranch_memory
    attached._specbranch_memory = Attachment(
        draft=before.draft if draft is None else what_drafts(target, own_draft),
        candidates=before.candidates if draft is None else candidates,
        looks_up=before.looks_up if draft is None else looks_up,
        tokenizers=before.tokenizers if draft is None and None in tokenizers else tokenizers,
        head=before.head if head is None else head,
        corpus=before.corpus if texts is None else texts,
        config=before.config if config is None else config,
    )
    return model


def _candidates(given: Any) -> CandidateGenerator | None:
    """Return the candidate generator that drafts, if there is one; it drafts alone."""
    named = list(given) if isinstance(given, (list, tuple)) else [given]
    found = [each for each in named if isinstance(each, CandidateGenerator)]
    if not found:
        return None
    if len(named) > 1:
        raise ValueError(
            f"draft={_named(named)}: a {type(found[0]).__name__} drafts alone, so give no other source with it"
        )
    check_generator(found[0])
    return found[0]


def _named(sources: list[Any]) -> str:
    """Name draft sources in an error: models by their class, since they would be printed layer by layer."""
    names = (type(each).__name__ if isinstance(each, torch.nn.Module) else repr(each) for each in sources)
    return f"[{', '.join(names)}]"


def _given_tokenizers(tokenizer: Any, assistant_tokenizer: Any) -> tuple[Any, Any]:
    if (tokenizer is None) != (assistant_tokenizer is None):
        missing = "tokenizer=, the target's" if tokenizer is None else "assistant_tokenizer=, the draft's"
        raise ValueError(f"one tokenizer was given: pass {missing}, too")
    return tokenizer, assistant_tokenizer


def _sources(
    target: PreTrainedModel, given: Any, tokenizers: tuple[Any, Any]
) -> tuple[PreTrainedModel | None, bool, tuple[Any, Any]]:
    """Return the draft model, if there is one, whether lookup was named, and the tokenizers of target and draft."""
    named = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    models = [each for each in named if each != LOOKUP]
    if len(models) > 1:
        raise ValueError(f"draft={_named(named)}: expected one draft model at most, and {LOOKUP!r}")
    if not models:
        return None, LOOKUP in named, tokenizers
    if isinstance(models[0], (str, Path)):
        if follows(target):  # rank 0 of a tensor parallel target has the draft
            return None, LOOKUP in named, tokenizers
        draft, tokenizers = _load(target, models[0], tokenizers)
    else:
        draft = draft_model(models[0])
    check_model(draft, "draft")
    return draft, LOOKUP in named, tokenizers


def _load(
    target: PreTrainedModel, name: str | Path, tokenizers: tuple[Any, Any]
) -> tuple[PreTrainedModel, tuple[Any, Any]]:
    """Load a draft to the target's device, in its dtype, and both tokenizers if they differ."""
    if (head := load_head(target, name)) is not None:
        return head, (None, None)
    draft = AutoModelForCausalLM.from_pretrained(name, dtype=target.dtype)
    if None in tokenizers:
        tokenizers = load_tokenizer(target.name_or_path), load_tokenizer(str(name))
    check_pair(target, draft, *tokenizers)
    if None in tokenizers or translation_for(target, draft, *tokenizers) is None:
        tokenizers = None, None
    return cast(PreTrainedModel, draft.to(target.device).eval()), tokenizers


def attach(model: Any) -> SpecBranchMixin:
    """Give a model the mixin, unless it has it."""
    if not isinstance(model, GenerationMixin):
        raise TypeError(f"{type(model).__name__} cannot generate text: load it with AutoModelForCausalLM")
    if not isinstance(model, SpecBranchMixin):
        model.__class__ = _attached_class(cast(Any, type(model)))
    return cast(SpecBranchMixin, model)


@lru_cache(maxsize=64)
def _attached_class(original: Any) -> Any:
    """Return a subclass with the name and the module of the original."""
    names = ("__module__", "__qualname__", "__doc__")
    namespace = {name: getattr(original, name) for name in names}
    namespace |= {"_specbranch_original": original, "__reduce_ex__": _reduce}
    return type(original.__name__, (SpecBranchMixin, original), namespace)


def _reduce(model: Any, protocol: Any) -> Any:
    """Pickle as the original class, to which the mixin is attached again; the attached class cannot be imported."""
    return _attached_blank, (type(model)._specbranch_original,), model.__dict__


def _attached_blank(original: Any) -> Any:
    attached = _attached_class(original)
    return attached.__new__(attached)


@contextmanager
def attached_for_call(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Attach SpecBranch to a model for calls that may run at a time; for `custom_generate`, which owns no model."""
    with _TEMPORARY_CALLS:
        by_user = isinstance(model, SpecBranchMixin) and not model._specbranch_memory.temporary_calls
        if not by_user and not isinstance(model, SpecBranchMixin):
            check_model(model, "target")
            attach(model)._specbranch_memory = Attachment()
        attachment = cast(SpecBranchMixin, model)._specbranch_memory
        attachment.temporary_calls += not by_user
    try:
        yield model
    finally:
        with _TEMPORARY_CALLS:
            attachment.temporary_calls -= not by_user
            is_last = not by_user and not attachment.temporary_calls
            if is_last and cast(SpecBranchMixin, model)._specbranch_memory is attachment:
                restore_class(cast(SpecBranchMixin, model))
