"""What a head reads of a line: gathered in one place, so that training and use see the same numbers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..decoding.hooks import Survivor
from .config import LengthHeadConfig

PER_POSITION = ("confidence", "probability", "entropy", "margin")
SMALLEST = 1e-4  # logarithms are taken of nothing smaller


class HeadInputs(NamedTuple):
    """Raw features of N lines. Positions behind a line's end are 0."""

    hidden: Tensor  # [N, K, H] target hidden states where the last token was chosen
    committed: Tensor  # [N, H] embedding of that token
    drafted: Tensor  # [N, D, H] embeddings of the first drafted tokens
    confidence: Tensor  # [N, G] the draft's largest probability
    probability: Tensor  # [N, G] its probability of the drafted token
    entropy: Tensor  # [N, G] of its distribution, in nats
    margin: Tensor  # [N, G] between its two largest probabilities
    kind: Tensor  # [N, 2] 1 for a line straight from the draft stage; its length over gamma

    def matrix(self, config: LengthHeadConfig) -> Tensor:
        """[N, F]: the features this head reads, side by side."""
        parts = []
        for name in config.feature_sizes:
            values = getattr(self, name).flatten(1).float()
            parts += [values, values.clamp(min=SMALLEST).log()] if name in PER_POSITION else [values]
        return torch.cat(parts, dim=1)


def head_inputs(line: Survivor, embeddings: nn.Module, gamma: int, drafted_tokens: int) -> HeadInputs:
    """Gather the inputs on the target's device.

    Args:
        line: what the drafter shows; `features` may be missing only if the head does not read them.
        embeddings: the target's input embeddings.
        gamma: positions to look at.
        drafted_tokens: how many of the first tokens to embed.
    """
    device = next(embeddings.parameters()).device
    length = line.length.to(device)  # [N]
    tokens = _fit(line.tokens.to(device), gamma)  # [N, G]
    real = torch.arange(gamma, device=device) < length[:, None]  # [N, G]
    first = _fit(tokens, drafted_tokens)
    drafted = embeddings(first) * (torch.arange(drafted_tokens, device=device) < length[:, None])[:, :, None]
    rows = length.shape[0]
    fresh = torch.zeros(rows, device=device) if line.fresh is None else line.fresh.to(device).float()
    probability, entropy, margin = _shape_of(line, tokens, gamma)
    hidden = line.features
    return HeadInputs(
        hidden=torch.zeros((rows, 0, 1), device=device) if hidden is None else hidden.to(device),
        committed=embeddings(line.committed.to(device)),
        drafted=drafted,
        confidence=_fit(line.confidence.to(device), gamma) * real,
        probability=probability * real,
        entropy=entropy * real,
        margin=margin * real,
        kind=torch.stack([fresh, length / gamma], dim=1),
    )


def _shape_of(line: Survivor, tokens: Tensor, gamma: int) -> tuple[Tensor, Tensor, Tensor]:
    """Probability of the drafted token, entropy and margin of the draft's distributions, [N, G] each."""
    if line.scores is None:
        blank = torch.zeros(tokens.shape, device=tokens.device)
        return blank, blank, blank
    q = line.scores.to(tokens.device)[:, :gamma]  # [N, M, V]
    top = q.topk(2, dim=-1).values
    entropy = -torch.special.xlogy(q, q).sum(-1)
    probability = q.gather(2, tokens[:, : q.shape[1], None])[:, :, 0]
    return _fit(probability, gamma), _fit(entropy, gamma), _fit(top[..., 0] - top[..., 1], gamma)


def _fit(table: Tensor, width: int) -> Tensor:
    """`table` [N, M] cut or filled up with zeros to [N, width]."""
    missing = width - table.shape[1]
    return table[:, :width] if missing <= 0 else nn.functional.pad(table, (0, missing))
