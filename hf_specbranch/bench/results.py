"""What a run records: times per method and prompt, and where outputs differ.

In bf16 a pass over several tokens rounds differently from a pass over one. Where two tokens are almost equally
likely, either may win; that is a near-tie. A difference with a clear margin is a bug.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..stats import SpecBranchStats
from .methods import Method


@dataclass(frozen=True)
class Difference:
    """The first difference of one output. A margin is the logit of the expected token minus that of the other."""

    method: str
    prompt: str
    position: int  # among the new tokens
    expected_token: int | None  # None: the reference output ends here
    token: int | None
    margin: float | None = None  # by the model's own logits
    margin_float32: float | None = None  # from the same hidden state, with the output layer in float32
    spacing: float | None = None  # between neighbouring numbers of the model's dtype at that magnitude
    rank: int | None = None  # of the other token; 0 is the likeliest

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def first_difference(expected: list[int], other: list[int]) -> int | None:
    """Return the first position at which two outputs differ; None if they are equal.

    Example:
        >>> first_difference([4, 5, 6], [4, 9, 6])
        1
    """
    if expected == other:
        return None
    pairs = zip(expected, other)
    return next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(expected), len(other)))


def difference(
    model: PreTrainedModel, method: str, prompt: str, input_ids: Tensor, expected: list[int], other: list[int]
) -> Difference | None:
    """Compare two outputs that follow `input_ids` [1, P], and compute the margin at the first difference.

    Returns:
        None if they are equal.
    """
    at = first_difference(expected, other)
    if at is None:
        return None
    if at >= min(len(expected), len(other)):  # one output is the beginning of the other
        ends = [tokens[at] if at < len(tokens) else None for tokens in (expected, other)]
        return Difference(method, prompt, at, ends[0], ends[1])
    common = torch.tensor([expected[:at]], dtype=input_ids.dtype, device=input_ids.device)
    tokens = torch.tensor([expected[at], other[at]], device=input_ids.device)
    return Difference(
        method, prompt, at, expected[at], other[at], *_margins(model, torch.cat([input_ids, common], 1), tokens)
    )


@torch.no_grad()
def _margins(model: PreTrainedModel, prefix: Tensor, tokens: Tensor) -> tuple[float, float, float, int]:
    """Return both margins, spacing and rank after `prefix` [1, L]; `tokens` [2] are the expected and the other one."""
    output = model(input_ids=prefix, output_hidden_states=True, use_cache=False)
    logits = output.logits[0, -1]  # [V]
    first, second = logits[tokens].float().tolist()
    layer = model.get_output_embeddings()
    hidden = output.hidden_states[-1][0, -1].float().to(layer.weight.device)  # [H]
    exact = layer.weight[tokens.to(layer.weight.device)].float() @ hidden  # [2]
    if getattr(layer, "bias", None) is not None:
        exact += layer.bias[tokens].float()
    size = torch.tensor(max(abs(first), abs(second)), dtype=torch.float32)
    spacing = torch.finfo(logits.dtype).eps * 2.0 ** float(size.clamp(min=1e-30).log2().floor())
    rank = int((logits > logits[tokens[1]]).sum())
    return first - second, float(exact[0] - exact[1]), spacing, rank


def summarize(differences: list[Difference]) -> dict[str, Any]:
    """Return how many outputs differ and the largest margin among them."""
    measured = [found for found in differences if found.margin is not None]

    def largest(name: str) -> float | None:
        return max((abs(getattr(found, name)) for found in measured), default=None)

    in_spacings = [abs(found.margin or 0.0) / found.spacing for found in measured if found.spacing]
    return {
        "outputs": len(differences),
        "largest_margin": largest("margin"),
        "largest_margin_float32": largest("margin_float32"),
        "largest_margin_in_spacings": max(in_spacings, default=None),
        "largest_rank": max((found.rank or 0 for found in measured), default=None),
        "without_margin": len(differences) - len(measured),
    }


@dataclass
class OnPrompt:
    """One method on one prompt."""

    new_tokens: int
    seconds: list[float] = field(default_factory=list)  # one entry per repeat
    decode_seconds: list[float] = field(default_factory=list)  # after the first token; our methods only
    stats: SpecBranchStats | None = None  # of the first repeat

    @property
    def speed(self) -> float:
        return self.new_tokens / median(self.seconds)


@dataclass
class Measurement:
    """Everything measured of one method so far."""

    method: Method
    first_seconds: float | None = None  # first generation, on the longest prompt
    second_seconds: float | None = None  # the same again, where the first was short
    peak_memory: int | None = None  # bytes, in the first generation
    prompts: dict[int, OnPrompt] = field(default_factory=dict)  # by the prompt's index
    gaps: list[float] = field(default_factory=list)  # between streamed tokens
    first_token: list[float] = field(default_factory=list)  # seconds to the first token of each streamed generation
    differences: list[Difference] = field(default_factory=list)
    run_again: int = 0  # measured generations that captured a graph and were repeated

    @property
    def stats(self) -> SpecBranchStats | None:
        """Statistics of all prompts together; None for transformers' own methods."""
        return pooled([found.stats for found in self.prompts.values() if found.stats is not None])

    @property
    def overall_speed(self) -> float:
        """All tokens over all seconds; unlike the median over prompts, long texts weigh more."""
        found = self.prompts.values()
        return sum(each.new_tokens for each in found) / sum(median(each.seconds) for each in found)

    def ratio_to(self, other: Measurement | None) -> float | None:
        """Return the median over prompts of the ratio of speeds on the same prompt."""
        if other is None:
            return None
        both = [index for index in self.prompts if index in other.prompts]
        return median(self.prompts[at].speed / other.prompts[at].speed for at in both) if both else None

    def warm_up_seconds(self, longest: int) -> float | None:
        """Return how much longer the first generation took than later ones of the same prompt."""
        if self.first_seconds is None:
            return None
        if self.second_seconds is not None:
            return self.first_seconds - self.second_seconds
        later = self.prompts.get(longest)
        return None if later is None else self.first_seconds - median(later.seconds)


def pooled(all_stats: list[SpecBranchStats]) -> SpecBranchStats | None:
    """Add up counts and times, so that rates are those of all generations together; None for no statistics.

    Example:
        >>> pooled([SpecBranchStats(new_tokens=3), SpecBranchStats(new_tokens=4)]).new_tokens
        7
    """
    if not all_stats:
        return None
    total = SpecBranchStats(all_stats[0].policy)
    for name in ("runtime", "slowed_by", "draft_weights"):
        setattr(total, name, "; ".join(sorted({getattr(stats, name) for stats in all_stats} - {""})))
    total.draft_shortlist = max(stats.draft_shortlist for stats in all_stats)
    for stats in all_stats:
        for entry in fields(stats):
            value = getattr(stats, entry.name)
            if entry.name != "draft_shortlist" and isinstance(value, (int, float)) and not isinstance(value, bool):
                setattr(total, entry.name, getattr(total, entry.name) + value)
        for accepted, count in enumerate(stats.acceptance_histogram):
            total.acceptance_histogram.extend([0] * (accepted + 1 - len(total.acceptance_histogram)))
            total.acceptance_histogram[accepted] += count
        total.plans.extend(stats.plans)
    return total
