"""The drafter's decisions: a list of small objects, as `LogitsProcessor`s are for scores.

A hook may decide *stop here* (draft no further), *fork this wide* (how many branches) and *keep this many* (how much of
a draft to send to the target next). No hook can make the output wrong: it decides before a token is drawn, and drafted
tokens that are not sent in this round are kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import warn

NO_OPINION = -1


class DraftState(NamedTuple):
    """What is known when the draft model is about to choose a token, row by row."""

    tokens: Tensor  # [B, C] text so far, drafted tokens included; only the first `length` count
    length: Tensor  # [B]
    scores: Tensor  # [B, V] the draft model's probabilities for the next token
    confidence: Tensor  # [B] their maximum


class Survivor(NamedTuple):
    """A draft that is still valid after a verify result: its tokens are drafted, and none of them is verified."""

    tokens: Tensor  # [B, M]
    length: Tensor  # [B] how many are real
    confidence: Tensor  # [B, M] the draft model's largest probability at each position
    committed: Tensor  # [B] the token just committed, which the draft follows
    features: Tensor | None  # [B, layers, H] target hidden states at the last verified position, if a hook reads them
    fresh: Tensor | None = None  # [B] bool: no survivor, but a new draft from the draft stage
    scores: Tensor | None = None  # [B, M, V] the draft model's distribution at each position, if a hook reads it
    column: Tensor | None = None  # [B] where in the text the draft begins


class SpeculationHook:
    """Base class: a hook overrides the decisions it wants to make.

    Every method returns one value per row, or None to leave every row to the next hook.

    Attributes:
        feature_layers: indices into the target's `hidden_states` that `keep` reads.
        fresh_drafts: `keep` also decides about new drafts from the draft stage, not about survivors only.
        draft_scores: `keep` reads the draft model's distributions.
        settings: everything that the decisions depend on besides their arguments. Set it if they consist of tensor
            operations alone, without device syncs and without state: the hook is then captured in CUDA graphs. None:
            it is not, and every round is driven from the host.

    Example:
        >>> class NeverFork(SpeculationHook):
        ...     def fork(self, state):
        ...         return torch.ones_like(state.length)
    """

    feature_layers: tuple[int, ...] = ()
    fresh_drafts: bool = False
    draft_scores: bool = False
    settings: Hashable | None = None

    def stop(self, state: DraftState) -> Tensor | None:
        """Return [B] bool: stop drafting on this row; the position becomes the branch point."""
        return None

    def fork(self, state: DraftState) -> Tensor | None:
        """Return [B] int: how many branches to open here, NO_OPINION to leave it to the next hook."""
        return None

    def keep(self, survivor: Survivor) -> Tensor | None:
        """Return [B] int: how many drafted tokens to send next, NO_OPINION to leave it to the next hook."""
        return None


class ConfidenceStop(SpeculationHook):
    """Stop before the first position whose confidence is below `epsilon`, and cut survivors there."""

    def __init__(self, epsilon: float) -> None:
        self.epsilon = self.settings = epsilon

    def stop(self, state: DraftState) -> Tensor:
        return state.confidence < self.epsilon

    def keep(self, survivor: Survivor) -> Tensor:
        sure = survivor.confidence >= self.epsilon
        return sure.long().cumprod(1).sum(1)


class TopKBranches(SpeculationHook):
    """Open more branches the less confident the draft model is: `max(1, floor(k_max * (1 - confidence)))`."""

    def __init__(self, k_max: int) -> None:
        self.k_max = self.settings = k_max

    def fork(self, state: DraftState) -> Tensor:
        return (self.k_max * (1 - state.confidence)).floor().long().clamp(min=1)


class LengthHeadHook(SpeculationHook):
    """Sends what a length head (H-RAD) predicts: 0 sends nothing, 1 decides by confidence, 2 sends the whole draft."""

    def __init__(self, head: Callable[[Survivor], Tensor]) -> None:
        self.head, self.origin = head, str(getattr(head, "origin", ""))
        self.feature_layers = tuple(getattr(head, "feature_layers", ()))
        self.fresh_drafts = _wants_fresh_drafts(head)
        self.draft_scores = bool(getattr(head, "draft_scores", False))
        self.settings = getattr(head, "settings", None)

    def keep(self, survivor: Survivor) -> Tensor:
        prediction = self.head(survivor).to(survivor.length.device)
        opinions = torch.stack([torch.zeros_like(prediction), torch.full_like(prediction, NO_OPINION), survivor.length])
        return opinions.gather(0, prediction[None].long())[0]


class HookList:
    """Applies hooks in order. One *stop* is enough; of *fork* and *keep* the first opinion counts."""

    def __init__(self, hooks: Sequence[SpeculationHook]) -> None:
        self.hooks = list(hooks)
        self.stoppers = [hook for hook in hooks if type(hook).stop is not SpeculationHook.stop]
        self.feature_layers = tuple(sorted({layer for hook in hooks for layer in hook.feature_layers}))
        self.on_fresh_drafts = [_wants_fresh_drafts(hook) for hook in hooks]
        self.fresh_drafts = any(self.on_fresh_drafts)
        self.draft_scores = any(hook.draft_scores for hook in hooks)

    @property
    def settings(self) -> tuple[Hashable, ...]:
        """What a captured stage bakes in of these hooks, as part of its key."""
        return tuple((type(hook).__name__, hook.settings) for hook in self.hooks)

    def stop(self, state: DraftState) -> Tensor:
        stopped = torch.zeros_like(state.length, dtype=torch.bool)
        for hook in self.stoppers:
            if (opinion := hook.stop(state)) is not None:
                stopped = stopped | opinion
        return stopped

    def fork(self, state: DraftState) -> Tensor:
        opinions = (hook.fork(state) for hook in self.hooks)
        return _first_opinion(opinions, default=torch.ones_like(state.length)).clamp(min=1)

    def keep(self, survivor: Survivor) -> Tensor:
        opinions = (self._opinion(*each, survivor) for each in zip(self.hooks, self.on_fresh_drafts))
        kept = _first_opinion(opinions, default=survivor.length).clamp(min=0)
        return torch.minimum(kept, survivor.length)

    def _opinion(self, hook: SpeculationHook, on_fresh_drafts: bool, survivor: Survivor) -> Tensor | None:
        """Return one hook's decision. It sees the layers it reads, and decides about fresh drafts if it wants to."""
        if survivor.features is not None and hook.feature_layers != self.feature_layers:
            wanted = [self.feature_layers.index(layer) for layer in hook.feature_layers]
            survivor = survivor._replace(features=survivor.features[:, wanted] if wanted else None)
        opinion = hook.keep(survivor)
        if opinion is None or survivor.fresh is None or on_fresh_drafts:
            return opinion
        return torch.where(survivor.fresh.to(opinion.device), NO_OPINION, opinion)


def _wants_fresh_drafts(hook: object) -> bool:
    name = "fresh_drafts"
    if inspect.getattr_static(hook, "fresh_lines", None) is not None:
        warn(type(hook).__name__, "fresh_lines", name)
        name = "fresh_lines"
    return bool(getattr(hook, name, False))


def _first_opinion(opinions: Iterable[Tensor | None], default: Tensor) -> Tensor:
    decided = torch.full_like(default, NO_OPINION)
    for opinion in opinions:
        if opinion is not None:
            decided = torch.where(decided == NO_OPINION, opinion.to(decided), decided)
    return torch.where(decided == NO_OPINION, default, decided)
