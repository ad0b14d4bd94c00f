"""A head as it is used in a round: the trained form's numbers, in few operations.

A round asks about one line a text, so a verdict costs what its operations cost to start, not their arithmetic. What
depends on the weights alone is worked out once: mean and deviation go into the first layer, and what the head makes of
a token goes into a table over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from ..decoding.hooks import Survivor
from .cache import LeastRecentlyUsed
from .inputs import PER_POSITION, SMALLEST, TINY, WIDE, head_inputs, shape_of
from .model import LEAST_THRESHOLD, SCORE_RANGE, SCORE_SCALE, SOME, LengthHead

LARGEST_TABLE = 2**23  # entries; larger ones are worked out token by token


class OfToken:
    """A linear function of a token's embedding: looked up where a table of it is small enough.

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
        """[..., W] from tokens [...]."""
        if self.values is not None:
            return self.values[tokens]
        return linear(embeddings(tokens).to(self.weight), self.weight, self.bias)


class FoldedExpectation:
    """`Expectation` with all drafted places side by side.

    A token whose embedding is 0 is a token here, and a missing one to the trained form; only padding has such a one.

    Args:
        head: one that matches.
        table: [V, H] the embeddings.
    """

    def __init__(self, head: LengthHead, table: Tensor) -> None:
        config, trained = head.config, head.expectation
        size, places = config.context_size, config.drafted_tokens
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
        self.places = places

    def __call__(self, line: Survivor, embeddings: nn.Module) -> Tensor:
        """[N, D] as `Expectation.forward`; what stands behind a line's end means nothing."""
        tokens = line.tokens[:, : self.places]
        if (missing := self.places - tokens.shape[1]) > 0:
            tokens = pad(tokens, (0, missing))
        keys = self.key(tokens.T, embeddings)  # [D, N, W + 1]
        state = self.state_bias if self.committed is None else self.committed(line.committed, embeddings)
        if line.features is not None and len(self.state_weight):
            state = torch.addmm(state, line.features.flatten(1).to(self.state_weight), self.state_weight)  # [N, Q]
        states = state.expand(1, keys.shape[1], -1)
        if self.steps is not None:
            states = torch.cat([states, torch.bmm(keys[:-1], self.steps)]).cumsum(0)  # [D, N, Q]
        queries = torch.baddbmm(self.query_bias, states.relu(), self.query_weight)
        return (queries * keys).sum(-1).T


class FoldedHead:
    """The verdicts of a head.

    Args:
        head: on the device where it will be asked.
        table: [V, H] the target's input embeddings.
    """

    @torch.no_grad()
    def __init__(self, head: LengthHead, table: Tensor) -> None:
        config = self.config = head.config
        self.wide = () if config.matches else tuple(name for name in WIDE if name in config.features)
        self.positional = tuple(name for name in PER_POSITION if name in config.features)
        self.places = torch.arange(max(config.gamma, config.drafted_tokens), device=head.mean.device)
        self.places[config.gamma :] = torch.iinfo(torch.long).max  # nothing behind gamma is looked at
        self.expectation = FoldedExpectation(head, table) if config.matches else None
        self.rule_offset, self.rule_scale = _rule(head)
        first, *others = _linear(head.layers)
        self.layers = [_folded_first(head, first)]
        self.layers += [(layer.weight.T.contiguous(), layer.bias.detach()) for layer in others]

    def __call__(self, line: Survivor, embeddings: nn.Module) -> Tensor:
        """[N] 0, 1 or 2."""
        if line.length.device != self.places.device:  # the draft may live elsewhere
            line = Survivor(*(each if each is None else each.to(self.places.device) for each in line))  # type: ignore[arg-type]
        real = self.places < line.length[:, None]  # [N, G]
        (weight, bias), *others = self.layers
        x = torch.addmm(bias, torch.cat(self._read(line, real, embeddings), dim=1), weight)
        for weight, bias in others:
            x = torch.addmm(bias, x.relu(), weight)
        return torch.addcmul(self.rule_offset, x.softmax(-1), self.rule_scale).argmax(-1)

    def _read(self, line: Survivor, real: Tensor, embeddings: nn.Module) -> list[Tensor]:
        """What the first layer reads, in the order of `_folded_first`."""
        parts = []
        if self.wide:
            inputs = head_inputs(line, embeddings, self.config.gamma, self.config.drafted_tokens, self.wide)
            parts += [getattr(inputs, name).flatten(1) for name in self.wide]
        if self.positional:
            values = self._numbers(line, real)
            parts += [values, values.clamp(min=SMALLEST).log()]
        if "kind" in self.config.features:
            fresh = torch.zeros_like(line.length) if line.fresh is None else line.fresh
            parts += [fresh[:, None], line.length[:, None]]
        if self.expectation is not None:
            scores = self.expectation(line, embeddings).clamp(*SCORE_RANGE)
            parts.append(scores * real[:, : self.config.drafted_tokens])
        return parts

    def _numbers(self, line: Survivor, real: Tensor) -> Tensor:
        """[N, P * G] what belongs to positions."""
        gamma = self.config.gamma
        tokens, confidence = line.tokens[:, :gamma], line.confidence[:, :gamma]
        q = None if line.scores is None else line.scores[:, :gamma]
        columns = [confidence if name == "confidence" else shape_of(name, q, tokens) for name in self.positional]
        values = torch.stack(columns, dim=1)  # [N, P, M]
        if (missing := gamma - values.shape[2]) > 0:
            values = pad(values, (0, missing))
        return (values * real[:, None, :gamma]).flatten(1)


