"""Whether a stand-in computes what a module computes, found by trying.

Where an output projection is zero there is nothing to compare, so it holds random numbers for the moment.
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


def agreeing(stand_ins: Mapping[nn.Module, Forward], calls: dict[nn.Module, Call]) -> dict[nn.Module, Forward]:
    """Those stand-ins that differ from their modules by no more than rounding."""
    if is_dry_run():  # there is nothing to compare, and one of each kind meets all kernels
        errors_of(_one_of_each(stand_ins), calls)
        return dict(stand_ins)
    errors = errors_of(stand_ins, calls)
    return {
        module: stand_in
        for module, stand_in in stand_ins.items()
        if errors[module] <= tolerance(_tensor(calls[module].output).dtype)
    }


@torch.no_grad()
def errors_of(stand_ins: Mapping[nn.Module, Forward], calls: dict[nn.Module, Call]) -> dict[nn.Module, float]:
    """Relative distances between each module's own output and its stand-in's; read from the device all at once."""
    errors: dict[nn.Module, Tensor] = {}
    for module, stand_in in stand_ins.items():
        try:
            first = _distance(stand_in, calls[module])
            errors[module] = torch.maximum(first, _distance_if_audible(module, stand_in, calls[module]))
        except Exception:  # whatever it is, from an attribute that is not there to a kernel that does not fit this GPU
            errors[module] = torch.full((), torch.inf)
    if not errors:
        return {}
    distances = torch.stack([error.cpu() for error in errors.values()]).nan_to_num(torch.inf, torch.inf)
    return dict(zip(errors, distances.tolist()))


def _one_of_each(stand_ins: Mapping[nn.Module, Forward]) -> dict[nn.Module, Forward]:
    """One for each class of modules and shape of parameters."""
    kinds: dict[tuple[Any, ...], tuple[nn.Module, Forward]] = {}
    for module, stand_in in stand_ins.items():
        shapes = tuple(parameter.shape for parameter in module.parameters())
        kinds.setdefault((type(module), shapes), (module, stand_in))
    return dict(kinds.values())


def _distance(stand_in: Forward, call: Call) -> Tensor:
    """|got - expected| / |expected|; 0 where both are zero."""
    expected = _tensor(call.output).float()
    distance = (_tensor(stand_in(*call.args, **_with_mask(call.kwargs))).float() - expected).norm()
    return torch.where(distance == 0, distance, distance / expected.norm())


def _distance_if_audible(module: nn.Module, stand_in: Forward, call: Call) -> Tensor:
    """The distance with random numbers in output projections that are zero, and where a difference would show.

    Layers are tried again under a faint residual: beside a large one nothing of what they add would be heard.
    Attention is tried again on an input that makes it sharp: where all tokens get nearly the same weight, positions
    make no difference.
    """
    layer, attention = isinstance(stand_in, LayerForward), isinstance(stand_in, AttentionForward)
    silent = [weight for weight in _output_weights(module) if not weight.any()]
    if not silent and not layer and not attention:
        return _tensor(call.output).new_zeros((), dtype=torch.float32)
    args, kwargs = call.args, call.kwargs
    if layer:
        args = (_faint(args[0]), *args[1:])
    elif attention and "hidden_states" in kwargs:
        kwargs = {**kwargs, "hidden_states": _sharp(module, kwargs["hidden_states"])}
    elif attention:
        args = (_sharp(module, args[0]), *args[1:])
    with evaluating(module), _random_numbers_in(silent):
        again = Call(args, kwargs, module(*args, **kwargs))
        if not _tensor(again.output).any():
            raise ValueError("the output is zero whatever the output projection is")
        return _distance(stand_in, again)


def _output_weights(module: nn.Module) -> list[Tensor]:
    """Of the products at the end of attention and MLP, under this module or in it."""
    products = (getattr(part, name, None) for part in module.modules() for name in ("o_proj", "down_proj"))
    return [product.weight for product in products if type(product) is nn.Linear and not product.weight.is_meta]


def _faint(hidden_states: Tensor) -> Tensor:
    """Scaled to a mean square of 1/4096. Norms undo the scale, so a layer adds to it what it adds to any."""
    wide = hidden_states.float()
    return (wide * torch.rsqrt(wide.pow(2).mean()) / 64).to(hidden_states.dtype)


def _sharp(module: Any, hidden_states: Tensor) -> Tensor:
    """Scaled up until the scores of an attention differ by about 1."""
    products = [layer(hidden_states).float().pow(2).mean().sqrt() for layer in attention_inputs(module)]
    spread = products[0] * products[min(1, len(products) - 1)] * module.head_dim**0.5 * module.scaling
    factor: Tensor = spread.clamp(1e-4, 1).rsqrt()
    return (hidden_states.float() * factor).to(hidden_states.dtype)


@torch.no_grad()
def telling_input(module: nn.Module, call: Call) -> Call:
    """A call that tells one form of norm from another: its own input, shifted by its root mean square.

    The mean of an input with thousands of random channels is about 1% of its spread. In bfloat16 that hides among the
    rounding whether a norm subtracts it. Zeros, of which every norm makes zeros, are replaced by noise.
    """
    if not call.args:
        return call
    states = call.args[0] if call.args[0].any() else _noise(call.args[0], 1.0)
    shifted = states.float() + states.float().pow(2).mean(-1, keepdim=True).sqrt()
    args = (shifted.to(states.dtype), *call.args[1:])
    with evaluating(module):
        return Call(args, call.kwargs, module(*args, **call.kwargs))


@contextmanager
def _random_numbers_in(weights: list[Tensor]) -> Iterator[None]:
    """For the moment."""
    kept = [weight.data for weight in weights]
    try:
        for weight in weights:
            weight.data = _noise(weight.data, weight.shape[1] ** -0.5)
        yield
    finally:
        for weight, data in zip(weights, kept):
            weight.data = data


def _noise(like: Tensor, scale: float) -> Tensor:
    """The process's own random numbers go on as if nothing had been drawn."""
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.empty_like(like).normal_(std=scale, generator=generator)


def _with_mask(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call with its causal mask spelled out, so that an attention's stand-in goes through the split kernel."""
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
    """Rounding is about 1e-6 in float32 and 5e-3 in bfloat16, a different computation about 1."""
    return 1e-4 if dtype == torch.float32 else 2e-2


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off for the moment, each module's own setting restored afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
