"""The draft model as a draft source: it proposes draft tokens, and branches while the target verifies them.

Draft tokens that are sent are the beginning of the pending draft. A cut decides how much is sent, and throws nothing
away. That keeps drawn drafts exact: a token once drawn stays the candidate until the target reaches it.

The two stages, `propose` and `branch`, run on static buffers, so that each can be captured as one CUDA graph.
"""

from __future__ import annotations

from torch import Tensor

from ..kernels.rounds import ForwardInputs
from ..runtime.static_buffers import Buffers
from ..stats import SpecBranchStats
from .draft_model import DraftModel
from .draft_round import DraftRound
from .hooks import HookList
from .state import BranchStarts, DraftTokens, Feedback, TreeLeaves
from .torch_draft_ops import DraftOps


class Drafter:
    """Drafts for a batch of rows.

    Args:
        buffers: where the stages run.
        model: the draft model.
        round: the tensors of a round.
        ops: the operations between forwards, in torch or in Triton.
        hooks: where to stop, how wide to branch and how much to send.
        stats: where to count.
    """

    def __init__(
        self,
        buffers: Buffers,
        model: DraftModel,
        round: DraftRound,
        ops: DraftOps,
        hooks: HookList,
        stats: SpecBranchStats,
    ) -> None:
        self.buffers, self.model, self.round, self.ops = buffers, model, round, ops
        self.hooks, self.stats = hooks, stats
        self.device, self.policy, self.gamma, self.depth = round.pending.device, round.policy, round.gamma, round.depth
        self.max_tokens_per_round = self.gamma + 2
        # Drafts are proposed before every pass, and no verify result leaves a pending draft or a branch.
        self.same_every_round = self.policy.drafts_first and not self.policy.drafts_ahead
        self.only_our_kernels = ops.cuts_by_confidence  # see `Buffers.run`

    def prefill(self, length: int) -> None:
        """Read the first columns of the text."""
        if length > 0:
            pending = self.round.pending
            self.model.prefill(pending.ids[:, :length])
            pending.cached.copy_(pending.start)

    def propose(self, feedback: Feedback, reached: int) -> DraftTokens:
        """Adopt what survived the last round, and return what to verify: the pending draft, or a new one.

        Args:
            feedback: what the last round meant.
            reached: the longest any row of the text can be by now.
        """
        round, shown = self.round, self._slots_shown(reached)
        is_new = self.policy.drafts_first and feedback.draft_ended
        if is_new and round.static_shapes:
            self.stats.draft_forwards += self.gamma
            self.stats.draft_positions += self.gamma + 1
        key = ("propose", feedback.moved, is_new, feedback.features is None, shown)
        self.buffers.run(key, lambda: self._propose(feedback, is_new, shown), self.only_our_kernels)
        count = self.gamma if round.static_shapes else int(round.sent_length.max())
        scores = None if round.sent_scores is None else round.sent_scores[:, :count]
        leaves = None
        if round.leaves:
            leaves = TreeLeaves(round.rejections.tokens[:, : round.leaves], round.rejections.at[:, : round.leaves])
        return DraftTokens(round.sent_tokens[:, :count], round.sent_length, scores, leaves, self.buffers.serial)

    def branch(self, reached: int) -> BranchStarts:
        """Draft what may come after the draft tokens, before the verify result is known."""
        round = self.round
        if not self.policy.drafts_ahead:
            return BranchStarts(round.branch_tokens[:, :1], round.branch_at[:, :1], None)
        if round.static_shapes:
            self.stats.draft_forwards += 1 + self.depth
            self.stats.draft_positions += 1 + self.depth * (1 + round.side.most)
        shown = self._slots_shown(reached)
        self.buffers.run(("branch", shown), lambda: self._branch(shown), self.only_our_kernels)
        return BranchStarts(round.branch_tokens, round.branch_at, round.branch_scores, round.following)

    def drafted(self) -> Tensor:
        """[B, 6] what is drafted while the target verifies; the fields of `Drafted`."""
        return self.ops.drafted()

    def _slots_shown(self, reached: int) -> int:
        """How many slots a stage with static shapes reads."""
        if not self.round.static_shapes:
            return 0
        needed = reached + self.round.pending.reach + self.round.side.slots_needed
        self.model.runner.reserve(self.round.pending.count, needed)
        return self.model.runner.bucket(needed)

    # ---- the stages

    def _propose(self, feedback: Feedback, is_new: bool, shown: int) -> None:
        round, ops = self.round, self.ops
        ops.adopt(feedback.result, feedback.moved)
        if is_new:
            self._draft_new(shown)
        ops.send(None if ops.cuts_by_confidence else self._kept(feedback.features))
        if round.sent_scores is not None:
            round.sent_scores.copy_(round.pending.first_scores(self.gamma))
        if round.rejections.count:
            ops.find_rejections()
        ops.release()

    def _draft_new(self, shown: int) -> None:
        """Draft up to gamma tokens on the rows that have none, until a hook stops them (confidence below epsilon)."""
        round, ops = self.round, self.ops
        for step in range(self.gamma):
            if self._nobody(round.going & (round.pending.end < round.bound)):
                break
            logits = self._forward(ops.draft_inputs(step, shown))
            ops.extend(logits, round.going, round.bound, stops=True)

    def _kept(self, features: Tensor | None) -> Tensor:
        """[B] how much of each pending draft to send, by the hooks; the length head (H-RAD) is one of them.

        They are asked about surviving drafts, and about new ones if a hook wants to be: on a poorly aligned pair most
        rolled back tokens come from there. What is not sent becomes the main branch.
        """
        round, hooks, pending = self.round, self.hooks, self.round.pending
        round.fresh.copy_(round.empty & (pending.end > pending.start))
        concerned = round.survived | round.fresh if hooks.fresh_drafts else round.survived
        if not self.policy.forks or self._nobody(concerned):
            return pending.length
        longest = pending.reach if round.static_shapes else int(pending.length.max())
        kept = hooks.keep(pending.survivor(longest, features, round.fresh, with_scores=hooks.draft_scores))
        return kept.where(concerned, pending.length)

    def _branch(self, shown: int) -> None:
        round, ops = self.round, self.ops
        if self._nobody(round.ahead):
            return
        ops.extend(self._forward(ops.point_inputs(shown)), round.ahead, round.point, further=1)
        ops.fork()  # up to k_max branches, the less confident the draft is the more
        for step in range(self.depth):
            if ops.is_branching_done():
                break
            ops.extend_branches(self._forward(ops.branch_inputs(step, shown)), step)
        if round.following is not None:  # the main branch starts after all draft tokens, where there are no leaves
            round.following[:, 1:] = round.side.tokens[:, :, 1]
        ops.release()

    def _forward(self, inputs: ForwardInputs | None) -> Tensor | None:
        return None if inputs is None else self.model.forward(inputs)

    def _nobody(self, rows: Tensor) -> bool:
        """Whether no row takes part, where the device may be asked."""
        return not self.round.static_shapes and not bool(rows.any())
