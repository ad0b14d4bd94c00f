"""The draft's side of a round: a line of drafted tokens, and branches where it forks.

A chain is the part of the line that is sent to the target; a cut decides how much is sent, and throws nothing
away. That is what keeps drawn drafts exact: a token once drawn stays the candidate until the target gets to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..stats import SpecBranchStats
from .draft_model import DraftModel
from .hooks import DraftState, HookList
from .ledger import Drafted, settle
from .line import Line
from .policies import Policy
from .records import Branches, Chain, Outcome
from .siblings import Siblings
from .verify import NONE


class NoDrafter:
    """The draft's side of a method that drafts nothing."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows, self.device = rows, device

    def prefill(self) -> None: ...

    def draft(self, room: list[int]) -> Chain:
        return Chain.empty(self.rows, self.device)

    def branch(self) -> Branches:
        return Branches.none(self.rows, self.device)

    def follow(self, outcomes: Sequence[Outcome], features: Tensor | None) -> None: ...


class Drafter:
    """Drafts for a batch of rows.

    Args:
        model: the draft model.
        line: the line it extends, the prompt in place.
        policy: what to draft.
        gamma: the most tokens drafted in one go.
        hooks: the decisions where to stop, how wide to fork and how much to keep.
        generator: draws drafts from the draft's distribution; None takes its likeliest tokens.
        stats: where to count.
    """

    def __init__(
        self,
        model: DraftModel,
        line: Line,
        policy: Policy,
        gamma: int,
        hooks: HookList,
        generator: torch.Generator | None,
        stats: SpecBranchStats,
    ) -> None:
        self.model, self.line, self.device, self.rows = model, line, line.device, line.rows
        self.policy, self.gamma, self.depth = policy, gamma, policy.depth(gamma)
        self.hooks, self.generator, self.stats = hooks, generator, stats
        self.fed = [0 for _ in self.rows]  # columns whose keys and values are in the cache
        self.chain_length = [0 for _ in self.rows]  # the part of the line the target is looking at
        self.width = [0 for _ in self.rows]  # branches opened behind it
        self.ahead = [False for _ in self.rows]  # rows that draft past it
        self.survived = [False for _ in self.rows]  # the line outlived a verdict and has not been cut yet
        self.fresh = [False for _ in self.rows]  # the line comes straight from the draft stage
        self.siblings: Siblings | None = None
        self.features: Tensor | None = None

    def prefill(self) -> None:
        """Read the prompt."""
        end = self.line.end
        if end[0] > 0:
            logits = self.model.prefill(self.line.ids[:, : end[0]])
            self._take_in(logits, end, [True for _ in self.rows])

    def draft(self, room: list[int]) -> Chain:
        """The chain for the next target pass: what is left of the line, or a newly drafted one.

        Args:
            room: how many tokens each row may still gain; 0 where it is finished.
        """
        self.fresh = [False for _ in self.rows]
        if self.policy.drafts_first:
            self._draft_stage(room)
        kept = self._cut()
        self.survived = [False for _ in self.rows]
        self.chain_length = [max(0, min(kept[b], self.gamma, room[b] - 1)) for b in self.rows]
        self.ahead = [self.policy.drafts_ahead and room[b] > self.chain_length[b] + 1 for b in self.rows]
        return self.line.chain(self.chain_length, with_scores=self.generator is not None)

    def branch(self) -> Branches:
        """Draft what may come after the chain, before the verdict on it is known."""
        line, ahead, self.siblings = self.line, self.ahead, None
        if not any(ahead):
            self.width = [0 for _ in self.rows]
            return Branches.none(len(self.rows), self.device)
        at_end = [ahead[b] and line.length[b] == self.chain_length[b] for b in self.rows]
        if any(at_end[b] and not line.known[b] for b in self.rows):
            self._feed_line()
        self.stats.num_draft_tokens += line.extend(at_end, self.generator)
        point = self._point()
        state = line.state(point)
        self.width = self._fork_width(state)
        tokens = line.branch_tokens(point)[:, : max(self.width)]
        self._grow(point, tokens)
        return Branches(tokens, line.tensor(self.width), state.scores)

    def follow(self, outcomes: Sequence[Outcome], features: Tensor | None) -> None:
        """Take note of a verdict: where the text goes on, and which drafted line lives on there.

        Args:
            outcomes: one a row.
            features: [B, layers, H] target hidden states at the last verified position, if hooks want them.
        """
        self.features = features
        for b, outcome in enumerate(outcomes):
            drafted = Drafted(
                chain=self.chain_length[b],
                main=self.line.length[b] - self.chain_length[b],
                branches=self.width[b] if self.policy.forks else 0,
                depth=self.depth,
            )
            settle(self.stats, drafted, outcome)
        self._follow_siblings(outcomes)
        for b, outcome in enumerate(outcomes):
            if outcome.complete and outcome.survivor == NONE:
                self._diverge(b, outcome)
            elif not (outcome.complete and outcome.survivor > 0):
                self.line.start[b] += outcome.committed
                self.line.length[b] -= outcome.committed
            self.survived[b] = outcome.complete and outcome.survivor != NONE and not outcome.finished
            if outcome.finished:
                self.line.length[b] = 0

    # ---- the draft stage

    def _draft_stage(self, room: list[int]) -> None:
        """Draft up to gamma tokens on the rows that have none, stopping where the hooks say so."""
        line = self.line
        empty = [length == 0 for length in line.length]
        going = [empty[b] and room[b] > 1 for b in self.rows]
        for step in range(self.gamma):
            going = [going[b] and step < room[b] - 1 for b in self.rows]
            if any(going[b] and not line.known[b] for b in self.rows):
                self._feed_line()
            if self.hooks.stoppers and any(going):
                stopped = self.hooks.stop(line.state(line.end)).tolist()  # decides how long the stage is
                going = [going[b] and not stopped[b] for b in self.rows]
            if not any(going):
                break
            self.stats.num_draft_tokens += line.extend(going, self.generator)
        self.fresh = [empty[b] and line.length[b] > 0 for b in self.rows]

    def _feed_line(self) -> None:
        """Feed what the cache has not seen of each row's line."""
        end = self.line.end
        count = max(1, max(end[b] - self.fed[b] for b in self.rows))
        logits = self.model.read_line(self.line.ids, end, count)
        self._take_in(logits, end, [True for _ in self.rows])

    def _take_in(self, logits: Tensor, end: list[int], going: list[bool]) -> None:
        """Note the distribution behind each line's end; logits [B, Q, V] are those of its last columns."""
        self.line.note(self.model.distribution_behind(self.line.ids, end, logits), end, going)
        for b in self.rows:
            if going[b]:
                self.fed[b], self.line.known[b] = end[b], True

    def _cut(self) -> list[int]:
        """How much of each line to send, by the hooks.

        They are asked about survivors, and about lines fresh from the draft stage if one of them wants to be: on a
        poorly aligned pair most rolled back tokens come from there. What is not sent becomes the main branch.
        """
        hooks, line = self.hooks, self.line
        asked = [self.survived[b] or (hooks.fresh_lines and self.fresh[b]) for b in self.rows]
        if not self.policy.forks or not any(asked):
            return line.length
        kept = hooks.keep(line.survivor(self.features, self.fresh, with_scores=hooks.draft_scores)).tolist()
        return [kept[b] if asked[b] else line.length[b] for b in self.rows]

    # ---- the branch stage

    def _point(self) -> list[int]:
        """The branch point's column in each row."""
        return [start + chain for start, chain in zip(self.line.start, self.chain_length)]

    def _fork_width(self, state: DraftState) -> list[int]:
        wanted = self.hooks.fork(state).tolist() if self.policy.forks else [1 for _ in self.rows]
        return [min(wanted[b], self.line.branches) if self.ahead[b] else 0 for b in self.rows]

    def _grow(self, point: list[int], tokens: Tensor) -> None:
        """Draft the main branch and its siblings, `depth` tokens behind the branch point."""
        if tokens.shape[1] > 1:
            self.siblings = Siblings(self.line, self.model, point, tokens[:, 1:], self.depth)
        self.stats.num_draft_tokens += sum(max(0, width - 1) * (1 + self.depth) for width in self.width)
        goal = [chain + 1 + self.depth for chain in self.chain_length]
        for step in range(self.depth):
            wants = [self.ahead[b] and self.line.length[b] < goal[b] for b in self.rows]
            if not any(wants) and self.siblings is None:
                break
            self._grow_step(step, wants)

    def _grow_step(self, step: int, wants: list[bool]) -> None:
        """One forward over the tips of all branches; the main one takes part where it is not long enough."""
        line, siblings, end = self.line, self.siblings, self.line.end
        feeds_main = any(wants[b] and not line.known[b] for b in self.rows)
        tips, shown = [], max(end)
        if feeds_main:
            # A row whose main branch is long enough feeds a column again that it has fed before.
            column = line.tensor([end[b] - 1 if wants[b] else max(end[b] - 2, 0) for b in self.rows])[:, None]
            tips.append((line.ids.gather(1, column), column, column))
        if siblings is not None:
            tips.append(siblings.tips(step))
            shown = max(shown, siblings.slots_used)
        visible = [self.model.text_up_to(column, shown)] if feeds_main else []
        visible += [siblings.visible(step, shown)] if siblings is not None else []
        if tips:
            tokens, columns, slots = (torch.cat(part, dim=1) for part in zip(*tips))
            logits = self.model.forward(tokens, columns, slots, torch.cat(visible, dim=1))
        if feeds_main:
            self._take_in(logits[:, :1], end, wants)
        self.stats.num_draft_tokens += line.extend(wants, self.generator)
        if siblings is not None:
            siblings.extend(step, logits[:, -siblings.count :], self.generator)

    # ---- after the verdict

    def _follow_siblings(self, outcomes: Sequence[Outcome]) -> None:
        winners = [o.survivor - 1 if o.complete and o.survivor > 0 else None for o in outcomes]
        if all(winner is None for winner in winners):
            return
        if self.siblings is not None:
            self.siblings.adopt(winners)
        for b, winner in enumerate(winners):
            if winner is not None:
                self.fed[b] = self.line.end[b] - 1  # its last token waits to be fed

    def _diverge(self, b: int, outcome: Outcome) -> None:
        """The target's own token ends the line."""
        line, column = self.line, self.line.start[b] + outcome.accepted
        line.ids[b, column] = outcome.token
        line.start[b], line.length[b], line.known[b] = column + 1, 0, False
        self.fed[b] = min(self.fed[b], column)
        if self.model.guide is not None:
            self.model.guide.rewind(column)
