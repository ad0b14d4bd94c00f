"""Which calls of `generate()` a head of the target drafts for, and the heads that such calls have made."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from .base import TargetHead
from .dflash import is_block_draft
from .loading import block_draft
from .mtp import mtp_head

# They read the keys and values of the target, in the layout of its own cache.
GEMMA_ASSISTANTS = ("Gemma4Assistant", "Gemma4UnifiedAssistant")


def drafted_by_transformers(source: str, assistant: Any) -> str:
    """Return what makes transformers' own candidate generators draft; empty if a source of ours does.

    Args:
        source: the setting that names a source of candidates, or nothing; see `MergedSettings.candidate_source`.
        assistant: the `assistant_model` of the call.
    """
    name = type(assistant).__name__
    if name.startswith(GEMMA_ASSISTANTS):
        return f"assistant_model={name}"
    ours = source == "use_mtp" or (source == "speculation_type" and _is_block_draft(assistant))
    return "" if ours else source


class OwnHeads:
    """The heads that calls of one target have asked for; each is made once."""

    def __init__(self) -> None:
        self.mtp: TargetHead | None = None
        self.made: tuple[Any, TargetHead] | None = None  # a DFlash draft of transformers, and the head made of it

    def draft(self, target: PreTrainedModel, draft: Any, source: str = "") -> Any:
        """Return what drafts for a call: a head, if the setting `source` or the draft itself asks for one."""
        if source == "use_mtp":
            self.mtp = self.mtp or mtp_head(target)
            return self.mtp
        if not _is_block_draft(draft):
            return draft
        if self.made is None or self.made[0] is not draft:
            self.made = draft, block_draft(target, draft)
        return self.made[1]


def _is_block_draft(draft: Any) -> bool:
    return not isinstance(draft, TargetHead) and is_block_draft(getattr(draft, "config", {}))
