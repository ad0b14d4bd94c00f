"""What a draft source is: anything that proposes draft tokens for the target to verify.

A draft model is the first (`drafter.Drafter`); `loop.NoDraft` proposes nothing. Another source implements this
protocol, and `sources.Sources.source_of` chooses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.rounds import ForwardInputs
from .resolve import BranchStarts, DraftTokens, Feedback, RoundResult


class DraftSource(Protocol):
    """Proposes draft tokens, and continues them while the target verifies.

    Attributes:
        name: what has drafted the last proposal, for the statistics.
        device: where its tensors are.
        depth: tokens of a side branch after its first.
        same_every_round: a round launches the same work whatever the last verify result was, so that the next round may
            start before the host has read it.
        keeps_drafts: what is left of a draft stays pending, where a round commits less than was accepted (rows in
            step). False for a source that makes a new draft in every round.
        reads_early: reads the prompt without waiting for the device, so that it may begin before the host knows the
            first token.
        begin_next: launches what the next round most likely begins with, before the host has read the result of this
            one; None if there is nothing. It is given what `propose` is given.
    """

    name: str
    device: torch.device
    depth: int
    same_every_round: bool
    keeps_drafts: bool
    reads_early: bool

    @property
    def begin_next(self) -> Callable[[Feedback, int], None] | None: ...

    def prefill(self, length: int) -> None:
        """Read the first columns of the text."""
        ...

    def remember(self, tokens: list[int]) -> None:
        """Keep in mind how much of a final text of one row was read, so that it is not read again."""
        ...

    def propose(self, feedback: Feedback, reached: int) -> DraftTokens:
        """Adopt what survived the last round, and return the draft tokens for the next target pass.

        Args:
            feedback: what the last round meant.
            reached: the longest any row of the text can be by now.
        """
        ...

    def branch(self, reached: int) -> BranchStarts:
        """Draft continuations for likely verify results, while the target runs."""
        ...

    def drafted(self) -> Tensor:
        """[B, 6] what is drafted while the target verifies; the fields of `Drafted`."""
        ...


class DraftOps(Protocol):
    """The operations between the forwards of the draft model, in the order of a round.

    Attributes:
        cuts_by_confidence: `send` finds out by itself how much to send; no other hook has a say.
    """

    cuts_by_confidence: bool

    def adopt(self, result: RoundResult, moved: bool) -> None:
        """Resolve the last round: what survived becomes the pending draft. `moved`: in some row a side branch does."""
        ...

    def draft_inputs(self, step: int) -> ForwardInputs | None:
        """Return the inputs of step `step` of a new draft; None if every distribution needed is known."""
        ...

    def extend(self, logits: Tensor | None, flag: Tensor, bound: Tensor, further: int = 0, stops: bool = False) -> None:
        """Record the distribution after the pending draft, and append a token where a row goes on.

        Args:
            logits: [B, Q, V'] of the draft's last forward, or None.
            flag: [B] bool: rows that may go on.
            bound: [B] the column where they stop, but for `further`.
            further: added to the bound.
            stops: hooks may stop a row (below epsilon, for one), which takes it out of `flag` for good.
        """
        ...

    @property
    def more_steps(self) -> Tensor | None:
        """[B] where `extend` writes 0 if a new draft takes no further step; None: it does not.

        Else it writes 1 plus the confidence of the last token in units of `1 / CONFIDENCE_UNITS`.
        """
        ...

    def send(self, kept: Tensor | None) -> None:
        """Send the first tokens of each pending draft: `kept` [B] of them, within the room there is."""
        ...

    def find_rejections(self) -> None:
        """Find the likeliest rejections of the draft that is sent."""
        ...

    def point_inputs(self) -> ForwardInputs | None:
        """Return the inputs for the distribution at the branch point; None if it is known."""
        ...

    def fork(self) -> None:
        """Choose the first tokens of the branches: up to k_max at the branch point, and the likely rejections."""
        ...

    def branch_inputs(self, step: int) -> ForwardInputs | None:
        """Return the inputs of step `step` of all branches; None if there is nothing to feed."""
        ...

    def extend_branches(self, logits: Tensor | None, step: int) -> None:
        """Append a token to every branch."""
        ...

    def is_branching_done(self) -> bool:
        """Whether no branch needs another step."""
        ...

    def drafted(self) -> Tensor:
        """[B, 6] what is drafted; the fields of `Drafted`."""
        ...

    def release(self) -> None:
        """Let go of tensors that a stage has made."""
        ...
