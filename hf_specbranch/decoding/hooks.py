"""The drafter's decisions, as a list of small objects in the manner of `LogitsProcessor`s.

A hook may say *stop here* (draft no further), *fork this wide* (how many branches) and *keep this many* (how
much of a surviving branch to send to the target next). None of them can make the output wrong: they see
nothing of a token before it is drawn, and what is not kept is only not sent yet.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NO_OPINION = -1


class DraftState(NamedTuple):
    """What is known when the draft is about to choose a token, row by row."""

    tokens: Tensor  # [B, C] text so far, drafted tokens included; only the first `length` count
    length: Tensor  # [B]
    scores: Tensor  # [B, V] the draft's probabilities for the next token
    confidence: Tensor  # [B] their maximum


class Survivor(NamedTuple):
    """A line that has outlived a verdict: its tokens are drafted, none is verified."""

    tokens: Tensor  # [B, M]
    length: Tensor  # [B] how many are real
    confidence: Tensor  # [B, M] the draft's largest probability at each position
    committed: Tensor  # [B] the token just committed, which the line follows
    features: Tensor | None  # [B, layers, H] target hidden states at the last verified position, if asked for
    fresh: Tensor | None = None  # [B] bool: not a survivor but a line that comes straight from the draft stage
    scores: Tensor | None = None  # [B, M, V] the draft's distribution at each position, if asked for
    column: Tensor | None = None  # [B] where in the text the line begins


class SpeculationHook:
    """Base class: a hook overrides the decisions it has an opinion on.

    Every method returns one value a row, or None for no opinion on any row.

    Attributes:
        feature_layers: indices into the target's `hidden_states` that `keep` wants to read.
        fresh_lines: `keep` is also asked about lines that come straight from the draft stage.
        draft_scores: `keep` wants to read the draft's distributions.
        settings: everything the decisions depend on besides what they are shown, if they are made of tensor operations
            alone, ask the device nothing and keep no state: such a hook is captured in CUDA graphs. None: it is not,
            and rounds are driven from the host.

    Example:
        >>> class NeverFork(SpeculationHook):
        ...     def fork(self, state):
        ...         return torch.ones_like(state.length)
    """

    feature_layers: tuple[int, ...] = ()
    fresh_lines: bool = False
    draft_scores: bool = False
    settings: Hashable | None = None

    def stop(self, state: DraftState) -> Tensor | None:
        """[B] bool: draft nothing more on this row; the position becomes the branch point."""
        return None

    def fork(self, state: DraftState) -> Tensor | None:
        """[B] int: how many branches to open here, NO_OPINION to leave it to the next hook."""
        return None

    def keep(self, survivor: Survivor) -> Tensor | None:
        """[B] int: how many drafted tokens to send next, NO_OPINION to leave it to the next hook."""
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
    """Fork wider the less sure the draft is: `max(1, floor(k_max * (1 - confidence)))`."""

    def __init__(self, k_max: int) -> None:
        self.k_max = self.settings = k_max

    def fork(self, state: DraftState) -> Tensor:
        return (self.k_max * (1 - state.confidence)).floor().long().clamp(min=1)


class LengthHeadHook(SpeculationHook):
    """A length head's verdict on a survivor: 0 keeps nothing, 1 has no opinion, 2 keeps all."""

    def __init__(self, head: Callable[[Survivor], Tensor]) -> None:
        self.head = head
        self.feature_layers = tuple(getattr(head, "feature_layers", ()))
        self.fresh_lines = bool(getattr(head, "fresh_lines", False))
        self.draft_scores = bool(getattr(head, "draft_scores", False))
        self.settings = getattr(head, "settings", None)

    def keep(self, survivor: Survivor) -> Tensor:
        acceptance = self.head(survivor).to(survivor.length.device)
        opinions = torch.stack([torch.zeros_like(acceptance), torch.full_like(acceptance, NO_OPINION), survivor.length])
        return opinions.gather(0, acceptance[None].long())[0]


class HookList:
    """Hooks asked in order. One *stop* stops; of *fork* and *keep* the first opinion counts."""

    def __init__(self, hooks: Sequence[SpeculationHook]) -> None:
        self.hooks = list(hooks)
        self.stoppers = [hook for hook in hooks if type(hook).stop is not SpeculationHook.stop]
        self.feature_layers = tuple(sorted({layer for hook in hooks for layer in hook.feature_layers}))
        self.fresh_lines = any(hook.fresh_lines for hook in hooks)
        self.draft_scores = any(hook.draft_scores for hook in hooks)

    @property
    def settings(self) -> tuple[Hashable, ...]:
        """What a captured stage bakes in of these hooks."""
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
        opinions = (self._opinion(hook, survivor) for hook in self.hooks)
        kept = _first_opinion(opinions, default=survivor.length).clamp(min=0)
        return torch.minimum(kept, survivor.length)

    def _opinion(self, hook: SpeculationHook, survivor: Survivor) -> Tensor | None:
        """What one hook says, shown the layers it asked for; nothing on fresh lines unless it asked for them."""
        if survivor.features is not None and hook.feature_layers != self.feature_layers:
            wanted = [self.feature_layers.index(layer) for layer in hook.feature_layers]
            survivor = survivor._replace(features=survivor.features[:, wanted] if wanted else None)
        opinion = hook.keep(survivor)
        if opinion is None or survivor.fresh is None or hook.fresh_lines:
            return opinion
        return torch.where(survivor.fresh.to(opinion.device), NO_OPINION, opinion)


def _first_opinion(opinions: Iterable[Tensor | None], default: Tensor) -> Tensor:
    decided = torch.full_like(default, NO_OPINION)
    for opinion in opinions:
        if opinion is not None:
            decided = torch.where(decided == NO_OPINION, opinion.to(decided), decided)
    return torch.where(decided == NO_OPINION, default, decided)
