"""Lookup beside a draft model: looked-up tokens take the place of a draft where that saves more time.

The draft model takes no part in a round of looked-up tokens. When it drafts again, its first step reads what was
committed meanwhile: all of it where it may ask how much that is, the last `CHUNK` tokens in captured stages, and what
came before them in passes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..kernels.rounds import ForwardInputs
from ..planning.costs import StepCosts
from ..planning.step_worth import StepWorth
from ..runtime.eager import make_spans
from ..runtime.pieces import to_device
from .draft_source import DraftSource
from .drafter import Drafter
from .lookup import LookupDraft
from .resolve import BranchStarts, DraftTokens, Feedback, TreeLeaves
from .stepwise_drafter import PRIOR_DRAFTS, StepwiseDrafter

CHUNK = 16  # tokens that the draft reads in one captured pass, in about the time of one
# Of the draft tokens that are accepted, before any were verified, by whether a draft stops where it is uncertain.
TYPICAL = {True: 0.75, False: 0.5}
REPETITION = 0.5  # tokens that count for a draft besides: where a text repeats itself, it is better than usual


class LookupBesideDraft:
    """The draft source that looks tokens up where that pays more than to draft. See `DraftSource`.

    Args:
        drafter: the draft model as a source.
        lookup: the other one.
        costs: what steps of both models cost.
    """

    keeps_drafts = True

    def __init__(self, drafter: Drafter, lookup: LookupDraft, costs: StepCosts) -> None:
        self.drafter, self.lookup, self.costs = drafter, lookup, costs
        self.current: DraftSource = drafter
        self.name = drafter.name
        self.device, self.depth, self.reads_early = drafter.device, drafter.depth, drafter.reads_early
        self.stepwise = drafter if isinstance(drafter, StepwiseDrafter) else None
        # A host that waits for each step of a draft waits for the result before it too, and then knows the last match.
        self.same_every_round = drafter.same_every_round and self.stepwise is None
        self.typical = TYPICAL[self.stepwise is not None] * drafter.usual_steps  # accepted tokens of a draft
        self.rows = len(lookup.lookup.text.lengths)
        self.worth = StepWorth(drafter.stats, costs, self.rows, self._width)
        self.left: list[int] = []  # the length of each row, as the host knew it, when lookup took over

    @property
    def _width(self) -> int:
        """The draft tokens and tree leaves in a pass."""
        return self.drafter.gamma + self.drafter.round.leaves

    @property
    def begin_next(self) -> Callable[[Feedback, int], None] | None:
        """The first step of the next draft. If a lookup follows, the step has read the text for a later one."""
        drafter = self.stepwise
        return drafter.begin if drafter is self.current and drafter.same_every_round else None

    def prefill(self, length: int) -> None:
        self.drafter.prefill(length)
        self.lookup.prefill(length)

    def remember(self, tokens: list[int]) -> None:
        self.drafter.remember(tokens if self.current is self.drafter else tokens[: self.left[0]])

    def propose(self, feedback: Feedback, reached: int) -> DraftTokens:
        count = self._looks_up() if feedback.draft_ended else 0
        if count:
            if self.current is self.drafter:
                self.left = list(self.lookup.lookup.text.lengths)
                self._run("leave", lambda: self._leave(feedback))
                if self.stepwise is not None:
                    self.stepwise.begun = False
            self.current, self.name = self.lookup, self.lookup.name
            return self._with_skipped_token(self.lookup.look_up(count))
        if self.current is self.drafter:
            return self.drafter.propose(feedback, reached)
        self.current, self.name = self.drafter, self.drafter.name
        with self._resumed(feedback, reached):
            return self.drafter.propose(feedback, reached)

    def _with_skipped_token(self, found: DraftTokens) -> DraftTokens:
        """Let the target read a tree leaf again that the last round has made text, as rounds with leaves do."""
        if not self.drafter.round.leaves:
            return found
        none = found.tokens[:, :0]
        return found._replace(leaves=TreeLeaves(none, none))

    def branch(self, reached: int) -> BranchStarts:
        self.lookup.lookup.prepare()
        return self.current.branch(reached)

    @property
    def drafted(self) -> Callable[[], Tensor]:
        """The counts of the present source: a captured stage keeps asking that one."""
        return self.current.drafted

    def _looks_up(self) -> int:
        """Return how many tokens to look up; 0 if a draft saves more time.

        A round is worth the tokens that it adds, less those that the text makes in as much time. Where a draft is worth
        less than a pass without one, captured stages look tokens up even if no match is likely.
        """
        lookup = self.lookup.lookup
        count = self.lookup.choose()
        if lookup.forced is not None:
            return count
        count = count or self.lookup.at_hand
        speed = self.worth.speed() / self.rows
        worth = lookup.expected(count) - speed * lookup.times.seconds(count)
        return count if worth > self._draft_worth(speed) else 0

    def _draft_worth(self, speed: float) -> float:
        """Return what a round is worth in which the model drafts, at so many tokens per second and row."""
        drafter, stats = self.drafter, self.drafter.stats
        counts = stats.sources.get(drafter.name, {"rounds": 0, "accepted": 0})
        accepted = PRIOR_DRAFTS * self.typical + counts["accepted"] + stats.tree_leaf_hits
        seconds = self.costs.pass_seconds(self._width) + drafter.usual_steps * self.costs.draft_step
        return accepted / (PRIOR_DRAFTS + counts["rounds"]) + REPETITION - speed * seconds

    # ---- between the sources

    def _leave(self, feedback: Feedback) -> None:
        """Note which columns the draft model has read of the text; what it drafted after them is gone."""
        pending, result = self.drafter.round.pending, feedback.result
        right = result.length - result.committed
        if self.drafter.model.states is None:  # a head reads accepted tokens again, with the target's states
            right = right + result.accepted
        pending.cached.copy_(torch.minimum(pending.cached, right))

    @contextmanager
    def _resumed(self, feedback: Feedback, reached: int) -> Iterator[None]:
        """Put the drafter where the last round began; inside the context, the first step of a draft catches up."""
        self._run("resume", lambda: self._take_text(feedback))
        if not self.drafter.round.static_shapes:
            yield  # it reads what it has not read when it drafts
            return
        model, text, usual = self.drafter.model, self.lookup.lookup.text, self.drafter.model.reread
        unread = usual + text.in_flight + max(now - then for now, then in zip(text.lengths, self.left))
        if self.lookup.lookup.forced is not None:  # a warm-up captures all stages
            unread = max(unread, 2 * CHUNK)
        catches_up = model.states is None and not model.runner.is_recurrent  # may read any column again
        shown = self.drafter._slots_shown(reached)
        for _ in range(-(-unread // CHUNK) - catches_up):
            self._run(("read", shown), lambda: self._read(feedback, shown))
        model.reread = CHUNK if catches_up else usual
        try:
            yield
        finally:
            model.reread = usual

    def _take_text(self, feedback: Feedback) -> None:
        pending, result, text = self.drafter.round.pending, feedback.result, self.lookup.lookup.text
        columns = min(text.ids.shape[1], pending.capacity)  # either may have room for more than the text needs
        pending.ids[:, :columns] = to_device(text.ids[:, :columns], pending.device)
        pending.start.copy_(result.length - result.committed)
        pending.end.copy_(pending.start)

    def _read(self, feedback: Feedback, shown: int) -> None:
        """Read the next columns, but for the last token, which the next draft begins with."""
        pending, model, last = self.drafter.round.pending, self.drafter.model, feedback.result.length - 2
        further = torch.arange(CHUNK, device=pending.device)
        columns = torch.minimum(pending.cached[:, None] + further, last[:, None]).clamp(min=0)  # [B, CHUNK]
        inputs = ForwardInputs(
            pending.ids.gather(1, columns),
            columns,
            model.positions.gather(1, columns),
            make_spans(model.first, columns + 1),
        )
        model.forward(inputs, shown)
        pending.cached.copy_(torch.minimum(pending.cached + CHUNK, last + 1))

    def _run(self, key: Hashable, stage: Callable[[], None]) -> None:
        self.drafter.buffers.run((key, "beside lookup"), stage)
