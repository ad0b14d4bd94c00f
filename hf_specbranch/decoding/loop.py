"""SpecBranch, the method. Each round: propose, verify, branch, resolve, adopt.

- *propose*: if no draft is pending, the draft model drafts up to gamma tokens, and stops where its confidence is
  below epsilon. If a branch survived the last round, the length head (H-RAD) and the confidence decide how many of
  its tokens to send: none, all, or up to the first token below epsilon. A draft in one round is never longer than
  gamma.
- *verify*: the target runs one pass over all draft tokens, and over tree leaves (alternatives to single draft
  tokens).
- *branch*: while it runs, the draft model continues after the last draft token, the branch point. The main branch
  starts with its likeliest token; where it is uncertain, side branches start with other tokens, up to k_max in all.
  Rejection branches start at earlier positions, in case the target rejects there.
- *resolve*: the verifier finds how many draft tokens are accepted, the target's own token after them, and the branch
  that starts with that token (`Verifier.verify`). `finish_round` commits these tokens and counts the others
  (`resolve.py`).
- *adopt*: at the start of the next `propose` the surviving branch becomes the pending draft.

Policies (`policies.py`) change only the drafter. Whether both models really run at the same time is up to `Overlap`;
the output does not depend on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.base import Step
from ..runtime.overlap import Overlap
from ..stats import SpecBranchStats
from .draft_source import DraftSource
from .outputs import Recorder
from .resolve import Accounting, BranchStarts, Drafted, DraftTokens, Feedback
from .target import Target
from .text import Text
from .verifier import Verifier


class Parts(NamedTuple):
    """The objects that a generation is made of."""

    target: Target  # runs the large model
    drafter: DraftSource  # proposes draft tokens
    verifier: Verifier  # accepts or rejects them
    text: Text  # holds what is committed
    recorder: Recorder | None  # keeps scores and other outputs, if the caller wants any
    accounting: Accounting  # counts accepted, rolled back and wasted tokens


def decode(parts: Parts, overlap: Overlap, feedback: Feedback, rounds: Iterable[int]) -> Feedback:
    """Run rounds until the text is complete, or `rounds` is exhausted.

    Args:
        parts: the parts of the generation.
        overlap: runs the target's pass at the same time as the draft's work, or before it.
        feedback: the result of the last finished round.
        rounds: one item per round that may be taken; the items are not used.
    """
    target, drafter, verifier, text = parts.target, parts.drafter, parts.verifier, parts.text
    in_flight = RoundsInFlight(text, drafter, target.stats, parts.recorder is not None)
    for _ in rounds:
        while not text.finished and in_flight.must_finish_one():
            feedback = finish_round(parts, *in_flight.pop())
        if text.finished:
            break
        in_flight.update_text()
        with overlap.working("draft"):
            draft_tokens = text.padded(drafter.propose(feedback, text.reach))  # adopts what survived, then drafts
        wait_for_target = overlap.start(target.verify, draft_tokens)
        with overlap.working("branch"):
            branches = drafter.branch(text.reach)
        step = wait_for_target()
        verifier.verify(step, draft_tokens, branches, drafter.drafted)
        in_flight.push(step, drafter.name, draft_tokens.most_committed)
        if (begin_next := drafter.begin_next) is not None and in_flight.may_go_on():
            in_flight.update_text()
            with overlap.working("draft"):
                begin_next(feedback, text.reach)
    feedback = finish_all(parts, overlap, in_flight, feedback)
    parts.accounting.flush()
    text.stream_out()
    return feedback


def finish_round(parts: Parts, step: Step, source: str = "") -> Feedback:
    """Resolve a round on the host: commit its tokens, count the others, and return feedback for the drafter.

    Args:
        parts: the parts of the generation.
        step: the target's pass.
        source: the name of what has drafted.
    """
    text, verifier, recorder, accounting = parts.text, parts.verifier, parts.recorder, parts.accounting
    if text.static_shapes:  # stream the previous round now, while the device runs this one
        accounting.flush()
        text.stream_out()
    results = verifier.results()
    rows = text.commit(results, None if recorder is None else recorder.scores_so_far(verifier.scores))
    parts.target.check_room()
    if not text.static_shapes:
        text.stream_out()
    if recorder is not None:
        recorder.add(step, verifier.scores, text.queries_of(rows))
    # A row that had ended before has gained nothing. It took part in a round that was in flight, which counts nowhere.
    counted = [
        result.without_draft() if row.finished and not row.committed else result for result, row in zip(results, rows)
    ]
    accounting.add(counted, rows, source)
    return Feedback(
        result=text.result.to(parts.drafter.device),
        features=verifier.features,
        moved=any(row.complete and row.survivor > 0 for row in rows),  # a side branch survived
        draft_ended=0 in accounting.pending,
    )


def finish_all(parts: Parts, overlap: Overlap, in_flight: RoundsInFlight, feedback: Feedback) -> Feedback:
    """Finish the rounds in flight; those that were started after the end of the text are not counted."""
    while in_flight:
        step, source = in_flight.pop()
        if parts.text.finished:
            parts.verifier.host_copies.skip()
            overlap.discard_round()
        else:
            feedback = finish_round(parts, step, source)
    in_flight.close()
    return feedback


def read_prompt(parts: Parts, before_draft: Callable[[], None] | None = None) -> Feedback:
    """Generate the first token with the target alone. The draft reads the prompt after that token is streamed.

    Where it takes the host no time to let the draft do so, it does while the host waits for the token.

    Args:
        parts: the parts of the generation.
        before_draft: called before the draft reads the prompt.
    """
    step = parts.target.prefill()
    no_draft = NoDraft(parts.verifier.nothing)
    parts.verifier.verify(step, *no_draft.nothing, no_draft.drafted)

    def read_with_draft() -> None:
        if before_draft is not None:
            before_draft()
        parts.drafter.prefill(parts.text.prompt_length)

    early = parts.drafter.reads_early and not parts.text.may_finish(1)
    if early:
        read_with_draft()
    feedback = finish_round(parts, step)
    parts.text.stream_out()
    if not early and not parts.text.finished:
        read_with_draft()
    return feedback


class RoundInFlight(NamedTuple):
    """A round that was launched, and whose result the host has not read."""

    step: Step
    source: str  # what has drafted
    rows: int  # that had not ended
    most_tokens: int  # that it can add


class RoundsInFlight:
    """The rounds that were launched, and whose results the host has not read; the oldest first.

    One round may be in flight while the next one starts, if four conditions hold: the verifier writes the round
    result on the device itself; there is no stopping criterion that the host must call; nobody records the logits,
    which the next round overwrites; and the drafter launches the same work whatever the result was, so that it needs no
    feedback from the host. A round that was started after the
    end of the text is discarded. Of a batch, a row that has ended takes part in the round that is in flight, where its
    result is ignored; from then on the host marks finished rows on the device, so each round waits for the host.

    Args:
        text: the committed text.
        drafter: proposes draft tokens.
        stats: counts passes of unfinished rows.
        records: the logits of each round are read on the host.
    """

    def __init__(self, text: Text, drafter: DraftSource, stats: SpecBranchStats, records: bool = False) -> None:
        self.text, self.stats, self.steps = text, stats, deque[RoundInFlight]()
        self.can_continue = text.resolved_on_device and not text.stopper.called and not records
        self.max_in_flight = int(self.can_continue and drafter.same_every_round)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def tokens(self) -> int:
        """The most tokens that these rounds can add."""
        return sum(each.most_tokens for each in self.steps)

    def must_finish_one(self) -> bool:
        """Whether the host must read a result before another round may start."""
        most = 0 if any(self.text.done) else self.max_in_flight
        return bool(self.steps) and (len(self.steps) > most or self.text.may_finish(self.tokens))

    def may_go_on(self) -> bool:
        """Whether the device can go on from the result of the last round before the host has read it.

        Not in a batch: if a row ends in that round, the host must tell the device before it goes on.
        """
        return self.can_continue and len(self.text.done) == 1 and not self.text.may_finish(self.tokens)

    def update_text(self) -> None:
        """Tell the text how many tokens these rounds have added at most."""
        self.text.in_flight = self.tokens

    def push(self, step: Step, source: str, most_tokens: int) -> None:
        self.steps.append(RoundInFlight(step, source, self.text.done.count(False), most_tokens))

    def pop(self) -> tuple[Step, str]:
        """Return the pass of the oldest round, and the name of what has drafted.

        Rows that had ended when it was launched are no longer counted.
        """
        step, source, rows, _ = self.steps.popleft()
        # Of a round that is discarded, `Overlap.discard_round` takes back one row.
        self.stats.row_passes -= rows - (1 if self.text.finished else self.text.done.count(False))
        self.text.others_in_flight = len(self.steps)
        return step, source

    def close(self) -> None:
        self.text.in_flight = 0


class NoDraft:
    """The draft source of autoregressive decoding: it proposes nothing.

    Args:
        nothing: no draft tokens and no branches.
    """

    name, depth, same_every_round, keeps_drafts, reads_early = "", 0, True, True, False
    begin_next = None

    def __init__(self, nothing: tuple[DraftTokens, BranchStarts]) -> None:
        self.nothing, self.device = nothing, nothing[0].length.device

    def prefill(self, length: int) -> None: ...

    def remember(self, tokens: list[int]) -> None: ...

    def propose(self, feedback: Feedback, reached: int) -> DraftTokens:
        return self.nothing[0]

    def branch(self, reached: int) -> BranchStarts:
        return self.nothing[1]

    def drafted(self) -> Tensor:
        rows = self.nothing[0].length.shape[0]
        return torch.zeros((rows, len(Drafted._fields)), dtype=torch.long, device=self.device)
