"""The parts of a loop, made for one `generate()` call."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.logits_process import TemperatureLogitsWarper

from ..runners.desk import Desk
from ..runners.eager import EagerRunner, round_up
from ..runners.slots import past_length
from ..stats import SpecBranchStats
from .draft_model import DraftModel
from .drafter import Drafter, NoDrafter
from .fixed_scoring import has_fixed_form, signature
from .hooks import ConfidenceStop, HookList, SpeculationHook, ThreeWay, TopKBranches
from .judge import Judge
from .ledger import Books
from .line import Line
from .loop import Parts
from .policies import Policy
from .recorder import Recorder
from .scoring import can_guide, is_opaque
from .target import Target
from .text import Text

if TYPE_CHECKING:
    from .engine import Call

# Tokens drawn from the draft were accepted at least as often as its likeliest ones from here on (docs/benchmarks.md);
# towards 0 the two become the same, and likeliest tokens need no distribution to be kept and tested.
GREEDY_DRAFTS_BELOW = 0.3
CHEAP = 50  # a draft is that has so many times fewer parameters than its target


class Assembly:
    """Puts together who takes part in a generation, and the desks they work on.

    Args:
        call: the `generate()` call.
        policy: the method.
        runner: runs the target.
        draft_runner: runs the draft, if the method has one.
        recorder: keeps what the caller wants beside the tokens.
        stats: where to count.
    """

    def __init__(
        self,
        call: Call,
        policy: Policy,
        runner: EagerRunner,
        draft_runner: EagerRunner | None,
        recorder: Recorder,
        stats: SpecBranchStats,
    ) -> None:
        self.call, self.policy, self.recorder, self.stats = call, policy, recorder, stats
        self.runner, self.draft_runner = runner, draft_runner
        self.stopper, self.attention = call.stopper, call.attention()
        self.samples = bool(call.generation_config.do_sample)
        self.in_step = call.rows > 1 and (self.stopper.needs_rows_in_step or any(map(is_opaque, call.processors)))
        self.branches = call.config.max_branches if policy.forks else 1
        self.vocabulary = call.model.config.get_text_config(decoder=True).vocab_size
        if draft_runner is not None:
            self.branches = min(self.branches, self.vocabulary, draft_runner.vocabulary)
        given = given_hooks(call)
        self.fixed = self._can_be_fixed(given)
        self.config = call.config.decided(self.fixed, self._draft_is_cheap, alone=not given)
        epsilon = self.config.threshold()
        rules = [ConfidenceStop(epsilon)] if epsilon > 0 else []  # at 0 nothing ever stops: drafts of fixed length
        self.hooks = HookList([*given, *rules, TopKBranches(call.config.max_branches)])
        self.gamma = self.config.draft_length
        self.outcomes, self.leaves = self._outcomes(), self._leaves()
        self.capacity = self._size(self.stopper.max_length + self.gamma + 3)  # columns of the text
        self.seeds = make_seeds(call)

    def parts(self) -> Parts:
        """Everything a loop needs."""
        call = self.call
        desk = self._desk(self.runner, call.input_ids.device, ())
        pad = getattr(call.generation_config, "_pad_token_tensor", None)
        pad_token = int(pad) if pad is not None else 0
        text = Text(desk, call.input_ids, self.capacity, self.stopper, pad_token, self.in_step, call.streamer)
        drafter = None if self.draft_runner is None else self._drafter(self.draft_runner, desk.serial)
        serial = NoDrafter.serial if drafter is None else drafter.serial
        generator = desk.generator("verdicts", self.seeds[0]) if self.samples else None
        layers = self.hooks.feature_layers
        judge = Judge(desk, text, list(call.processors), self.vocabulary, self.samples, generator, layers, serial)
        target = self._target(desk, text, serial)
        books = Books(self.stats, 0 if drafter is None else drafter.depth)
        return Parts(target, drafter or NoDrafter(judge.nothing), judge, text, self.recorder, books)

    def _can_be_fixed(self, hooks: list[SpeculationHook]) -> bool:
        """Whether stages are captured whole; the statistics say why not, where that costs speed."""
        self.stats.runtime = self.runner.runtime
        if not self.runner.captures:
            return False
        self.stats.slowed_by = self._why_not_fixed(hooks)
        return not self.stats.slowed_by

    def _why_not_fixed(self, hooks: list[SpeculationHook]) -> str:
        if self.call.observer is not None:
            return "an observer looks at every round"
        for processor in self.call.processors:
            if not has_fixed_form(processor):
                return f"{type(processor).__name__} runs on the host"
        for hook in hooks:
            if hook.settings is None:
                return f"the hook {type(hook).__name__} runs on the host"
        if not self.recorder.keeps_nothing:
            return "scores, logits, hidden states or attentions are returned"
        if self.in_step:
            return "a stopping criterion wants rows of equal length"
        if self.draft_runner is not None and not self.draft_runner.captures:
            return "the draft runs eagerly"
        places = {self.call.input_ids.device, self.runner.device, (self.draft_runner or self.runner).device}
        if len(places) > 1:
            return "inputs, target and draft are not on one device"
        return ""

    @property
    def _draft_is_cheap(self) -> bool:
        """Whether a whole line is drafted in a small part of the target's pass."""
        return self.draft_runner is None or is_cheap(self.runner.model, self.draft_runner.model)

    def _outcomes(self) -> int:
        """The most branches at chain positions; a guide follows the line and its end only."""
        if not self.policy.forks or any(map(can_guide, self.call.processors)):
            return 0
        return min(int(self.config.max_outcomes), self._most_foreseen)

    def _leaves(self) -> int:
        """The most runners-up; none where rounds must end at the target's first own token."""
        ordered = self.in_step or any(map(is_opaque, self.call.processors))
        if self.draft_runner is None or not self.policy.forks or ordered or not self.recorder.keeps_nothing:
            return 0
        return min(self.call.config.runners_up, self._most_foreseen)

    @property
    def _most_foreseen(self) -> int:
        most: int = self.gamma * min(self.branches, self.vocabulary - 1)
        return most

    def _size(self, needed: int) -> int:
        """Few sizes where memory and stages are to be used again."""
        return round_up(needed) if self.fixed else needed

    def _desk(self, runner: EagerRunner, device: torch.device, more: tuple[Hashable, ...]) -> Desk:
        if not self.fixed:
            return Desk(device)
        call = self.call
        processors = tuple(map(signature, call.processors))
        settings = (call.rows, self.capacity, self._target_slots, self.samples, self.hooks.feature_layers, processors)
        return runner.desk((settings, more))

    @property
    def _target_slots(self) -> int:
        cached = self.attention.shape[1] - self.call.input_ids.shape[1]
        return self._size(cached + self.capacity + self.leaves)

    def _target(self, desk: Desk, text: Text, drafter: int) -> Target:
        call, runner = self.call, self.runner
        past = call.past
        if past is not None and past_length(past) > 0:
            runner.cache.load(past)
        kwargs = {**call.model_kwargs, "past_key_values": runner.cache}
        wanted = ("output_attentions", "output_hidden_states")
        outputs = {name: True for name in wanted if call.model_kwargs.get(name)}
        if self.hooks.feature_layers:
            outputs["output_hidden_states"] = True

        def prefill() -> Any:
            return call.model._prefill(call.input_ids, call.generation_config, kwargs)

        first = call.first_position(self.attention)
        return Target(
            desk, runner, text, prefill, self.attention, first, self._target_slots, outputs,
            self.hooks.feature_layers, drafter, self.stats,
        )  # fmt: skip

    def _drafter(self, runner: EagerRunner, target: int) -> Drafter:
        call, prompt = self.call, self.call.input_ids.to(runner.device)
        draws = self.samples and not self.in_step and draws_drafts(call)
        capacity = self._size(self.capacity + (self.branches + self.outcomes + 2) * (self.gamma + 1))
        counts = (self.gamma, self.branches, self.outcomes, self.leaves)
        baked = (target, capacity, *counts, self.policy.name, draws, self.vocabulary)
        desk = self._desk(runner, runner.device, (*baked, self.hooks.settings))
        own = self.attention[:, self.attention.shape[1] - prompt.shape[1] :]  # it reads the text, not what is cached
        own = own.to(runner.device)
        model = DraftModel(desk, runner, own, self.vocabulary, call.processors, capacity, self.stats)
        generator = desk.generator("drafts", self.seeds[1]) if draws else None
        reach = 2 * self.gamma + 2  # a chain, the branch point, a branch
        line = Line(desk, prompt, capacity, reach, self.vocabulary, generator)
        limit = self.stopper.max_length
        return Drafter(desk, model, line, self.policy, *counts, self.hooks, limit, self.stats)


