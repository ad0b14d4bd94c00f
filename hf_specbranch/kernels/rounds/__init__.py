"""The operations of a round in Triton, one or two kernels each.

Between the forwards of a round there are many small decisions: which token the draft takes, where it stops, what is
sent to the target, what the verify result means. In torch each takes a dozen kernels over a few numbers, and a kernel
takes 2 us whatever it does: together they took as long as the draft model itself.

The torch versions in `decoding/` are the references: `TorchDraftOps`, `Verifier._verify_in_torch` and
`Target._inputs_in_torch`. NONE is -1, as there.
"""

from .advance import CONFIDENCE_UNITS, advance
from .branches import find_likely_rejections, fork
from .chunks import likeliest
from .draws import Drawn, drawn_choices
from .inputs import open_branches, pending_inputs, verify_inputs
from .memory import ForwardInputs, PendingBuffers, SideBranchBuffers, empty_inputs
from .resolve import AfterRound, adopt, resolve_pending
from .send import SentDraft, count_drafted, send
from .verify import verify_draft

__all__ = [
    "CONFIDENCE_UNITS",
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
    "likeliest",
    "open_branches",
    "pending_inputs",
    "resolve_pending",
    "send",
    "verify_draft",
    "verify_inputs",
]
