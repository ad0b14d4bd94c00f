"""Weights as checkpoints store them: packed elements, scales per group, zero points; or dense.

A `Packed` weight consists of views of the module's own tensors, so nothing is copied and a change in place is seen.
Layouts that store the transposed matrix (GPTQ) are transposed views. An element is

    (code - zero) * scale        or, with a shift per group,        code * scale + shift
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

WORD = 8  # 4-bit elements in an int32 word
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

# 8 bits: int8 and float8 are what they say. 4 bits: "offset" is an unsigned code, by default with a zero point of 8;
# "signed" is two's complement; "table" is an index into 16 values. "dense": numbers of half precision, without scales.
Code = Literal["int8", "float8", "offset", "signed", "table", "dense"]
Zeros = Literal["none", "words", "shift"]


class Packed(NamedTuple):
    """A quantised or dense weight [N, K]. Tensors may be views with any strides."""

    data: Tensor  # [N, K] of numbers, or words [N, K / 8] of int32, the first element in the lowest bits
    scale: Tensor  # [N / scale_rows, K / group] of floats, or uint8 exponents of two plus 127 (e8m0)
    code: Code
    group: int  # elements of a row with one scale
    scale_rows: int = 1  # rows with one scale
    zero: Tensor | None = (
        None  # "words": codes packed like the data, along N: [N / 8, K / group]; "shift": [N, K / group]
    )
    zeros: Zeros = "none"
    zero_offset: int = 0  # added to each zero point: checkpoints of GPTQ's first version store one less
    table: Tensor | None = None  # [16] of float32
    high_first: bool = False  # of two elements in a byte, the first is in the high bits

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        rows, width = self.data.shape
        return torch.Size((rows, width * WORD if self.data.dtype == torch.int32 else width))

    @property
    def name(self) -> str:
        """The format, for the key of autotuned plans: all that the kernel is compiled for."""
        along = "n" if self.data.stride(0) == 1 else "k"
        scale = str(self.scale.dtype).removeprefix("torch.")
        return f"{self.code}-{along}-g{min(self.group, self.shape[1])}x{self.scale_rows}-{self.zeros}-{scale}"


def dense(weight: Tensor) -> Packed:
    """Return a weight of half precision as it is, for kernels that take packed ones. Its scales are not used."""
    return Packed(weight, weight, "dense", weight.shape[1])


def dequantise(packed: Packed) -> Tensor:
    """Return the weight [N, K] in float32: the reference.

    Example:
        >>> words = torch.full((1, 4), 0x76543210, dtype=torch.int32)
        >>> dequantise(Packed(words, torch.tensor([[0.5]]), "offset", group=32))[0, :8].tolist()
        [-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5]
    """
    if packed.code == "dense":
        return packed.data.float()
    rows, depth = packed.shape
    scale = _spread(_exponents(packed.scale), rows, depth, packed.scale_rows, packed.group)
    if packed.code in ("int8", "float8"):
        code = packed.data.float()
    else:
        nibbles = unpack_words(packed.data, packed.high_first)
        if packed.code == "table":
            assert packed.table is not None
            code = packed.table.float()[nibbles.long()]
        elif packed.code == "signed":
            code = ((nibbles ^ 8) - 8).float()
        else:
            code = nibbles.float() - (8 if packed.zeros != "words" else 0)
    if packed.zero is None:
        return code * scale
    if packed.zeros == "shift":
        return code * scale + _spread(packed.zero.float(), rows, depth, 1, packed.group)
    points = unpack_words(packed.zero.T, False).T[:rows] + packed.zero_offset
    return (code - _spread(points.float(), rows, depth, 1, packed.group)) * scale


def unpack_words(words: Tensor, high_first: bool) -> Tensor:
    """Return the 4-bit codes of int32 words: [..., W] to [..., 8 W]."""
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    if high_first:
        shifts = shifts ^ 4
    return (words[..., None] >> shifts & 15).flatten(-2)


def _exponents(scale: Tensor) -> Tensor:
    return torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()


def _spread(values: Tensor, rows: int, depth: int, scale_rows: int, group: int) -> Tensor:
    """Repeat one value per group for every element."""
    return values.repeat_interleave(scale_rows, 0)[:rows].repeat_interleave(group, 1)[:, :depth]
