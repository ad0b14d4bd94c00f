"""A row of a running batch takes another text: everything that is kept per row is set for it.

To the loop the new text looks like one whose last token was committed in the last round, with no draft pending. All of
it but that token must be in the KV caches of both models (`copy_row`); the next pass of the target reads the last token
and returns the first new one. Only values change, in memory that stays where it is, so captured stages stay valid.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..runtime.eager import EagerRunner
from ..runtime.kv_cache import SlotLayer
from .draft_elsewhere import DraftElsewhere
from .draft_source import DraftSource
from .drafter import Drafter
from .lookup import Lookup, LookupDraft
from .loop import NoDraft, Parts
from .resolve import NONE, Feedback, RowResult
from .several_sources import LookupBesideDraft
from .stepwise_drafter import StepwiseDrafter
from .text import Text

NOBODY = (0,)  # the text of a row that nobody uses


def take_over_row(parts: Parts, feedback: Feedback, row: int, tokens: Sequence[int], done: bool = False) -> Feedback:
    """Let a row go on with another text; return the feedback for the next round.

    Args:
        parts: the parts of the generation, between two rounds.
        feedback: the result of the last round.
        row: which row.
        tokens: the new text, at least one token.
        done: nobody uses the row, and it gains nothing.
    """
    _take_text(parts.text, row, tokens, done)
    _take_draft(parts.drafter, row, tokens)
    return feedback._replace(result=parts.text.result.to(parts.drafter.device), draft_ended=True)


def vacate_row(parts: Parts, feedback: Feedback, row: int) -> Feedback:
    """Let a row whose text has ended wait for another one."""
    return take_over_row(parts, feedback, row, NOBODY, done=True)


def _take_text(text: Text, row: int, tokens: Sequence[int], done: bool) -> None:
    length = len(tokens)
    text.ids[row, :length] = torch.tensor(tokens, device=text.ids.device)
    last = RowResult(committed=1, accepted=0, token=tokens[-1], survivor=NONE, continuation=NONE, finished=done)
    text.result.packed[:, row] = torch.tensor([*map(int, last), length], device=text.ids.device)
    text.lengths[row], text.done[row], text.fired[row], text.new[row] = length, done, done, []


def _take_draft(source: DraftSource, row: int, tokens: Sequence[int]) -> None:
    if isinstance(source, DraftElsewhere):
        _take_draft(source.source, row, tokens)
    elif isinstance(source, LookupBesideDraft):
        _take_draft(source.drafter, row, tokens)
        _take_draft(source.lookup, row, tokens)
        if source.left:
            source.left[row] = len(tokens)
    elif isinstance(source, Drafter):
        pending, length = source.round.pending, len(tokens)
        pending.ids[row, :length] = torch.tensor(tokens, device=pending.device)
        for memory in (pending.start, pending.end, pending.cached):
            memory[row] = length - 1
        if isinstance(source, StepwiseDrafter):
            source.begun = False  # with the text before
    elif isinstance(source, LookupDraft):
        _take_lookup(source.lookup, row, tokens)
    elif not isinstance(source, NoDraft):
        raise NotImplementedError(f"drafts of {source.name} cannot change texts while a batch runs")


def _take_lookup(lookup: Lookup, row: int, tokens: Sequence[int]) -> None:
    lookup.prepare()
    lookup.rows[row] = lookup.new_row(tokens)


def copy_row(source: EagerRunner, source_row: int, runner: EagerRunner, row: int, rows: int, length: int) -> None:
    """Copy the keys and values of the first tokens of a row to a row of another runner of the same model.

    Args:
        source: the runner that has them.
        source_row: in which row.
        runner: the runner that gets them.
        row: in which row.
        rows: rows of that runner.
        length: how many tokens.
    """
    runner.reserve(rows, length)
    runner.slot_positions[row, :length] = source.slot_positions[source_row, :length]
    for index, layer in source.cache.slot_layers():
        if index == len(runner.cache.layers):
            runner.cache.layers.append(SlotLayer(runner.cache.address))
        other = runner.cache.layers[index]
        keys, values = (each[source_row : source_row + 1, :, :length] for each in (layer.keys, layer.values))
        if not other.is_initialized:
            other.lazy_initialization(*(each[:, :, :0].expand(rows, -1, -1, -1) for each in (keys, values)))
        other.keys[row, :, :length], other.values[row, :, :length] = keys[0], values[0]
