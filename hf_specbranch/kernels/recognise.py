"""Which modules of a model the kernels can replace.

Candidates are recognised by their submodules (q_proj, k_proj, v_proj, o_proj; gate_proj, up_proj, down_proj; a weight
and an epsilon). A few tokens then run through the model. The output of every candidate is compared with that of its
replacement forward on the same input, and a module that differs is not replaced. No names of models or classes are
used.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..model_state import every_module
from .attention_interface import override_attention
from .backend import FLOATS
from .forwards import (
    AnglesForward,
    AttentionForward,
    LayerForward,
    MlpForward,
    NormForward,
    Shared,
    attention_inputs,
    epsilon,
    mlp_inputs,
)
from .gated import recognise as recognise_activation
from .module_check import Call, Forward, agreeing, distinguishing_call, errors_of, evaluating, tolerance
from .norm import FORMS, PLAIN, NormForm, rms_norm_reference

TOKENS = 16  # of the check: kernels compiled for these run up to 16 queries over any cache of a multiple of 16 slots


def recognise(
    model: PreTrainedModel, calls: dict[nn.Module, Call], shared: Shared, uncapped: bool
) -> dict[nn.Module, Forward]:
    """Return replacement forwards for the modules that compute what the kernels compute, each checked on its own input.

    Args:
        model: the model.
        calls: inputs and outputs of its modules, from `record_calls`.
        shared: the state that the replacements share.
        uncapped: the model's attention ignores soft caps and sinks.
    """
    norms = _norms(calls, shared)
    forms = {module: forward.form for module, forward in norms.items()}
    found: dict[nn.Module, Forward] = {**norms, **_angles(model)}
    candidates: dict[nn.Module, Forward] = {}
    for module in calls:
        if looks_like_mlp(module) and (activation := recognise_activation(_activation(module))):
            candidates[module] = MlpForward(module, shared, activation)
        elif looks_like_attention(module) and (form := _shared_form(forms, _head_norms(module))) is not None:
            candidates[module] = AttentionForward(module, shared, form, uncapped)
    found |= agreeing(candidates, calls)
    found |= agreeing(_layers(model, calls, forms, shared), calls)
    return found


@torch.no_grad()
def calls_registered_attention(model: PreTrainedModel, names: tuple[str, str]) -> bool:
    """Return whether a model computes the same when its config names the second of two attentions.

    Some models look at the name and take a path of their own.
    """
    config = model.config.get_text_config(decoder=True)
    ids = _few_tokens(model)
    hidden = torch.ones((1, 1, TOKENS, TOKENS), dtype=torch.bool, device=ids.device).triu(1)
    hidden[..., TOKENS - 1, 1] = True
    mask = ~hidden
    if names[0] == "eager":
        mask = torch.zeros(hidden.shape, dtype=model.dtype, device=ids.device)
        mask.masked_fill_(hidden, torch.finfo(model.dtype).min)
    logits = []
    with evaluating(model):
        try:
            for name in names:
                with override_attention(config, name):
                    logits.append(model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float())
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError, AssertionError):
            return False
    return bool((logits[0] - logits[1]).norm() <= tolerance(model.dtype) * logits[0].norm())


def looks_like_norm(module: Any) -> bool:
    """Return whether a module has a weight, an epsilon and nothing else."""
    return (
        (hasattr(module, "variance_epsilon") or hasattr(module, "eps"))
        and [name for name, _ in module.named_parameters()] == ["weight"]
        and module.weight.dim() == 1
        and module.weight.dtype in FLOATS
    )


def looks_like_mlp(module: Any) -> bool:
    """Return whether a module has gate, up and down products, or gate and up in one."""
    inputs_of = ("gate_up_proj",) if hasattr(module, "gate_up_proj") else ("gate_proj", "up_proj")
    if not has_products(module, (*inputs_of, "down_proj")):
        return False
    inputs, size = mlp_inputs(module), module.down_proj.in_features
    return sum(layer.out_features for layer in inputs) == 2 * size and _same_shape(inputs)


def looks_like_attention(module: Any) -> bool:
    """Return whether a module has products for q, k, v and the output, and at most norms of the heads of q and k."""
    inputs_of = ("qkv_proj",) if hasattr(module, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
    wanted = all(hasattr(module, name) for name in ("head_dim", "scaling", "layer_idx"))
    if not wanted or not has_products(module, (*inputs_of, "o_proj")):
        return False
    width = sum(layer.out_features for layer in attention_inputs(module)) - module.o_proj.in_features
    norms = [norm for norm in (getattr(module, name, None) for name in ("q_norm", "k_norm")) if norm is not None]
    return (
        module.o_proj.in_features % module.head_dim == 0
        and width > 0
        and width % (2 * module.head_dim) == 0
        and _same_shape(attention_inputs(module))
        and len(norms) in (0, 2)
        and all(looks_like_norm(norm) and norm.weight.shape == (module.head_dim,) for norm in norms)
    )


def looks_like_angles(module: Any) -> bool:
    """Return whether a module computes rotary angles from frequencies that do not depend on the length of the text."""
    frequencies = getattr(module, "inv_freq", None)
    return (
        isinstance(frequencies, Tensor)
        and frequencies.dim() == 1
        and isinstance(getattr(module, "attention_scaling", None), int | float)
        and getattr(module, "rope_type", None) in ("default", "linear", "llama3", "yarn")
    )


def looks_like_layer(module: Any) -> bool:
    """Return whether a module has attention and MLP, with a norm before each."""
    names = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
    return all(isinstance(getattr(module, name, None), nn.Module) for name in names)


def untouched(module: Any) -> bool:
    """Return whether a module has no hooks and its class's own forward."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" not in module.__dict__ and not any(getattr(module, name) for name in hooks)


