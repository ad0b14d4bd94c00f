"""Checksums of tensors: whether any bit of a model's weights has changed, for about one read of them.

The bytes of a tensor are 32-bit words in rows of 4,096. Its checksum is, modulo 2^64,

    seed + sum over rows r and columns c of row_factor(r) * column_factor(c) * word(r, c)

with odd pseudo-random factors of 64 bits. A change of one word always changes it: the difference of two words is not a
multiple of 2^32, and odd factors keep it that way. Other changes, such as two words that swap places, are missed with
a probability of about 2^-32. The seed is a hash of dtype and shape.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from .backend import Value, constexpr, jit, serves, tl, varying

COLUMNS = 4096  # words in a row
ROWS = 16  # in the share of one program: 256 KiB
MOST_TENSORS = 1024  # in one launch
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53


@torch.no_grad()
def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Return a checksum of the bits, dtype and shape of each tensor, without waiting for the device.

    Args:
        tensors: any dtypes and shapes, all on one device. The order matters.

    Returns:
        int64 [number of tensors], on their device. It depends on nothing but the tensors.

    Raises:
        TypeError: a tensor is not a plain strided one with memory of its own, so that its bits cannot be read.
        ValueError: the tensors are on several devices.

    Example:
        >>> weight = torch.randn(3, 5)
        >>> before = checksum([weight])
        >>> weight[2, 1] = -weight[2, 1]
        >>> torch.equal(checksum([weight]), before)
        False
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    for tensor in tensors:
        _check(tensor, tensors[0].device)
    device = tensors[0].device
    if not serves(device):
        return checksum_reference(tensors)
    groups = [tensors[start : start + MOST_TENSORS] for start in range(0, len(tensors), MOST_TENSORS)]
    return torch.cat([_by_kernel(group, device) for group in groups])


@torch.no_grad()
def checksum_reference(tensors: Sequence[Tensor]) -> Tensor:
    """Compute what `checksum` does, in plain torch."""
    return torch.stack([_in_torch(tensor) for tensor in tensors])


def _check(tensor: Tensor, device: torch.device) -> None:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        raise TypeError(
            f"the bits of a {type(tensor).__name__} (layout {tensor.layout}, device {tensor.device}) cannot be read: "
            f"expected a plain strided tensor"
        )
    if tensor.device != device:
        raise ValueError(f"tensors on {device} and {tensor.device}: call checksum once per device")


def _by_kernel(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    memory = [_readable(tensor) for tensor in tensors]  # copies live until the kernel is launched
    words = [tensor.nbytes // 4 for tensor in memory]
    ends, programs = [], 0  # of the programs of each tensor
    for number in words:
        programs += -(-number // (COLUMNS * ROWS))
        ends.append(programs)
    addresses, seeds = [tensor.data_ptr() for tensor in memory], [_seed(each.dtype, each.shape) for each in tensors]
    if len(tensors) % 2:  # an even number, so that all rows are aligned alike and the kernel is built once
        addresses, seeds, words, ends = ([*numbers, last] for numbers, last in (
            (addresses, 0), (seeds, 0), (words, 0), (ends, programs)
        ))  # fmt: skip
    table = torch.tensor([seeds, addresses, words, ends])  # [4, n]
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    out = table[0]  # programs add to the seeds
    if programs:
        _checksum_kernel[(programs,)](
            out, table[1], table[2], table[3], len(tensors),
            TENSORS=MOST_TENSORS, COLUMNS=COLUMNS, ROWS=ROWS, num_warps=4,
        )  # fmt: skip
    return out[: len(tensors)]


def _readable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy where the kernel cannot read it: whole words one after the other, at 16 bytes."""
    aligned = tensor.data_ptr() % 16 == 0 and tensor.storage_offset() * tensor.itemsize % 4 == 0
    if aligned and tensor.is_contiguous() and tensor.nbytes % 4 == 0 and not _lazy(tensor):
        return tensor
    return _words(tensor)


