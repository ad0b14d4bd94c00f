"""Where an output differs from that of the way all are compared with, and how close a call that was.

In bf16 a pass over several tokens rounds differently from a pass over one. Where two tokens are almost equally
likely, either may win; that is a near-tie. A difference with a clear margin is a bug.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Difference:
    """The first difference of one output. Margins are logits of the expected token minus those of the other."""

    way: str
    prompt: str
    position: int  # among the new tokens
    expected_token: int | None  # None: the output it is compared with ends here
    token: int | None
    margin: float | None = None  # by the model's logits, as they come
    margin_float32: float | None = None  # by the same last hidden state, with the output layer in float32
    spacing: float | None = None  # between neighbouring numbers of the model's dtype at that size
    rank: int | None = None  # of the other token by the model's logits; 0 is the likeliest

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def first_difference(expected: list[int], other: list[int]) -> int | None:
    """The first position at which two outputs differ; None if they are equal.

    Example:
        >>> first_difference([4, 5, 6], [4, 9, 6])
        1
    """
    if expected == other:
        return None
    pairs = zip(expected, other)
    return next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(expected), len(other)))


def difference(
    model: PreTrainedModel, way: str, prompt: str, input_ids: Tensor, expected: list[int], other: list[int]
) -> Difference | None:
    """Compare two outputs that follow `input_ids` [1, P]; at the first difference, ask the model for its logits.

    Returns:
        None if they are equal.
    """
    at = first_difference(expected, other)
    if at is None:
        return None
    if at >= min(len(expected), len(other)):  # one output is the beginning of the other
        ends = [tokens[at] if at < len(tokens) else None for tokens in (expected, other)]
        return Difference(way, prompt, at, ends[0], ends[1])
    common = torch.tensor([expected[:at]], dtype=input_ids.dtype, device=input_ids.device)
    tokens = torch.tensor([expected[at], other[at]], device=input_ids.device)
    return Difference(
        way, prompt, at, expected[at], other[at], *_margins(model, torch.cat([input_ids, common], 1), tokens)
    )


@torch.no_grad()
def _margins(model: PreTrainedModel, prefix: Tensor, tokens: Tensor) -> tuple[float, float, float, int]:
    """Both margins, spacing and rank after `prefix` [1, L] for the expected token and the other, [2]."""
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


def summary(differences: list[Difference]) -> dict[str, Any]:
    """How many outputs differ and the largest margin among them."""
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
