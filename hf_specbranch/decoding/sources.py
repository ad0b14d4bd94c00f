"""Which draft source a plan takes, and how it is made: the place to add another one.

A source implements `draft_source.DraftSource`. `Sources.source_of` chooses it by the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import torch
from torch import Tensor

from ..config import SpecBranchConfig
from ..planning.costs import StepCosts
from ..planning.step_worth import StepWorth
from ..runtime.eager import EagerRunner, leading_padding
from ..runtime.static_buffers import Buffers
from ..stats import SpecBranchStats
from ..target_heads.base import TargetHead
from .block_model import BlockDraftOps, BlockModel
from .call import Call
from .candidates import CandidateDraft
from .draft_elsewhere import DraftElsewhere
from .draft_model import DraftModel, read_ahead
from .draft_source import DraftOps, DraftSource
from .draft_state import DraftRound, LikelyRejections, PendingDraft, SideBranches, branch_depth
from .drafter import Drafter, TorchDraftOps
from .head_model import HeadModel
from .hooks import ConfidenceStop, HookList, TopKBranches
from .lookup import Lookup, LookupDraft, PassTimes, lengths_up_to
from .loop import NoDraft, Parts
from .outputs import Recorder
from .policies import POLICIES, Policy
from .reencoded import EXPANSION, LOOKBEHIND, READ, ReencodedDraft
from .several_sources import LookupBesideDraft
from .shared_vocabulary import TranslatedDrafter, TranslatedDraftModel, spare_columns
from .stepwise_drafter import StepwiseDrafter
from .text import Stopper, Text
from .text_index import INDEXED, LONGEST, SHORTEST
from .triton_draft_ops import TritonDraftOps, kernels_know


def is_elsewhere(drafter: Drafter, here: Buffers) -> bool:
    """Return whether a draft is on another device than the target's buffers."""
    return drafter.device != here.device