def _lazy(tensor: Tensor) -> bool:
    """Return whether memory holds the conjugate or the negative of what the tensor says."""
    return tensor.is_neg() or tensor.is_conj()


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as int32 words, in new memory, with zeros after the last byte."""
    flat = tensor.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
    padded = flat.new_zeros((flat.numel() + 3) // 4 * 4)
    padded[: flat.numel()] = flat
    return padded.view(torch.int32)


def _in_torch(tensor: Tensor) -> Tensor:
    """Return the checksum of one tensor, int64 []."""
    flat = _readable(tensor).reshape(-1).view(torch.int32)
    columns = _column_factors(tensor.device)
    total = torch.tensor(_seed(tensor.dtype, tensor.shape), device=tensor.device)
    for start, part in enumerate(torch.split(flat, COLUMNS * ROWS)):  # few rows at a time remain in a CPU's cache
        sums = (part[: part.numel() // COLUMNS * COLUMNS].view(-1, COLUMNS) * columns).sum(1)
        rest = part[sums.numel() * COLUMNS :]
        sums = torch.cat((sums, (rest * columns[: rest.numel()]).sum(0, keepdim=True)))
        rows = torch.arange(start * ROWS, start * ROWS + sums.numel(), device=tensor.device)
        total += (sums * _factors(rows)).sum()
    return total


@lru_cache(maxsize=4)
def _column_factors(device: torch.device) -> Tensor:
    return _factors(-1 - torch.arange(COLUMNS, device=device))


def _factors(index: Tensor) -> Tensor:
    """Return odd pseudo-random factors: two rounds of multiplication and shift, then the lowest bit set."""
    mixed = (index + 1) * _signed(GOLDEN)
    for factor in (FIRST, SECOND):
        mixed = (mixed ^ (mixed >> 33) & 0x7FFFFFFF) * _signed(factor)  # a shift of unsigned numbers
    return mixed ^ (mixed >> 33) & 0x7FFFFFFF | 1


def _signed(number: int) -> int:
    """Return the int64 with the bits of a uint64."""
    return number - (1 << 64) if number >> 63 else number


@lru_cache(maxsize=4096)  # the layers of a model are alike
def _seed(dtype: torch.dtype, shape: torch.Size) -> int:
    return zlib.crc32(f"{dtype}{tuple(shape)}".encode())


@jit
def _factors_in_kernel(index: Value) -> Value:
    mixed = (index + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 33)) * 0xFF51AFD7ED558CCD
    mixed = (mixed ^ (mixed >> 33)) * 0xC4CEB9FE1A85EC53
    return (mixed ^ (mixed >> 33) | 1).to(tl.int64)


@varying("number")
def _checksum_kernel(
    out: Value,
    addresses: Value,
    words: Value,
    ends: Value,
    number: Value,
    TENSORS: constexpr,
    COLUMNS: constexpr,
    ROWS: constexpr,
) -> None:
    program = tl.program_id(0)
    every = tl.arange(0, TENSORS)
    end = tl.load(ends + every, mask=every < number, other=0x7FFFFFFF)
    over = end <= program  # tensors that end before this program
    tensor = tl.sum(over.to(tl.int32), 0)
    first = (program - tl.max(tl.where(over, end, 0), 0)).to(tl.int64) * ROWS  # row
    size = tl.load(words + tensor)
    memory = tl.multiple_of(tl.load(addresses + tensor).to(tl.pointer_type(tl.int32)), 16)
    column = tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int64)
    whole = size // COLUMNS  # rows; they are loaded without a mask, in vectors
    for turn in range(0, tl.minimum(ROWS, whole - first)):
        word = tl.load(memory + (first + turn) * COLUMNS + column)
        total += word.to(tl.int64) * _factors_in_kernel(first + turn)
    rest = tl.where(whole < first + ROWS, size - whole * COLUMNS, 0)  # words of the last row, if it is ours
    word = tl.load(memory + whole * COLUMNS + column, mask=column < rest, other=0)
    total += word.to(tl.int64) * _factors_in_kernel(whole)
    tl.atomic_add(out + tensor, tl.sum(total * _factors_in_kernel(-1 - column.to(tl.int64)), 0))
