"""The short causal convolution of recurrent layers over a few tokens, which keeps its window after every token.

    out[t, c] = act(sum_j weight[c, j] * x[t - W + 1 + j, c] + bias[c])

The last W inputs of each channel are the state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .activation import MlpActivation, activate, activated, code_of
from .backend import (
    Value,
    can_run,
    constexpr,
    dependent_launch,
    launch_dependents,
    power_of_two,
    tl,
    triton,
    varying,
    wait_for_dependencies,
)
from .kept_states import KeptStates

_BLOCK = 128  # channels of a program


def short_convolution(
    x: Tensor,
    columns: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: MlpActivation | None,
    kept: KeptStates,
) -> Tensor:
    """Convolve the tokens of a pass, and keep the window after each of them.

    Args:
        x: [B, Q, N], a product that holds the input of the convolution.
        columns: [C] the columns of the input, in the order of the channels.
        weight: [C, W].
        bias: [C] or None.
        activation: of the output, if there is one.
        kept: windows [size * B, C, W].

    Returns:
        [B, Q, C].

    Example:
        >>> from hf_specbranch.kernels.kept_states import empty_states
        >>> x, kept = torch.ones(1, 3, 2), empty_states(1, 3, (2, 2), torch.float32, torch.device("cpu"))
        >>> short_convolution(x, torch.arange(2), torch.ones(2, 2), None, None, kept)[0, :, 0]
        tensor([1., 2., 2.])
    """
    if not can_run(x, weight, bias) or kept.states.dtype != x.dtype:
        return short_convolution_reference(x, columns, weight, bias, activation, kept)
    rows, tokens, width = x.shape
    channels, taps = weight.shape
    out = x.new_empty((rows, tokens, channels))
    _convolution_kernel[(triton.cdiv(channels, _BLOCK), tokens, rows)](
        x.contiguous(), columns, weight.contiguous(), weight if bias is None else bias, kept.states,
        kept.slots.contiguous(), out, tokens, rows, width, channels, kept.size, TAPS=taps, BIAS=bias is not None,
        ACTIVATION=code_of(activation), BLOCK_TAPS=power_of_two(taps), BLOCK=_BLOCK, num_warps=4,
        **dependent_launch(x.device),
    )  # fmt: skip
    return out


def short_convolution_reference(
    x: Tensor,
    columns: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: MlpActivation | None,
    kept: KeptStates,
) -> Tensor:
    """Compute what `short_convolution` does, in plain torch."""
    inputs, windows = x[..., columns], []
    for token in range(x.shape[1]):
        windows.append(torch.cat([kept.before(token)[..., 1:].to(x.dtype), inputs[:, token, :, None]], dim=-1))
        kept.put(token, windows[token])
    window = torch.stack(windows, dim=2).to(weight.dtype)  # [B, C, Q, W]
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    out = (window.to(wide) * weight.to(wide)[:, None]).sum(-1)
    if bias is not None:
        out = out + bias.to(wide)[:, None]
    out = out.to(weight.dtype)
    return (out if activation is None else activate(out, activation)).to(x.dtype).transpose(1, 2)


@varying("tokens", "rows", "size")
def _convolution_kernel(
    x: Value,
    columns: Value,
    weight: Value,
    bias: Value,
    states: Value,
    slots: Value,
    out: Value,
    tokens: Value,
    rows: Value,
    width: Value,
    channels: Value,
    size: Value,
    TAPS: constexpr,
    BIAS: constexpr,
    ACTIVATION: constexpr,
    BLOCK_TAPS: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    launch_dependents(PDL)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    tap = tl.arange(0, BLOCK_TAPS)
    known = channel < channels
    inside = known[:, None] & (tap < TAPS)[None, :]
    column = tl.load(columns + channel, mask=known, other=0).to(tl.int64)
    place = channel[:, None] * TAPS + tap[None, :]  # in the weight, and in a window
    factors = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    wait_for_dependencies(PDL)
    slot, first_slot = tl.load(slots + row * tokens + token), tl.load(slots + row * tokens)
    last_slot = tl.load(slots + row * tokens + tokens - 1)
    offset = slot - first_slot - TAPS + 1 + tap  # of each slot of the window from the first of the pass; < 0: kept
    at = tokens - 1 + first_slot - last_slot + offset  # the token in that slot
    first = (first_slot % size * rows + row) * channels * TAPS
    before = tl.load(
        states + first + channel[:, None] * TAPS + (TAPS + offset)[None, :],
        mask=inside & (offset < 0)[None, :],
        other=0.0,
    )
    read = tl.load(
        x + (row * tokens + at)[None, :] * width + column[:, None], mask=inside & (offset >= 0)[None, :], other=0.0
    )
    window = tl.where((offset < 0)[None, :], before, read)
    total = tl.sum(window.to(tl.float32) * factors, 1)
    if BIAS:
        total += tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    result = total.to(out.dtype.element_ty)
    if ACTIVATION > 0:
        result = activated(result, ACTIVATION)
    tl.store(out + (row * tokens + token) * channels + channel, result, mask=known)
    after = ((slot + 1) % size * rows + row) * channels * TAPS
    tl.store(states + after + place, window, mask=inside)
