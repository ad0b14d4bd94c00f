"""Length heads: the trained part that says how a draft will fare before the target looks at it."""

from .config import LengthHeadConfig
from .model import LengthHead
from .validation import HeadError

__all__ = ["HeadError", "LengthHead", "LengthHeadConfig"]
