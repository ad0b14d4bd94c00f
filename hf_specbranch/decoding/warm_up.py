"""Warm-up: captures every stage that calls of one kind may need, before the first of them.

A kind of call is a batch size, a longest text, and settings. Stages run on a text of no meaning, which is thrown away.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import MaxLengthCriteria

from ..config import SpecBranchConfig
from ..progress import Progress
from ..runtime.eager import NOTHING, EagerRunner, round_up
from ..runtime.overlap import Overlap
from ..runtime.prefill import (
    STEP,
    can_prefill,
    can_read_in_spare_slots,
    captured_sizes,
    prefill,
    read_in_spare_slots,
)
from ..runtime.selection import BRANCH_SLOTS
from ..stats import SpecBranchStats
from .assembly import Assembly
from .call import Call
from .engine import assembled, chose_copy, take_over
from .loop import Parts, decode, read_prompt
from .policies import POLICIES
from .resolve import DraftTokens, Feedback, TreeLeaves

ROUNDS = 2  # of each plan: the second has the result of the first
MOST_RESERVED = 0.5  # of the free memory


def capture_stages(call: Call, progress: Progress) -> tuple[Tensor, SpecBranchStats]:
    """Capture the stages of all plans that a call like this one may follow.

    If sizes say that a copy of the draft is faster and its steps are not, the stages of the draft itself are captured.

    Where stages are not captured, this finds out what is found out once per model, and no more. So it does for models
    with recurrent layers, whose states belong to a text that was read: their stages are captured on first use.

    Args:
        call: a call with a short prompt and the longest text.
        progress: advanced by each plan.

    Returns:
        The prompt, and statistics: how many graphs were captured, and the seconds that took.
    """
    stats = SpecBranchStats(policy=call.config.policy)
    unending = [criterion for criterion in call.criteria if type(criterion) is MaxLengthCriteria]
    with assembled(replace(call, criteria=unending, streamer=None), stats) as assembly:
        if not assembly.static_shapes or any(runner.is_recurrent for runner in assembly.runners):
            return call.input_ids, stats
        if (original := faster_draft(assembly)) is None:
            _capture_all(assembly, progress)
    return (call.input_ids, stats) if original is None else capture_stages(replace(call, draft=original), progress)


def faster_draft(assembly: Assembly) -> PreTrainedModel | None:
    """Return the draft itself, if a copy of it was chosen by sizes and is not faster; else None."""
    call = assembly.call
    if not chose_copy(call) or assembly.samples:
        return None
    from ..planning.draft_choice import compare_steps, original_of

    assert call.draft is not None
    is_fast = compare_steps(call.model, call.draft, partial(_step_gain, assembly))
    return None if is_fast else original_of(call.draft)


def _step_gain(assembly: Assembly) -> float | None:
    """Return how many times faster a step of the copy is than one of the draft itself, if that can be timed.

    Args:
        assembly: with the runner of the copy.
    """
    from ..planning.draft_choice import original_of
    from ..planning.step_time import step_gain

    call, runner = assembly.call, assembly.draft_runner
    original = original_of(call.draft)
    if runner is None or original is None:
        return None
    return step_gain(runner, original, call.config, call.rows, BRANCH_SLOTS)


def _capture_all(assembly: Assembly, progress: Progress) -> None:
    """Capture the passes that read prompts, and the stages of all plans."""
    call = assembly.call
    # All ranks of a tensor parallel target read prompts together, in passes that are not captured.
    for runner in assembly.runners[0 if call.ranks is None else 1 :]:
        progress.doing(f"{call.rows} rows: prefill")
        _prefill_all_sizes(runner, call.rows)
        if _reserve(runner, call.rows, call.slots + BRANCH_SLOTS):
            _prefill_all_sizes(runner, call.rows)
    assembly.all_steps = True
    parts = assembly.parts()
    feedback = read_prompt(parts)
    with assembly.overlap() as overlap:
        for plan in assembly.plans:
            progress.doing(f"{call.rows} rows: {plan.policy}, length {plan.draft_length}")
            for length in _lengths(assembly.runner, parts):
                _run(plan, length, assembly, parts, overlap, feedback)
            progress.advance()
    torch.cuda.synchronize(assembly.runner.device)
    for runner in assembly.runners:
        runner.remembered = NOTHING


def _reserve(runner: EagerRunner, rows: int, slots: int) -> bool:
    """Make room for the longest texts now, if most of the free memory remains; return whether the cache has moved.

    Otherwise there is room when a text needs it.
    """
    if runner.device.type != "cuda" or not (capacity := runner.cache.address.capacity):
        return False
    growth = runner.cache.num_bytes / capacity * (slots - capacity)
    free, _ = torch.cuda.mem_get_info(runner.device)
    return growth < MOST_RESERVED * free and runner.reserve(rows, slots)


def _prefill_all_sizes(runner: EagerRunner, rows: int) -> None:
    for size in captured_sizes(rows, runner.takes_spans):
        tokens = torch.zeros((rows, size), dtype=torch.long, device=runner.device)
        if can_prefill(runner, tokens, padded=False):
            prefill(runner, tokens, torch.zeros_like(tokens), tokens[:, :1])
    if can_read_in_spare_slots(runner, rows, STEP, used=0):  # the planner lets the draft read part of the text again
        read_in_spare_slots(runner, torch.zeros((1, STEP), dtype=torch.long, device=runner.device), rows, last=1)


def _lengths(runner: EagerRunner, parts: Parts) -> list[int]:
    """Return lengths of a text such that stages have run with all numbers of slots that they may be captured for."""
    shortest, longest = parts.text.prompt_length + 1, parts.text.stopper.max_length
    if runner.takes_spans:
        return [shortest]
    sizes = [1 << power for power in range(1, 32) if shortest < (1 << power) // 2 <= longest]
    return [shortest, *(size // 2 + 1 for size in sizes if size > round_up(shortest) and size // 2 + 1 < longest)]


def _run(
    plan: SpecBranchConfig, length: int, assembly: Assembly, parts: Parts, overlap: Overlap, feedback: Feedback
) -> None:
    """Run the rounds of a plan on a text of this length, with every kind of result that a round may have."""
    text, policy = parts.text, POLICIES[plan.policy]
    text.lengths = [length] * len(text.lengths)
    text.length.fill_(length)
    parts = assembly.with_drafter(plan, parts)
    overlap.enabled = plan.overlap and policy.drafts_ahead
    feedback = take_over(parts, feedback)
    on_host = assembly.lookup or assembly.candidates  # decides on the host how many tokens to propose
    # Drafts, tokens from elsewhere, and drafts after these.
    for count in (0,) if on_host is None else (0, *on_host.lengths, 0):
        if on_host is not None:
            on_host.forced = count
        feedback = decode(parts, overlap, feedback, range(ROUNDS))
        if plan.tree_leaves:  # when another plan takes over, a leaf may have to be read again
            none = text.ids[:, :0]
            leaf = DraftTokens(none, text.length, leaves=TreeLeaves(none, none))
            parts.target.verify(leaf, parts.target.last_width)
    if policy.drafts_ahead:
        for moved, draft_ended in product((False, True), repeat=2):
            parts.drafter.propose(feedback._replace(moved=moved, draft_ended=draft_ended), text.reach)
        if assembly.lookup is not None:
            for count in (assembly.lookup.most, 0):
                assembly.lookup.forced = count
                parts.drafter.propose(feedback._replace(moved=False, draft_ended=True), text.reach)
    overlap.take()