def given_hooks(call: Call) -> list[SpeculationHook]:
    """The user's hooks, then the head; the built-in rules come after these."""
    head = call.config.length_head
    if isinstance(head, SpeculationHook):
        return [*call.hooks, head]
    return [*call.hooks, ThreeWay(head)] if callable(head) else list(call.hooks)


def is_cheap(target: torch.nn.Module, draft: torch.nn.Module) -> bool:
    """Whether the draft is small beside its target."""
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in (target, draft)]
    return sizes[0] >= CHEAP * sizes[1]


def make_seeds(call: Call) -> tuple[int, int]:
    """Seeds for the verdicts and for the drafts, apart, so that threads cannot reorder the draws.

    Both come from the caller's source of randomness: the same seed gives the same text.
    """
    if not call.generation_config.do_sample:
        return 0, 0
    source = call.generator
    where = source.device if source is not None else torch.device("cpu")
    first, second = torch.randint(2**62, (2,), generator=source, device=where).tolist()
    return first, second


def draws_drafts(call: Call) -> bool:
    """Whether drafts are drawn from `q`, or are its likeliest tokens. A processor that must be called in order
    gives no `p` for positions ahead, so drafts cannot be tested against it; they can be compared with its choice.
    """
    if any(map(is_opaque, call.processors)):
        return False
    if call.config.draft_sampling != "auto":
        return call.config.draft_sampling == "sample"
    warpers = [p for p in call.processors if isinstance(p, TemperatureLogitsWarper)]
    return (warpers[-1].temperature if warpers else 1.0) >= GREEDY_DRAFTS_BELOW
