"""The method. A round: draft a chain, let the target verify it, draft what may follow, judge, commit.

Whether the draft works while the target does, or after it, is for `Overlap` to say; the tokens are the same. The
policies differ in what the drafter does when it is asked, nowhere else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from ..runtime.base import Step
from ..runtime.overlap import Overlap
from .accounting import Accounting
from .drafter import Drafter, NoDrafter
from .outputs import Recorder
from .state import Feedback
from .target import Target
from .text import Text
from .verifier import Verifier


class Parts(NamedTuple):
    """Who takes part in a generation."""

    target: Target  # runs the large model
    drafter: Drafter | NoDrafter  # runs the small one
    verifier: Verifier  # compares what they say
    text: Text  # holds what is agreed
    recorder: Recorder  # keeps scores and the like for the caller
    accounting: Accounting  # counts


def rounds(parts: Parts, overlap: Overlap, feedback: Feedback, turns: Iterable[int]) -> Feedback:
    """Rounds until the text is complete, or until something else is to be tried.

    Args:
        parts: who takes part.
        beside: runs the target's pass beside the draft's work, or before it.
        feedback: what the last verdict meant.
        turns: one for each round that may be taken.
    """
    target, drafter, verifier, text = parts.target, parts.drafter, parts.verifier, parts.text
    lead = max_rounds_in_flight(parts)
    in_flight: deque[Step] = deque()  # rounds whose verdicts the host has not heard
    for _ in turns:
        while (
            in_flight
            and not text.finished
            and (len(in_flight) > lead or text.may_finish(len(in_flight) * drafter.most))
        ):
            feedback = finish_round(parts, in_flight.popleft())
        if text.finished:
            break
        text.in_flight = len(in_flight) * drafter.most
        with overlap.working("draft"):
            draft_tokens = text.padded(drafter.draft(feedback, text.reach))
        verified = overlap.start(target.verify, draft_tokens)
        with overlap.working("branch"):
            branches = drafter.branch(text.reach)
        in_flight.append(verified())
        verifier(in_flight[-1], draft_tokens, branches, drafter.drafted)
    for step in in_flight:
        if text.finished:  # begun before the host knew
            verifier.host_copies.skip()
            overlap.give_up()
        else:
            feedback = finish_round(parts, step)
    text.in_flight = 0
    parts.accounting.settle()
    text.stream_out()
    return feedback


def max_rounds_in_flight(parts: Parts) -> int:
    """How many rounds may begin before the host has heard the last verdict.

    One, where the device knows how to go on: it has told itself what the verdict means, a single row goes on in any
    case unless it ends, and the drafter does the same whatever was said. So the device need not wait for the host. A
    round begun behind the end of the text is given up.
    """
    text = parts.text
    round_result = text.resolved_on_device and len(text.lengths) == 1 and not text.stopper.called
    return int(round_result and parts.drafter.same_every_round)


def read_prompt(parts: Parts) -> Feedback:
    """The first token comes from the target alone; the draft reads the prompt once it is out."""
    step = parts.target.prefill()
    nobody = NoDrafter(parts.verifier.nothing)
    parts.verifier(step, *nobody.nothing, nobody.drafted)
    feedback = finish_round(parts, step)
    parts.text.stream_out()
    if not parts.text.finished:
        parts.drafter.prefill(parts.text.prompt_length)
    return feedback


def finish_round(parts: Parts, step: Step) -> Feedback:
    """End a round: the verdict, the text it adds, and what that means for the drafter."""
    text, verifier, recorder, accounting = parts.text, parts.verifier, parts.recorder, parts.accounting
    if text.static_shapes:  # what the last round added, while the device works on this one
        accounting.settle()
        text.stream_out()
    results = verifier.results()
    rejection_branches = text.commit(results, recorder.scores_so_far(verifier.scores))
    parts.target.check_room()
    if not text.static_shapes:
        text.stream_out()
    recorder.add(step, verifier.scores, text.queries_of(rejection_branches))
    accounting.note(results, rejection_branches)
    return Feedback(
        round_result=text.round_result.to(parts.drafter.device),
        features=verifier.features,
        moved=any(row_result.complete and row_result.survivor > 0 for row_result in rejection_branches),
        draft_ended=0 in accounting.pending_lengths(),
    )
