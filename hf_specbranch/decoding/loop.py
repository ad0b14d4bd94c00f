"""The method. A round: draft a chain, let the target verify it, draft what may follow, judge, commit.

`sequential_loop` does one thing after the other; in `overlapped_loop` the draft works while the target does.
Both commit the same tokens. The policies differ in what the drafter does when it is asked, nowhere else.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..runners.base import Step
from ..runners.placement import Beside
from .drafter import Drafter, NoDrafter
from .judge import Judge
from .recorder import Recorder
from .records import Branches, Chain
from .target import Target
from .text import Text


class Parts(NamedTuple):
    """Who takes part in a generation."""

    target: Target  # runs the large model
    drafter: Drafter | NoDrafter  # runs the small one
    judge: Judge  # compares what they say
    text: Text  # holds what is agreed
    recorder: Recorder  # keeps scores and the like for the caller
    feature_layers: tuple[int, ...] = ()  # hidden states the hooks want


def sequential_loop(parts: Parts, beside: Beside) -> None:
    """Draft, verify, draft ahead, judge: each after the other."""
    target, drafter, text = parts.target, parts.drafter, parts.text
    step = target.prefill()
    drafter.prefill()
    conclude(parts, step, *nothing_drafted(text))
    while not text.finished:
        chain = drafter.draft(text.room())
        step = target.verify(chain)
        with beside.drafting():
            branches = drafter.branch()
        conclude(parts, step, chain, branches)


def overlapped_loop(parts: Parts, beside: Beside) -> None:
    """The same rounds, with the draft at work during the target's passes."""
    target, drafter, text = parts.target, parts.drafter, parts.text
    prompt_read = beside.start(target.prefill)
    drafter.prefill()
    conclude(parts, prompt_read(), *nothing_drafted(text))
    while not text.finished:
        chain = drafter.draft(text.room())
        verified = beside.start(target.verify, chain)
        with beside.drafting():
            branches = drafter.branch()
        conclude(parts, verified(), chain, branches)


def conclude(parts: Parts, step: Step, chain: Chain, branches: Branches) -> None:
    """End a round: the verdict, the text it adds, and what the drafter makes of it."""
    verdict, scores = parts.judge(step.logits, chain, branches)
    outcomes = parts.text.commit(verdict, chain, parts.recorder.scores_so_far(scores))
    parts.recorder.add(step, scores, outcomes)
    parts.drafter.follow(outcomes, features_at(step, verdict.accepted, parts.feature_layers))


def nothing_drafted(text: Text) -> tuple[Chain, Branches]:
    rows, device = text.ids.shape[0], text.ids.device
    return Chain.empty(rows, device), Branches.none(rows, device)


def features_at(step: Step, accepted: Tensor, layers: tuple[int, ...]) -> Tensor | None:
    """[B, layers, H]: the target's hidden states where the verdict's last token was chosen."""
    if not layers or step.hidden_states is None or step.logits.shape[1] != step.hidden_states[0].shape[1]:
        return None
    rows, device = torch.arange(accepted.shape[0]), accepted.device  # layers of a split model live on several
    states = [step.hidden_states[layer][rows, accepted.cpu()].to(device) for layer in layers]
    return torch.stack(states, dim=1)
