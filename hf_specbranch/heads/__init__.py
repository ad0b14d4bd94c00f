"""Length heads (H-RAD): small trained networks that predict how much of a draft the target will accept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazily

__all__ = ["HeadError", "LengthHead", "LengthHeadConfig"]

if TYPE_CHECKING:
    from .config import LengthHeadConfig
    from .model import LengthHead
    from .validation import HeadError
else:
    __getattr__, __dir__ = lazily(
        __name__, {"HeadError": "validation", "LengthHead": "model", "LengthHeadConfig": "config"}
    )
