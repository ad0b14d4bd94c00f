"""From a prepared `generate()` call to a loop with its parts, and back to transformers' output."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin

from ..config import SpecBranchConfig
from ..fallback import FallBack
from ..planning.online import SegmentTimer
from ..runtime.kv_cache import past_length
from ..runtime.overlap import Overlap
from ..runtime.selection import runner_for
from ..stats import SpecBranchStats
from .assembly import Assembly
from .hooks import SpeculationHook
from .loop import Parts, read_prompt, rounds
from .model_inputs import USUAL_INPUTS, inputs_after_prompt, reread_of
from .outputs import Recorder
from .policies import POLICIES
from .scoring import Processor, is_opaque
from .stopping import Stopper
from .text import Text

# How a model would say that it does more with a prompt than to read its tokens.
OWN_WAYS = ("_prefill", "prepare_inputs_for_generation")
COLUMNS = 64  # of padding that are read in one pass


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
    observer: Callable[[Parts], Parts] | None = None  # may put itself between the loop and its parts, and look on
    pause: int | None = None  # the length of text at which this call ends and another continues
    ended: tuple[bool, ...] = ()  # rows that were complete before

    @property
    def rows(self) -> int:
        return self.input_ids.shape[0]

    @property
    def stopper(self) -> Stopper:
        longest = self.generation_config.max_length
        return Stopper(self.criteria, longest if self.pause is None else min(longest, self.pause))

    @property
    def slots(self) -> int:
        """The longest a row may get in the target's cache."""
        return self.attention().shape[1] + self.stopper.max_length - self.input_ids.shape[1]

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

    def first_position(self, attention: Tensor, next_position: Tensor | None) -> Tensor:
        """[B] the position of slot 0, such that slot `s` after the prompt has position `s + first`.

        Args:
            attention: [B, filled], see `attention()`.
            next_position: [B, 1] or [axes, B, 1] of the first new token; None: the model counts slots.
        """
        if next_position is None:
            return torch.zeros(self.rows, dtype=torch.long, device=attention.device)
        if next_position.ndim == 3:  # those of the text; the others are kept relative to them
            return -(~attention).sum(1)
        return next_position[:, 0].expand(self.rows) - attention.shape[1]

    def is_tokens_alone(self, attention: Tensor) -> bool:
        """Whether all the target is to read are the tokens of the prompt, one behind the other, none of them padding.

        Then it may read them in any way; otherwise only the model's own generation path knows how.
        """
        given = {name for name, value in self.model_kwargs.items() if value is not None and value is not False}
        model, length = type(self.model), self.input_ids.shape[1]
        if given - USUAL_INPUTS or attention.shape[1] != length or (self.past is not None and past_length(self.past)):
            return False
        if any(getattr(model, name) is not getattr(GenerationMixin, name) for name in OWN_WAYS):
            return False
        positions: Tensor | None = self.model_kwargs.get("position_ids")
        if positions is not None:
            usual = torch.arange(length, dtype=positions.dtype, device=positions.device)
            if not torch.equal(positions, usual.expand(*positions.shape[:-1], -1)):
                return False
        return bool(attention.all())


def speculate(call: Call) -> tuple[Tensor | SpecBranchOutput, SpecBranchStats]:
    """Generate text, and say what it took."""
    began = time.perf_counter()
    stats = SpecBranchStats(policy=call.config.policy)
    output = _generate(replace(call, pause=pause_of(call)), stats, began)
    stats.total_seconds = time.perf_counter() - began
    return output, stats


def pause_of(call: Call) -> int | None:
    """The length of text at which plain `generate()` reads all of it again, if this call gets there."""
    reread, cached = reread_of(call.model), 0 if call.past is None else past_length(call.past)
    if reread is None or call.stopper.max_length <= reread.at or (cached or call.input_ids.shape[1]) >= reread.at:
        return None
    records = not Recorder(call.generation_config, call.rows, 0).keeps_nothing
    if cached or records or not reread.whole or call.stopper.called or any(map(is_opaque, call.processors)):
        raise FallBack(
            f"{type(call.model).__name__} gives up its cache at {reread.at} tokens, within reach of this call"
        )
    return reread.at


def _continued(call: Call, text: Text) -> Call:
    """The same call with the text so far as its prompt."""
    prompt, new = text.sequences(), max(text.lengths) - call.input_ids.shape[1]
    ones = torch.ones((call.rows, new), dtype=torch.bool, device=prompt.device)
    kwargs = {**call.model_kwargs, "attention_mask": torch.cat([call.attention(), ones], dim=1).long()}
    if (positions := kwargs.get("position_ids")) is not None:
        more = positions[..., -1:] + torch.arange(1, new + 1, device=positions.device)
        kwargs["position_ids"] = torch.cat([positions, more], dim=-1)
    return replace(call, input_ids=prompt, model_kwargs=kwargs, pause=None, ended=text.ended_rows(call.pause))


