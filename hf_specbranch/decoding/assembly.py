"""The parts of a loop, made for one `generate()` call."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.logits_process import TemperatureLogitsWarper

from ..config import SpecBranchConfig
from ..kernels.backend import serves
from ..model_state import num_parameters
from ..planning.agreement import Agreement, agreement_with, read_agreement
from ..planning.chooser import MOST_HIDDEN, plans_within, usual_costs
from ..planning.online import Planner, knowledge_of
from ..runtime.eager import EagerRunner, round_up
from ..runtime.kv_cache import past_length
from ..runtime.prefill import can_read_in_spare_slots, read_in_spare_slots
from ..runtime.selection import BRANCHES
from ..runtime.static_buffers import Buffers
from ..stats import SpecBranchStats
from .acceptance import NONE
from .accounting import Accounting
from .draft_model import DraftModel
from .drafter import Drafter, NoDrafter
from .hooks import ConfidenceStop, HookList, LengthHeadHook, SpeculationHook, TopKBranches
from .likely_rejections import LikelyRejections
from .loop import Parts
from .model_inputs import ModelInputs
from .outputs import Recorder
from .pending_draft import PendingDraft
from .policies import POLICIES, Policy
from .quick_drafter import QuickDrafter, is_plain
from .quick_judge import QuickJudge
from .quick_target import QuickTarget
from .scoring import can_guide, is_opaque
from .state import Feedback
from .static_scoring import has_static_form, signature
from .target import Target
from .text import Text
from .verifier import Verifier

if TYPE_CHECKING:
    from .engine import Call

# Tokens drawn from the draft were accepted at least as often as its likeliest ones from here on (docs/benchmarks.md);
# towards 0 the two become the same, and likeliest tokens need no distribution to be kept and tested.
GREEDY_DRAFTS_BELOW = 0.3
CHEAP = 50  # a draft is that has so many times fewer parameters than its target
WINDOW, CONTEXT, FEWEST = 128, 256, 16  # tokens of a text the planner looks at; those the draft reads; too few to judge


class Assembly:
    """Puts together who takes part in a generation, and the desks they work on.

    Args:
        call: the `generate()` call.
        runner: runs the target.
        draft_runner: runs the draft, if there is one.
        further: what else the target is given after the prompt.
        recorder: keeps what the caller wants beside the tokens.
        stats: where to count.
    """

    def __init__(
        self,
        call: Call,
        runner: EagerRunner,
        draft_runner: EagerRunner | None,
        further: ModelInputs,
        recorder: Recorder,
        stats: SpecBranchStats,
    ) -> None:
        self.call, self.recorder, self.stats = call, recorder, stats
        self.runner, self.draft_runner, self.further = runner, draft_runner, further
        self.stopper, self.attention = call.stopper, call.attention()
        self.samples = bool(call.generation_config.do_sample)
        self.ordered = any(map(is_opaque, call.processors))  # processors must be called for one token after the other
        self.guided = any(map(can_guide, call.processors))
        self.in_step = self.ordered or (call.rows > 1 and self.stopper.needs_rows_in_step)
        self.vocabulary = scored_tokens(call.model)
        self.given = HookList(given_hooks(call))
        self.static_shapes = self._can_be_static(self.given.hooks)
        self.quick = (
            self.static_shapes and bool(call.config.kernels) and serves(runner.device)
        )  # bookkeeping in few kernels
        cheap = draft_runner is None or is_cheap(runner.model, draft_runner.model)
        first = call.config.decided(self.static_shapes, cheap, alone=not self.given.hooks)
        self.plans = [first, *plans_within(call.config, self.static_shapes)] if self._may_plan else [first]
        longest = max(plan.draft_length for plan in self.plans)
        self.capacity = self._size(self.stopper.max_length + longest + 3)  # columns of the text
        self.seeds = make_seeds(call)

    @property
    def _may_plan(self) -> bool:
        """Whether anything is left to choose. Hooks, heads and observers were made for one method."""
        config, special = self.call.config, self.in_step
        watched = bool(self.given.hooks) or self.call.observer is not None
        return config.policy == "auto" and self.draft_runner is not None and not special and not watched

    def parts(self) -> Parts:
        """Everything a loop needs but a drafter."""
        call = self.call
        buffers = self._buffers_for(self.runner, call.input_ids.device, ())
        pad = getattr(call.generation_config, "_pad_token_tensor", None)
        pad_token = int(pad) if pad is not None else 0
        text = Text(
            buffers, call.input_ids, self.capacity, self.stopper, pad_token, self.in_step, call.streamer, call.ended
        )
        generator = buffers.generator("verdicts", next(self.seeds)) if self.samples else None
        layers = self.given.feature_layers
        kind = QuickJudge if self.quick else Verifier
        shown = self.recorder.scores_so_far
        verifier = kind(buffers, text, list(call.processors), self.vocabulary, self.samples, generator, layers, shown)
        target = self._target(buffers, text)
        return Parts(
            target, NoDrafter(verifier.nothing), verifier, text, self.recorder, Accounting(self.stats, depth=0)
        )

    def change(self, plan: SpecBranchConfig, parts: Parts, feedback: Feedback) -> tuple[Parts, Feedback]:
        """The same text, to be continued after another plan.

        What stands drafted is given up, whatever it is, and the new drafter reads the text anew. For drafts that are
        drawn that is exact only if the choice of a plan does not depend on drafted tokens the target has not judged.
        """
        text = parts.text
        parts.accounting.close()
        parts.target.read_skipped_token()
        parts = self.with_drafter(plan, parts)
        text.survivor.fill_(NONE)  # whichever it was
        parts.drafter.prefill(max(text.lengths))
        return parts, feedback._replace(
            round_result=text.round_result.to(parts.drafter.device), moved=False, draft_ended=True
        )

    def agreements(self, text: Text) -> list[Agreement]:
        """How the draft does on the text of the first row that goes on, if any does; nothing while that is short."""
        assert self.call.draft is not None
        row = 0 if text.finished else text.done.index(False)
        new, length = len(text.new[row]), text.lengths[row]
        if new < FEWEST:
            return []
        draft, padding = self.draft_runner, int((~self._own_attention[row]).sum())
        assert draft is not None
        context = CONTEXT if draft.position_limit is None else min(CONTEXT, draft.position_limit)
        ids = text.ids[row : row + 1, max(padding, length - context) : length]
        before = max(1, ids.shape[1] - min(new, WINDOW))
        temperature = temperature_of(self.call) if self.samples else 1.0
        candidates = self.call.config.max_branches + 1
        if self.static_shapes and self.call.rows == 1 and can_read_in_spare_slots(draft, ids, length + BRANCHES):
            logits = read_in_spare_slots(draft, ids.clamp(max=draft.vocabulary - 1))
            return [agreement_with(logits, ids, before, candidates, temperature)]
        return [read_agreement(self.call.draft, ids, before, candidates, temperature)]

    def planner(self, text: Text) -> Planner:
        """Who chooses between the plans."""
        target, draft = self.runner, self.draft_runner
        assert draft is not None
        usual = usual_costs(target.model, draft.model, self.static_shapes) if self.samples else None
        return Planner(
            self.plans,
            captured=self.static_shapes,
            situation=(self.call.config, self.call.rows, target.runtime, self.static_shapes),
            known=knowledge_of(target.model, draft.model),
            usual=usual,
            agreements=lambda: self.agreements(text),
            context=lambda: max(text.lengths),
            most_hidden=MOST_HIDDEN if target.device == draft.device else 1.0,
        )

    def captures(self) -> int:
        """How many graphs have been captured so far."""
        runners = [runner for runner in (self.runner, self.draft_runner) if runner is not None]
        return sum(runner.graphs_captured for runner in runners)

    def with_drafter(self, plan: SpecBranchConfig, parts: Parts) -> Parts:
        """These parts, and a drafter for the plan."""
        policy = POLICIES[plan.policy]
        if self.draft_runner is None or not policy.drafts:
            return parts._replace(drafter=NoDrafter(parts.verifier.nothing), accounting=Accounting(self.stats, depth=0))
        drafter = self._drafter(plan, self.draft_runner, parts)
        return parts._replace(drafter=drafter, accounting=Accounting(self.stats, drafter.depth))

    def _can_be_static(self, hooks: list[SpeculationHook]) -> bool:
        """Whether stages are captured whole; the statistics say why not, where that costs speed."""
        self.stats.runtime = self.runner.runtime
        if not self.runner.captures:
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
        if not self.recorder.keeps_nothing:
            return "scores, logits, hidden states or attentions are returned"
        positions = self.further.position_ids
        if positions is not None and positions.ndim == 3 and bool((positions != positions[:1]).any()):
            return "positions have several axes"
        if self.further.names:
            return f"{', '.join(self.further.names)} must be given to every pass of the target"
        if self.in_step:
            return "a stopping criterion wants rows of equal length"
        if self.draft_runner is not None and not self.draft_runner.captures:
            return "the draft runs eagerly"
        places = {self.call.input_ids.device, self.runner.device, (self.draft_runner or self.runner).device}
        if len(places) > 1:
            return "inputs, target and draft are not on one device"
        return ""

    def _size(self, needed: int) -> int:
        """Few sizes where memory and stages are to be used again."""
        return round_up(needed) if self.static_shapes else needed

    def _buffers_for(self, runner: EagerRunner, device: torch.device, more: tuple[Hashable, ...]) -> Buffers:
        if not self.static_shapes:
            return Buffers(device)
        call = self.call
        processors = tuple(map(signature, call.processors))
        sizes = (call.rows, self.capacity, self._target_slots)
        return runner.buffers((sizes, self.samples, self.quick, self.given.feature_layers, processors, more))

    @property
    def _target_slots(self) -> int:
        cached = self.attention.shape[1] - self.call.input_ids.shape[1]
        leaves = max(int(plan.tree_leaves) for plan in self.plans)
        return self._size(cached + self.capacity + leaves)

    def _target(self, buffers: Buffers, text: Text) -> Target:
        call, runner = self.call, self.runner
        past = call.past
        if past is not None and past_length(past) > 0:
            runner.cache.load(past)
        kwargs = {**call.model_kwargs, "past_key_values": runner.cache}
        wanted = ("output_attentions", "output_hidden_states")
        outputs = {name: True for name in wanted if call.model_kwargs.get(name)}
        if self.given.feature_layers:
            outputs["output_hidden_states"] = True

        def prefill() -> Any:
            return call.model._prefill(call.input_ids, call.generation_config, kwargs)

        next_position = self.further.position_ids
        first = call.first_position(self.attention, next_position)
        axes = None
        if next_position is not None and next_position.ndim == 3:
            axes = next_position.expand(-1, call.rows, -1) - (first + self.attention.shape[1])[:, None]
        return (QuickTarget if self.quick else Target)(
            buffers, runner, text, prefill, self.attention, first, self._target_slots, outputs,
            self.given.feature_layers, self.stats, self.static_shapes and call.is_tokens_alone(self.attention),
            self.further, axes,
        )  # fmt: skip

    def _drafter(self, plan: SpecBranchConfig, runner: EagerRunner, parts: Parts) -> Drafter:
        call, text, policy, gamma = self.call, parts.text, POLICIES[plan.policy], plan.draft_length
        alternatives = min(plan.max_branches, self.vocabulary, runner.vocabulary)
        branches = alternatives if policy.forks else 1
        rejection_branches, leaves = self._speculated_widths(plan, policy, alternatives)
        draws = self.samples and not self.in_step and draws_drafts(call)
        capacity = self._size(self.capacity + (branches + rejection_branches + 2) * (gamma + 1))
        counts = (gamma, branches, rejection_branches, leaves)
        epsilon = plan.threshold()
        rules = [ConfidenceStop(epsilon)] if epsilon > 0 else []  # at 0 nothing ever stops: drafts of fixed length
        hooks = HookList([*self.given.hooks, *rules, TopKBranches(plan.max_branches)])
        baked = (text.serial, capacity, alternatives, *counts, policy.name, draws, self.vocabulary)
        buffers = self._buffers_for(runner, runner.device, (*baked, hooks.settings))
        own = self._own_attention.to(runner.device)
        ends = frozenset(self.stopper.eos)
        model = DraftModel(buffers, runner, own, self.vocabulary, call.processors, capacity, self.stats, ends)
        generator = buffers.generator("drafts", next(self.seeds)) if draws else None
        reach = 2 * gamma + 2  # a chain, the branch point, a branch
        ids, start = text.before_round()
        pending = PendingDraft(
            buffers, ids.to(runner.device), start.to(runner.device), capacity, reach, self.vocabulary, generator
        )
        likely_rejections = LikelyRejections(buffers, pending, gamma, alternatives, max(rejection_branches, leaves))
        kind = QuickDrafter if self.quick and is_plain(policy, gamma, hooks) else Drafter
        return kind(
            buffers, model, pending, policy, *counts, likely_rejections, hooks, self.stopper.max_length, self.stats
        )

    @property
    def _own_attention(self) -> Tensor:
        """[B, P] bool over the prompt: the draft reads the text, not what is cached."""
        return self.attention[:, self.attention.shape[1] - self.call.input_ids.shape[1] :]

    def _speculated_widths(self, plan: SpecBranchConfig, policy: Policy, alternatives: int) -> tuple[int, int]:
        """The most branches at chain positions, and the most runners-up."""
        most = plan.draft_length * min(alternatives, self.vocabulary - 1)
        rejection_branches, leaves = policy.forks and not self.guided, policy.drafts_first  # a guide follows one line
        if self.in_step or not self.recorder.keeps_nothing:  # a round must end at the first own token
            leaves = False
        return min(int(plan.max_rejection_branches), most) * rejection_branches, min(
            int(plan.tree_leaves), most
        ) * leaves


def given_hooks(call: Call) -> list[SpeculationHook]:
    """The user's hooks, then the head; the built-in rules come after these."""
    head = call.config.length_head
    if isinstance(head, SpeculationHook):
        return [*call.hooks, head]
    return [*call.hooks, LengthHeadHook(head)] if callable(head) else list(call.hooks)


