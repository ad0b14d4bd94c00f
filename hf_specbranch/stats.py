"""Counts and times of one generation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from .config import with_old_names


@with_old_names(
    outcome_points="rejection_points",
    outcome_hits="rejection_hits",
    outcome_hit_rate="rejection_hit_rate",
    runners_up="tree_leaves",
    runner_up_hits="tree_leaf_hits",
)
@dataclass
class SpecBranchStats:
    """Counts and times of one `generate()` call, over all rows of the batch.

    Every draft token ends as exactly one of *accepted* (it is in the output), *rolled back* (it was on the branch that
    the loop followed, and was discarded) or *wasted* (it was on a branch that lost).

    Attributes:
        policy: the policy that ran.
        runtime: what ran the target: "eager" or "graph".
        draft_weights: "float8" or "int8" if a copy of the draft with such weights has drafted; else empty.
        draft_shortlist: how many tokens the draft could propose, if not all.
        length_head: the head that was used: `org/head@commit`, or its folder; empty without one.
        slowed_by: why rounds on a GPU were driven step by step from the host, if not asked for; else empty.
        graphs_captured: stages captured during this call, which takes time; later calls replay them.
        capture_seconds: time of this call that went into building kernels and capturing stages.
        padding_rows: rows that were added to the batch, since stages of that size were captured already.
        reused_tokens: prompt tokens that were not read again, since their keys and values were still in memory.
        new_tokens: generated tokens.
        target_forwards: forward passes of the target, the prefill included.
        draft_forwards: forward passes of the draft model.
        target_positions: tokens per row that the target's passes read, the prompt excluded.
        draft_positions: tokens per row that the draft's passes read, the prompt excluded.
        row_passes: target passes, each counted once per unfinished row.
        num_drafts: verifications of a draft, one per row and pass.
        num_draft_tokens: draft tokens, those on branches included.
        num_accepted_tokens: draft tokens that are in the output.
        rollback_tokens: draft tokens that were rolled back.
        wasted_branch_tokens: draft tokens that were wasted on branches.
        branch_points: verifications that reached a branch point.
        branch_hits: branch points at which a branch survived.
        rejection_points: verifications that rejected a draft token while rejection branches were open.
        rejection_hits: rejection points at which a rejection branch survived.
        tree_leaves: tree leaves that the target checked.
        tree_leaf_hits: tree leaves that were accepted; each brings one more token.
        acceptance_histogram: entry `i` counts the verifications that accepted `i` draft tokens.
        sources: for each source of drafts, how many tokens it has drafted and how many of them were accepted.
        draft_seconds: time spent drafting: before the target's passes, and while they ran.
        hidden_seconds: the part of `draft_seconds` during which the target ran on another device or stream. 0 where
            both models share a CPU: there each slows the other down, and overlap saves no time.
        plans: what `policy="auto"` chose, predicted and measured, plan by plan.
        time_to_first_token: seconds from the call to the first token.
        total_seconds: seconds of the whole call, `capture_seconds` included.

    Example:
        >>> from hf_specbranch import SpecBranchStats
        >>> SpecBranchStats(new_tokens=12, row_passes=4).mean_acceptance_length
        3.0
    """

    policy: str = ""
    runtime: str = ""
    slowed_by: str = ""
    draft_weights: str = ""
    length_head: str = ""
    draft_shortlist: int = 0
    graphs_captured: int = 0
    capture_seconds: float = 0.0
    padding_rows: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    target_forwards: int = 0
    draft_forwards: int = 0
    target_positions: int = 0
    draft_positions: int = 0
    row_passes: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    rollback_tokens: int = 0
    wasted_branch_tokens: int = 0
    branch_points: int = 0
    branch_hits: int = 0
    rejection_points: int = 0
    rejection_hits: int = 0
    tree_leaves: int = 0
    tree_leaf_hits: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    sources: dict[str, dict[str, int]] = field(default_factory=dict)
    draft_seconds: float = 0.0
    hidden_seconds: float = 0.0
    plans: list[dict[str, Any]] = field(default_factory=list)
    time_to_first_token: float = 0.0
    total_seconds: float = 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per target pass."""
        return _ratio(self.new_tokens, self.row_passes)

    @property
    def draft_acceptance_rate(self) -> float:
        """Fraction of the draft tokens that were accepted."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def rollback_rate(self) -> float:
        """Rolled back / (accepted + rolled back)."""
        return _ratio(self.rollback_tokens, self.num_accepted_tokens + self.rollback_tokens)

    @property
    def branch_hit_rate(self) -> float:
        """Fraction of the branch points at which a branch survived."""
        return _ratio(self.branch_hits, self.branch_points)

    @property
    def rejection_hit_rate(self) -> float:
        """Fraction of the rejection points at which a rejection branch survived."""
        return _ratio(self.rejection_hits, self.rejection_points)

    @property
    def hidden_fraction(self) -> float:
        """Fraction of the drafting time during which the target ran: hidden_seconds / draft_seconds."""
        return _ratio(self.hidden_seconds, self.draft_seconds)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of the whole call, prefill and captures included."""
        return _ratio(self.new_tokens, self.total_seconds)

    @property
    def decoding_seconds(self) -> float:
        """Seconds of the call without `capture_seconds`: what the same call takes once everything is captured."""
        return max(0.0, self.total_seconds - self.capture_seconds)

    def __str__(self) -> str:
        """Return a few short lines for people; `to_dict` has everything."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.new_tokens} tokens, {self.tokens_per_second:.1f} per second, policy {self.policy}"
        yield f"{self.mean_acceptance_length:.2f} tokens per target pass"
        yield f"passes: {self.target_forwards} target, {self.draft_forwards} draft"
        if self.num_draft_tokens:
            yield (
                f"draft tokens: {self.num_draft_tokens}; {self.num_accepted_tokens} accepted, {self.rollback_tokens} "
                f"rolled back, {self.wasted_branch_tokens} wasted"
            )
        for source, counts in self.sources.items():
            share = _ratio(counts["accepted"], self.new_tokens)
            yield f"{source}: {share:.0%} of the text; {counts['accepted']} of {counts['drafted']} tokens accepted"
        if self.branch_points:
            yield f"branch points hit: {self.branch_hits} of {self.branch_points}"
        if self.rejection_points:
            yield f"rejection branches hit: {self.rejection_hits} of {self.rejection_points}"
        if self.tree_leaves:
            yield f"tree leaves accepted: {self.tree_leaf_hits} of {self.tree_leaves}"
        if self.hidden_seconds:
            yield f"drafting hidden: {self.hidden_fraction:.0%}"
        if self.plans:
            last = self.plans[-1]
            yield f"last plan of {len(self.plans)}: {last['plan']}: {last['tokens_per_second']:.0f} per second"
        if self.reused_tokens:
            yield f"{self.reused_tokens} tokens of the prompt were still in memory and not read again"
        if self.graphs_captured or self.capture_seconds:
            taken = f" in {self.capture_seconds:.2f} s" if self.capture_seconds else ""
            yield f"captured {self.graphs_captured} CUDA graphs{taken}; later generations reuse them"
        if self.slowed_by:
            yield f"slowed: {self.slowed_by}"

    def to_dict(self) -> dict[str, Any]:
        """Return counts and rates by name, ready for JSON."""
        rates = [name for name, value in vars(type(self)).items() if isinstance(value, property)]
        return {name: getattr(self, name) for name in [f.name for f in fields(self)] + rates}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
