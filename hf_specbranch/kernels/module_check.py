"""The self-check of a module: does its replacement forward compute what the module computes?

Where an output projection is zero there is nothing to compare, so it is temporarily filled with noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .forwards import AttentionForward, LayerForward, attention_inputs
from .parallel_build import is_dry_run

Forward = Callable[..., Any]


class Call(NamedTuple):
    """One call of a module's own forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


def agreeing(replacements: Mapping[nn.Module, Forward], calls: dict[nn.Module, Call]) -> dict[nn.Module, Forward]:
    """Return the replacements that differ from their modules by no more than rounding."""
    if is_dry_run():  # there is nothing to compare, and one of each kind launches all kernels
        errors_of(_one_of_each(replacements), calls)
        return dict(replacements)
    errors = errors_of(replacements, calls)
    return {
        module: replacement
        for module, replacement in replacements.items()
        if errors[module] <= tolerance(_tensor(calls[module].output).dtype)
    }


@torch.no_grad()
def errors_of(replacements: Mapping[nn.Module, Forward], calls: dict[nn.Module, Call]) -> dict[nn.Module, float]:
    """Return the relative distance between each module's output and its replacement's; one copy from the device."""
    errors: dict[nn.Module, Tensor] = {}
    for module, replacement in replacements.items():
        try:
            first = _distance(replacement, calls[module])
            errors[module] = torch.maximum(first, _distance_above_noise(module, replacement, calls[module]))
        except Exception:  # from a missing attribute to a kernel that does not fit this GPU
            errors[module] = torch.full((), torch.inf)
    if not errors:
        return {}
    distances = torch.stack([error.cpu() for error in errors.values()]).nan_to_num(torch.inf, torch.inf)
    return dict(zip(errors, distances.tolist()))


def _one_of_each(replacements: Mapping[nn.Module, Forward]) -> dict[nn.Module, Forward]:
    """Return one for each class of modules and shape of parameters."""
    kinds: dict[tuple[Any, ...], tuple[nn.Module, Forward]] = {}
    for module, replacement in replacements.items():
        shapes = tuple(parameter.shape for parameter in module.parameters())
        kinds.setdefault((type(module), shapes), (module, replacement))
    return dict(kinds.values())


def _distance(replacement: Forward, call: Call) -> Tensor:
    """Return |got - expected| / |expected|; 0 where both are zero."""
    expected = _tensor(call.output).float()
    distance = (_tensor(replacement(*call.args, **_with_mask(call.kwargs))).float() - expected).norm()
    return torch.where(distance == 0, distance, distance / expected.norm())


def _distance_above_noise(module: nn.Module, replacement: Forward, call: Call) -> Tensor:
    """Return the distance on an input where a difference is above the noise floor, with noise in zero projections.

    A layer is checked again with a small residual: next to a large one, what it adds is lost in rounding. Attention is
    checked again on an input that makes it sharp: where all tokens get nearly the same weight, positions make no
    difference.
    """
    layer, attention = isinstance(replacement, LayerForward), isinstance(replacement, AttentionForward)
    zero_weights = [weight for weight in _output_weights(module) if not weight.any()]
    if not zero_weights and not layer and not attention:
        return _tensor(call.output).new_zeros((), dtype=torch.float32)
    args, kwargs = call.args, call.kwargs
    if layer:
        args = (_with_small_residual(args[0]), *args[1:])
    elif attention and "hidden_states" in kwargs:
        kwargs = {**kwargs, "hidden_states": _sharp(module, kwargs["hidden_states"])}
    elif attention:
        args = (_sharp(module, args[0]), *args[1:])
    with evaluating(module), _noise_in(zero_weights):
        again = Call(args, kwargs, module(*args, **kwargs))
        if not _tensor(again.output).any():
            raise ValueError("the output is zero whatever the output projection is")
        return _distance(replacement, again)


def _output_weights(module: nn.Module) -> list[Tensor]:
    """Return the weights of the last products of attention and MLP, in this module or below."""
    products = (getattr(inner, name, None) for inner in module.modules() for name in ("o_proj", "down_proj"))
    return [product.weight for product in products if type(product) is nn.Linear and not product.weight.is_meta]


def _with_small_residual(hidden_states: Tensor) -> Tensor:
    """Scale to a mean square of 1/4096. Norms undo the scale, so what a layer adds does not change."""
    wide = hidden_states.float()
    return (wide * torch.rsqrt(wide.pow(2).mean()) / 64).to(hidden_states.dtype)


def _sharp(module: Any, hidden_states: Tensor) -> Tensor:
    """Scale up until the scores of an attention differ by about 1."""
    products = [layer(hidden_states).float().pow(2).mean().sqrt() for layer in attention_inputs(module)]
    spread = products[0] * products[min(1, len(products) - 1)] * module.head_dim**0.5 * module.scaling
    factor: Tensor = spread.clamp(1e-4, 1).rsqrt()
    return (hidden_states.float() * factor).to(hidden_states.dtype)


@torch.no_grad()
def distinguishing_call(module: nn.Module, call: Call) -> Call:
    """Return a call that distinguishes the forms of a norm: the same input, shifted by its root mean square.

    The mean of an input with thousands of random channels is about 1% of its spread. In bfloat16, rounding then hides
    whether a norm subtracts it. An input of zeros is replaced by noise.
    """
    if not call.args:
        return call
    states = call.args[0] if call.args[0].any() else _noise(call.args[0], 1.0)
    shifted = states.float() + states.float().pow(2).mean(-1, keepdim=True).sqrt()
    args = (shifted.to(states.dtype), *call.args[1:])
    with evaluating(module):
        return Call(args, call.kwargs, module(*args, **call.kwargs))


@contextmanager
def _noise_in(weights: list[Tensor]) -> Iterator[None]:
    """Temporarily replace the weights with noise."""
    kept = [weight.data for weight in weights]
    try:
        for weight in weights:
            weight.data = _noise(weight.data, weight.shape[1] ** -0.5)
        yield
    finally:
        for weight, data in zip(weights, kept):
            weight.data = data


def _noise(like: Tensor, scale: float) -> Tensor:
    """Return noise from a generator of its own: the global random state does not change."""
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.empty_like(like).normal_(std=scale, generator=generator)


def _with_mask(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with an explicit causal mask, so that a replaced attention takes the split kernel."""
    states = kwargs.get("hidden_states")
    if "attention_mask" not in kwargs or kwargs["attention_mask"] is not None or states is None:
        return kwargs
    length = states.shape[1]
    mask = torch.ones((1, 1, length, length), dtype=torch.bool, device=states.device).tril()
    return {**kwargs, "attention_mask": mask.expand(states.shape[0], -1, -1, -1)}


def _tensor(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest distance that passes: rounding is about 1e-6 in float32 and 5e-3 in bfloat16, an error 1."""
    return 1e-4 if dtype == torch.float32 else 2e-2


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Temporarily set evaluation mode, and restore each module's own setting."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
