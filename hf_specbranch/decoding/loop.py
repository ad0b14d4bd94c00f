"""The method. A round: draft a chain, let the target verify it, draft what may follow, judge, commit.

Whether the draft works while the target does, or after it, is for `Beside` to say; the tokens are the same. The
policies differ in what the drafter does when it is asked, nowhere else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from ..runtime.base import Step
from ..runtime.overlap import Beside
from .accounting import Books
from .drafter import Drafter, NoDrafter
from .outputs import Recorder
from .state import Feedback
from .target import Target
from .text import Text
from .verifier import Judge


class Parts(NamedTuple):
    """Who takes part in a generation."""

    target: Target  # runs the large model
    drafter: Drafter | NoDrafter  # runs the small one
    judge: Judge  # compares what they say
    text: Text  # holds what is agreed
    recorder: Recorder  # keeps scores and the like for the caller
    books: Books  # counts


def rounds(parts: Parts, beside: Beside, feedback: Feedback, turns: Iterable[int]) -> Feedback:
    """Rounds until the text is complete, or until something else is to be tried.

    Args:
        parts: who takes part.
        beside: runs the target's pass beside the draft's work, or before it.
        feedback: what the last verdict meant.
        turns: one for each round that may be taken.
    """
    target, drafter, judge, text = parts.target, parts.drafter, parts.judge, parts.text
    lead = lead_over_the_host(parts)
    unheard: deque[Step] = deque()  # rounds whose verdicts the host has not heard
    for _ in turns:
        while unheard and not text.finished and (len(unheard) > lead or text.may_be_over(len(unheard) * drafter.most)):
            feedback = hear(parts, unheard.popleft())
        if text.finished:
            break
        text.unheard = len(unheard) * drafter.most
        with beside.working("draft"):
            chain = text.padded(drafter.draft(feedback, text.reach))
        verified = beside.start(target.verify, chain)
        with beside.working("branch"):
            branches = drafter.branch(text.reach)
        unheard.append(verified())
        judge(unheard[-1], chain, branches, drafter.drafted)
    for step in unheard:
        if text.finished:  # begun before the host knew
            judge.inbox.skip()
            beside.give_up()
        else:
            feedback = hear(parts, step)
    text.unheard = 0
    parts.books.settle()
    text.hand_out()
    return feedback


def lead_over_the_host(parts: Parts) -> int:
    """How many rounds may begin before the host has heard the last verdict.

    One, where the device knows how to go on: it has told itself what the verdict means, a single row goes on in any
    case unless it ends, and the drafter does the same whatever was said. So the device need not wait for the host. A
    round begun behind the end of the text is given up.
    """
    text = parts.text
    told = text.told_on_device and len(text.lengths) == 1 and not text.stopper.called
    return int(told and parts.drafter.always_alike)


def read_prompt(parts: Parts) -> Feedback:
    """The first token comes from the target alone; the draft reads the prompt once it is out."""
    step = parts.target.prefill()
    nobody = NoDrafter(parts.judge.nothing)
    parts.judge(step, *nobody.nothing, nobody.drafted)
    feedback = hear(parts, step)
    parts.text.hand_out()
    if not parts.text.finished:
        parts.drafter.prefill(parts.text.prompt_length)
    return feedback


def hear(parts: Parts, step: Step) -> Feedback:
    """End a round: the verdict, the text it adds, and what that means for the drafter."""
    text, judge, recorder, books = parts.text, parts.judge, parts.recorder, parts.books
    if text.fixed:  # what the last round added, while the device works on this one
        books.settle()
        text.hand_out()
    reports = judge.reports()
    outcomes = text.commit(reports, recorder.scores_so_far(judge.scores))
    parts.target.check_room()
    if not text.fixed:
        text.hand_out()
    recorder.add(step, judge.scores, text.queries_of(outcomes))
    books.note(reports, outcomes)
    return Feedback(
        told=text.told.to(parts.drafter.device),
        features=judge.features,
        moved=any(outcome.complete and outcome.survivor > 0 for outcome in outcomes),
        line_ended=0 in books.lines_left(),
    )
