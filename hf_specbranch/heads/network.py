"""The network of a length head and the features it reads; training and decoding see the same numbers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..decoding.hooks import Survivor
from .config import FEATURES, LengthHeadConfig

# The three classes of the paper's length predictor, H-RAD. They decide what is sent to the target in this round:
# none of the draft will be accepted (send nothing), all of it will (send all of it), or decide by confidence.
CLASSES = ("none", "some", "all")
NONE, SOME, ALL = range(3)
LEAST_THRESHOLD = 2.0**-20  # a lower one counts as this: smaller probabilities are rounding

WIDE = ("hidden", "committed", "drafted")
PER_POSITION = ("confidence", "probability", "entropy")
OF_SCORES = ("probability", "entropy")
SMALLEST = 1e-4  # logarithms are taken of nothing smaller
TINY = 1e-30
SCORE_RANGE, SCORE_SCALE = (-20.0, 5.0), 4.0  # of the scores of drafted tokens, which are close to log-probabilities
NORMALISED = 0.05  # weight of (log Z)^2: with Z near 1 a token's score is its log-probability, without a softmax


class HeadInputs(NamedTuple):
    """Raw features of N drafts. Positions after the end of a draft are 0."""

    hidden: Tensor  # [N, K, H] target hidden states where the last token was chosen
    committed: Tensor  # [N, H] embedding of that token
    drafted: Tensor  # [N, D, H] embeddings of the first drafted tokens
    confidence: Tensor  # [N, G] the draft model's largest probability
    probability: Tensor  # [N, G] its probability of the drafted token
    entropy: Tensor  # [N, G] of its distribution, in nats
    kind: Tensor  # [N, 2] 1 for a draft fresh from the draft stage; its length over gamma

    def matrix(self, config: LengthHeadConfig) -> Tensor:
        """Return the features that a head with this config reads, side by side: [N, F]."""
        parts = []
        for name in config.feature_sizes:
            values = getattr(self, name).flatten(1).float()
            parts += [values, values.clamp(min=SMALLEST).log()] if name in PER_POSITION else [values]
        return torch.cat(parts, dim=1)


def head_inputs(
    drafts: Survivor, embeddings: nn.Module, gamma: int, drafted_tokens: int, features: tuple[str, ...] = FEATURES
) -> HeadInputs:
    """Gather the inputs on the target's device.

    Args:
        drafts: one draft per row, as hooks see them; `features` may be missing if the head reads no hidden states.
        embeddings: the target's input embeddings.
        gamma: positions to look at.
        drafted_tokens: how many of the first tokens to embed.
        features: the ones that are needed; others are left empty, which saves reading whole distributions.
    """
    device = next(embeddings.parameters()).device
    length = drafts.length.to(device)  # [N]
    tokens = _fit(drafts.tokens.to(device), gamma)  # [N, G]
    real = torch.arange(gamma, device=device) < length[:, None]  # [N, G]
    rows = length.shape[0]
    fresh = torch.zeros(rows, device=device) if drafts.fresh is None else drafts.fresh.to(device)
    nothing = torch.zeros((rows, 0), device=device)
    committed, drafted, hidden = nothing, nothing, nothing if drafts.features is None else drafts.features.to(device)
    if "committed" in features:
        committed = embeddings(drafts.committed.to(device))
    if "drafted" in features:
        drafted = embeddings(_fit(tokens, drafted_tokens)) * _fit(real, drafted_tokens)[:, :, None]
    q = None if drafts.scores is None else drafts.scores.to(device)[:, :gamma]  # [N, M, V]
    shape = {name: nothing if name not in features else shape_of(name, q, tokens) * real for name in OF_SCORES}
    return HeadInputs(
        hidden=hidden,
        committed=committed,
        drafted=drafted,
        confidence=_fit(drafts.confidence.to(device), gamma) * real,
        kind=torch.stack([fresh, length / gamma], dim=1),
        **shape,
    )


def shape_of(name: str, q: Tensor | None, tokens: Tensor) -> Tensor:
    """Return "probability" or "entropy", [N, G], of the distributions q [N, M, V] of the drafted tokens [N, G]."""
    if q is None:
        return torch.zeros(tokens.shape, device=tokens.device)
    if name == "probability":
        values = q.gather(2, tokens[:, : q.shape[1], None])[:, :, 0]
    else:  # the entropy: several times faster on a CPU than xlogy, and the same but for the last digits
        values = q.clamp(min=TINY).log_().mul_(q).sum(-1).neg_()
    return _fit(values, tokens.shape[1])


def _fit(table: Tensor, width: int) -> Tensor:
    """Cut `table` [N, M] or fill it up with zeros to [N, width]."""
    missing = width - table.shape[1]
    return table[:, :width] if missing <= 0 else nn.functional.pad(table, (0, missing))


class Reading(NamedTuple):
    """The target's hidden states and next-token distributions at M positions of plain text."""

    hidden: Tensor  # [M, K, H] its last layers where a token was chosen
    tokens: Tensor  # [M, 1 + D] that token, and those that followed
    likely: Tensor  # [M, D, C] the likeliest tokens for each of the places that followed
    chance: Tensor  # [M, D, C] their probabilities
    embeddings: Tensor  # [V, H] the target's input embeddings

    def at(self, rows: Tensor) -> Reading:
        """Return some of the positions."""
        return Reading(self.hidden[rows], self.tokens[rows], self.likely[rows], self.chance[rows], self.embeddings)


