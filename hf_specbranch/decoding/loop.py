"""The method. A round: draft a chain, let the target verify it, draft what may follow, judge, commit.

`sequential_loop` does one thing after the other; in `overlapped_loop` the draft works while the target does.
Both commit the same tokens. The policies differ in what the drafter does when it is asked, nowhere else.
"""

from __future__ import annotations

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


def sequential_loop(parts: Parts, beside: Beside) -> None:
    """Draft, verify, draft ahead, judge: each after the other."""
    target, drafter, text = parts.target, parts.drafter, parts.text
    feedback = read_prompt(parts)
    while not text.finished:
        chain = drafter.draft(feedback, max(text.lengths))
        step = target.verify(chain)
        with beside.drafting():
            branches = drafter.branch(max(text.lengths))
        feedback = conclude(parts, step, chain, branches)
    parts.books.settle()
    text.hand_out()


def overlapped_loop(parts: Parts, beside: Beside) -> None:
    """The same rounds, with the draft at work during the target's passes."""
    target, drafter, text = parts.target, parts.drafter, parts.text
    feedback = read_prompt(parts)
    while not text.finished:
        chain = drafter.draft(feedback, max(text.lengths))
        verified = beside.start(target.verify, chain)
        with beside.drafting():
            branches = drafter.branch(max(text.lengths))
        feedback = conclude(parts, verified(), chain, branches)
    parts.books.settle()
    text.hand_out()


def read_prompt(parts: Parts) -> Feedback:
    """The first token comes from the target alone; the draft reads the prompt once it is out."""
    feedback = conclude(parts, parts.target.prefill(), *parts.judge.nothing)
    parts.text.hand_out()
    if not parts.text.finished:
        parts.drafter.prefill()
    return feedback


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
        line_ended=books.a_line_ended(),
    )
