"""Pictures of what was measured; they need the extra `plot`."""

from .by_length import save_by_length
from .drawing import check_plots
from .rollback import save_rollback
from .speedup import save_speedup

__all__ = ["check_plots", "save_by_length", "save_rollback", "save_speedup"]
