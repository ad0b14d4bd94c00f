"""The plain tensors that hold weights: quantised and sharded ones are subclasses of tensors, which hold others."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


def plain_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the plain tensors that hold these parameters and buffers, each once.

    Quantised weights may be subclasses of tensors, which hold packed data and scales.

    Example:
        >>> from torch import nn
        >>> layer = nn.Linear(3, 2)
        >>> [tuple(tensor.shape) for tensor in plain_tensors([layer.weight, layer.bias, layer.weight])]
        [(2, 3), (2,)]
    """
    held = {id(tensor): tensor for tensor in tensors}
    return [part for tensor in held.values() for part in plain_parts(tensor)]


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that hold a parameter or buffer."""
    if type(tensor) in (Tensor, nn.Parameter):
        return [tensor]
    if hasattr(tensor, "__tensor_flatten__"):  # torchao, and DTensor, which holds its device mesh too
        held = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return [part for each in held if isinstance(each, Tensor) for part in plain_parts(each)]
    state = getattr(tensor, "quant_state", None)  # bitsandbytes
    if state is None:
        return [tensor]
    nested = getattr(state, "state2", None)
    states = (state,) if nested is None else (state, nested)
    values = [getattr(each, name, None) for each in states for name in ("absmax", "code", "offset")]
    return [tensor.data.as_subclass(Tensor), *(value for value in values if isinstance(value, Tensor))]