def _rule(head: LengthHead) -> tuple[Tensor, Tensor]:
    """[3] offset and [3] scale: `offset + scale * probabilities` is largest where `verdict_by_thresholds` points.

    The entry of "some" is just above 0. That of "all" is above it if its threshold is passed, and that of "none", if
    its is, far above both: by a power of 2, which keeps the comparison exact.
    """
    far = 2.0**60  # more than 1 over the least difference to a threshold, 2**-24 * LEAST_THRESHOLD
    like = head.mean
    none, everything = (max(t, LEAST_THRESHOLD) for t in (head.config.none_threshold, head.config.all_threshold))
    offset = like.new_tensor([-far * float(like.new_tensor(none)), TINY, -everything])
    return offset, like.new_tensor([far, 0.0, 1.0])


def _folded_first(head: LengthHead, layer: nn.Linear) -> tuple[Tensor, Tensor]:
    """The first layer [F, L] and its bias [L], mean and deviation in them; what it reads is ordered as in `_read`."""
    config = head.config
    widths = {name: width for name, width in config.feature_sizes.items() if not (config.matches and name in WIDE)}
    read = sum(widths.values())  # 0 if all that is read is matched
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
        self._cache: LeastRecentlyUsed[LengthHead, tuple[Hashable, FoldedHead]] = LeastRecentlyUsed(
            limit, weak_keys=True
        )

    def of(self, head: LengthHead, table: Tensor) -> tuple[FoldedHead, Hashable]:
        """Return the folded form of a head and a key that changes with its config and its weights.

        Args:
            head: the head, on the device where it will be used.
            table: [V, H] the target's input embeddings.
        """
        weights = (*head.parameters(), *head.buffers(), table)
        state = tuple((weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights)
        key = (repr(head.config), state)
        made = self._cache.get(head, lambda head: (key, FoldedHead(head, table)), lambda made: made[0] == key)
        return made[1], key


_FOLDED_HEADS = FoldedHeads(limit=8)


class BoundHead:
    """A head and the embeddings it reads, as a hook calls it; no module, so that neither becomes part of the other."""

    fresh_lines = True

    def __init__(self, head: LengthHead, embeddings: nn.Module) -> None:
        self.embeddings = embeddings
        self.feature_layers = head.config.feature_layers
        self.draft_scores = head.config.reads_scores
        self.folded, self.settings = _FOLDED_HEADS.of(head, next(embeddings.parameters()))

    def __call__(self, line: Survivor) -> Tensor:
        if line.features is None and self.feature_layers:  # the round after the prompt
            return torch.full_like(line.length, SOME)
        return self.folded(line, self.embeddings)
