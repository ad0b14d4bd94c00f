"""Branch-parallel speculative decoding in `model.generate()`.

Names are imported when they are first used. The pipeline task is registered when transformers' pipelines are imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .lazy import after_import, lazily

__all__ = [
    "LengthHead",
    "LengthHeadConfig",
    "LookupCorpus",
    "SpecBranchConfig",
    "SpecBranchMixin",
    "SpecBranchStats",
    "SpeculationHook",
    "load_demo_pair",
    "specbranch",
]
__version__ = "0.1.0"

if TYPE_CHECKING:
    from .attach import specbranch
    from .config import SpecBranchConfig
    from .corpus import LookupCorpus
    from .decoding.hooks import SpeculationHook
    from .demo_pair import load_demo_pair
    from .heads import LengthHead, LengthHeadConfig
    from .mixin import SpecBranchMixin
    from .stats import SpecBranchStats
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "LengthHead": "heads",
            "LengthHeadConfig": "heads",
            "LookupCorpus": "corpus",
            "SpecBranchConfig": "config",
            "SpecBranchMixin": "mixin",
            "SpecBranchStats": "stats",
            "SpeculationHook": "decoding.hooks",
            "load_demo_pair": "demo_pair",
            "specbranch": "attach",
        },
    )

after_import("transformers.pipelines", lambda: importlib.import_module(f"{__name__}.pipeline"))  # which registers it
