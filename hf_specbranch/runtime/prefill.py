"""Prefill through captured passes.

Python launches the kernels of an eager pass one by one. For a short text that takes longer than to compute them. So a
text is read in passes of few sizes, each of which is captured once. Only the first pass may have padding. Long texts of
several rows are read in passes that are not captured, through the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .base import Step
from .eager import EagerRunner, make_spans

# With a 7B model on an H200, the first token after a prompt of 129 tokens takes 22 ms if the prompt is padded to 256
# tokens (28 ms to 512, 36 ms to 1,024). After a prompt of 1,000 tokens it takes 32 ms (58 ms if kernels are launched
# one by one).
STEP, MOST = 256, 1024  # a short text is read in one pass: a multiple of STEP tokens, or less where rows are many
SIZES = 256, 512, 1024  # the sizes of passes over one row, under spans
MOST_SPARE = 4096  # slots of all rows for a text that is read beside a generation
LONG_PASS = 8192  # tokens of all rows in a pass that is not captured; such a pass is limited by the device


def can_prefill(runner: EagerRunner, tokens: Tensor, padded: bool) -> bool:
    """Return whether `prefill` can read a text [B, P], with padding on the left or without.

    Recurrent layers cannot read padding, and to keep a state for each token of a prompt would take too much memory.
    """
    if runner.is_recurrent:
        return False
    if runner.takes_spans:
        return tokens.shape[1] > 0
    rows, length = tokens.shape
    return not padded and length > 0 and rows * padded_length(length, rows) <= MOST


def prefill(
    runner: EagerRunner,
    tokens: Tensor,
    positions: Tensor,
    first: Tensor,
    start: int = 0,
    keep: Callable[[Step, int, int], None] | None = None,
    **outputs: Any,
) -> Tensor:
    """Read a text, token `i` into slot `i`. Return logits [B, 1, V] after its last token.

    Args:
        runner: the model and its cache.
        tokens: [B, P].
        positions: [B, P or more] positions of the tokens in the slots.
        first: [B, 1] the first slot that is not padding.
        start: how many tokens have their keys and values in the cache already.
        keep: given each pass, the number of tokens read by then, and how many of them this pass has read, as its last.
        outputs: what else a pass must return, as arguments of the model.
    """
    rows, length = tokens.shape
    for size, count in passes(rows, length - start, runner.takes_spans):
        step = _read(runner, tokens[:, start : start + count], positions, first, start, size, outputs)
        start += count
        if keep is not None:
            keep(step, start, count)
    return step.logits[:, -1:]


def passes(rows: int, count: int, takes_spans: bool) -> Iterator[tuple[int, int]]:
    """Yield the size of each pass over so many tokens, and how many of these it reads; the rest is padding.

    Example:
        >>> list(passes(1, 2400, takes_spans=True))
        [(512, 352), (1024, 1024), (1024, 1024)]
        >>> list(passes(8, 65, takes_spans=True)), list(passes(2, 4581, takes_spans=True))
        ([(128, 65)], [(4096, 4096), (485, 485)])
    """
    if rows == 1 and takes_spans:
        full, rest = divmod(count, SIZES[-1])
        if rest:
            yield next(size for size in SIZES if rest <= size), rest
        for _ in range(full):
            yield SIZES[-1], SIZES[-1]
    elif rows * padded_length(count, rows) <= MOST:
        yield padded_length(count, rows), count
    else:
        columns = max(1, LONG_PASS // rows)
        for begin in range(0, count, columns):
            yield (min(columns, count - begin),) * 2


def _read(
    runner: EagerRunner,
    tokens: Tensor,
    positions: Tensor,
    first: Tensor,
    start: int,
    size: int,
    outputs: dict[str, Any],
) -> Step:
    """Read tokens [B, N] into the slots from `start` on, in one pass of `size` tokens.

    Padding goes before the text, so that the last token of the text is always the last of the pass. The padding is
    written to slots after the text. No query of the text attends to these before their own tokens are written.
    """
    rows, count = tokens.shape
    runner.reserve(rows, start + size)
    order = torch.arange(size, device=tokens.device)
    slots = (start + order.roll(size - count)).expand(rows, -1)
    positions = positions[
        :, slots[0].clamp(max=start + count - 1)
    ]  # padding repeats the last: a later one may not exist
    seen = torch.ones((rows, start + size), dtype=torch.bool, device=tokens.device)
    visible = runner.visible(make_spans(first, slots + 1), start + size, seen)
    tokens = pad(tokens, (size - count, 0))
    captured = size in captured_sizes(rows, runner.takes_spans)  # the end of a long text has any other size
    forward = runner.forward if captured else runner.forward_uncaptured
    return forward(tokens, positions, slots, visible, **runner.last_logits_only, **outputs)


def spare_slots(rows: int, length: int) -> int:
    """Return how many slots `read_in_spare_slots` takes for a text; 0 if there are too many rows to read it all."""
    slots = -(-length // STEP) * STEP
    return slots if rows * slots <= MOST_SPARE else 0


def longest_in_spare_slots(rows: int) -> int:
    """Return the longest text that there are spare slots for; 0 if there are too many rows.

    Example:
        >>> longest_in_spare_slots(1), longest_in_spare_slots(6), longest_in_spare_slots(20)
        (4096, 512, 0)
    """
    return MOST_SPARE // rows // STEP * STEP


def can_read_in_spare_slots(runner: EagerRunner, rows: int, length: int, used: int) -> bool:
    """Return whether a text fits into the slots after those in use; recurrent layers need its beginning, too."""
    return not runner.is_recurrent and 0 < spare_slots(rows, length) <= runner.cache.address.capacity - used


def read_in_spare_slots(runner: EagerRunner, tokens: Tensor, rows: int, last: int) -> Tensor:
    """Return logits [1, last, V] after each of the last tokens of a text [1, L].

    Its keys and values go to the last slots of the cache, so a generation under way is not disturbed. Passes have one
    size, which is captured once. All `rows` of the cache read the text, because a captured pass has no other size.
    """
    length, capacity = tokens.shape[1], runner.cache.address.capacity
    start = capacity - spare_slots(rows, length)
    seen = torch.ones((rows, capacity), dtype=torch.bool, device=tokens.device)
    first = torch.full((rows, 1), start, device=tokens.device)
    found = []
    for begin in range(0, length, STEP):
        order = torch.arange(begin, begin + STEP, device=tokens.device).expand(rows, -1)
        visible = runner.visible(make_spans(first, start + order + 1), capacity, seen)
        positions = order if runner.position_limit is None else order.clamp(max=runner.position_limit - 1)
        chunk = tokens[:, begin : begin + STEP]
        padded = pad(chunk, (0, STEP - chunk.shape[1])).expand(rows, -1)
        logits = runner.forward(padded, positions, start + order, visible).logits
        if (wanted := begin + chunk.shape[1] - (length - last)) > 0:  # the next pass overwrites them
            found.append(logits[:1, max(0, chunk.shape[1] - wanted) : chunk.shape[1]].clone())
    return torch.cat(found, dim=1)


def captured_sizes(rows: int, takes_spans: bool) -> list[int]:
    """Return the sizes of all passes that are captured for a number of rows.

    Example:
        >>> captured_sizes(8, takes_spans=True)
        [128]
    """
    if rows == 1 and takes_spans:
        return list(SIZES)
    return list(range(step_of(rows), MOST // rows + 1, step_of(rows)))


def padded_length(length: int, rows: int) -> int:
    """Return the next length for which a pass over several rows, or under masks, is captured."""
    return -(-length // step_of(rows)) * step_of(rows)


def step_of(rows: int) -> int:
    """Return the step between these lengths: STEP, or the largest power of two of which one pass has room."""
    return min(STEP, 1 << (max(1, MOST // rows).bit_length() - 1))
