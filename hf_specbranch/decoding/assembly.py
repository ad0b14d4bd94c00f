"""Makes the parts of the loop for one `generate()` call."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..config import SpecBranchConfig
from ..kernels.backend import serves
from ..model_state import state_of, weight_bytes
from ..planning.agreement import Agreement, agreement_from_logits, read_agreement
from ..planning.chooser import plans_within
from ..planning.costs import StepCosts
from ..planning.online import Planner
from ..runtime.eager import EagerRunner, PlanRun
from ..runtime.kv_cache import past_length
from ..runtime.overlap import Overlap
from ..runtime.prefill import can_read_in_spare_slots, longest_in_spare_slots, read_in_spare_slots, spare_slots
from ..runtime.selection import BRANCH_SLOTS
from ..runtime.static_buffers import Buffers
from ..stats import SpecBranchStats
from ..target_heads.base import TargetHead
from .call import Call
from .call_costs import CallCosts
from .hooks import HookList, SpeculationHook
from .loop import NoDraft, Parts
from .model_inputs import ModelInputs
from .outputs import Recorder
from .policies import POLICIES, for_head, without_alternatives
from .resolve import Accounting
from .scoring import can_guide, has_static_form
from .sources import Sources
from .target import Target
from .target_states import TargetStates
from .text import Text
from .verifier import Verifier

CHEAP = 50  # a draft is cheap that has so many times fewer parameters than its target
# Tokens of a text that the planner looks at; too few of them; tokens that the draft reads for that, by whether stages
# are captured. A draft that has not read the prompt agrees less: most answers refer to it.
WINDOW, FEWEST, CONTEXT = 128, 16, {True: 1024, False: 256}


class Assembly(Sources):
    """Makes the parts of a generation, and the buffers they work on.

    Args:
        call: the `generate()` call.
        runner: runs the target.
        draft_runner: runs the draft, if there is one.
        further: what else the target is given after the prompt.
        recorder: keeps further outputs for the caller, if any are wanted.
        stats: where to count.
    """

    def __init__(
        self,
        call: Call,
        runner: EagerRunner,
        draft_runner: EagerRunner | None,
        further: ModelInputs,
        recorder: Recorder | None,
        stats: SpecBranchStats,
    ) -> None:
        self.call, self.recorder, self.stats = call, recorder, stats
        self.runner, self.draft_runner, self.further = runner, draft_runner, further
        self.stopper, self.attention = call.stopper, call.attention()
        if not call.is_unpadded and has_holes(self.attention):  # spans cannot say that
            for each in (runner, draft_runner or runner):
                each.takes_spans = False
        self.samples = bool(call.generation_config.do_sample)
        self.guided = any(map(can_guide, call.processors))
        self.in_step = call.in_step
        self.vocabulary = scored_tokens(call.model)
        self.given = HookList(call.all_hooks)
        self.static_shapes = self._can_be_static(self.given.hooks)
        # The operations between forwards run in Triton, where they can.
        self.in_triton = self.static_shapes and bool(call.config.kernels) and serves(runner.device)
        cheap = draft_runner is None or is_cheap(runner.model, draft_runner.model)
        config = call.config
        if any(each.is_recurrent for each in self.runners):
            config = without_alternatives(config, runner, draft_runner)
        if self.head is not None:
            config = for_head(config, self.head, self.static_shapes)
        first = config.decided(self.static_shapes, cheap, alone=not self.given.hooks)
        self.plans = [first]
        if self._may_plan:
            self.plans += plans_within(config, self.static_shapes, self.costs.predicted(0).draft_step)
        longest = max(max(plan.draft_length, plan.lookup_tokens) for plan in self.plans)
        self.reach = self.stopper.max_length + longest + 3  # the last draft too
        # Before a stage is captured, which contains where they are. A round may be in flight when the host finds that a
        # row has ended in the round before: the row goes back by up to two passes.
        runner.cache.keep_states((2 if runner.captures else 1) * (longest + 1) + 1)
        if draft_runner is not None:  # a draft is rolled back over all that was drafted, ahead of the target too
            draft_runner.cache.keep_states(2 * longest + 8)
        self.capacity = runner.columns(self.reach)  # columns of the text
        self.seeds = call.seeds()

    @property
    def head(self) -> TargetHead | None:
        """The draft, if it is a head of the target."""
        draft = None if self.draft_runner is None else self.draft_runner.model
        return draft if isinstance(draft, TargetHead) else None

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The target's hidden states that hooks or a head read."""
        return tuple(sorted({*self.given.feature_layers, *(() if self.head is None else self.head.state_layers)}))

    @property
    def _may_plan(self) -> bool:
        """Whether the planner has anything to choose."""
        draft = self.draft_runner
        if draft is None or (draft.is_recurrent and self.call.rows > 1):  # it cannot read rows of different lengths
            return False
        return self.call.may_plan

    def parts(self) -> Parts:
        """Return everything that the loop needs except a drafter."""
        call = self.call
        buffers = self.buffers_for(self.runner, call.input_ids.device, ())
        text = Text(
            buffers, call.input_ids, self.capacity, self.stopper, call.pad_token, self.in_step, call.streamer,
            call.ended, call.padding,
        )  # fmt: skip
        generator = buffers.generator("verify", next(self.seeds)) if self.samples else None
        verifier = Verifier(
            buffers, text, list(call.processors), self.vocabulary, self.samples, generator, self.given.feature_layers,
            None if self.recorder is None else self.recorder.scores_so_far, self.in_triton,
        )  # fmt: skip
        target = self._target(buffers, text)
        return Parts(target, NoDraft(verifier.nothing), verifier, text, self.recorder, Accounting(self.stats, depth=0))

    def agreements(self, text: Text, model: PreTrainedModel | None = None) -> list[Agreement]:
        """Return how the draft, or another model, agrees with the text of the first unfinished row, if it is long."""
        row = 0 if text.finished else text.done.index(False)
        new, length = len(text.new[row]), text.lengths[row]
        if new < FEWEST:
            return []
        draft, padding = self.draft_runner, int((~self._own_attention[row]).sum())
        assert draft is not None and self.call.draft is not None
        context = min(CONTEXT[self.static_shapes], draft.position_limit or length)
        if self.static_shapes:  # a longer text of many rows would be read kernel by kernel
            context = min(context, longest_in_spare_slots(self.call.rows) or context)
        ids = text.ids[row : row + 1, max(padding, length - context) : length].to(draft.device)
        before = max(1, ids.shape[1] - min(new, WINDOW))
        temperature = self.call.temperature if self.samples else 1.0
        candidates = self.call.config.max_branches + 1
        rows, used = self.call.rows, max(text.lengths) + BRANCH_SLOTS
        if draft.takes_spans:
            draft.reserve(rows, used + spare_slots(rows, ids.shape[1]))
        model = model or self.call.draft
        shortlist = state_of(model).shortlist
        tokens = None if shortlist is None else shortlist.ids
        if model is draft.model and self.static_shapes and can_read_in_spare_slots(draft, rows, ids.shape[1], used):
            known, ids = ids.clamp(max=draft.vocabulary - 1), ids[:, before - 1 :]
            logits = read_in_spare_slots(draft, known, rows, last=ids.shape[1])
            found = agreement_from_logits(logits, ids, 1, candidates, temperature, tokens)
        else:
            found = read_agreement(model, ids, before, candidates, temperature, tokens)
        return [found if self.lookup is None else replace(found, lookups=self.lookup.recorded(row, len(found.rank)))]

    def planner(self, text: Text) -> Planner:
        """Return the planner that chooses between the plans."""
        costs = self.costs
        if not self.samples:
            costs.factors()  # the planner begins with these
        return Planner(
            self.plans, self.call.config, costs.situation, costs.knowledge, costs.predicted,
            agreements=lambda: self.agreements(text),
            context=lambda: max(text.lengths),
            measures=not self.samples,
            is_captured=lambda plan: not self.static_shapes or self._stages(plan) in self.runner.plans_run,
            remaining=lambda: self.stopper.max_length - max(text.lengths),
        )  # fmt: skip

    @cached_property
    def costs(self) -> CallCosts:
        """What steps of both models cost."""
        prompt = self.call.input_ids.shape[1]
        return CallCosts(
            self.runner, self.draft_runner, self.call.rows, prompt, self.static_shapes, measured=not self.samples
        )

    def step_costs(self, context: int) -> StepCosts:
        """Return what steps cost at this length of text."""
        return self.costs.at(context)

    def captures(self) -> int:
        """How many graphs have been captured so far."""
        return sum(runner.graphs_captured for runner in self.runners)

    def capture_seconds(self) -> float:
        """The time that captures have taken so far."""
        return sum(runner.capture_seconds for runner in self.runners)

    @property
    def runners(self) -> list[EagerRunner]:
        """The runner of the target, and that of the draft if there is one."""
        return [runner for runner in (self.runner, self.draft_runner) if runner is not None]

    def overlap(self) -> Overlap:
        """Return what runs draft and target at the same time."""
        draft = self.draft_runner or self.runner
        return Overlap(self.runner.device, draft.device, self.stats, inline=self.static_shapes)

    def with_drafter(self, plan: SpecBranchConfig, parts: Parts) -> Parts:
        """Return these parts with the draft source of the plan."""
        if self.static_shapes:
            self.runner.plans_run.add(self._stages(plan))
        source = self.source_of(plan, parts)
        accounting = Accounting(self.stats, source.depth, source.keeps_drafts)
        return parts._replace(drafter=source, accounting=accounting)

    def _stages(self, plan: SpecBranchConfig) -> PlanRun:
        """Name the stages of a plan: everything that makes them differ from those of another plan or call."""
        drafting = (plan.draft_length, plan.confidence_threshold, plan.max_branches, plan.max_rejection_branches)
        drafts = (*drafting, plan.tree_leaves) if POLICIES[plan.policy].drafts else ()
        lookup = plan.lookup_tokens, plan.max_matching_ngram_size
        return PlanRun(self.call.stage_settings, (plan.policy, drafts, lookup, self.capacity, self.runner.takes_spans))

    def observed(self, parts: Parts) -> Parts:
        """Return the parts as the caller's observer wraps them, if there is one."""
        return parts if self.call.observer is None else self.call.observer(parts)

    def _can_be_static(self, hooks: list[SpeculationHook]) -> bool:
        """Whether stages are captured whole; the statistics say why not, where that costs speed."""
        self.stats.runtime = self.runner.runtime
        if not self.runner.captures:
            self.stats.slowed_by = self.runner.why_eager
            return False
        self.stats.slowed_by = self._why_not_static(hooks)
        return not self.stats.slowed_by

    def _why_not_static(self, hooks: list[SpeculationHook]) -> str:
        if self.call.observer is not None:
            return "an observer looks at every round"
        for processor in self.call.processors:
            if not has_static_form(processor):
                return f"{type(processor).__name__} runs on the host"
        for hook in hooks:
            if hook.settings is None:
                return f"the hook {type(hook).__name__} runs on the host"
        if self.recorder is not None:
            return "scores, logits, hidden states or attentions are returned"
        positions = self.further.position_ids
        if positions is not None and positions.ndim == 3 and bool((positions != positions[:1]).any()):
            return "positions have several axes"
        if self.further.names:
            return f"{', '.join(self.further.names)} must be given to every pass of the target"
        if self.in_step:
            return "a stopping criterion wants rows of equal length"
        if self.draft_runner is not None and not self.draft_runner.captures:
            return ": ".join(filter(None, ("the draft runs eagerly", self.draft_runner.why_eager)))
        if self.call.input_ids.device != self.runner.device:
            return "inputs and target are not on one device"
        if self.call.translation is not None and (self.draft_runner or self.runner).device != self.runner.device:
            return "a draft with another tokenizer is on another device"
        return ""

    def buffers_for(self, runner: EagerRunner, device: torch.device, more: tuple[Hashable, ...]) -> Buffers:
        if not self.static_shapes:
            return Buffers(device)
        sizes = (self.call.rows, self.capacity, self._target_slots)
        return runner.buffers((sizes, self.call.stage_settings, self.in_triton, self.state_layers, more))

    @property
    def _target_slots(self) -> int:
        cached = self.attention.shape[1] - self.call.input_ids.shape[1]
        leaves = max(int(plan.tree_leaves) for plan in self.plans)
        return self.runner.columns(cached + self.reach + leaves)

    def _target(self, buffers: Buffers, text: Text) -> Target:
        call, runner = self.call, self.runner
        cached = 0 if call.past is None else past_length(call.past)
        if call.past is not None and cached:
            runner.cache.load(call.past)
        kwargs = {**call.model_kwargs, runner.cache_argument: runner.cache}
        wanted = ("output_attentions", "output_hidden_states")
        outputs = {name: True for name in wanted if call.model_kwargs.get(name)}
        returns_hidden = "output_hidden_states" in outputs
        if self.state_layers:
            outputs["output_hidden_states"] = True

        def prefill(given: TargetStates | None) -> Any:
            states = {} if given is None or returns_hidden else given.outputs
            return call.model._prefill(call.input_ids, call.generation_config, {**kwargs, **states})

        next_position = self.further.position_ids
        first = call.first_position(self.attention, next_position)
        axes = None
        if next_position is not None and next_position.ndim == 3:
            axes = next_position.expand(-1, call.rows, -1) - (first + self.attention.shape[1])[:, None]
        alone = self.static_shapes and call.ranks is None
        tokens_alone = alone and call.is_tokens_alone(self.attention, runner.takes_spans)
        fresh = not cached and call.ranks is None and self.head is None  # a head needs the states of the prompt
        reuses = call.config.prefix_reuse and fresh
        return Target(
            buffers, runner, text, prefill, self.attention, first, self._target_slots, outputs, self.state_layers,
            self.stats, tokens_alone, self.further, axes, self.in_triton, reuses, call.ranks, call.is_unpadded,
        )  # fmt: skip


def has_holes(attention: Tensor) -> bool:
    """Whether attention [B, S] hides a token after one that it does not hide, as padding on the right does.

    Example:
        >>> has_holes(torch.tensor([[False, True, True]])), has_holes(torch.tensor([[True, False, True]]))
        (False, True)
    """
    return bool((attention[:, :-1] & ~attention[:, 1:]).any())


def scored_tokens(model: PreTrainedModel) -> int:
    """Return how many tokens a model scores; embeddings may be wider than its config says."""
    weight: Tensor | None = getattr(model.get_output_embeddings(), "weight", None)
    vocabulary, rows = int(model.config.get_text_config(decoder=True).vocab_size), 0 if weight is None else len(weight)
    # Of a tensor parallel model, transformers 5.15 shows no weights but those of this rank.
    return max(vocabulary, rows) if weight is None or getattr(model, "_tp_size", None) else rows


def is_cheap(target: torch.nn.Module, draft: torch.nn.Module) -> bool:
    """Whether the draft is small compared with its target."""
    return weight_bytes(target) >= CHEAP * weight_bytes(draft)
