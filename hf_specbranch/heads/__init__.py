"""Length heads (H-RAD): small trained networks that predict how much of a draft the target will accept."""

from .config import LengthHeadConfig
from .model import LengthHead
from .validation import HeadError

__all__ = ["HeadError", "LengthHead", "LengthHeadConfig"]
