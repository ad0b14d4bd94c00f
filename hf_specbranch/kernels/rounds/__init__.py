"""The bookkeeping of a round in few kernels.

Between the forwards of a round stand many small decisions: which token the draft takes, where it stops, what is sent to
the target, what the verdict means. In torch each is a dozen kernels over a few numbers, and a kernel takes 2 us
whatever it does: together they took as long as the draft itself. Here each decision is one kernel.

What they must compute is written in torch in `decoding/`: `Drafter`, `Verifier` and `Target` are the references of
`QuickDrafter`, `QuickJudge` and `QuickTarget`. NONE is -1, as in `verify`.
"""

from .advance import advance
from .count import count_drafted
from .draws import Drawn, drawn_choices
from .fork import fork
from .inputs import open_branches, pending_inputs, verify_inputs
from .memory import ForwardInputs, PendingBuffers, SideBranchBuffers, empty_inputs
from .rejections import find_likely_rejections
from .resolve import AfterRound, adopt, resolve_pending
from .send import SentDraft, send
from .verify import verify_draft

__all__ = [
    "AfterRound",
    "Drawn",
    "ForwardInputs",
    "PendingBuffers",
    "SentDraft",
    "SideBranchBuffers",
    "adopt",
    "advance",
    "count_drafted",
    "drawn_choices",
    "empty_inputs",
    "find_likely_rejections",
    "fork",
    "open_branches",
    "pending_inputs",
    "resolve_pending",
    "send",
    "verify_draft",
    "verify_inputs",
]
