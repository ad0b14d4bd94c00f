"""The method. A round: draft a chain, let the target verify it, draft what may follow, judge, commit.

Whether the draft works while the target does, or after it, is for `Beside` to say; the tokens are the same. The
policies differ in what the drafter does when it is asked, nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..runners.base import Step
from ..runners.placement import Beside
from .drafter import Drafter, NoDrafter
from .judge import Judge
from .ledger import Books
from .recorder import Recorder
from .records import Branches, Chain, Feedback
from .target import Target
from .text import Text


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
    target, drafter, text = parts.target, parts.drafter, parts.text
    for _ in turns:
        if text.finished:
            break
        with beside.working("draft"):
            chain = drafter.draft(feedback, max(text.lengths))
        verified = beside.start(target.verify, chain)
        with beside.working("branch"):
            branches = drafter.branch(max(text.lengths))
        feedback = conclude(parts, verified(), chain, branches)
    parts.books.settle()
    text.hand_out()
    return feedback


def read_prompt(parts: Parts) -> Feedback:
    """The first token comes from the target alone; the draft reads the prompt once it is out."""
    nothing = parts.judge.nothing
    feedback = conclude(parts._replace(drafter=NoDrafter(nothing)), parts.target.prefill(), *nothing)
    parts.text.hand_out()
    if not parts.text.finished:
        parts.drafter.prefill(parts.text.prompt_length)
    return feedback._replace(told=feedback.told.to(parts.drafter.device))


def conclude(parts: Parts, step: Step, chain: Chain, branches: Branches) -> Feedback:
    """End a round: the verdict, the text it adds, and what that means for the drafter."""
    text, judge, recorder, books = parts.text, parts.judge, parts.recorder, parts.books
    judge(step, chain, branches, parts.drafter.drafted)
    if text.fixed:  # what the last round added, while the device works on this one
        books.settle()
        text.hand_out()
    reports = judge.reports()
    outcomes = text.commit(reports, recorder.scores_so_far(judge.scores))
    if not text.fixed:
        text.hand_out()
    recorder.add(step, judge.scores, outcomes)
    books.note(reports, outcomes)
    return Feedback(
        told=text.told.to(parts.drafter.device),
        features=judge.features,
        moved=any(outcome.complete and outcome.survivor > 0 for outcome in outcomes),
        line_ended=0 in books.lines_left(),
    )
