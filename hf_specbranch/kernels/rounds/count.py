"""What stands drafted while the target looks at a chain: `Drafter.drafted`."""

from __future__ import annotations

from torch import Tensor

from ..backend import Value, constexpr, power_of_two, tl, varying
from .memory import FEW, LineMemory


def tally(
    line: LineMemory, chain_length: Tensor, width: Tensor, at: Tensor, leaves_at: Tensor, count: Tensor,
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
        out: [B, 6]; see `Report`.
    """
    _tally_kernel[(line.rows,)](
        line.start, line.end, chain_length, width, at, leaves_at, count, out, at.shape[1], branches,
        leaves_at.stride(0), leaves, FORKS=forks, BLOCK=power_of_two(max(at.shape[1], leaves), FEW), num_warps=1,
    )  # fmt: skip


@varying("stride", "branches", "leaves_stride", "leaves")
def _tally_kernel(
    start: Value, end: Value, chain_length: Value, width: Value, at: Value, leaves_at: Value, count: Value,
    out: Value, stride: Value, branches: Value, leaves_stride: Value, leaves: Value,
    FORKS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    nth = tl.arange(0, BLOCK)
    chain = tl.load(chain_length + row)
    out += row * 6
    outcomes = tl.load(at + row * stride + nth, mask=(nth >= branches) & (nth < stride), other=-1) >= 0
    checked = tl.load(leaves_at + row * leaves_stride + nth, mask=nth < leaves, other=-1) >= 0
    tl.store(out, chain)
    tl.store(out + 1, tl.load(end + row) - tl.load(start + row) - chain)
    if FORKS:
        tl.store(out + 2, tl.load(width + row))
    else:
        tl.store(out + 2, chain * 0)
    tl.store(out + 3, tl.sum(outcomes.to(tl.int64), 0))
    tl.store(out + 4, tl.sum(checked.to(tl.int64), 0))
    tl.store(out + 5, tl.load(count + row))
