"""What one generation did, counted."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from .renamed import with_old_names


class Totals(NamedTuple):
    """Forwards of one kind, taken together."""

    seconds: float = 0.0
    forwards: int = 0
    positions: int = 0  # tokens they read of a row

    def __add__(self, other: Totals) -> Totals:  # type: ignore[override]
        return Totals(self.seconds + other.seconds, self.forwards + other.forwards, self.positions + other.positions)


@with_old_names(
    outcome_points="rejection_points",
    outcome_hits="rejection_hits",
    outcome_hit_rate="rejection_hit_rate",
    runners_up="tree_leaves",
    runner_up_hits="tree_leaf_hits",
)
@dataclass
class SpecBranchStats:
    """Counts and times of one `generate()` call, all rows of the batch together.

    Every drafted token ends as exactly one of *accepted* (it is in the output), *rolled back* (it stood on the
    line the loop followed and was thrown away) or *wasted* (it stood on a branch that lost).

    Example:
        >>> from hf_specbranch import SpecBranchStats
        >>> SpecBranchStats(new_tokens=12, row_passes=4).mean_acceptance_length
        3.0
    """

    policy: str = ""
    runtime: str = ""  # what ran the target: "eager" or "graph"
    slowed_by: str = ""  # why rounds were driven step by step from the host although graphs were there; else empty
    graphs_captured: int = 0  # stages that were recorded meanwhile, which takes time; later generations replay them
    new_tokens: int = 0
    target_forwards: int = 0  # the prefill is one of them
    draft_forwards: int = 0
    target_positions: int = 0  # tokens that these forwards read of a row, the prompt left out
    draft_positions: int = 0  # likewise
    row_passes: int = 0  # target passes counted once for each row still being generated
    num_drafts: int = 0  # verdicts on something drafted
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    rollback_tokens: int = 0
    wasted_branch_tokens: int = 0
    branch_points: int = 0  # verdicts that reached a fork
    branch_hits: int = 0  # of these, the ones after which a branch lived on
    rejection_points: int = 0  # verdicts that ended the chain early although branches were there for that case
    rejection_hits: int = 0  # of these, the ones after which a branch lived on
    tree_leaves: int = 0  # runner-up tokens the target checked beside the chains
    tree_leaf_hits: int = 0  # of these, the ones that were right and brought a further token
    acceptance_histogram: list[int] = field(default_factory=list)  # [i]: verdicts that accepted i drafted tokens
    draft_seconds: float = 0.0  # drafting that could run beside the target
    hidden_seconds: float = 0.0  # the part of it during which the target ran too
    plans: list[dict[str, Any]] = field(default_factory=list)  # what `policy="auto"` chose, predicted and saw
    time_to_first_token: float = 0.0
    total_seconds: float = 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Committed tokens per target pass."""
        return _ratio(self.new_tokens, self.row_passes)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted tokens among all drafted ones."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def rollback_rate(self) -> float:
        """Rolled back / (accepted + rolled back)."""
        return _ratio(self.rollback_tokens, self.num_accepted_tokens + self.rollback_tokens)

    @property
    def branch_hit_rate(self) -> float:
        """How often a branch survived where the verdict reached the fork."""
        return _ratio(self.branch_hits, self.branch_points)

    @property
    def rejection_hit_rate(self) -> float:
        """How often a branch survived where the chain was cut short."""
        return _ratio(self.rejection_hits, self.rejection_points)

    @property
    def hidden_fraction(self) -> float:
        """The part of the drafting time that passed while the target was at work."""
        return _ratio(self.hidden_seconds, self.draft_seconds)

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the whole time, prompt included."""
        return _ratio(self.new_tokens, self.total_seconds)

    def count_acceptance(self, accepted: int) -> None:
        """Note one verdict that accepted this many drafted tokens."""
        missing = accepted + 1 - len(self.acceptance_histogram)
        self.acceptance_histogram.extend([0] * missing)
        self.acceptance_histogram[accepted] += 1

    def to_dict(self) -> dict[str, Any]:
        """Counts and rates by name, ready for JSON."""
        rates = [name for name, value in vars(type(self)).items() if isinstance(value, property)]
        return {name: getattr(self, name) for name in [f.name for f in fields(self)] + rates}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
