"""What a head reads of a line: gathered in one place, so that training and use see the same numbers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..decoding.hooks import Survivor
from .config import FEATURES, LengthHeadConfig

WIDE = ("hidden", "committed", "drafted")
PER_POSITION = ("confidence", "probability", "entropy")
OF_SCORES = ("probability", "entropy")
SMALLEST = 1e-4  # logarithms are taken of nothing smaller
TINY = 1e-30


class HeadInputs(NamedTuple):
    """Raw features of N lines. Positions behind a line's end are 0."""

    hidden: Tensor  # [N, K, H] target hidden states where the last token was chosen
    committed: Tensor  # [N, H] embedding of that token
    drafted: Tensor  # [N, D, H] embeddings of the first drafted tokens
    confidence: Tensor  # [N, G] the draft's largest probability
    probability: Tensor  # [N, G] its probability of the drafted token
    entropy: Tensor  # [N, G] of its distribution, in nats
    kind: Tensor  # [N, 2] 1 for a line straight from the draft stage; its length over gamma

    def matrix(self, config: LengthHeadConfig) -> Tensor:
        """[N, F]: the features this head reads, side by side."""
        parts = []
        for name in config.feature_sizes:
            values = getattr(self, name).flatten(1).float()
            parts += [values, values.clamp(min=SMALLEST).log()] if name in PER_POSITION else [values]
        return torch.cat(parts, dim=1)


def head_inputs(
    line: Survivor, embeddings: nn.Module, gamma: int, drafted_tokens: int, features: tuple[str, ...] = FEATURES
) -> HeadInputs:
    """Gather the inputs on the target's device.

    Args:
        line: what the drafter shows; `features` may be missing only if the head does not read them.
        embeddings: the target's input embeddings.
        gamma: positions to look at.
        drafted_tokens: how many of the first tokens to embed.
        features: the ones that are needed; others are left empty, which saves reading whole distributions.
    """
    device = next(embeddings.parameters()).device
    length = line.length.to(device)  # [N]
    tokens = _fit(line.tokens.to(device), gamma)  # [N, G]
    real = torch.arange(gamma, device=device) < length[:, None]  # [N, G]
    rows = length.shape[0]
    fresh = torch.zeros(rows, device=device) if line.fresh is None else line.fresh.to(device)
    nothing = torch.zeros((rows, 0), device=device)
    committed, drafted, hidden = nothing, nothing, nothing if line.features is None else line.features.to(device)
    if "committed" in features:
        committed = embeddings(line.committed.to(device))
    if "drafted" in features:
        drafted = embeddings(_fit(tokens, drafted_tokens)) * _fit(real, drafted_tokens)[:, :, None]
    q = None if line.scores is None else line.scores.to(device)[:, :gamma]  # [N, M, V]
    shape = {name: nothing if name not in features else shape_of(name, q, tokens) * real for name in OF_SCORES}
    return HeadInputs(
        hidden=hidden,
        committed=committed,
        drafted=drafted,
        confidence=_fit(line.confidence.to(device), gamma) * real,
        kind=torch.stack([fresh, length / gamma], dim=1),
        **shape,
    )


def shape_of(name: str, q: Tensor | None, tokens: Tensor) -> Tensor:
    """[N, G] one number of the draft's distributions [N, M, V], of which the tokens [N, G] were drafted."""
    if q is None:
        return torch.zeros(tokens.shape, device=tokens.device)
    if name == "probability":
        values = q.gather(2, tokens[:, : q.shape[1], None])[:, :, 0]
    else:  # the entropy: several times faster on a CPU than xlogy, and the same but for the last digits
        values = q.clamp(min=TINY).log_().mul_(q).sum(-1).neg_()
    return _fit(values, tokens.shape[1])


def _fit(table: Tensor, width: int) -> Tensor:
    """`table` [N, M] cut or filled up with zeros to [N, width]."""
    missing = width - table.shape[1]
    return table[:, :width] if missing <= 0 else nn.functional.pad(table, (0, missing))
