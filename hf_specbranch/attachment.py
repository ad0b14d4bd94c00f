"""What a model remembers of `specbranch(model, ...)`, and how it forgets it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel
from transformers.generation import CandidateGenerator

from .config import SpecBranchConfig
from .corpus import LookupCorpus


@dataclass
class Attachment:
    """What was given to `specbranch(model, ...)`. A plain object, so that the draft is no submodule of the target."""

    draft: PreTrainedModel | None = None
    candidates: CandidateGenerator | None = None  # drafts in place of a model
    tokenizers: tuple[Any, Any] = (None, None)  # the target's and the draft's, where they were given or loaded
    head: Any = None
    looks_up: bool = False  # lookup was named as a source of drafts
    corpus: LookupCorpus | None = None
    config: SpecBranchConfig | None = None
    warned: set[str] = field(default_factory=set)  # the reasons for falling back that were logged
    temporary_calls: int = 0  # running calls of `attached_for_call`, where the user has not attached the model
    asks: bool = field(init=False)  # a source of drafts or settings were given

    def __post_init__(self) -> None:
        given = self.draft, self.candidates, self.corpus, self.config
        self.asks = self.looks_up or any(each is not None for each in given)


def restore_class(model: Any) -> None:
    """Give an attached model its original class again, and forget what was attached."""
    for name in ("_specbranch_memory", "specbranch_stats"):
        model.__dict__.pop(name, None)
    model.__class__ = type(model)._specbranch_original
