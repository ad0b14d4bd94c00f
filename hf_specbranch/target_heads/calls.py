"""Which calls of `generate()` a head of the target drafts for, and the heads that such calls have made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..model_state import state_of
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


@dataclass
class MadeHeads:
    """The heads that calls of one target have asked for."""

    mtp: TargetHead | None = None
    of_draft: tuple[Any, TargetHead] | None = None  # a DFlash draft of transformers, and the head made of it


def what_drafts(target: PreTrainedModel, draft: Any, source: str = "") -> Any:
    """Return a head, made once, if the setting `source` or the draft itself asks for one; otherwise the draft."""
    if source != "use_mtp" and not _is_block_draft(draft):
        return draft
    state = state_of(target)
    if state.made_heads is None:
        state.made_heads = MadeHeads()
    made: MadeHeads = state.made_heads
    if source == "use_mtp":
        made.mtp = made.mtp or mtp_head(target)
        return made.mtp
    if made.of_draft is None or made.of_draft[0] is not draft:
        made.of_draft = draft, block_draft(target, draft)
    return made.of_draft[1]


def _is_block_draft(draft: Any) -> bool:
    return not isinstance(draft, TargetHead) and is_block_draft(getattr(draft, "config", {}))
