"""From a prepared `generate()` call to a loop with its parts, and back to transformers' output."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.logits_process import TemperatureLogitsWarper

from ..config import SpecBranchConfig
from ..runners.choose import runner_for
from ..runners.eager import EagerRunner
from ..runners.placement import Beside
from ..runners.slots import can_load, past_length
from ..stats import SpecBranchStats
from .draft_model import DraftModel
from .drafter import Drafter, NoDrafter
from .hooks import ConfidenceStop, HookList, SpeculationHook, ThreeWay, TopKBranches
from .judge import Judge
from .line import Line
from .loop import Parts, overlapped_loop, sequential_loop
from .policies import POLICIES, Policy
from .recorder import Recorder
from .scoring import Processor, is_opaque
from .stopping import Stopper
from .target import Target
from .text import Text

# Tokens drawn from the draft were accepted at least as often as its likeliest ones from here on (docs/benchmarks.md);
# towards 0 the two become the same, and likeliest tokens need no distribution to be kept and tested.
GREEDY_DRAFTS_BELOW = 0.3


@dataclass
class SpecBranchOutput(GenerateDecoderOnlyOutput):
    """What `generate(return_dict_in_generate=True)` returns, with the statistics beside it."""

    stats: SpecBranchStats | None = None


@dataclass
class Call:
    """One `generate()` call as transformers has prepared it."""

    model: PreTrainedModel
    draft: PreTrainedModel | None
    config: SpecBranchConfig
    hooks: Sequence[SpeculationHook]
    generator: torch.Generator | None
    input_ids: Tensor  # [B, P]
    processors: Sequence[Processor]
    criteria: Sequence[Any]
    generation_config: GenerationConfig
    streamer: Any
    model_kwargs: dict[str, Any]
    fills_cache: bool  # the caller's own past_key_values is to be kept up to date

    @property
    def rows(self) -> int:
        return self.input_ids.shape[0]

    @property
    def past(self) -> Cache | None:
        return self.model_kwargs.get("past_key_values")

    def attention(self) -> Tensor:
        """[B, filled] bool over everything the target will have read, cached tokens included."""
        mask: Tensor | None = self.model_kwargs.get("attention_mask")
        if mask is not None:
            return mask.bool()
        length = getattr(self.generation_config, "_mask_length", None)
        if length is None:
            embedded = self.model_kwargs.get("inputs_embeds")
            length = self.input_ids.shape[1] if embedded is None else embedded.shape[1]
        return torch.ones((self.rows, length), dtype=torch.bool, device=self.input_ids.device)

    def first_position(self, attention: Tensor) -> Tensor:
        """[B] the position of slot 0, such that slot `s` after the prompt has position `s + first`."""
        positions: Tensor | None = self.model_kwargs.get("position_ids")
        if positions is None:
            return -(~attention).sum(1)
        return positions[:, -1].expand(self.rows) - (attention.shape[1] - 1)


def speculate(call: Call) -> tuple[Tensor | SpecBranchOutput, SpecBranchStats]:
    """Generate text, and say what it took."""
    began = time.perf_counter()
    policy = POLICIES[call.config.policy]
    stats = SpecBranchStats(policy=policy.name)
    stopper = Stopper(call.criteria, call.generation_config.max_length)
    in_step = call.rows > 1 and (stopper.needs_rows_in_step or any(map(is_opaque, call.processors)))
    text = _make_text(call, stopper, in_step)
    hooks = _make_hooks(call)
    verdict_rng, draft_rng = _make_generators(call, text, in_step)
    attention = call.attention()
    recorder = Recorder(call.generation_config, call.rows, attention.shape[1])
    judge = Judge(text, call.processors, bool(call.generation_config.do_sample), verdict_rng)
    slots = attention.shape[1] + stopper.max_length - text.prompt_length

    with ExitStack() as runners:
        runner = runners.enter_context(runner_for(call.model, "target", call.rows, slots, call.config.runtime))
        target = _make_target(call, runner, text, attention, hooks, stats)
        drafter: Drafter | NoDrafter = NoDrafter(call.rows, text.ids.device)
        if call.draft is not None and policy.drafts:
            runner = runners.enter_context(runner_for(call.draft, "draft", call.rows, slots, call.config.runtime))
            drafter = _make_drafter(call, runner, policy, text, attention, hooks, draft_rng, stats)
        parts = Parts(target, drafter, judge, text, recorder, hooks.feature_layers)
        with Beside(target.device, drafter.device) as beside:
            loop = overlapped_loop if call.config.overlap and policy.drafts_ahead else sequential_loop
            loop(parts, beside)
            stats.draft_seconds, stats.hidden_seconds = beside.measure()
        if call.streamer is not None:
            call.streamer.end()
        stats.new_tokens = text.gained
        stats.time_to_first_token = text.first_gain - began
        stats.total_seconds = time.perf_counter() - began
        return _make_output(call, target, text, recorder, stats), stats


def _make_text(call: Call, stopper: Stopper, in_step: bool) -> Text:
    pad = getattr(call.generation_config, "_pad_token_tensor", None)
    capacity = stopper.max_length + call.config.draft_length + 2
    pad_token = int(pad) if pad is not None else 0
    return Text(call.input_ids, capacity, stopper, pad_token, in_step, call.streamer)


def _make_hooks(call: Call) -> HookList:
    """The user's hooks first, then the head, then the built-in rules."""
    config = call.config
    hooks = list(call.hooks)
    if isinstance(config.length_head, SpeculationHook):
        hooks.append(config.length_head)
    elif callable(config.length_head):
        hooks.append(ThreeWay(config.length_head))
    if config.confidence_threshold > 0:  # at 0 nothing ever stops: drafts of fixed length
        hooks.append(ConfidenceStop(config.confidence_threshold))
    return HookList([*hooks, TopKBranches(config.max_branches)])