def _generate(call: Call, stats: SpecBranchStats, began: float) -> Tensor | SpecBranchOutput:
    recorder = Recorder(call.generation_config, call.rows, call.attention().shape[1])
    with ExitStack() as runners:
        settings = call.rows, call.slots, call.config.runtime, call.config.kernels
        runner = runners.enter_context(runner_for(call.model, "target", *settings))
        draft_runner = None
        if call.draft is not None and POLICIES[call.config.policy].drafts:
            draft_runner = runners.enter_context(runner_for(call.draft, "draft", *settings))
        further = inputs_after_prompt(call.model, call.input_ids, call.model_kwargs)
        assembly = Assembly(call, runner, draft_runner, further, recorder, stats)
        captured_before = assembly.captures()
        parts = assembly.parts()
        text, draft_device = parts.text, (draft_runner or runner).device
        with Overlap(parts.target.device, draft_device, stats, inline=text.static_shapes) as overlap:
            follow = follow_plan if len(assembly.plans) == 1 else follow_planner
            follow(assembly, parts, overlap)
        stats.new_tokens += text.gained
        stats.graphs_captured += assembly.captures() - captured_before
        stats.time_to_first_token = stats.time_to_first_token or text.first_gain - began
        if call.pause is None or all(text.ended_rows(call.pause)):
            if call.streamer is not None:
                call.streamer.end()
            return _make_output(call, parts, stats)
    return _generate(_continued(call, text), stats, began)


def follow_plan(assembly: Assembly, parts: Parts, overlap: Overlap) -> None:
    """Generate the text where there is nothing to choose."""
    plan = assembly.plans[0]
    parts = assembly.with_drafter(plan, parts)
    if assembly.call.observer is not None:
        parts = assembly.call.observer(parts)
    overlap.enabled = plan.overlap and POLICIES[plan.policy].drafts_ahead
    rounds(parts, overlap, read_prompt(parts), count())
    overlap.take()


def follow_planner(assembly: Assembly, parts: Parts, overlap: Overlap) -> None:
    """Generate the text leg by leg."""
    text = parts.text
    planner, timer = assembly.planner(text), SegmentTimer(assembly.stats, overlap, text, assembly.captures)
    segments = planner.segments()
    segment = next(segments)
    plan = segment.plan
    parts = assembly.with_drafter(plan, parts)
    feedback = read_prompt(parts)
    while not text.finished:
        if segment.plan != plan:
            plan = segment.plan
            parts, feedback = assembly.change(plan, parts, feedback)
        timer.start()
        overlap.enabled = segment.overlap
        feedback = rounds(parts, overlap, feedback, range(segment.rounds))
        took = timer.read(segment)
        if text.finished:
            planner.end(segment, took)
        else:
            segment = segments.send(took)


def _make_output(call: Call, parts: Parts, stats: SpecBranchStats) -> Tensor | SpecBranchOutput:
    target, text, recorder = parts.target, parts.text, parts.recorder
    sequences = text.sequences()
    past, returns = call.past, bool(call.generation_config.return_dict_in_generate)
    fills = past is not None and (returns or call.fills_cache)
    if fills:
        target.read_skipped_token()
    if fills or not recorder.keeps_nothing:
        read_padding(parts)
    config = call.model.config.get_text_config(decoder=True)
    outputs = recorder.outputs(past, config, call.attention()) if returns else {}
    if fills:
        # As in plain generate, the last token is not in the cache yet.
        target.runner.cache.store(past, past_length(past), target.base + max(text.lengths) - 1)
    target.leave_rotary()
    if not returns:
        return sequences
    return SpecBranchOutput(sequences=sequences, past_key_values=past, stats=stats, **outputs)


def read_padding(parts: Parts) -> None:
    """Let rows that ended early read the padding after their text, as they do in plain `generate()`: what it makes of
    that is in its scores, hidden states and cache.
    """
    text = parts.text
    for first in range(min(text.lengths) - 1, max(text.lengths) - 1, COLUMNS):
        last = min(first + COLUMNS, max(text.lengths) - 1)
        step = parts.target.read_columns(first, last)
        scores = parts.verifier.score_columns(step.logits, first) if parts.recorder.keeps_scores else None
        parts.recorder.add(step, scores, [range(max(0, length - 1 - first), last - first) for length in text.lengths])
