"""Linear layers of our own with eight bits per weight: what a draft is copied to, so that a step reads fewer bytes."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..kernels.dequantise import fits, product_of_many_rows
from ..kernels.linear import BLOCK
from ..kernels.packed import Packed
from .products import is_plain

Bits8 = Literal["float8", "int8"]
DTYPES = {"float8": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST = {"float8": 448.0, "int8": 127.0}
ROWS_AT_A_TIME = 16384  # rows that are converted in float32 at a time


class PackedLinear(nn.Module):
    """A linear layer whose weight has eight bits per element, and one scale per row in FP8, per 128 elements in int8.

    FP8 numbers have an exponent of their own, so that finer scales would make them hardly more exact.

    Few rows of `x` in half precision run through the kernel of quantised weights, since the tensors are those of a
    format that it knows (`quantised_formats`). Otherwise the weight is dequantised for each product: by a kernel, or
    by torch where Triton does not run.

    Args:
        weight: [N, K], which is not changed.
        bias: [N] or None; copied.
        kind: "float8" or "int8".

    Example:
        >>> layer = nn.Linear(256, 8)
        >>> packed = PackedLinear(layer.weight, layer.bias, "int8")
        >>> x = torch.ones(1, 256)
        >>> bool((packed(x) - layer(x)).abs().max() < 0.1)
        True
    """

    weight: Tensor  # [N, K]
    weight_scale: Tensor  # [N, 1] or [N, K / 128] of bfloat16
    bias: Tensor | None  # [N]
    dequantises = True  # its own forward has no better way for many rows

    def __init__(self, weight: Tensor, bias: Tensor | None, kind: Bits8) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.kind: Bits8 = kind
        data, scale = pack_rows(weight, kind)
        self.register_buffer("weight", data)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Compute x W^T + bias."""
        packed = Packed(self.weight, self.weight_scale, self.kind, self.in_features // self.weight_scale.shape[1])
        if fits(packed, x.dtype):
            return product_of_many_rows(x, packed, self.bias)
        groups = self.weight.to(x.dtype).view(*self.weight_scale.shape, -1) * self.weight_scale.to(x.dtype)[:, :, None]
        return functional.linear(x, groups.flatten(1), self.bias)

    def set_rows(self, first: int, weight: Tensor, bias: Tensor | None) -> None:
        """Replace rows `first` onward in place, so that captured graphs see it: weight [n, K], bias [n] or None."""
        data, scale = pack_rows(weight, self.kind)
        self.weight[first : first + len(data)] = data
        self.weight_scale[first : first + len(data)] = scale
        if self.bias is not None and bias is not None:
            self.bias[first : first + len(data)] = bias


@torch.no_grad()
def pack_rows(weight: Tensor, kind: Bits8) -> tuple[Tensor, Tensor]:
    """Return codes [N, K] and scales of a weight: the largest element of a row, or of a group, has the largest code.

    Example:
        >>> weight = torch.zeros(1, 128)
        >>> weight[0, :2] = torch.tensor([0.5, -1.0])
        >>> pack_rows(weight, "int8")[0][0, :3].tolist()
        [64, -127, 0]
    """
    depth, largest = weight.shape[1], LARGEST[kind]
    group = depth if kind == "float8" else BLOCK
    data = torch.empty(weight.shape, dtype=DTYPES[kind], device=weight.device)
    scale = torch.empty((weight.shape[0], depth // group), dtype=torch.bfloat16, device=weight.device)
    for first in range(0, weight.shape[0], ROWS_AT_A_TIME):
        groups = weight[first : first + ROWS_AT_A_TIME].detach().float()
        groups = groups.view(len(groups), -1, group)
        last = first + len(groups)
        scale[first:last] = (groups.abs().amax(2) / largest).clamp(min=torch.finfo(torch.bfloat16).tiny)
        codes = (groups / scale[first:last, :, None].float()).clamp(-largest, largest).flatten(1)
        data[first:last] = codes.round() if kind == "int8" else codes
    return data, scale


def can_be_packed(layer: nn.Module) -> bool:
    """Return whether a layer is a plain linear layer whose packed weight the kernel would read."""
    return isinstance(layer, nn.Linear) and is_plain(layer) and layer.in_features % BLOCK == 0
