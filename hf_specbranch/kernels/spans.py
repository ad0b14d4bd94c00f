"""Spans: which slots each query of a pass sees, as four numbers.

A query sees the text up to its place, and on a branch its own slots:

    first <= slot < end    or    own_first <= slot < own_end

Spans [B, Q, 4] stay the same size however long the text is, so a captured pass that reads them serves every length. A
mask [B, Q, S] would have to be as wide as the text can get. Kernels take spans where transformers has a mask, and tell
them apart by their dtype. `runtime.eager` makes them, and turns them into masks.
"""

import torch

SPANS = torch.int32  # the dtype of spans
