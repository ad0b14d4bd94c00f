"""Distributions over a vocabulary, read in chunks: the softmax, the likeliest token and a drawn token.

A program reads a chunk in about 2 us, and a vocabulary of 150,000 tokens has some 40 chunks. So one program reads each
chunk, and the kernel that needs the result combines what they found. A vocabulary of one chunk needs no extra kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..backend import Value, constexpr, jit, power_of_two, tl, varying
from ..parallel_build import room as index_memory
from . import memory


class Found(NamedTuple):
    """What was found in each of C chunks of distributions [B, Q]."""

    largest: Tensor  # [B, Q, C] the largest value
    total: Tensor  # [B, Q, C] the sum of exp(value - largest)
    rate: Tensor  # [B, Q, C] of the drawn token: exp(value - largest) / waiting time
    token: Tensor  # [B, Q, C] the drawn token, or the likeliest


def chunk_size(vocabulary: int) -> int:
    """Return the tokens per chunk."""
    return min(memory.LARGEST_BLOCK, power_of_two(vocabulary))


def chunk_count(vocabulary: int) -> int:
    """Return the number of chunks."""
    return -(-vocabulary // chunk_size(vocabulary))


def search_chunks(logits: Tensor, known: int, noise: Tensor | None = None) -> tuple[Found, int]:
    """Read every chunk, if there are several; return what was found, and the number of chunks as a power of two.

    Args:
        logits: [B, Q, V'], of which the first `known` are read.
        known: the size of the vocabulary.
        noise: [B, Q, known] exponential random numbers, with which tokens are drawn; None: the likeliest are found.
    """
    rows, queries, _ = logits.shape
    count, block = chunk_count(known), chunk_size(known)
    figures = torch.empty((3, rows, queries, count), device=logits.device)
    tokens = index_memory((rows, queries, count), torch.long, logits.device)
    found = Found(figures[0], figures[1], figures[2], tokens)
    if count > 1:
        _search_kernel[(count, queries, rows)](
            logits, figures if noise is None else noise, *found, logits.stride(0), logits.stride(1), known,
            DRAWS=noise is not None, BLOCK=block, num_warps=memory.warps(block),
        )  # fmt: skip
    return found, power_of_two(count)


def likeliest(scores: Tensor) -> Tensor:
    """Return the token with the largest score at each position: [B, Q, V] to [B, Q]."""
    rows, queries, vocabulary = scores.shape
    found, chunks = search_chunks(scores, vocabulary)
    choices = index_memory((rows, queries), torch.long, scores.device)
    block = chunk_size(vocabulary)
    _likeliest_kernel[(queries, rows)](
        scores, *found, choices, scores.stride(0), scores.stride(1), vocabulary,
        CHUNKS=chunks, BLOCK=block, num_warps=memory.warps(block) if chunks == 1 else 1,
    )  # fmt: skip
    return choices


@varying("row_stride", "query_stride", "known")
def _search_kernel(
    logits: Value, noise: Value, largest: Value, total: Value, rate: Value, token: Value,
    row_stride: Value, query_stride: Value, known: Value, DRAWS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    chunk, query, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    place = row * tl.num_programs(1) + query
    top, sum_here, fastest, found = search_chunk(
        logits + row * row_stride + query * query_stride, noise + place * known, chunk, known, DRAWS, BLOCK
    )
    place = place * tl.num_programs(0) + chunk
    tl.store(largest + place, top)
    tl.store(total + place, sum_here)
    tl.store(rate + place, fastest)
    tl.store(token + place, found.to(tl.int64))


@varying("row_stride", "query_stride", "known")
def _likeliest_kernel(
    scores: Value, largest: Value, total: Value, rate: Value, token: Value, choices: Value,
    row_stride: Value, query_stride: Value, known: Value, CHUNKS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    query, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = row * tl.num_programs(0) + query
    scores += row * row_stride + query * query_stride
    _top, _total, found = combined(
        scores, scores, largest, total, rate, token, place, known, DRAWS=False, CHUNKS=CHUNKS, BLOCK=BLOCK
    )
    tl.store(choices + place, found)


@jit
def search_chunk(
    logits: Value, noise: Value, chunk: Value, known: Value, DRAWS: constexpr, BLOCK: constexpr
) -> tuple[Value, Value, Value, Value]:
    """Return the largest value of a chunk, the sum of exp(value - largest), and rate and index of the token found."""
    index = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = index < known
    value = tl.load(logits + index, mask=inside, other=-float("inf")).to(tl.float32)
    value = tl.where(value == value, value, float("inf"))  # torch, too, takes NaN for the largest
    top = tl.max(value, 0)
    weight = tl.exp(value - finite(top))
    rate = top
    if DRAWS:
        # The first arrival among waiting times with rates `q` is token `x` with probability `q(x)`.
        speed = weight / tl.load(noise + index, mask=inside, other=1.0)
        rate = tl.max(speed, 0)
        place = tl.argmax(speed, 0)
    else:
        place = tl.argmax(value, 0)
    return top, tl.sum(weight, 0), rate, chunk * BLOCK + place


@jit
def combined(
    logits: Value, noise: Value, largest: Value, total: Value, rate: Value, token: Value, place: Value, known: Value,
    DRAWS: constexpr, CHUNKS: constexpr, BLOCK: constexpr,
) -> tuple[Value, Value, Value]:  # fmt: skip
    """Return the largest value of a distribution, the sum of exp(value - largest), and the token found."""
    if CHUNKS == 1:
        top, whole, _rate, found = search_chunk(logits, noise, 0, known, DRAWS, BLOCK)
        return top, whole, found.to(tl.int64)
    else:
        count = tl.cdiv(known, BLOCK)
        chunk = tl.arange(0, CHUNKS)
        inside = chunk < count
        tops = tl.load(largest + place * count + chunk, mask=inside, other=-float("inf"))
        top = tl.max(tops, 0)
        share = tl.exp(tops - finite(top))
        whole = tl.sum(share * tl.load(total + place * count + chunk, mask=inside, other=0.0), 0)
        if DRAWS:
            speed = share * tl.load(rate + place * count + chunk, mask=inside, other=-1.0)
            winner = tl.argmax(tl.where(inside, speed, -1.0), 0)
        else:
            winner = tl.argmax(tops, 0)
        return top, whole, tl.load(token + place * count + winner)


@jit
def finite(largest: Value) -> Value:
    """Return what to subtract before exp: nothing where every value is -inf."""
    return tl.where(largest == -float("inf"), 0.0, largest)
