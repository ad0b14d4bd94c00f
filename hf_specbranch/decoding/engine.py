"""From a prepared `generate()` call to the decoding loop, and back to transformers' output."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from ..fallback import FallBack
from ..model_state import state_of
from ..planning.chooser import Choice
from ..planning.knowledge import knowledge_of
from ..planning.online import Planner, PlanSegment
from ..planning.timer import SegmentTimer, summary
from ..runtime.idle_runners import free_all
from ..runtime.kv_cache import past_length
from ..runtime.overlap import Overlap, cpu_threads
from ..runtime.selection import runner_for
from ..stats import SpecBranchStats
from .assembly import Assembly
from .call import Call
from .call_costs import threads_of
from .hooks import LengthHeadHook
from .loop import Parts, decode, read_prompt
from .model_inputs import inputs_after_prompt, reread_of
from .outputs import Recorder
from .policies import POLICIES
from .resolve import NONE, Feedback
from .row_padding import count_padding, pad_rows
from .scoring import is_opaque
from .target import Target
from .text import Text

COLUMNS = 64  # of padding that are read in one pass


@dataclass
class SpecBranchOutput(GenerateDecoderOnlyOutput):
    """What `generate(return_dict_in_generate=True)` returns, with the statistics."""

    stats: SpecBranchStats | None = None


def speculate(call: Call) -> tuple[Tensor | SpecBranchOutput, SpecBranchStats]:
    """Generate text; return the output and the statistics."""
    began = time.perf_counter()
    wanted, random_state = replace(call, pause=pause_of(call)), call.random_state()
    call = pad_rows(wanted) if wanted.rows > 1 and wanted.ranks is None else wanted
    stats = SpecBranchStats(policy=call.config.policy, padding_rows=call.padding)
    with cpu_threads.limited(call.model.device if not call.generation_config.do_sample else None):
        output = None
        try:
            output = _generate(call, stats, began)
        except torch.OutOfMemoryError:
            # Before the first token the call can begin again, without what earlier calls have left on the device. A
            # padded call can begin again at any time, without padding: it has no streamer that was given tokens.
            # Other ranks of a tensor parallel target cannot.
            if not call.padding and (stats.new_tokens or call.ranks is not None or not free_all(call.model.device)):
                raise
        if output is None:  # not in the handler, where the exception keeps the memory of the first attempt alive
            if call.padding:
                call = wanted
                free_all(call.model.device)
            call.restore_random_state(random_state)
            stats = SpecBranchStats(policy=call.config.policy)
            output = _generate(call, stats, began)
    stats.total_seconds = time.perf_counter() - began
    stats.length_head = next((each.origin for each in call.all_hooks if isinstance(each, LengthHeadHook)), "")
    if call.padding:
        count_padding(call, stats)
    return output, stats


def pause_of(call: Call) -> int | None:
    """Return the length of text at which plain `generate()` reads all of it again, if this call gets there."""
    reread, cached = reread_of(call.model), 0 if call.past is None else past_length(call.past)
    if reread is None or call.stopper.max_length <= reread.at or (cached or call.input_ids.shape[1]) >= reread.at:
        return None
    whole = reread.whole and not cached and not call.records and call.ranks is None
    if not whole or call.stopper.called or any(map(is_opaque, call.processors)):
        raise FallBack(
            f"{type(call.model).__name__} gives up its cache at {reread.at} tokens, within reach of this call"
        )
    return reread.at


def _continued(call: Call, text: Text) -> Call:
    """Return the same call with the text so far as its prompt."""
    prompt, new = text.sequences(), max(text.lengths) - call.input_ids.shape[1]
    ones = torch.ones((call.rows, new), dtype=torch.bool, device=prompt.device)
    kwargs = {**call.model_kwargs, "attention_mask": torch.cat([call.attention(), ones], dim=1).long()}
    if (positions := kwargs.get("position_ids")) is not None:
        more = positions[..., -1:] + torch.arange(1, new + 1, device=positions.device)
        kwargs["position_ids"] = torch.cat([positions, more], dim=-1)
    return replace(call, input_ids=prompt, model_kwargs=kwargs, pause=None, ended=text.ended_rows(call.pause))


@contextmanager
def assembled(call: Call, stats: SpecBranchStats) -> Iterator[Assembly]:
    """Provide the runners of a call and what is made of them; count what is captured meanwhile."""
    recorder = Recorder(call.generation_config, call.rows, call.filled) if call.records else None
    with ExitStack() as runners:
        config = call.config
        settings = call.rows, call.slots, config.runtime, config.kernels, config.memory_budget
        runner = runners.enter_context(runner_for(call.model, "target", *settings))
        draft_runner = None
        if call.draft is not None and POLICIES[call.config.policy].drafts:
            draft_runner = runners.enter_context(runner_for(call.draft, "draft", *settings))
            stats.draft_weights, stats.draft_shortlist = form_of(call.draft)
        further = inputs_after_prompt(call.model, call.input_ids, call.model_kwargs)
        assembly = Assembly(call, runner, draft_runner, further, recorder, stats)
        captured_before, seconds_before = assembly.captures(), assembly.capture_seconds()
        try:
            yield assembly
        finally:
            stats.graphs_captured += assembly.captures() - captured_before
            stats.capture_seconds += assembly.capture_seconds() - seconds_before


def _generate(call: Call, stats: SpecBranchStats, began: float) -> Tensor | SpecBranchOutput:
    resting = resting_choice(call)
    with assembled(call if resting is None else replace(call, config=resting.plan), stats) as assembly:
        parts = assembly.parts()
        text = parts.text
        try:
            with assembly.overlap() as overlap:
                if resting is not None:
                    rest(call, resting, assembly, parts, overlap)
                elif len(assembly.plans) == 1:
                    follow_plan(assembly, parts, overlap)
                else:
                    follow_planner(assembly, parts, overlap)
        finally:
            stats.new_tokens += text.gained
        stats.time_to_first_token = stats.time_to_first_token or text.first_gain - began
        if call.pause is None or all(text.ended_rows(call.pause)):
            if call.streamer is not None:
                call.streamer.end()
            return _make_output(call, parts, stats)
    return _generate(_continued(call, text), stats, began)


def follow_plan(assembly: Assembly, parts: Parts, overlap: Overlap) -> None:
    """Generate the text where there is nothing to choose."""
    start_prompt(assembly, parts, overlap)
    plan = assembly.plans[0]
    with overlap.on_side_stream():
        assembly.read_ahead(plan, parts.text)
    parts = assembly.observed(assembly.with_drafter(plan, parts))
    overlap.enabled = plan.overlap and POLICIES[plan.policy].drafts_ahead
    feedback = read_prompt(parts, before_draft=overlap.join)
    while not parts.text.finished:
        feedback = decode(parts, overlap, feedback, cpu_threads.watch(count()))
    overlap.take()
    remember_text(parts)


def start_prompt(assembly: Assembly, parts: Parts, overlap: Overlap) -> None:
    """Let the device read the prompt while the host prepares the draft; a head needs states of that pass."""
    overlap.fork()  # here, so that the draft can read the prompt at the same time
    if assembly.static_shapes and assembly.head is None:
        _ = assembly.stopper.eos  # read now: once the device reads the prompt, the host would wait for it
        parts.target.start_prefill()


def resting_choice(call: Call) -> Choice | None:
    """Return plain decoding, if that is known to be best and nothing is to be found out: then no draft is prepared.

    A sampled text must not depend on what was measured, and all ranks of a tensor parallel target make the same parts.
    """
    if call.draft is None or call.generation_config.do_sample or call.ranks is not None or not call.may_plan:
        return None
    known = knowledge_of(call.model, call.draft)
    return known.resting_choice(call.config, call.rows, threads_of(call.model.device))


def rest(call: Call, choice: Choice, assembly: Assembly, parts: Parts, overlap: Overlap) -> None:
    """Generate the text without a draft, and let the planner know how long that took."""
    assert call.draft is not None
    text, stats, passes = parts.text, assembly.stats, assembly.stats.target_forwards
    follow_plan(assembly, parts, overlap)
    seconds, tokens = time.perf_counter() - text.first_gain, text.gained / len(text.lengths)
    rounds = stats.target_forwards - passes - 1  # the first pass reads the prompt
    if rounds:
        segment = PlanSegment(choice.plan, rounds, False, choice.tokens_per_second)
        stats.plans.append(summary(segment, rounds, tokens - 1, seconds))
    knowledge_of(call.model, call.draft).end_rest(call.config, call.rows, tokens, seconds)


def follow_planner(assembly: Assembly, parts: Parts, overlap: Overlap) -> None:
    """Generate the text in segments, each with the plan that the planner chooses."""
    start_prompt(assembly, parts, overlap)
    text = parts.text
    planner = assembly.planner(text)
    timer = SegmentTimer(assembly.stats, overlap, text, assembly.captures, assembly.capture_seconds)
    segments = planner.segments()
    segment = next(segments)
    plan = segment.plan
    with overlap.on_side_stream():
        assembly.read_ahead(plan, text)
    parts = assembly.with_drafter(plan, parts)
    observed = assembly.observed(parts)

    def before_draft() -> None:
        timer.join()
        overlap.join()

    feedback = read_prompt(observed, before_draft)
    while not text.finished:
        if segment.plan != plan:
            timer.join()
            plan = segment.plan
            observed.accounting.close()
            observed.target.read_skipped_token()
            parts.drafter.remember(text.row_tokens())
            parts = assembly.with_drafter(plan, parts)
            observed = assembly.observed(parts)
            feedback = take_over(observed, feedback)
        timer.start()
        overlap.enabled = segment.overlap
        feedback = decode(observed, overlap, feedback, cpu_threads.watch(range(segment.rounds)))
        timing = timer.read(segment)
        if text.finished:
            planner.end(segment, timing)
            compare_drafts(assembly, planner, text)
        else:
            segment = segments.send(timing)
    remember_text(parts)


def form_of(draft: PreTrainedModel) -> tuple[str, int]:
    """Return how a copy of a draft stores its weights and how many tokens it scores, for the statistics."""
    state = state_of(draft)
    weights = "" if state.form is None else state.form.weights or ""
    return weights, 0 if state.shortlist is None else len(state.shortlist.ids)


def compare_drafts(assembly: Assembly, planner: Planner, text: Text) -> None:
    """Let the planner find out how a copy of the draft compares with the draft itself, where it chose the copy."""
    call = assembly.call
    if not chose_copy(call):
        return
    from ..planning.draft_choice import compare_drafts, estimated_gain

    assert call.draft is not None
    read = partial(assembly.agreements, text)
    with suppress(torch.OutOfMemoryError):  # the text is finished, and must not be lost
        gain = partial(estimated_gain, planner, call.model, call.draft)
        compare_drafts(planner, call.model, call.draft, read, gain)


def chose_copy(call: Call) -> bool:
    """Return whether a copy of the draft drafts because the planner chose it, not because the settings name it."""
    form = None if call.draft is None else state_of(call.draft).form
    if form is None or "auto" not in call.config.draft_form:
        return False
    from ..planning.draft_choice import named_form

    return bool(form != named_form(call.config))


def remember_text(parts: Parts) -> None:
    """Let both runners keep in mind the text whose keys and values they hold, for a prompt that begins like it."""
    if len(parts.text.lengths) == 1:
        tokens = parts.text.row_tokens()
        parts.target.remember(tokens)
        parts.drafter.remember(tokens)


def take_over(parts: Parts, feedback: Feedback) -> Feedback:
    """Continue the same text with a new drafter, which reads it again.

    The pending draft was rolled back. For drafts that are drawn this is exact only if the choice of a plan does not
    depend on draft tokens that the target has not verified.
    """
    text = parts.text
    text.result.survivor.fill_(NONE)  # whichever it was
    parts.drafter.prefill(max(text.lengths))
    return feedback._replace(result=text.result.to(parts.drafter.device), moved=False, draft_ended=True)


def _make_output(call: Call, parts: Parts, stats: SpecBranchStats) -> Tensor | SpecBranchOutput:
    target, text, recorder = parts.target, parts.text, parts.recorder
    sequences = text.sequences()
    past, returns = call.past, bool(call.generation_config.return_dict_in_generate)
    if call.fills:
        target.read_skipped_token()
    if call.fills or recorder is not None:
        read_padding(parts)
    config = call.model.config.get_text_config(decoder=True)
    outputs = {} if recorder is None else recorder.outputs(past, config, call.attention())
    leave_cache(call, target)
    if not returns:
        return sequences
    return SpecBranchOutput(sequences=sequences, past_key_values=past, stats=stats, **outputs)


def leave_cache(call: Call, target: Target) -> None:
    """Leave the caller's cache, and frequencies that depend on length, as plain `generate()` would."""
    if call.fills and call.past is not None:
        # As in plain generate, the last token is not in the cache yet.
        lengths = target.text.lengths
        last = target.base + max(lengths) - 1
        target.runner.cache.store(call.past, past_length(call.past), last, rows=len(lengths))
    target.leave_rotary()


def read_padding(parts: Parts) -> None:
    """Let rows that ended early read the padding after their text, as plain `generate()` does.

    Its scores, hidden states and cache contain what the model makes of that padding.
    """
    text, recorder = parts.text, parts.recorder
    for first in range(min(text.lengths) - 1, max(text.lengths) - 1, COLUMNS):
        last = min(first + COLUMNS, max(text.lengths) - 1)
        step = parts.target.read_columns(first, last)
        if recorder is not None:
            scores = parts.verifier.score_columns(step.logits, first) if recorder.keeps_scores else None
            recorder.add(step, scores, [range(max(0, length - 1 - first), last - first) for length in text.lengths])
