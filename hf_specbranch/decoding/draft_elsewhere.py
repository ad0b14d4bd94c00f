"""A draft source on another GPU than the target's: what passes between the two is copied to memory of fixed address.

Each stage then has one device, and is captured like any other. Copies wait for both devices' streams, on the devices:
the host takes no part in a round. While the target runs, the draft has its GPU for itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.static_buffers import Buffers
from .draft_source import DraftSource
from .resolve import BranchStarts, DraftTokens, Feedback, RoundResult, TreeLeaves

BROUGHT = -2  # names the memory of copies; see `DraftTokens.memory`


class DraftElsewhere:
    """A source whose tensors are brought to the target's device. See `DraftSource`.

    Args:
        source: proposes draft tokens, on its own device.
        there: the buffers of its stages.
        here: the buffers of the target's stages.
    """

    def __init__(self, source: DraftSource, there: Buffers, here: Buffers) -> None:
        self.source, self.there, self.here, self.device = source, there, here, here.device
        self.name, self.depth = source.name, source.depth
        self.same_every_round, self.keeps_drafts = source.same_every_round, source.keeps_drafts
        self.reads_early, self.begin_next = False, None  # not tried with a device of its own
        self.copies: dict[tuple[str, torch.Size, bool], Tensor] = {}
        self.counts: Tensor | None = None  # [B, 6] what is drafted, here
        self.is_there = True  # what was proposed last is on the other device; looked-up tokens are not

    def prefill(self, length: int) -> None:
        self.source.prefill(length)

    def remember(self, tokens: list[int]) -> None:
        self.source.remember(tokens)

    def propose(self, feedback: Feedback, reached: int) -> DraftTokens:
        result = RoundResult(self._copy("result", feedback.result.packed, to_draft=True))
        features = None if feedback.features is None else self._copy("features", feedback.features, to_draft=True)
        drafted = self.source.propose(feedback._replace(result=result, features=features), reached)
        leaves, self.name = drafted.leaves, self.source.name
        self.is_there = drafted.tokens.device == self.there.device
        if leaves is not None:
            leaves = TreeLeaves(self._copy("leaves", leaves.tokens), self._copy("leaves.at", leaves.at))
        q = None if drafted.q is None else self._copy("q", drafted.q)
        tokens, length = self._copy("tokens", drafted.tokens), self._copy("length", drafted.length)
        return DraftTokens(tokens, length, q, leaves, BROUGHT)

    def branch(self, reached: int) -> BranchStarts:
        found = self.source.branch(reached)
        self.counts = self._copy("drafted", self._drafted())
        q = None if found.q is None else self._copy("branch q", found.q)
        following = None if found.following is None else self._copy("following", found.following)
        return BranchStarts(self._copy("branches", found.tokens), self._copy("branches.at", found.at), q, following)

    def drafted(self) -> Tensor:
        assert self.counts is not None
        return self.counts

    def _drafted(self) -> Tensor:
        """Count, on the draft's device in a stage."""
        if not self.is_there:
            return self.source.drafted()
        name = f"drafted by {self.source.name}"
        self.there.run(name, lambda: self._keep_counts(name))
        return self.there.recall(name)

    def _keep_counts(self, name: str) -> None:
        self.there.keep(name, self.source.drafted())

    def _copy(self, name: str, value: Tensor, to_draft: bool = False) -> Tensor:
        """Start to copy a tensor to its place on the other device."""
        key = name, value.shape, to_draft
        if key not in self.copies:
            buffers = self.there if to_draft else self.here
            self.copies[key] = buffers.tensor(f"copy of {name} {tuple(value.shape)}", value.shape, value.dtype)
        return self.copies[key].copy_(value, non_blocking=True)
