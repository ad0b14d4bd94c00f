"""Length heads: the trained part that says how a draft will fare before the target looks at it."""

from .config import LengthHeadConfig
from .model import LengthHead

__all__ = ["LengthHead", "LengthHeadConfig"]