def has_products(module: Any, names: tuple[str, ...]) -> bool:
    """Return whether these are plain linear layers: not wrapped, quantised or hooked."""
    layers = [getattr(module, name, None) for name in names]
    return all(type(layer) is nn.Linear and untouched(layer) and layer.weight.dtype in FLOATS for layer in layers)


def layer_norms(module: Any) -> list[nn.Module]:
    """Return the norms that a layer applies itself."""
    names = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return [getattr(module, name) for name in names if hasattr(module, name)]


def _same_shape(layers: Any) -> bool:
    """Return whether layers have inputs of one size, and all or none a bias."""
    return len({(layer.in_features, layer.bias is None) for layer in layers}) == 1


def _activation(module: Any) -> Any:
    return getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)


def _head_norms(module: Any) -> list[nn.Module]:
    norms = (getattr(module, name, None) for name in ("q_norm", "k_norm"))
    return [norm for norm in norms if norm is not None]


def _shared_form(forms: dict[nn.Module, NormForm], norms: list[nn.Module]) -> NormForm | None:
    """Return the form of all these norms; None if one is unknown or they differ."""
    if not all(norm in forms and untouched(norm) for norm in norms):
        return None
    kinds = {forms[norm] for norm in norms}
    return PLAIN if not kinds else kinds.pop() if len(kinds) == 1 else None


def _norms(calls: dict[nn.Module, Call], shared: Shared) -> dict[nn.Module, NormForward]:
    """Replace every norm by the form that is closest for its class, if that is close enough."""
    calls = {module: distinguishing_call(module, call) for module, call in calls.items() if looks_like_norm(module)}
    classes: dict[type, list[nn.Module]] = {}
    for module in calls:
        classes.setdefault(type(module), []).append(module)
    closest: dict[nn.Module, Forward] = {}
    for modules in classes.values():
        form = _closest_form([modules[0], modules[len(modules) // 2], modules[-1]], calls)
        closest |= {module: NormForward(module, shared, form) for module in modules}
    return {module: forward for module, forward in agreeing(closest, calls).items() if isinstance(forward, NormForward)}


def _closest_form(modules: list[nn.Module], calls: dict[nn.Module, Call]) -> NormForm:
    """Compare the forms in torch: a kernel would be compiled for each."""
    variants = [{module: partial(_norm_in_torch, module, form=form) for module in modules} for form in FORMS]
    errors = [sum(errors_of(replacements, calls).values()) for replacements in variants]
    return FORMS[errors.index(min(errors))]


def _norm_in_torch(module: Any, hidden_states: Tensor, form: NormForm) -> Tensor:
    return rms_norm_reference(hidden_states, module.weight, epsilon(module), form=form)[0]


@torch.no_grad()
def _angles(model: PreTrainedModel) -> dict[nn.Module, Forward]:
    """Replace the modules that compute cosines and sines of positions; checked up to large positions."""
    found: dict[nn.Module, Forward] = {}
    x = model.get_input_embeddings().weight[:1, None]
    positions = (torch.arange(TOKENS, device=x.device) * 2047)[None]
    for module in every_module(model):
        if not looks_like_angles(module):
            continue
        try:
            pairs = zip(AnglesForward(module)(x, positions), module(x, positions), strict=True)
            error = max(float((got.float() - expected.float()).abs().max()) for got, expected in pairs)
        except (TypeError, ValueError, RuntimeError, AttributeError):
            continue
        if error <= (1e-5 if x.dtype == torch.float32 else 8e-3):  # two units in the last place of bfloat16
            found[module] = AnglesForward(module)
    return found


def _layers(
    model: PreTrainedModel, calls: dict[nn.Module, Call], forms: dict[nn.Module, NormForm], shared: Shared
) -> dict[nn.Module, Forward]:
    layers = [module for module in calls if looks_like_layer(module)]
    candidates: dict[nn.Module, Forward] = {}
    for layer, following in zip(layers, [*layers[1:], None]):
        form = _shared_form(forms, layer_norms(layer))
        if form is None:
            continue
        after: Any = getattr(following, "input_layernorm", None) if following else _final_norm(model)
        usable = after in forms and forms[after] == form and untouched(after)
        candidates[layer] = LayerForward(layer, shared, form, after if usable else None)
    return candidates


def _final_norm(model: PreTrainedModel) -> nn.Module | None:
    norm = getattr(model.base_model, "norm", None)
    return norm if isinstance(norm, nn.Module) else None


@torch.no_grad()
def record_calls(model: PreTrainedModel) -> dict[nn.Module, Call]:
    """Run a few tokens through the model and record the inputs and outputs of the candidates."""
    calls: dict[nn.Module, Call] = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.setdefault(module, Call(args, kwargs, output))

    looks = (looks_like_norm, looks_like_mlp, looks_like_attention, looks_like_layer)
    candidates = [module for module in every_module(model) if any(look(module) for look in looks)]
    with evaluating(model), ExitStack() as stack:
        for module in candidates:
            stack.callback(module.register_forward_hook(record, with_kwargs=True).remove)
        model(input_ids=_few_tokens(model), use_cache=False)
    return calls


def _few_tokens(model: PreTrainedModel) -> Tensor:
    weight = model.get_input_embeddings().weight
    ids: Tensor = (torch.arange(TOKENS, device=weight.device) * 7 + 1)[None] % weight.shape[0]
    return ids
