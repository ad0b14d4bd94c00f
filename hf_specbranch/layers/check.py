"""The self-check of a module: does its replacement forward compute what the module computes?

Where an output projection is zero there is nothing to compare, so it is temporarily filled with noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ..kernels.backend import references_only
from ..kernels.parallel_build import is_dry_run
from ..model_state import is_lora
from .base import Call, Record, Replacement, tensor_of
from .kept_errors import current_errors
from .lora import base_of
from .packed_linear import PackedLinear

Forward = Callable[..., Any]
F = TypeVar("F", bound=Forward)
OUTPUTS = ("o_proj", "dense", "down_proj", "c_proj", "fc2", "dense_4h_to_h")  # the last products of attention and MLP


def agreeing(replacements: Mapping[nn.Module, F], calls: dict[nn.Module, Call]) -> dict[nn.Module, F]:
    """Return the replacements that differ from their modules by no more than rounding."""
    if is_dry_run():  # there is nothing to compare, and one of each kind launches all kernels
        errors_of(_one_of_each(replacements), calls)
        return dict(replacements)
    errors = errors_of(replacements, calls)
    return {module: replacement for module, replacement in replacements.items() if errors[module] <= 1}


def agreeing_variants(variants: Mapping[nn.Module, Sequence[F]], calls: dict[nn.Module, Call]) -> dict[nn.Module, F]:
    """Return for each module one of its variants that agrees.

    The variants of one module of a class are compared in torch: a kernel would be compiled for each. The others of the
    class are probably of the same variant; where they are not, theirs are compared too.
    """
    usual: dict[type, int] = {}
    for module, forwards in variants.items():
        if type(module) not in usual:
            usual[type(module)] = _closest(module, forwards, calls) or 0
    found = agreeing(
        {module: forwards[min(usual[type(module)], len(forwards) - 1)] for module, forwards in variants.items()}, calls
    )
    others = {
        module: forwards[index]
        for module, forwards in variants.items()
        if module not in found and (index := _closest(module, forwards, calls)) is not None
    }
    return {**found, **agreeing(others, calls)}


def _closest(module: nn.Module, forwards: Sequence[Forward], calls: dict[nn.Module, Call]) -> int | None:
    """Return which of the variants is closest to the module; None if none agrees."""
    if len(forwards) == 1:
        return 0
    with references_only():
        errors = [errors_of({module: forward}, calls)[module] for forward in forwards]
    return errors.index(min(errors)) if min(errors) <= 1 else None


@torch.no_grad()
def errors_of(replacements: Mapping[nn.Module, Forward], calls: dict[nn.Module, Call]) -> dict[nn.Module, float]:
    """Return the relative distance between each module's output and its replacement's, over the largest that passes.

    If an earlier process has found it, nothing is computed.
    """
    if not replacements:
        return {}
    kept = current_errors()
    if kept is not None and (known := kept.look_up(replacements)) is not None:
        return known
    for module in replacements:
        _ = calls[module].output  # made now: an error of the module itself is not one of its replacement
    distances: list[Tensor] = []
    for module, replacement in replacements.items():
        try:
            first = _distance(replacement, calls[module])
            largest = torch.maximum(first, _distance_above_noise(module, replacement, calls[module]))
            distances.append(largest / tolerance(_compared(replacement, calls[module].output).dtype))
        except Exception as error:  # from a missing attribute to a kernel that does not fit this GPU
            distances.append(torch.full((), torch.inf))
            if kept is not None and isinstance(error, torch.OutOfMemoryError):
                kept.is_complete = False
    found = torch.stack([distance.cpu() for distance in distances]).nan_to_num(torch.inf, torch.inf)  # one copy
    errors = dict(zip(replacements, found.tolist()))
    if kept is not None:
        kept.add(errors)
    return errors


def _one_of_each(replacements: Mapping[nn.Module, F]) -> dict[nn.Module, F]:
    """Return one for each class of modules and shape of parameters."""
    kinds: dict[tuple[Any, ...], tuple[nn.Module, F]] = {}
    for module, replacement in replacements.items():
        shapes = tuple(parameter.shape for parameter in module.parameters())
        kinds.setdefault((type(module), shapes), (module, replacement))
    return dict(kinds.values())


def _distance(replacement: Forward, call: Call) -> Tensor:
    """Return |got - expected| / |expected|; 0 where both are zero. With ties, that of the middle token."""
    expected = _compared(replacement, call.output).float()
    difference = (
        _compared(replacement, replacement(*call.args, **_with_mask(call.args, call.kwargs))).float() - expected
    )
    dims = -1 if getattr(replacement, "has_ties", False) else None
    distance: Tensor = torch.linalg.vector_norm(difference, dim=dims)
    return torch.where(distance == 0, distance, distance / torch.linalg.vector_norm(expected, dim=dims)).median()


def _compared(replacement: Forward, output: Any) -> Tensor:
    return replacement.compared(output) if isinstance(replacement, Replacement) else tensor_of(output)


def _distance_above_noise(module: nn.Module, replacement: Forward, call: Call) -> Tensor:
    """Return the distance on an input where a difference is above the noise floor, with noise in zero projections."""
    zero_weights = _zero_output_weights(module)
    telling = replacement.telling_arguments(call.args, call.kwargs) if isinstance(replacement, Replacement) else None
    if not zero_weights and telling is None:
        return tensor_of(call.output).new_zeros((), dtype=torch.float32)
    args, kwargs = telling or (call.args, call.kwargs)
    with evaluating(module), _noise_in(zero_weights):
        output = module(*args, **kwargs)
        if not tensor_of(output).any():
            raise ValueError("the output is zero whatever the output projection is")
        return _distance(replacement, Call(lambda: Record(args, kwargs, output)))


def _zero_output_weights(module: nn.Module) -> list[Tensor]:
    """Return the weights of the last products of attention, MLP and adapters that are zero, in this module or below.

    With a weight of eight bits comes its scale, which is next to nothing then.
    """
    found = (getattr(inner, name, None) for inner in module.modules() for name in OUTPUTS)
    adapters = (up for inner in module.modules() if is_lora(inner) for up in cast(Any, inner).lora_B.values())
    zero: list[Tensor] = []
    for product in (*(base_of(product) for product in found), *adapters):
        weight = product.weight if type(product) in (nn.Linear, PackedLinear) else product
        if type(weight) not in (nn.Parameter, Tensor) or weight.is_meta or _has_values(weight):
            continue
        zero += [weight, product.weight_scale] if isinstance(product, PackedLinear) else [weight]
    return zero


def _has_values(weight: Tensor) -> bool:
    return bool((weight.view(torch.uint8) if weight.element_size() == 1 else weight).any())


def distinguishing_call(module: nn.Module, call: Call) -> Call:
    """Return a call that distinguishes the forms of a norm: the same input, shifted by its root mean square.

    The mean of an input with thousands of random channels is about 1% of its spread. In bfloat16, rounding then hides
    whether a norm subtracts it. An input of zeros is replaced by noise.
    """

    @torch.no_grad()
    def make() -> Record:
        if not call.args:
            return Record(call.args, call.kwargs, call.output)
        states = call.args[0] if call.args[0].any() else _noise(call.args[0], 1.0)
        shifted = states.float() + states.float().pow(2).mean(-1, keepdim=True).sqrt()
        args = (shifted.to(states.dtype), *call.args[1:])
        with evaluating(module):
            return Record(args, call.kwargs, module(*args, **call.kwargs))

    return Call(make)


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
    if like.element_size() == 1:  # codes of eight bits
        return torch.empty_like(like, dtype=torch.float32).normal_(std=16, generator=generator).to(like.dtype)
    return torch.empty_like(like).normal_(std=scale, generator=generator)


def _with_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords with an explicit causal mask, so that a replaced attention takes the split kernel."""
    states = kwargs.get("hidden_states", args[0] if args else None)
    if "attention_mask" not in kwargs or kwargs["attention_mask"] is not None or states is None:
        return kwargs
    length = states.shape[1]
    mask = torch.ones((1, 1, length, length), dtype=torch.bool, device=states.device).tril()
    return {**kwargs, "attention_mask": mask.expand(states.shape[0], -1, -1, -1)}


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
