"""Padding rows: a batch whose size is not captured runs on the stages of a larger one.

To capture the stages of a new batch size takes some tenths of a second; a few more rows in each pass take a few percent
longer. So 7 rows run on the idle runner of 8 rows, if there is one. The eighth row is a copy of the first that is
finished from the start: `Text` keeps it on the device, and neither the host nor the caller ever sees it. What padding
rows have cost is added up for each batch size. Once that reaches the time of a capture, the size is captured.

Only calls are padded whose output cannot show it: a sampled text would depend on what was captured before, since a
larger batch takes other random numbers, and a user's own processors, criteria, hooks and streamers must see the rows of
plain `generate()`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..model_state import state_of
from ..planning.sizes import predicted_costs, size_of
from ..runtime.kv_cache import past_length
from ..runtime.selection import idle_for
from ..stats import SpecBranchStats
from .call import Call
from .policies import POLICIES
from .scoring import has_static_form, with_copies_of_first_row

MOST = 2  # a batch is padded to at most so many times its rows
CAPTURE_SECONDS = 0.5  # to capture the stages of a batch size
PER_ROW = ("attention_mask", "position_ids")  # inputs with one entry per row, besides the tokens


def pad_rows(call: Call) -> Call:
    """Return the call with padding rows, if stages of that size are captured, and those of its own size are not."""
    rows = call.rows
    if rows == 1 or not can_be_padded(call):
        return call
    sizes = captured_sizes(call)
    larger = min((size for size in sizes if rows < size <= MOST * rows), default=None)
    pays = state_of(call.model).padding_seconds.get(rows, 0.0) < CAPTURE_SECONDS
    if rows in sizes or larger is None or not pays or not call.is_tokens_alone(call.attention(), by_spans=True):
        return call
    return with_rows(call, larger)


def can_be_padded(call: Call) -> bool:
    """Return whether nothing that the caller sees or passes in can depend on padding rows."""
    config, past = call.generation_config, call.past
    if config.do_sample or call.streamer is not None or call.records or call.observer is not None:
        return False
    if call.candidates is not None or call.translation is not None:
        return False
    if call.pause is not None or call.stopper.called or call.all_hooks or (past is not None and past_length(past)):
        return False
    given: list[Any] = [call.model_kwargs.get(name) for name in PER_ROW]
    per_row = all(each is None or (each.ndim == 2 and each.shape[0] in (1, call.rows)) for each in given)
    return per_row and all(map(has_static_form, call.processors))


def captured_sizes(call: Call) -> set[int]:
    """Return the batch sizes for which idle runners have captured stages that a call like this one takes."""
    config = call.config
    target = idle_for(call.model, config.runtime, config.kernels)
    settings = call.stage_settings
    sizes = {each.purpose[0] for each in target if any(run.settings == settings for run in each.plans_run)}
    if sizes and call.draft is not None and POLICIES[config.policy].drafts:
        sizes &= {each.purpose[0] for each in idle_for(call.draft, config.runtime, config.kernels)}
    return sizes


def with_rows(call: Call, rows: int) -> Call:
    """Return the call with copies of its first row after the last, so that there are this many rows."""
    more = rows - call.rows

    def padded(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor[:1].expand(more, -1)])

    given = {name: call.model_kwargs.get(name) for name in PER_ROW}
    inputs = {name: padded(each) for name, each in given.items() if each is not None and each.shape[0] == call.rows}
    kwargs = {**call.model_kwargs, **inputs}
    processors = [with_copies_of_first_row(each, more) for each in call.processors]
    ids = padded(call.input_ids)
    return replace(call, input_ids=ids, model_kwargs=kwargs, processors=processors, padding=more)


def count_padding(call: Call, stats: SpecBranchStats) -> None:
    """Add the time that the padding rows of a finished call have taken, as far as sizes predict it."""
    size, rows, context = size_of(call.model), call.rows - call.padding, call.input_ids.shape[1]
    sent = round(stats.target_positions / max(1, stats.target_forwards - 1)) - 1
    costs = (predicted_costs(size, size, True, count, context) for count in (rows, call.rows))
    own, padded = (each.pass_seconds(max(0, sent)) for each in costs)
    prefill = min(stats.time_to_first_token, stats.decoding_seconds)
    lost = prefill * call.padding / call.rows + (stats.decoding_seconds - prefill) * (1 - own / padded)
    known = state_of(call.model).padding_seconds
    known[rows] = known.get(rows, 0.0) + lost