def scored_tokens(model: PreTrainedModel) -> int:
    """How many tokens a model scores; embeddings may be wider than its config says."""
    weight: Tensor | None = getattr(model.get_output_embeddings(), "weight", None)
    return int(model.config.get_text_config(decoder=True).vocab_size if weight is None else weight.shape[0])


def is_cheap(target: torch.nn.Module, draft: torch.nn.Module) -> bool:
    """Whether the draft is small beside its target."""
    return num_parameters(target) >= CHEAP * num_parameters(draft)


def make_seeds(call: Call) -> Iterator[int]:
    """Seeds for the verdicts and for each drafter, apart, so that threads cannot reorder the draws.

    They come from the caller's source of randomness: the same seed gives the same text.
    """
    if not call.generation_config.do_sample:
        return count()
    source = call.generator
    where = source.device if source is not None else torch.device("cpu")
    return count(int(torch.randint(2**62, (1,), generator=source, device=where)))


def draws_drafts(call: Call) -> bool:
    """Whether drafts are drawn from `q`, or are its likeliest tokens. A processor that must be called in order
    gives no `p` for positions ahead, so drafts cannot be tested against it; they can be compared with its choice.
    """
    if any(map(is_opaque, call.processors)):
        return False
    if call.config.draft_sampling != "auto":
        return call.config.draft_sampling == "sample"
    return temperature_of(call) >= GREEDY_DRAFTS_BELOW


def temperature_of(call: Call) -> float:
    """At which a sampled text is drawn."""
    warpers = [p for p in call.processors if isinstance(p, TemperatureLogitsWarper)]
    return float(warpers[-1].temperature) if warpers else 1.0
