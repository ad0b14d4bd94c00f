"""The bookkeeping of a round in few kernels.

Between the forwards of a round stand many small decisions: which token the draft takes, where it stops, what is sent to
the target, what the verdict means. In torch each is a dozen kernels over a few numbers, and a kernel takes 2 us
whatever it does: together they took as long as the draft itself. Here each decision is one kernel.

What they must compute is written in torch in `decoding/`: `Drafter`, `Judge` and `Target` are the references of
`QuickDrafter`, `QuickJudge` and `QuickTarget`. NONE is -1, as in `verify`.
"""

from .advance import advance
from .count import tally
from .draws import Drawn, drawn_choices
from .fork import fork
from .inputs import open_branches, read_on, with_chain
from .memory import LineMemory, SiblingMemory, Tips
from .rejections import foresee
from .resolve import Afterwards, adopt, follow
from .send import Sent, send
from .verify import verdict

__all__ = [
    "Afterwards", "Drawn", "LineMemory", "Sent", "SiblingMemory", "Tips", "adopt", "advance", "drawn_choices", "follow",
    "foresee", "fork", "open_branches", "read_on", "send", "tally", "verdict", "with_chain",
]  # fmt: skip
