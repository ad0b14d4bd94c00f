"""Attach SpecBranch to a model, and name what drafts for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, TypeVar, cast

import torch
from transformers import PreTrainedModel

from .kernels import warm_up_in_background
from .mixin import SpecBranchMixin, attach, restore_class
from .model_state import draft_model, transformers_model
from .request import Attachment, check_model

Model = TypeVar("Model", bound=torch.nn.Module)
_TEMPORARY_CALLS = Lock()


def specbranch(model: Model, draft: torch.nn.Module | None = None, head: Any = None) -> Model:
    """Attach SpecBranch to a loaded model.

    The same object is returned, with the same weights, class name and methods; only its `generate()` now
    takes `assistant_model` as the draft of SpecBranch. Attaching again is harmless and may name another
    draft or head; `model.detach_specbranch()` undoes it.

    Args:
        model: a decoder-only transformers model, or a PEFT model around one. Adapters may be switched between calls.
        draft: a smaller model with the same tokenizer, used where `generate()` is given none.
        head: a length head (a `LengthHead`, a folder, a repository id or "auto"), used where `generate()` is given
            none.

    Example:
        >>> from hf_specbranch import load_demo_pair, specbranch
        >>> target, draft, tokenizer = load_demo_pair()
        >>> model = specbranch(target, draft=draft)
        >>> model is target
        True
    """
    check_model(target := transformers_model(model), "target")
    own_draft = draft_model(draft)
    if own_draft is not None:
        check_model(own_draft, "draft")
    warm_up_in_background(target.device)
    before = (attached := attach(target))._specbranch_memory
    attached._specbranch_memory = Attachment(
        draft=own_draft if own_draft is not None else before.draft, head=head if head is not None else before.head
    )
    return model


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
