"""LoRA as PEFT computes it: what adapters add to the product of a linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..kernels.low_rank import LowRank
from ..model_state import adapters_in_use, is_lora


class Term(NamedTuple):
    """One adapter of one layer: it adds scale * (B (A x) + bias)."""

    down: Tensor  # A [r, K]
    up: Tensor  # B [N, r]
    bias: Tensor | None  # [N]
    scale: float


def base_of(layer: Any) -> Any:
    """Return the layer inside a LoRA layer, or any other layer unchanged."""
    return layer.base_layer if is_lora(layer) else layer


def is_wrapped(layer: Any) -> bool:
    """Return whether PEFT has put something around a linear layer."""
    sizes = (getattr(layer, name, None) for name in ("in_features", "out_features"))
    return type(layer).__module__.startswith("peft.tuners.") and all(isinstance(size, int) for size in sizes)


def terms_of(layer: Any) -> list[Term] | None:
    """Return what the adapters of a layer add now: none for a layer without adapters, None if there is dropout."""
    if not is_lora(layer):
        return []
    terms = []
    for name in adapters_in_use(layer):
        if layer.lora_dropout[name].training and not isinstance(layer.lora_dropout[name], nn.Identity):
            return None
        down, up = layer.lora_A[name], layer.lora_B[name]
        terms.append(Term(down.weight, up.weight, up.bias, float(layer.scaling[name])))
    return terms


def add_terms(base: Tensor, x: Tensor, terms: Sequence[Sequence[Term]], sizes: Sequence[int]) -> Tensor:
    """Add what adapters add to a product of several layers, rounded where PEFT rounds.

    Args:
        base: the product [..., N] of the layers without adapters.
        x: [..., K].
        terms: of each layer.
        sizes: the columns of each layer.
    """
    parts = list(torch.split(base, list(sizes), dim=-1))
    for index, of_layer in enumerate(terms):
        part, states = parts[index], x
        for term in of_layer:
            states = states.to(term.down.dtype)
            inner = functional.linear(states, term.down)
            part = part + functional.linear(inner, term.up, term.bias) * term.scale
        parts[index] = part.to(base.dtype)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def low_rank(terms: Sequence[Sequence[Term]], sizes: Sequence[int]) -> LowRank | None:
    """Return the terms as kernels take them: at most one for each layer and no bias; None for others."""
    if any(len(of_layer) > 1 or any(term.bias is not None for term in of_layer) for of_layer in terms):
        return None
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    found = [(end, of_layer[0]) for end, of_layer in zip(ends, terms) if of_layer]
    return LowRank(
        downs=tuple(term.down for _, term in found),
        ups=tuple(term.up for _, term in found),
        scales=tuple(term.scale for _, term in found),
        starts=tuple(end - term.up.shape[0] for end, term in found),
    )
