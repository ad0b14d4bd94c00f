"""Branch-parallel speculative decoding behind `model.generate()`."""

from .config import SpecBranchConfig
from .decoding.hooks import SpeculationHook
from .demo_pair import load_demo_pair
from .heads import LengthHead, LengthHeadConfig
from .mixin import SpecBranchMixin, specbranch
from .pipeline import register_task
from .stats import SpecBranchStats

__all__ = [
    "LengthHead",
    "LengthHeadConfig",
    "SpecBranchConfig",
    "SpecBranchMixin",
    "SpecBranchStats",
    "SpeculationHook",
    "load_demo_pair",
    "specbranch",
]
__version__ = "0.1.0"

register_task()
