"""Gated delta networks (Qwen3-Next, Qwen3.5) over a few tokens: one product, convolution, delta rule, gated norm.

The kernels read the states before the pass where the cache keeps them, and put the state after every token there. So
all tokens of a pass are read at once, and any of them can be rolled back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.backend import FLOATS
from ..kernels.delta_rule import DeltaGates, DeltaHeads, delta_rule
from ..kernels.gated_norm import gated_norm
from ..kernels.kept_states import KeptStates, empty_states
from ..kernels.linear import Partials
from ..kernels.short_convolution import short_convolution
from .base import Replacement, submodules
from .norm import Ahead, epsilon
from .product import Product
from .products import OwnProduct

INPUT_NAMES = (("in_proj_qkvz", "in_proj_ba"), ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
MOST_TOKENS = 32  # read without a cache; more are left to the module, which reads them in chunks


class Columns(NamedTuple):
    """Where the product of all input projections holds what."""

    mixed: Tensor  # [C] q, k and v, in the order of the convolution's channels
    gate: Tensor  # [H * V] the gate of the output
    b: Tensor  # [H] how much each head learns
    a: Tensor  # [H] how much each head forgets


class DeltaNetForward(Replacement):
    """Replaces a gated delta network in passes by slots, and without a cache.

    Args:
        module: the network.
        inputs: the product of all input projections.
        output: the product that reads the heads.
        heads: their sizes.
        ahead: shared by the replacements of the model, if its layers are replaced.
    """

    gives_partials = True

    def __init__(
        self, module: Any, inputs: Product, output: Product, heads: DeltaHeads, ahead: Ahead | None = None
    ) -> None:
        super().__init__([*inputs.bypassed, *output.bypassed, module.conv1d, module.norm])
        self.module, self.inputs, self.output, self.heads, self.ahead = module, inputs, output, heads, ahead
        self.columns = columns_of(len(inputs.layers) == 2, heads, module.conv1d.weight.device)

    def __call__(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor | Partials:
        states = self._states(hidden_states, cache_params, attention_mask)
        if states is None:  # the prompt, or a cache of transformers
            own: Tensor = type(self.module).forward(
                self.module, hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs
            )
            return own
        windows, kept = states
        module, columns, product = self.module, self.columns, self.inputs(hidden_states)
        weight, bias = module.conv1d.weight.squeeze(1), module.conv1d.bias
        mixed = short_convolution(product, columns.mixed, weight, bias, "silu", windows)
        gates = DeltaGates(product, columns.a, columns.b, module.A_log, module.dt_bias)
        heads = delta_rule(mixed, gates, self.heads, kept)
        gated = gated_norm(heads, module.norm.weight, epsilon(module.norm), product, columns.gate)
        sums_partials = self.ahead is not None and self.ahead.sums_partials
        return self.output.split_k(gated) if sums_partials else self.output(gated)

    def _states(
        self, hidden_states: Tensor, cache: Any, attention_mask: Tensor | None
    ) -> tuple[KeptStates, KeptStates] | None:
        """Return the kept windows and states of a pass that can be read here; None for others.

        All tokens of a pass by slots are text, so no mask hides any of them.
        """
        if cache is not None:
            layer = cache.layers[self.module.layer_idx]
            return layer.states_of_pass() if hasattr(layer, "states_of_pass") else None
        rows, tokens, _ = hidden_states.shape
        hides = attention_mask is not None and attention_mask.ndim == 2
        if hides or tokens > MOST_TOKENS:
            return None
        window = self.module.conv1d.weight.squeeze(1).shape
        shape = self.heads.value_heads, self.heads.key_size, self.heads.value_size
        dtype, device = hidden_states.dtype, hidden_states.device
        windows = empty_states(rows, tokens, tuple(window), dtype, device)
        return windows, empty_states(rows, tokens, shape, torch.float32, device)


def columns_of(by_head: bool, heads: DeltaHeads, device: torch.device) -> Columns:
    """Return where the input projections, one after the other, hold what.

    Args:
        by_head: the first projection holds q, k, v and the gate of the first key head, then of the next, and the
            second one b and a likewise; otherwise there are four: of q, k and v, of the gate, of b and of a.
        heads: their sizes.
        device: of the columns.

    Example:
        >>> columns_of(True, DeltaHeads(1, 1, 2, 1), torch.device("cpu")).mixed.tolist()
        [0, 1, 2, 3, 4]
    """
    share = heads.value_heads // heads.key_heads
    keys, values = heads.key_heads * heads.key_size, heads.value_heads * heads.value_size
    every = torch.arange(2 * keys + 2 * values + 2 * heads.value_heads, device=device)
    if not by_head:
        return Columns(*torch.split(every, [2 * keys + values, values, heads.value_heads, heads.value_heads]))
    first, second = torch.split(every, [2 * keys + 2 * values, 2 * heads.value_heads])
    widths = [heads.key_size, heads.key_size, share * heads.value_size, share * heads.value_size]
    q, k, v, gate = (part.flatten() for part in torch.split(first.view(heads.key_heads, -1), widths, dim=1))
    b, a = (part.flatten() for part in torch.split(second.view(heads.key_heads, -1), share, dim=1))
    return Columns(torch.cat([q, k, v]), gate, b, a)


def delta_inputs(module: Any) -> Sequence[Any]:
    """Return the layers that read the input of a gated delta network; nothing for other modules."""
    if _heads_of(module) is None:
        return []
    return next((layers for names in INPUT_NAMES if (layers := submodules(module, names))), [])


def recognise_delta_net(
    module: Any, product_of: Callable[[Sequence[Any]], Product | None] = OwnProduct, ahead: Ahead | None = None
) -> DeltaNetForward | None:
    """Return a replacement if this looks like a gated delta network.

    Args:
        module: any module.
        product_of: computes products; default: by the layers' own code.
        ahead: shared by the replacements of the model, if its layers are replaced.
    """
    heads, layers = _heads_of(module), delta_inputs(module)
    if heads is None or not layers:
        return None
    inputs, output = product_of(layers), product_of([module.out_proj])
    keys, values = heads.key_heads * heads.key_size, heads.value_heads * heads.value_size
    if inputs is None or output is None or output.in_features != values:
        return None
    if inputs.out_features != 2 * (keys + values + heads.value_heads) or len(module.conv1d.weight) != 2 * keys + values:
        return None
    return DeltaNetForward(module, inputs, output, heads, ahead)


def _heads_of(module: Any) -> DeltaHeads | None:
    """Return the sizes of the heads of a gated delta network; None for other modules."""
    sizes = [getattr(module, name, None) for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")]
    if not all(isinstance(size, int) and size > 0 for size in sizes) or sizes[1] % sizes[0]:  # type: ignore[operator]
        return None
    heads = DeltaHeads(*sizes)  # type: ignore[arg-type]
    parts = submodules(module, ("conv1d", "norm", "out_proj"))
    tensors = [getattr(module, name, None) for name in ("A_log", "dt_bias")]
    known = (
        bool(parts)
        and isinstance(module.conv1d, nn.Conv1d)
        and module.conv1d.groups == module.conv1d.in_channels == module.conv1d.out_channels
        and getattr(module, "activation", None) in ("silu", "swish")
        and isinstance(getattr(module, "layer_idx", None), int)
        and all(isinstance(tensor, Tensor) and tensor.shape == (heads.value_heads,) for tensor in tensors)
        and isinstance(weight := getattr(module.norm, "weight", None), Tensor)
        and weight.shape == (heads.value_size,)
        and weight.dtype in (*FLOATS, torch.float64)
        and (hasattr(module.norm, "variance_epsilon") or hasattr(module.norm, "eps"))
    )
    return heads if known else None
