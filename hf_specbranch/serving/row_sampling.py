"""Sampling with settings of its own for each row of a running batch.

A row is sampled by adding noise to its scores and taking the largest: if `g(x)` are independent Gumbel variables,
`argmax(log p(x) + g(x))` is a draw from `p`. The noise of a position is a function of the row's seed, the position and
the token, and of nothing else. Three things follow:

- The text is the one that decoding token by token with the same noise would give, whatever was drafted, branched or
  accepted: to the loop this is greedy decoding of other scores.
- A request with a seed has the same text whatever else is in the batch.
- Target and draft share the noise, so that they agree more often than two draws would.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..decoding.scoring import RowProcessor
from ..runtime.static_buffers import Buffers

# What rows of a batch may need. Captured stages contain all of it, so a batch has no more than its requests ask for.
GREEDY_ROWS, SAMPLED_ROWS, CUT_ROWS = range(3)


class Sampling(NamedTuple):
    """How the tokens of one request are chosen."""

    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    seed: int = 0

    @property
    def kind(self) -> int:
        """What this needs of a batch."""
        if self.temperature == 0:
            return GREEDY_ROWS
        return CUT_ROWS if self.top_p < 1 else SAMPLED_ROWS


GREEDY = Sampling()


class RowSettings(NamedTuple):
    """The settings of all rows on a device."""

    temperature: Tensor  # [B] float32
    cut: Tensor  # [B] float32: 1 - top_p
    seed: Tensor  # [B] int64

    def write(self, row: int, sampling: Sampling) -> None:
        """Set one row."""
        for memory, value in zip(self, (sampling.temperature, 1 - sampling.top_p, sampling.seed)):
            memory[row] = value


class RowSampling(RowProcessor):
    """Draws the tokens of each row at its own temperature, with its own top-p and seed; other rows are greedy.

    Args:
        rows: rows of the batch.
        kind: the most that a row may need; `GREEDY_ROWS`, `SAMPLED_ROWS` or `CUT_ROWS`.

    Example:
        >>> sampling = RowSampling(2)
        >>> sampling.set_row(1, Sampling(temperature=0.8, seed=7))
        >>> scores = torch.tensor([[[0.0, 1.0]], [[0.0, 1.0]]])
        >>> sampling.score(scores, torch.tensor([[5], [5]]))[0].tolist()
        [[0.0, 1.0]]
    """

    kind: int

    def __init__(self, rows: int, kind: int = CUT_ROWS) -> None:
        self.rows, self.kind = [GREEDY] * rows, kind
        self.copies: dict[object, RowSettings] = {}

    def set_row(self, row: int, sampling: Sampling) -> None:
        """Set how the tokens of a row are chosen from now on."""
        assert sampling.kind <= self.kind
        self.rows[row] = sampling
        for copy in self.copies.values():
            copy.write(row, sampling)

    def settings_in(self, buffers: Buffers, name: str) -> RowSettings:
        count = len(self.rows)
        memory = (
            buffers.tensor(f"{name}.temperature", (count,), torch.float32),
            buffers.tensor(f"{name}.cut", (count,), torch.float32),
            buffers.tensor(f"{name}.seed", (count,)),
        )
        return self._filled((buffers.serial, name), RowSettings(*memory))

    def _filled(self, key: object, settings: RowSettings) -> RowSettings:
        self.copies[key] = settings
        for row, sampling in enumerate(self.rows):
            settings.write(row, sampling)
        return settings

    def _on(self, device: torch.device) -> RowSettings:
        if device not in self.copies:
            temperature, cut = torch.zeros((2, len(self.rows)), dtype=torch.float32, device=device)
            seed = torch.zeros(len(self.rows), dtype=torch.long, device=device)
            self._filled(device, RowSettings(temperature, cut, seed))
        return self.copies[device]

    def score(self, scores: Tensor, length: Tensor, settings: RowSettings | None = None) -> Tensor:
        kind = self.kind
        if settings is None:  # this runs in Python each time, so it may leave out what no row needs now
            kind, settings = max(sampling.kind for sampling in self.rows), self._on(scores.device)
        if kind == GREEDY_ROWS:
            return scores
        temperature, cut, seed = (each[:, None, None] for each in settings)  # [B, 1, 1]
        drawn = temperature > 0
        sampled = scores / torch.where(drawn, temperature, 1.0)
        if kind == CUT_ROWS:
            sampled = within_top_p(sampled, cut)
        noise = gumbel_noise(seed[:, :, 0], length.to(scores.device), scores.shape[-1])
        return torch.where(drawn, sampled + noise, scores)


def within_top_p(scores: Tensor, cut: Tensor) -> Tensor:
    """Return the scores [B, n, V] without the least likely tokens that together have at most the probability `cut`.

    The same as `TopPLogitsWarper` with `top_p = 1 - cut`, which may differ from row to row: [B, 1, 1]. Where it is 0,
    nothing is cut, not even what rounding takes for impossible.
    """
    ordered, order = scores.sort(dim=-1)
    unlikely = (ordered.softmax(-1).cumsum(-1) <= cut) & (cut > 0)
    unlikely[..., -1:] = False
    return scores.masked_fill(unlikely.scatter(-1, order, unlikely), float("-inf"))


# ---- noise by counter: splitmix64 (Steele, Lea and Flood, 2014), one stream per seed and position

STEP = -0x61C8864680B583EB  # 2^64 over the golden ratio, as a signed number
MIX = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
SHIFTS = 30, 27, 31
BITS = 40  # of a uniform number, so that small ones have the precision of a float32


def gumbel_noise(seed: Tensor, position: Tensor, count: int) -> Tensor:
    """Return [B, n, count] Gumbel variables: those of a seed and a position are always the same.

    Args:
        seed: [B, 1] int64.
        position: [B, n] int64.
        count: how many for each position.
    """
    stream = _mix(_mix(seed + STEP) + position * STEP)[..., None]  # [B, n, 1]
    numbers = _mix(stream + (1 + torch.arange(count, device=seed.device)) * STEP)
    uniform = (_shifted(numbers, 64 - BITS).float() + 0.5) * 2.0**-BITS
    waiting = -torch.log1p(-uniform.clamp(max=1 - 2.0**-24))  # exponential, and above 0
    return -waiting.log()


def _mix(numbers: Tensor) -> Tensor:
    """Return each 64-bit number scrambled."""
    for shift, factor in zip(SHIFTS, MIX):
        numbers = (numbers ^ _shifted(numbers, shift)) * factor
    return numbers ^ _shifted(numbers, SHIFTS[-1])


def _shifted(numbers: Tensor, by: int) -> Tensor:
    """Return 64-bit numbers shifted to the right, with zeros on the left."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)