def _make_generators(call: Call, text: Text, in_step: bool) -> tuple[torch.Generator | None, torch.Generator | None]:
    """Randomness for the verdicts and for the drafts, apart, so that threads cannot reorder the draws.

    Both are seeded from the caller's source: the same seed gives the same text.
    """
    if not call.generation_config.do_sample:
        return None, None
    source = call.generator
    where = source.device if source is not None else torch.device("cpu")
    seeds = torch.randint(2**62, (2,), generator=source, device=where).tolist()
    verdicts = torch.Generator(text.ids.device).manual_seed(seeds[0])
    if call.draft is None or in_step or not _draws_drafts(call):
        return verdicts, None
    return verdicts, torch.Generator(_device(call.draft)).manual_seed(seeds[1])


def _draws_drafts(call: Call) -> bool:
    """Whether drafts are drawn from `q`, or are its likeliest tokens. A processor that must be called in order
    gives no `p` for positions ahead, so drafts cannot be tested against it; they can be compared with its choice.
    """
    if any(map(is_opaque, call.processors)):
        return False
    if call.config.draft_sampling != "auto":
        return call.config.draft_sampling == "sample"
    warpers = [p for p in call.processors if isinstance(p, TemperatureLogitsWarper)]
    return (warpers[-1].temperature if warpers else 1.0) >= GREEDY_DRAFTS_BELOW


def _make_target(
    call: Call, runner: EagerRunner, text: Text, attention: Tensor, hooks: HookList, stats: SpecBranchStats
) -> Target:
    past = call.past
    if past is not None and past_length(past) > 0:
        runner.cache.load(past)
    kwargs = {**call.model_kwargs, "past_key_values": runner.cache}
    wanted = {"output_attentions": True, "output_hidden_states": True}
    outputs = {name: True for name in wanted if call.model_kwargs.get(name)}
    if hooks.feature_layers:
        outputs["output_hidden_states"] = True

    def prefill() -> Any:
        return call.model._prefill(call.input_ids, call.generation_config, kwargs)

    return Target(runner, text, prefill, attention, call.first_position(attention), outputs, stats)


def _make_drafter(
    call: Call,
    runner: EagerRunner,
    policy: Policy,
    text: Text,
    attention: Tensor,
    hooks: HookList,
    generator: torch.Generator | None,
    stats: SpecBranchStats,
) -> Drafter:
    own = attention[:, attention.shape[1] - text.prompt_length :]  # the draft reads the text, not what is cached
    vocabulary = call.model.config.get_text_config(decoder=True).vocab_size
    gamma, branches = call.config.draft_length, call.config.max_branches if policy.forks else 1
    branches = min(branches, vocabulary, runner.vocabulary)
    capacity = text.ids.shape[1] + (branches + 2) * (gamma + 1)
    model = DraftModel(runner, own.to(runner.device), vocabulary, call.processors, capacity, stats)
    reach = 2 * gamma + 2  # a chain, the branch point, a branch
    line = Line(call.input_ids.to(runner.device), capacity, reach, branches, vocabulary)
    return Drafter(model, line, policy, gamma, hooks, generator, stats)


def _make_output(
    call: Call, target: Target, text: Text, recorder: Recorder, stats: SpecBranchStats
) -> Tensor | SpecBranchOutput:
    sequences = text.sequences()
    past, returns = call.past, bool(call.generation_config.return_dict_in_generate)
    if past is not None and (returns or call.fills_cache):
        # As in plain generate, the last token is not in the cache yet.
        target.runner.cache.store(past, past_length(past), target.base + max(text.lengths) - 1)
    if not returns:
        return sequences
    return SpecBranchOutput(sequences=sequences, past_key_values=past, stats=stats, **recorder.outputs())


def _device(model: PreTrainedModel) -> torch.device:
    device: torch.device = model.get_input_embeddings().weight.device
    return device


def check_cache(past: Any) -> None:
    """Refuse caches whose contents cannot be taken over."""
    if past is not None and past_length(past) > 0 and not can_load(past):
        kinds = sorted({type(layer).__name__ for layer in past.layers})
        raise ValueError(
            f"past_key_values holds layers of type {', '.join(kinds)}, which cannot be read by slot: pass a "
            f"DynamicCache or a StaticCache, or pass the whole text without past_key_values"
        )
