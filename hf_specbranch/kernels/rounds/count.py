"""What stands drafted while the target looks at a chain: `Drafter.drafted`."""

from __future__ import annotations

from torch import Tensor

from ..backend import Value, constexpr, power_of_two, tl, varying
from .memory import FEW, PendingBuffers


def count_drafted(
    pending: PendingBuffers, sent_length: Tensor, width: Tensor, at: Tensor, leaves_at: Tensor, count: Tensor,
    branches: int, leaves: int, forks: bool, out: Tensor,
) -> None:  # fmt: skip
    """Count, row by row.

    Args:
        chain_length: [B].
        width: [B] branches at the branch point.
        at: [B, K] where branches stand; those behind the first `branches` stand at chain positions.
        leaves_at: [B, n] where runners-up stand; the first `leaves` were sent.
        count: [B] tokens drafted in this round.
        forks: the method opens branches.
        out: [B, 6]; see `VerifyResult`.
    """
    _tally_kernel[(pending.rows,)](
        pending.start, pending.end, sent_length, width, at, leaves_at, count, out, at.shape[1], branches,
        leaves_at.stride(0), leaves, FORKS=forks, BLOCK=power_of_two(max(at.shape[1], leaves), FEW), num_warps=1,
    )  # fmt: skip


@varying("stride", "branches", "leaves_stride", "leaves")
def _tally_kernel(
    start: Value, end: Value, sent_length: Value, width: Value, at: Value, leaves_at: Value, count: Value,
    out: Value, stride: Value, branches: Value, leaves_stride: Value, leaves: Value,
    FORKS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    nth = tl.arange(0, BLOCK)
    draft_tokens = tl.load(sent_length + row)
    out += row * 6
    rejection_branches = tl.load(at + row * stride + nth, mask=(nth >= branches) & (nth < stride), other=-1) >= 0
    checked = tl.load(leaves_at + row * leaves_stride + nth, mask=nth < leaves, other=-1) >= 0
    tl.store(out, draft_tokens)
    tl.store(out + 1, tl.load(end + row) - tl.load(start + row) - draft_tokens)
    if FORKS:
        tl.store(out + 2, tl.load(width + row))
    else:
        tl.store(out + 2, draft_tokens * 0)
    tl.store(out + 3, tl.sum(rejection_branches.to(tl.int64), 0))
    tl.store(out + 4, tl.sum(checked.to(tl.int64), 0))
    tl.store(out + 5, tl.load(count + row))
