"""What a run finds out about each way, as it goes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from statistics import median

from ..stats import SpecBranchStats
from .differences import Difference
from .ways import Way


@dataclass
class OnPrompt:
    """One way on one prompt."""

    new_tokens: int
    seconds: list[float] = field(default_factory=list)  # of each repeat
    decode_seconds: list[float] = field(default_factory=list)  # behind the first token; of our ways
    stats: SpecBranchStats | None = None  # of the first

    @property
    def speed(self) -> float:
        return self.new_tokens / median(self.seconds)


@dataclass
class Measurement:
    """All that is known of one way so far."""

    way: Way
    first_seconds: float | None = None  # its first generation, on the longest prompt
    second_seconds: float | None = None  # the same again, where the first was a short one
    peak_memory: int | None = None  # bytes, of that generation
    prompts: dict[int, OnPrompt] = field(default_factory=dict)  # by the prompt's index
    gaps: list[float] = field(default_factory=list)  # between streamed tokens
    first_token: list[float] = field(default_factory=list)  # seconds to it, of each streamed generation
    differences: list[Difference] = field(default_factory=list)
    run_again: int = 0  # generations in which something was captured: they belong to the warm-up

    @property
    def stats(self) -> SpecBranchStats | None:
        """Counts and times of all prompts together; None for transformers' own ways."""
        return pooled([found.stats for found in self.prompts.values() if found.stats is not None])

    @property
    def overall_speed(self) -> float:
        """All tokens over all seconds: easy texts count for less than in the median."""
        found = self.prompts.values()
        return sum(each.new_tokens for each in found) / sum(median(each.seconds) for each in found)

    def ratio_to(self, other: Measurement | None) -> float | None:
        """Median over prompts of the ratio of speeds on a prompt."""
        if other is None:
            return None
        both = [index for index in self.prompts if index in other.prompts]
        return median(self.prompts[at].speed / other.prompts[at].speed for at in both) if both else None

    def warm_up_seconds(self, longest: int) -> float | None:
        """How much longer the first generation took than later ones of the same prompt."""
        if self.first_seconds is None:
            return None
        if self.second_seconds is not None:
            return self.first_seconds - self.second_seconds
        later = self.prompts.get(longest)
        return None if later is None else self.first_seconds - median(later.seconds)


def pooled(all_stats: list[SpecBranchStats]) -> SpecBranchStats | None:
    """Counts and times added up, so that rates are those of all generations together; None for none.

    Example:
        >>> pooled([SpecBranchStats(new_tokens=3), SpecBranchStats(new_tokens=4)]).new_tokens
        7
    """
    if not all_stats:
        return None
    runtimes, reasons = ({getattr(stats, name) for stats in all_stats} - {""} for name in ("runtime", "slowed_by"))
    total = SpecBranchStats(all_stats[0].policy, ", ".join(sorted(runtimes)), "; ".join(sorted(reasons)))
    for stats in all_stats:
        for entry in fields(stats):
            value = getattr(stats, entry.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                setattr(total, entry.name, getattr(total, entry.name) + value)
        for accepted, count in enumerate(stats.acceptance_histogram):
            total.acceptance_histogram.extend([0] * (accepted + 1 - len(total.acceptance_histogram)))
            total.acceptance_histogram[accepted] += count
        total.plans.extend(stats.plans)
    return total
