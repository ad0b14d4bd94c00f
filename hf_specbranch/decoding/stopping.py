"""Where a row ends: the user's stopping criteria, called after every token as in plain `generate()`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import stopping_criteria as sc

ROWWISE = (sc.StopStringCriteria, sc.MaxTimeCriteria)  # their answer for a row does not depend on the other rows


class Stopper:
    """Decides where rows end. Length and end-of-sequence tokens are checked here; other criteria are called.

    Args:
        criteria: a `StoppingCriteriaList`.
        max_length: the longest text, prompt included.
    """

    def __init__(self, criteria: Sequence[Any], max_length: int) -> None:
        self.max_length = max_length
        self.eos: set[int] = set()
        self.called: list[Any] = []
        for criterion in criteria:
            if type(criterion) is sc.EosTokenCriteria:
                self.eos.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is sc.MaxLengthCriteria:
                self.max_length = min(self.max_length, criterion.max_length)
            else:
                self.called.append(criterion)
        # Plain `generate()` pads finished rows only if there is an end-of-sequence token.
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)

    @property
    def needs_rows_in_step(self) -> bool:
        """Return whether some criterion may depend on the whole batch, so that rows must grow together."""
        return any(type(criterion) not in ROWWISE for criterion in self.called) or bool(self.called and not self.pads)

    def row_ends(self, ids: Tensor, length: int, token: int, scores: Any) -> bool:
        """Return whether a row that just gained `token` is complete; its text is the first `length` of ids [1, C]."""
        ends = [fired(criterion, ids[:, :length], scores)[0] for criterion in self.called]
        return any(ends) or token in self.eos or length >= self.max_length

    def rows_end(self, text: Tensor, tokens: list[int], scores: Any) -> list[bool]:
        """Return the same for all rows [B, L] at once."""
        ends = [token in self.eos or text.shape[1] >= self.max_length for token in tokens]
        for criterion in self.called:
            ends = [end or also for end, also in zip(ends, fired(criterion, text, scores))]
        return ends


def fired(criterion: Any, text: Tensor, scores: Any) -> list[bool]:
    """Return for each row of the text [B, L] whether a criterion fires.

    A criterion may return one value per row or a single bool for all rows, as in `StoppingCriteriaList`.
    """
    none = torch.zeros(text.shape[0], dtype=torch.bool, device=text.device)
    ends: list[bool] = (none | criterion(text, scores)).tolist()
    return ends
