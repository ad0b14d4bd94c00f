"""SpecBranch, the method. Each round: propose, verify, branch, resolve, adopt.

- *propose*: the draft model drafts up to gamma tokens, and stops where its confidence is below epsilon; of a draft that
  survived the last round, the length head (H-RAD) and the confidence say how much to send.
- *verify*: the target checks all draft tokens in one pass.
- *branch*: meanwhile the draft model continues, in up to k_max branches where it is uncertain.
- *resolve*: the verify result says which tokens are committed and which branch survives (`resolve.py`).
- *adopt*: the surviving branch is the pending draft of the next round.

The policies (`policies.py`) differ in what a drafter does when it is called, nowhere else. Whether the target and the
draft really work at the same time is up to `Overlap`; the tokens are the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from ..runtime.base import Step
from ..runtime.overlap import Overlap
from .draft_source import DraftSource, NoDraft
from .outputs import Recorder
from .resolve import Accounting, Feedback
from .target import Target
from .text import Text
from .verifier import Verifier


class Parts(NamedTuple):
    """The parts of a generation."""

    target: Target  # runs the large model
    drafter: DraftSource  # proposes draft tokens
    verifier: Verifier  # accepts or rejects them
    text: Text  # holds what is committed
    recorder: Recorder | None  # keeps scores and other outputs, if the caller wants any
    accounting: Accounting  # counts


def decode(parts: Parts, overlap: Overlap, feedback: Feedback, rounds: Iterable[int]) -> Feedback:
    """Run rounds until the text is complete, or `rounds` is exhausted.

    Args:
        parts: the parts of the generation.
        overlap: runs the target's pass at the same time as the draft's work, or before it.
        feedback: what the last round meant.
        rounds: one item per round that may be taken.
    """
    target, drafter, verifier, text = parts.target, parts.drafter, parts.verifier, parts.text
    in_flight = RoundsInFlight(text, drafter)
    for _ in rounds:
        while not text.finished and in_flight.must_finish_one():
            feedback = finish_round(parts, in_flight.pop())
        if text.finished:
            break
        in_flight.announce()
        with overlap.working("draft"):
            draft_tokens = text.padded(drafter.propose(feedback, text.reach))  # adopts what survived, then drafts
        verified = overlap.start(target.verify, draft_tokens)
        with overlap.working("branch"):
            branches = drafter.branch(text.reach)
        step = verified()
        verifier(step, draft_tokens, branches, drafter.drafted)
        in_flight.push(step)
    feedback = finish_all(parts, overlap, in_flight, feedback)
    parts.accounting.flush()
    text.stream_out()
    return feedback


def finish_round(parts: Parts, step: Step) -> Feedback:
    """Resolve a round on the host: commit the tokens, count them, and return what that means for the drafter."""
    text, verifier, recorder, accounting = parts.text, parts.verifier, parts.recorder, parts.accounting
    if text.static_shapes:  # the last round's tokens, while the device works on this one
        accounting.flush()
        text.stream_out()
    results = verifier.results()
    rows = text.commit(results, None if recorder is None else recorder.scores_so_far(verifier.scores))
    parts.target.check_room()
    if not text.static_shapes:
        text.stream_out()
    if recorder is not None:
        recorder.add(step, verifier.scores, text.queries_of(rows))
    accounting.add(results, rows)
    return Feedback(
        result=text.result.to(parts.drafter.device),
        features=verifier.features,
        moved=any(row.complete and row.survivor > 0 for row in rows),
        draft_ended=0 in accounting.pending,
    )


def finish_all(parts: Parts, overlap: Overlap, in_flight: RoundsInFlight, feedback: Feedback) -> Feedback:
    """Finish the rounds that are in flight; those that were started after the end of the text count nowhere."""
    while in_flight:
        step = in_flight.pop()
        if parts.text.finished:
            parts.verifier.host_copies.skip()
            overlap.discard_round()
        else:
            feedback = finish_round(parts, step)
    in_flight.close()
    return feedback


def read_prompt(parts: Parts) -> Feedback:
    """Generate the first token with the target alone; the draft reads the prompt once it is out."""
    step = parts.target.prefill()
    nobody = NoDraft(parts.verifier.nothing)
    parts.verifier(step, *nobody.nothing, nobody.drafted)
    feedback = finish_round(parts, step)
    parts.text.stream_out()
    if not parts.text.finished:
        parts.drafter.prefill(parts.text.prompt_length)
    return feedback


class RoundsInFlight:
    """The rounds between the device and the host, the oldest first.

    One round may be in flight while the next one starts, if the device knows how to go on by itself: the verifier has
    written on the device what its result means, a single row continues in any case unless it ends, and the drafter
    launches the same work whatever the result was. A round that was started after the end of the text is discarded.

    Args:
        text: the committed text.
        drafter: proposes draft tokens.
    """

    def __init__(self, text: Text, drafter: DraftSource) -> None:
        self.text, self.steps = text, deque[Step]()
        self.most_per_round = drafter.max_tokens_per_round
        knows = text.resolved_on_device and len(text.lengths) == 1 and not text.stopper.called
        self.limit = int(knows and drafter.same_every_round)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def tokens(self) -> int:
        """The most tokens that these rounds can add."""
        return len(self.steps) * self.most_per_round

    def must_finish_one(self) -> bool:
        """Whether the host must read a result before another round may start."""
        return bool(self.steps) and (len(self.steps) > self.limit or self.text.may_finish(self.tokens))

    def announce(self) -> None:
        """Tell the text how many tokens may have been added by now."""
        self.text.in_flight = self.tokens

    def push(self, step: Step) -> None:
        self.steps.append(step)

    def pop(self) -> Step:
        return self.steps.popleft()

    def close(self) -> None:
        self.text.in_flight = 0
