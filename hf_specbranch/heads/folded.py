"""A head as it runs in a round: the same predictions as the trained form, in fewer operations.

A round predicts for one draft per row, so a prediction costs what launching its operations costs, not their arithmetic.
What depends on the weights alone is computed once: mean and deviation are folded into the first layer, and linear
functions of a token's embedding become tables over the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from ..decoding.hooks import Survivor
from .cache import LeastRecentlyUsed
from .network import (
    LEAST_THRESHOLD,
    PER_POSITION,
    SCORE_RANGE,
    SCORE_SCALE,
    SMALLEST,
    SOME,
    TINY,
    WIDE,
    HeadNetwork,
    head_inputs,
    shape_of,
)

LARGEST_TABLE = 2**23  # entries; larger tables are not built, and their rows are computed token by token


class OfToken:
    """A linear function of a token's embedding, looked up in a table if that is small enough.

    Args:
        weight: [W, H].
        bias: [W].
        table: [V, H] the embeddings.
    """

    def __init__(self, weight: Tensor, bias: Tensor, table: Tensor) -> None:
        self.weight, self.bias = weight, bias
        small = len(table) * len(weight) <= LARGEST_TABLE
        self.values = linear(table.to(weight), weight, bias) if small else None  # [V, W]

    def __call__(self, tokens: Tensor, embeddings: nn.Module) -> Tensor:
        """Return [..., W] for tokens [...]."""
        if self.values is not None:
            return self.values[tokens]
        return linear(embeddings(tokens).to(self.weight), self.weight, self.bias)


class FoldedExpectation:
    """`Expectation` with all drafted positions in one batch.

    A token with an embedding of 0 counts as a token here and as missing in the trained form; only padding has one.

    Args:
        head: one whose config `matches`.
        table: [V, H] the embeddings.
    """

    def __init__(self, head: HeadNetwork, table: Tensor) -> None:
        config, trained = head.config, head.expectation
        size, positions = config.context_size, config.drafted_tokens
        scale = 1 / head.std[:size]
        weight, hidden = trained.state.weight * scale, config.feature_sizes.get("hidden", 0)
        bias = trained.state.bias - weight @ head.mean[:size]
        self.state_weight, self.state_bias = weight[:, :hidden].T.contiguous(), bias  # [K * H, Q], [Q]
        self.committed = OfToken(weight[:, hidden:], bias, table) if "committed" in config.features else None
        one = torch.ones_like(trained.key.bias[:1])  # meets the query's last entry, its bias
        key = pad(trained.key.weight / head.token_scale, (0, 0, 0, 1))
        self.key = OfToken(key, torch.cat([trained.key.bias, one]), table)
        steps = [pad(step.weight.T, (0, 0, 0, 1)) for step in _linear(trained.step)]
        self.steps = torch.stack(steps) if steps else None  # [D - 1, W + 1, Q]
        self.query_weight = torch.stack([query.weight.T for query in _linear(trained.query)])  # [D, Q, W + 1]
        self.query_bias = torch.stack([query.bias[None] for query in _linear(trained.query)])  # [D, 1, W + 1]
        self.positions = positions

    def __call__(self, drafts: Survivor, embeddings: nn.Module) -> Tensor:
        """Return [N, D] as `Expectation.forward`; entries after the end of a draft mean nothing."""
        tokens = drafts.tokens[:, : self.positions]
        if (missing := self.positions - tokens.shape[1]) > 0:
            tokens = pad(tokens, (0, missing))
        keys = self.key(tokens.T, embeddings)  # [D, N, W + 1]
        state = self.state_bias if self.committed is None else self.committed(drafts.committed, embeddings)
        if drafts.features is not None and len(self.state_weight):
            state = torch.addmm(state, drafts.features.flatten(1).to(self.state_weight), self.state_weight)  # [N, Q]
        states = state.expand(1, keys.shape[1], -1)
        if self.steps is not None:
            states = torch.cat([states, torch.bmm(keys[:-1], self.steps)]).cumsum(0)  # [D, N, Q]
        queries = torch.baddbmm(self.query_bias, states.relu(), self.query_weight)
        return (queries * keys).sum(-1).T


class FoldedHead:
    """Predicts what the trained form of a head predicts.

    Args:
        head: the trained form, on the device where it will run.
        table: [V, H] the target's input embeddings.
    """

    @torch.no_grad()
    def __init__(self, head: HeadNetwork, table: Tensor) -> None:
        config = self.config = head.config
        self.wide = () if config.matches else tuple(name for name in WIDE if name in config.features)
        self.positional = tuple(name for name in PER_POSITION if name in config.features)
        self.positions = torch.arange(max(config.gamma, config.drafted_tokens), device=head.mean.device)
        self.positions[config.gamma :] = torch.iinfo(torch.long).max  # nothing after gamma is read
        self.expectation = FoldedExpectation(head, table) if config.matches else None
        self.rule_offset, self.rule_scale = _rule(head)
        first, *others = _linear(head.layers)
        self.layers = [_folded_first(head, first)]
        self.layers += [(layer.weight.T.contiguous(), layer.bias.detach()) for layer in others]

    def __call__(self, drafts: Survivor, embeddings: nn.Module) -> Tensor:
        """Return [N] 0 (none), 1 (some) or 2 (all)."""
        if drafts.length.device != self.positions.device:  # the draft may live elsewhere
            drafts = Survivor(*(each if each is None else each.to(self.positions.device) for each in drafts))  # type: ignore[arg-type]
        real = self.positions < drafts.length[:, None]  # [N, G]
        (weight, bias), *others = self.layers
        x = torch.addmm(bias, torch.cat(self._read(drafts, real, embeddings), dim=1), weight)
        for weight, bias in others:
            x = torch.addmm(bias, x.relu(), weight)
        return torch.addcmul(self.rule_offset, x.softmax(-1), self.rule_scale).argmax(-1)

    def _read(self, drafts: Survivor, real: Tensor, embeddings: nn.Module) -> list[Tensor]:
        """Return what the first layer reads, in the order of `_folded_first`."""
        parts = []
        if self.wide:
            inputs = head_inputs(drafts, embeddings, self.config.gamma, self.config.drafted_tokens, self.wide)
            parts += [getattr(inputs, name).flatten(1) for name in self.wide]
        if self.positional:
            values = self._positional_features(drafts, real)
            parts += [values, values.clamp(min=SMALLEST).log()]
        if "kind" in self.config.features:
            fresh = torch.zeros_like(drafts.length) if drafts.fresh is None else drafts.fresh
            parts += [fresh[:, None], drafts.length[:, None]]
        if self.expectation is not None:
            scores = self.expectation(drafts, embeddings).clamp(*SCORE_RANGE)
            parts.append(scores * real[:, : self.config.drafted_tokens])
        return parts

    def _positional_features(self, drafts: Survivor, real: Tensor) -> Tensor:
        """Return [N, P * G], the features that belong to positions."""
        gamma = self.config.gamma
        tokens, confidence = drafts.tokens[:, :gamma], drafts.confidence[:, :gamma]
        q = None if drafts.scores is None else drafts.scores[:, :gamma]
        columns = [confidence if name == "confidence" else shape_of(name, q, tokens) for name in self.positional]
        values = torch.stack(columns, dim=1)  # [N, P, M]
        if (missing := gamma - values.shape[2]) > 0:
            values = pad(values, (0, missing))
        return (values * real[:, None, :gamma]).flatten(1)


def _rule(head: HeadNetwork) -> tuple[Tensor, Tensor]:
    """Return [3] offset and [3] scale: `argmax(offset + scale * probabilities)` is `prediction_by_thresholds`.

    The entry of "some" is just above 0. The entry of "all" exceeds it if P(all) exceeds its threshold. The entry of
    "none" exceeds both if P(none) exceeds its threshold; the scale is a power of 2, so the comparison is exact.
    """
    far = 2.0**60  # more than 1 over the least difference to a threshold, 2**-24 * LEAST_THRESHOLD
    like = head.mean
    none, everything = (max(t, LEAST_THRESHOLD) for t in (head.config.none_threshold, head.config.all_threshold))
    offset = like.new_tensor([-far * float(like.new_tensor(none)), TINY, -everything])
    return offset, like.new_tensor([far, 0.0, 1.0])


def _folded_first(head: HeadNetwork, layer: nn.Linear) -> tuple[Tensor, Tensor]:
    """Return the first layer, [F, L] and bias [L], with mean and deviation folded in; inputs as in `_read`."""
    config = head.config
    widths = {name: width for name, width in config.feature_sizes.items() if not (config.matches and name in WIDE)}
    read = sum(widths.values())  # 0 if every feature is matched
    last = slice(config.input_size - read, None)
    weight = layer.weight[:, :read] / head.std[last]
    bias = layer.bias - weight @ head.mean[last]
    part = dict(zip(widths, torch.split(weight, list(widths.values()), dim=1)))
    wide = [part[name] for name in WIDE if name in part]
    values = [part[name][:, : config.gamma] for name in PER_POSITION if name in part]
    logarithms = [part[name][:, config.gamma :] for name in PER_POSITION if name in part]
    kind = [part["kind"] / weight.new_tensor([1, config.gamma])] if "kind" in part else []
    matched = layer.weight[:, read:] / SCORE_SCALE
    return torch.cat([*wide, *values, *logarithms, *kind, matched], dim=1).T.contiguous(), bias


def _linear(modules: nn.Module) -> list[nn.Linear]:
    return [module for module in modules.children() if isinstance(module, nn.Linear)]


class FoldedHeads:
    """The folded forms of the heads that were used last.

    Args:
        limit: how many are kept; each holds tables over the vocabulary.
    """

    def __init__(self, limit: int) -> None:
        self._cache: LeastRecentlyUsed[HeadNetwork, tuple[object, FoldedHead]] = LeastRecentlyUsed(
            limit, weak_keys=True
        )

    def of(self, head: HeadNetwork, table: Tensor) -> FoldedHead:
        """Return the folded form of a head, a new one if its config or its weights have changed.

        Args:
            head: the head, on the device where it will be used.
            table: [V, H] the target's input embeddings.
        """
        weights = (*head.parameters(), *head.buffers(), table)
        state = tuple((weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights)
        key = (repr(head.config), state)
        return self._cache.get(head, lambda head: (key, FoldedHead(head, table)), lambda made: made[0] == key)[1]


_FOLDED_HEADS = FoldedHeads(limit=8)


class BoundHead:
    """A head and the embeddings it reads, as a hook calls it. It is no module, so neither becomes part of the other.

    The folded form is also the key (`settings`) of the CUDA graphs that bake it in, so it lives as long as they do.
    """

    fresh_drafts = True

    def __init__(self, head: HeadNetwork, embeddings: nn.Module) -> None:
        self.embeddings, self.origin = embeddings, getattr(head, "origin", "")
        self.feature_layers = head.config.feature_layers
        self.draft_scores = head.config.reads_scores
        self.folded = self.settings = _FOLDED_HEADS.of(head, next(embeddings.parameters()))

    def __call__(self, drafts: Survivor) -> Tensor:
        if drafts.features is None and self.feature_layers:  # the round after the prompt
            return torch.full_like(drafts.length, SOME)
        return self.folded(drafts, self.embeddings)