class Expectation(nn.Module):
    """Estimates how likely the target finds each drafted token, given its state and the tokens drafted before.

    Args:
        context_size: width of what describes the target's state.
        embedding_size: width of a token's embedding.
        tokens: how many drafted tokens are scored.
        query_size: hidden width.
        match_size: width of the space in which states (queries) and tokens (keys) are compared.
    """

    def __init__(self, context_size: int, embedding_size: int, tokens: int, query_size: int, match_size: int) -> None:
        super().__init__()
        self.key = nn.Linear(embedding_size, match_size)
        self.state = nn.Linear(context_size, query_size)
        self.step = nn.ModuleList([nn.Linear(match_size, query_size, bias=False) for _ in range(tokens - 1)])
        self.query = nn.ModuleList([nn.Linear(query_size, match_size + 1) for _ in range(tokens)])

    def queries(self, context: Tensor, keys: Tensor) -> Tensor:
        """Return [N, D, W + 1] from states [N, C] and the drafted tokens' keys [N, D, W]; the last entry is a bias."""
        state = self.state(context)
        queries = [self.query[0](state.relu())]
        for place, (step, query) in enumerate(zip(self.step, list(self.query)[1:])):
            state = state + step(keys[:, place])
            queries.append(query(state.relu()))
        return torch.stack(queries, dim=1)

    def forward(self, context: Tensor, drafted: Tensor) -> Tensor:
        """Return scores [N, D] of the drafted tokens, embeddings [N, D, H]; they are close to log-probabilities."""
        keys = self.key(drafted)
        queries = self.queries(context, keys)
        scores: Tensor = (queries[..., :-1] * keys).sum(-1) + queries[..., -1]
        return scores

    def loss(self, context: Tensor, reading: Reading, table: Tensor) -> Tensor:
        """Return the cross-entropy with the target's own distributions over the vocabulary (embeddings [V, H])."""
        keys = self.key(table)  # [V, W]
        queries = self.queries(context, keys[reading.tokens[:, 1:]])
        logits = queries[..., :-1] @ keys.T + queries[..., -1:]  # [M, D, V]
        log_z = logits.logsumexp(-1)
        log_likelihood = (reading.chance * (logits.gather(2, reading.likely) - log_z[..., None])).sum(-1)
        loss: Tensor = NORMALISED * log_z.square().mean() - log_likelihood.mean()
        return loss


class HeadNetwork(nn.Module):
    """A small MLP with three classes: none, some or all of a draft will be accepted.

    Args:
        config: its inputs and sizes.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: LengthHeadConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("mean", torch.zeros(config.input_size))
        self.register_buffer("std", torch.ones(config.input_size))
        sizes = (config.input_size, *config.layer_sizes)
        if config.matches:
            self.expectation = Expectation(
                config.context_size,
                config.target.hidden_size,
                config.drafted_tokens,
                config.query_size,
                config.match_size,
            )
            narrow = config.input_size - config.context_size - config.feature_sizes["drafted"]
            sizes = (narrow + config.drafted_tokens, *config.layer_sizes)
        layers: list[nn.Module] = []
        for width_in, width_out in zip(sizes, sizes[1:]):
            layers += [nn.Linear(width_in, width_out), nn.ReLU(), nn.Dropout(config.dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1], len(CLASSES)))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits [N, 3] from the features [N, F] of `HeadInputs.matrix`."""
        x = (features - self.mean) / self.std
        if self.config.matches:
            x = self._match(x, features)
        logits: Tensor = self.layers(x)
        return logits

    def predict(self, features: Tensor) -> Tensor:
        """Return [N] 0 (none), 1 (some) or 2 (all) from features [N, F], by the thresholds in the config."""
        probabilities = self(features).softmax(-1)
        return prediction_by_thresholds(probabilities, self.config.none_threshold, self.config.all_threshold)

    @property
    def token_scale(self) -> Tensor:
        """[1] by which embeddings of drafted tokens are divided: one number for all, so that padding stays 0."""
        first = self.config.context_size
        return self.std[first : first + 1]

    def _match(self, x: Tensor, features: Tensor) -> Tensor:
        """Replace the target's state and the first drafted tokens by one score per token."""
        config = self.config
        context, _, narrow = torch.split(x, self._blocks(x), dim=1)
        _, drafted, _ = torch.split(features, self._blocks(x), dim=1)
        drafted = drafted.reshape(x.shape[0], config.drafted_tokens, -1)
        scores = self.expectation(self.dropout(context), drafted / self.token_scale)
        exists = (drafted != 0).any(-1)  # a draft may be shorter
        return torch.cat([narrow, torch.where(exists, scores.clamp(*SCORE_RANGE) / SCORE_SCALE, 0.0)], dim=1)

    def _blocks(self, x: Tensor) -> list[int]:
        """Return the widths of the target's state, of the drafted tokens, and of the rest."""
        sizes = [self.config.context_size, self.config.feature_sizes["drafted"]]
        return [*sizes, x.shape[1] - sum(sizes)]


def prediction_by_thresholds(probabilities: Tensor, none_threshold: float, all_threshold: float) -> Tensor:
    """Return [N] from [N, 3]: 0 where P(none) exceeds its threshold, else 2 where P(all) exceeds its, else 1."""
    none, _, everything = probabilities.unbind(1)
    none_threshold, all_threshold = max(none_threshold, LEAST_THRESHOLD), max(all_threshold, LEAST_THRESHOLD)
    return (SOME + (everything > all_threshold)) * (none <= none_threshold)  # 0 is none, and 2 is some and one more
