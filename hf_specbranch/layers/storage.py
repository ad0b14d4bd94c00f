"""Several weights in one storage, so that one product reads them all. Each parameter is a view of its rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def join(parameters: Sequence[nn.Parameter]) -> bool:
    """Move parameters [N_i, ...] into one new storage, one after the other. They remain the same objects.

    Old storages are freed one by one. Parameters that share a storage with others are left alone.

    Returns:
        Whether anything moved.

    Example:
        >>> layer = nn.ModuleDict({"gate": nn.Linear(4, 8), "up": nn.Linear(4, 8)})
        >>> join([layer["gate"].weight, layer["up"].weight])
        True
        >>> joined([layer["gate"].weight, layer["up"].weight]).shape
        torch.Size([16, 4])
    """
    if not joinable(parameters):
        return False
    lengths = [parameter.shape[0] for parameter in parameters]
    with torch.no_grad():
        whole = parameters[0].data.new_empty((sum(lengths), *parameters[0].shape[1:]))
        for parameter, part in zip(parameters, torch.split(whole, lengths)):
            part.copy_(parameter.data)
            parameter.data = part
    return True


def joined(parameters: Sequence[Tensor]) -> Tensor | None:
    """Return the one tensor that these parameters fill, one after the other, or None. It is a view of their storage."""
    first = parameters[0]
    if not _plain(first):
        return None
    end = first.storage_offset()
    for parameter in parameters:
        if not (
            _plain(parameter)
            and parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and parameter.storage_offset() == end
            and (parameter.dtype, parameter.shape[1:]) == (first.dtype, first.shape[1:])
        ):
            return None
        end += parameter.numel()
    length = sum(parameter.shape[0] for parameter in parameters)
    shape = (length, *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())


def separate(parameters: Sequence[nn.Parameter]) -> None:
    """Give joined parameters storages of their own again."""
    if joined(parameters) is not None:
        for parameter in parameters:
            parameter.data = parameter.data.clone()


def joinable(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether `join` would move these parameters: they are plain, alike and not joined yet."""
    if joined(parameters) is not None:
        return False
    first = parameters[0]
    return len({id(parameter) for parameter in parameters}) == len(parameters) and all(
        _plain(parameter)
        and parameter.device == first.device
        and parameter.dtype == first.dtype
        and parameter.shape[1:] == first.shape[1:]
        and parameter.requires_grad == first.requires_grad
        and parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
        for parameter in parameters
    )


def _plain(parameter: Tensor) -> bool:
    return (
        type(parameter) in (nn.Parameter, Tensor)
        and type(parameter.data) is Tensor
        and parameter.device.type != "meta"
        and parameter.is_contiguous()
        and parameter.numel() > 0
    )
