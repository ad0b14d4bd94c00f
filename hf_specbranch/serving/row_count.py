"""How many rows a running batch has at most: as many as still raise its speed, and fit into memory."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..planning.sizes import predicted_costs, sizes_of

MOST, MOST_ON_CPU = 64, 16
CONTEXT = 1024  # tokens of a typical text
DRAFT = 4  # tokens of a typical draft
MIN_GAIN = 1.25  # twice the rows must generate this many times as many tokens per second
MEMORY = 0.4  # of the free memory of a GPU that keys and values may take, while answers move to another batch twice


def most_rows(model: PreTrainedModel, draft: PreTrainedModel | None, max_length: int) -> int:
    """Return the most rows of a batch, by the costs that the sizes of the models predict.

    Args:
        model: the target.
        draft: its draft, if there is one.
        max_length: the longest text.
    """
    on_gpu, sizes = model.device.type == "cuda", sizes_of(model, draft or model)
    fitting = MOST if on_gpu else MOST_ON_CPU
    if on_gpu:
        free, _ = torch.cuda.mem_get_info(model.device)
        per_token = sum(size.kv_token for size in (sizes if draft is not None else sizes[:1]))
        fitting = max(1, min(fitting, int(MEMORY * free / (per_token * max_length))))

    def speed(rows: int) -> float:
        costs = predicted_costs(*sizes, on_gpu, rows, min(CONTEXT, max_length))
        return rows / (costs.pass_seconds(DRAFT) + (0 if draft is None else DRAFT * costs.draft_step))

    rows = 1
    while 2 * rows <= fitting and speed(2 * rows) >= MIN_GAIN * speed(rows):
        rows *= 2
    return rows