class Sources:
    """Makes the draft sources of a generation. `Assembly`, which is one, sets the attributes."""

    call: Call
    stats: SpecBranchStats
    recorder: Recorder | None
    runner: EagerRunner
    draft_runner: EagerRunner | None
    stopper: Stopper
    attention: Tensor  # [B, filled] bool over everything the target will have read
    samples: bool
    static_shapes: bool
    in_step: bool
    guided: bool
    in_triton: bool
    given: HookList  # the user's hooks, and the length head
    vocabulary: int
    reach: int  # the most columns of the text, the last draft included
    seeds: Iterator[int]
    buffers_for: Callable[[EagerRunner, torch.device, tuple[Hashable, ...]], Buffers]
    step_costs: Callable[[int], StepCosts]  # at a length of text
    all_steps: bool = False  # drafts take all their steps, wherever they stop; for a warm-up
    lookup: Lookup | None = None  # follows the text through all plans
    candidates: CandidateDraft | None = None  # the user's generator, if it drafts

    def source_of(self, plan: SpecBranchConfig, parts: Parts) -> DraftSource:
        """Return the draft source of a plan."""
        source = self._source_of(plan, parts)
        drafter = source.drafter if isinstance(source, LookupBesideDraft) else source
        if self.static_shapes and isinstance(drafter, Drafter) and is_elsewhere(drafter, parts.text.buffers):
            return DraftElsewhere(source, drafter.buffers, parts.text.buffers)
        return source

    def _source_of(self, plan: SpecBranchConfig, parts: Parts) -> DraftSource:
        policy, nothing = POLICIES[plan.policy], parts.verifier.nothing
        if self.call.candidates is not None and policy.drafts:
            draws = self.samples and not self.in_step
            self.candidates = CandidateDraft(
                self.call.candidates, parts.text.buffers, parts.verifier, self._own_attention, plan.draft_length,
                self.vocabulary, draws,
            )  # fmt: skip
            return self.candidates
        drafter = None
        if self.draft_runner is not None and policy.drafts:
            if self._reencodes(plan, policy):
                return self._reencoded_draft(plan, self.draft_runner, parts)
            drafter = self._drafter(plan, self.draft_runner, parts)
            parts.target.states = parts.verifier.states = drafter.model.states
        if not plan.lookup_tokens or (drafter is not None and not self._may_look_up_beside(policy)):
            return NoDraft(nothing) if drafter is None else drafter
        found, patient = self._lookup(plan, parts), not self.samples
        lookup = LookupDraft(parts.text.buffers, found, self._first_columns(parts), nothing, patient)
        if drafter is None:
            return lookup
        return LookupBesideDraft(drafter, lookup, self.step_costs(max(parts.text.lengths)))

    def _draws(self) -> bool:
        """Whether drafts are drawn from the draft's distribution."""
        return self.samples and not self.in_step and self.call.draws_drafts

    def _reencodes(self, plan: SpecBranchConfig, policy: Policy) -> bool:
        """Whether a draft with another tokenizer continues the text, and does not propose shared tokens.

        Text has no distribution over the target's tokens, and nothing can be drafted ahead or looked up beside it.
        """
        ahead = policy.drafts_ahead or plan.lookup_tokens > 0
        return self.call.translation is not None and not self._draws() and not ahead

    def _reencoded_draft(self, plan: SpecBranchConfig, runner: EagerRunner, parts: Parts) -> ReencodedDraft:
        text, gamma, translation = parts.text, plan.draft_length, self.call.translation
        assert translation is not None
        capacity = runner.columns(EXPANSION * self.reach + 2 * (gamma + max(READ)))
        buffers = self.buffers_for(runner, runner.device, (text.serial, capacity, gamma, translation.serial))
        lookbehind = getattr(self.call.generation_config, "assistant_lookbehind", None)
        return ReencodedDraft(
            runner, buffers, text, self._own_attention, translation, gamma, plan.threshold(),
            LOOKBEHIND if lookbehind is None else lookbehind, self.stats, capacity,
        )  # fmt: skip

    def _may_look_up_beside(self, policy: Policy) -> bool:
        """Whether looked-up tokens may replace drafts: rows have none pending, and no hook follows drafts."""
        recurrent = self.draft_runner is not None and self.draft_runner.is_recurrent  # rows cannot catch up apart
        alone = self.call.rows == 1 or not (policy.drafts_ahead or recurrent)
        return policy.drafts_first and alone and not (self.guided or self.in_step or self.given.hooks)

    def _lookup(self, plan: SpecBranchConfig, parts: Parts) -> Lookup:
        if self.lookup is None:
            costs = self.step_costs(max(parts.text.lengths))
            times = PassTimes(costs.pass_seconds, measures=self.draft_runner is None and not self.samples)
            size = plan.max_matching_ngram_size
            attention = None if self.call.rows == 1 and self.call.is_unpadded else self._own_attention
            lengths = lengths_up_to(plan.lookup_tokens)
            if self.static_shapes:  # each number takes captures of its own
                lengths = plan.captured_lookups[: None if self.call.rows == 1 else 1]
            self.lookup = Lookup(
                parts.text, attention, lengths,
                LONGEST if isinstance(size, str) else size, self.call.corpus, times,
                SHORTEST if self.static_shapes else INDEXED,
            )  # fmt: skip
        return self.lookup

    def _first_columns(self, parts: Parts) -> Tensor:
        return leading_padding(self._own_attention).to(parts.text.ids.device)

    def _drafter(self, plan: SpecBranchConfig, runner: EagerRunner, parts: Parts) -> Drafter:
        call, text, policy, gamma = self.call, parts.text, POLICIES[plan.policy], plan.draft_length
        alternatives = min(plan.max_branches, self.vocabulary, runner.vocabulary)
        branches = alternatives if policy.forks else 1
        rejection_branches, leaves = self._speculated_widths(plan, policy, alternatives)
        draws = self._draws()
        translation = call.translation
        spare = 0 if translation is None else spare_columns(self.reach)
        capacity = runner.columns(self.reach + (branches + rejection_branches + 2) * (gamma + 1) + spare)
        counts = (gamma, branches, rejection_branches, leaves)
        head = runner.model if isinstance(runner.model, TargetHead) else None
        stepwise = self.static_shapes and head is None and translation is None and plan.stops_early
        by_cost = stepwise and plan.stops_by_cost and not policy.drafts_ahead
        epsilon = 0.0 if by_cost else plan.threshold()
        rules = [ConfidenceStop(epsilon)] if epsilon > 0 else []  # at 0 nothing stops a draft
        hooks = HookList([*self.given.hooks, *rules, TopKBranches(plan.max_branches)])
        serial = None if translation is None else translation.serial
        baked = (text.serial, capacity, alternatives, *counts, policy.name, draws, self.vocabulary, serial)
        buffers = self.buffers_for(runner, runner.device, (*baked, hooks.settings))
        own = self._own_attention.to(runner.device)
        ends = frozenset(self.stopper.eos)
        given = buffers, runner, own, self.vocabulary, call.processors, capacity, self.stats, ends
        layers: int = call.model.config.get_text_config(decoder=True).num_hidden_layers
        in_blocks = head is not None and head.block > 0
        kind = BlockModel if in_blocks else HeadModel
        model = DraftModel(*given) if head is None else kind(*given, text, gamma, layers)
        if translation is not None:
            model = TranslatedDraftModel(*given, translation=translation, spare=spare)
        elif self.knows_prompt:
            model.known_tokens = text.row_tokens
        generator = buffers.generator("drafts", next(self.seeds)) if draws else None
        reach = 2 * gamma + 2  # the draft tokens, the branch point, a branch
        ids, start = text.before_round()
        pending = PendingDraft(
            buffers, ids.to(runner.device), start.to(runner.device), capacity, reach, self.vocabulary, generator
        )
        side = SideBranches(buffers, pending, model, branches - 1 + rejection_branches, branch_depth(policy, gamma))
        rejections = LikelyRejections(buffers, pending, gamma, alternatives, max(rejection_branches, leaves))
        limit = self.stopper.max_length
        round = DraftRound(buffers, pending, side, rejections, policy, *counts, limit, self.vocabulary)
        ops: DraftOps = (BlockDraftOps if in_blocks else TorchDraftOps)(round, model, hooks)
        if translation is not None:
            parts_of_it = buffers, model, round, ops, hooks, self.stats
            return TranslatedDrafter(*parts_of_it, text=text, attention=self._own_attention)
        # The kernels do not know the first column that a recurrent draft can read again.
        if self.in_triton and head is None and not runner.is_recurrent and kernels_know(policy, gamma, hooks):
            ops = TritonDraftOps(round, model, hooks, buffers, stepwise)
        parts_of_it = buffers, model, round, ops, hooks, self.stats
        if not stepwise:
            return Drafter(*parts_of_it)
        costs = self.step_costs(max(text.lengths))
        worth = StepWorth(self.stats, costs, call.rows, gamma + leaves) if by_cost else None
        return StepwiseDrafter(*parts_of_it, worth=worth, all_steps=self.all_steps)

    @property
    def knows_prompt(self) -> bool:
        """Whether the draft is to read what the host knows, in captured passes: the tokens of one row, without padding.

        Not where its first pass has to be captured, which takes long.
        """
        runner, call = self.draft_runner, self.call
        if runner is None or isinstance(runner.model, TargetHead) or call.translation is not None:
            return False
        return self.static_shapes and call.rows == 1 and call.is_unpadded and runner.graphs_captured > 0

    def read_ahead(self, plan: SpecBranchConfig, text: Text) -> None:
        """Launch the passes in which the draft of a plan reads the prompt, if they need nothing that is made later."""
        runner = self.draft_runner
        if runner is None or not (POLICIES[plan.policy].drafts and self.knows_prompt) or text.may_finish(1):
            return
        alone = runner.takes_spans and not runner.is_recurrent and not self.guided and text.prompt_length > 0
        if alone and runner.device == self.runner.device:
            read_ahead(runner, text.ids[:, : text.prompt_length], text.row_tokens())

    @property
    def _own_attention(self) -> Tensor:
        """[B, P] bool over the prompt: the draft reads the text, not what is cached."""
        return self.attention[:, self.attention.shape[1] - self.call.input_ids.shape[1] :]

    def _speculated_widths(self, plan: SpecBranchConfig, policy: Policy, alternatives: int) -> tuple[int, int]:
        """Return the most rejection branches and the most tree leaves."""
        most = plan.draft_length * min(alternatives, self.vocabulary - 1)
        rejection_branches = min(int(plan.max_rejection_branches), most)
        leaves = min(int(plan.tree_leaves), most)
        if not policy.forks or self.guided:  # a guide follows one pending draft
            rejection_branches = 0
        # Rows in step, and recorded outputs, need rounds that end at the target's own token.
        if not policy.drafts_first or self.in_step or self.recorder is not None:
            leaves = 0
        return rejection_branches, leaves
