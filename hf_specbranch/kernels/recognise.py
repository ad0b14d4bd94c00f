"""Which modules of a model the kernels can stand in for, found by trying.

Candidates are told by their parts (q_proj, k_proj, v_proj, o_proj; gate_proj, up_proj, down_proj; a weight and an
epsilon). A few tokens then go through the model; every candidate's own output is compared with what its stand-in makes
of the same input, and one that differs stays as it is. No names of models or classes are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .backend import FLOATS
from .forwards import AttentionForward, LayerForward, MlpForward, NormForward, Shared, attention_inputs, mlp_inputs
from .gated import recognise as recognise_activation
from .norm import FORMS, PLAIN, NormForm

Forward = Callable[..., Any]


class Call(NamedTuple):
    """One call of a module's own forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


def recognise(model: PreTrainedModel, shared: Shared, uncapped: bool) -> dict[nn.Module, Forward]:
    """Stand-ins for the modules that compute what the kernels compute, each tried on its own input.

    Args:
        model: the model.
        shared: what the stand-ins are to share.
        uncapped: the model's attention ignores soft caps and sinks.
    """
    calls = _watch(model)
    norms = _norms(calls, shared)
    forms = {module: forward.form for module, forward in norms.items()}
    found: dict[nn.Module, Forward] = {**norms}
    candidates: dict[nn.Module, Forward] = {}
    for module in calls:
        if looks_like_mlp(module) and (activation := recognise_activation(_activation(module))):
            candidates[module] = MlpForward(module, shared, activation)
        elif looks_like_attention(module) and (form := _shared_form(forms, _head_norms(module))) is not None:
            candidates[module] = AttentionForward(module, shared, form, uncapped)
    found |= _agreeing(candidates, calls)
    found |= _agreeing(_layers(model, calls, forms, shared), calls)
    return found


@torch.no_grad()
def calls_registered_attention(model: PreTrainedModel, names: tuple[str, str]) -> bool:
    """Whether a model computes the same when its config asks for the second of two attentions.

    Some models look at the name and go a way of their own.
    """
    config = model.config.get_text_config(decoder=True)
    ids = _few_tokens(model)
    hidden = torch.ones((1, 1, 5, 5), dtype=torch.bool, device=ids.device).triu(1)
    hidden[..., 4, 1] = True
    mask = ~hidden
    if names[0] == "eager":
        mask = torch.zeros(hidden.shape, dtype=model.dtype, device=ids.device)
        mask.masked_fill_(hidden, torch.finfo(model.dtype).min)
    logits = []
    with _evaluating(model):
        try:
            for name in names:
                config._attn_implementation_internal = name
                logits.append(model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float())
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError):
            return False
        finally:
            config._attn_implementation_internal = names[0]
    return bool((logits[0] - logits[1]).norm() <= _tolerance(torch.empty(0, dtype=model.dtype)) * logits[0].norm())


def looks_like_norm(module: Any) -> bool:
    """A weight, an epsilon, nothing else."""
    return (
        (hasattr(module, "variance_epsilon") or hasattr(module, "eps"))
        and [name for name, _ in module.named_parameters()] == ["weight"]
        and module.weight.dim() == 1
        and module.weight.dtype in FLOATS
    )


def looks_like_mlp(module: Any) -> bool:
    """Gate, up and down products, or gate and up in one, and an activation."""
    parts = ("gate_up_proj",) if hasattr(module, "gate_up_proj") else ("gate_proj", "up_proj")
    if not has_products(module, (*parts, "down_proj")):
        return False
    inputs, size = mlp_inputs(module), module.down_proj.in_features
    return sum(layer.out_features for layer in inputs) == 2 * size and _same_shape(inputs)


def looks_like_attention(module: Any) -> bool:
    """Products for q, k, v and the output, whole heads, at most a norm of the heads of q and of k."""
    parts = ("qkv_proj",) if hasattr(module, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
    wanted = all(hasattr(module, name) for name in ("head_dim", "scaling", "layer_idx"))
    if not wanted or not has_products(module, (*parts, "o_proj")):
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


def looks_like_layer(module: Any) -> bool:
    """Attention and MLP with a norm before each."""
    names = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
    return all(isinstance(getattr(module, name, None), nn.Module) for name in names)


def untouched(module: Any) -> bool:
    """Whether calling a module is calling its class's forward: nobody hooked or replaced it."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" not in module.__dict__ and not any(getattr(module, name) for name in hooks)


def has_products(module: Any, names: tuple[str, ...]) -> bool:
    """Whether these are plain linear layers; wrapped, quantised and hooked ones are not."""
    layers = [getattr(module, name, None) for name in names]
    return all(type(layer) is nn.Linear and untouched(layer) and layer.weight.dtype in FLOATS for layer in layers)


def layer_norms(module: Any) -> list[nn.Module]:
    """The norms that a layer applies itself."""
    names = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return [getattr(module, name) for name in names if hasattr(module, name)]


def _same_shape(layers: Any) -> bool:
    """One input, biases in all or none."""
    return len({(layer.in_features, layer.bias is None) for layer in layers}) == 1


def _activation(module: Any) -> Any:
    return getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)


def _head_norms(module: Any) -> list[nn.Module]:
    norms = (getattr(module, name, None) for name in ("q_norm", "k_norm"))
    return [norm for norm in norms if norm is not None]


def _shared_form(forms: dict[nn.Module, NormForm], norms: list[nn.Module]) -> NormForm | None:
    """The form that all these norms have; None if one is unknown or they differ."""
    if not all(norm in forms and untouched(norm) for norm in norms):
        return None
    kinds = {forms[norm] for norm in norms}
    return PLAIN if not kinds else kinds.pop() if len(kinds) == 1 else None


def _norms(calls: dict[nn.Module, Call], shared: Shared) -> dict[nn.Module, NormForward]:
    """Every norm under the form that comes closest, if that is close enough."""
    modules = [module for module in calls if looks_like_norm(module)]
    tried = [{module: NormForward(module, shared, form) for module in modules} for form in FORMS]
    errors = [_errors(stand_ins, calls) for stand_ins in tried]
    best = {}
    for module in modules:
        error, choice = min((errors[index][module], index) for index in range(len(FORMS)))
        if error <= _tolerance(calls[module].output):
            best[module] = tried[choice][module]
    return best


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


def _agreeing(stand_ins: dict[nn.Module, Forward], calls: dict[nn.Module, Call]) -> dict[nn.Module, Forward]:
    errors = _errors(stand_ins, calls)
    return {
        module: stand_in
        for module, stand_in in stand_ins.items()
        if errors[module] <= _tolerance(_tensor(calls[module].output))
    }


@torch.no_grad()
def _errors(stand_ins: Mapping[nn.Module, Forward], calls: dict[nn.Module, Call]) -> dict[nn.Module, float]:
    """Relative distances between each module's own output and its stand-in's; read from the device all at once."""
    errors: dict[nn.Module, Tensor] = {}
    for module, stand_in in stand_ins.items():
        call = calls[module]
        expected = _tensor(call.output).float()
        try:
            got = _tensor(stand_in(*call.args, **_with_mask(module, call.kwargs))).float()
            errors[module] = (got - expected).norm() / expected.norm()
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError, AssertionError):
            errors[module] = torch.full((), torch.inf, device=expected.device)
    if not errors:
        return {}
    distances = torch.stack([error.cpu() for error in errors.values()]).nan_to_num(torch.inf, torch.inf)
    return dict(zip(errors, distances.tolist()))


def _with_mask(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
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


def _tolerance(output: Any) -> float:
    """Rounding is about 1e-6 in float32 and 5e-3 in bfloat16, a different computation about 1."""
    return 1e-4 if _tensor(output).dtype == torch.float32 else 2e-2


@torch.no_grad()
def _watch(model: PreTrainedModel) -> dict[nn.Module, Call]:
    """Send a few tokens through the model and note what the candidates were given and gave."""
    calls: dict[nn.Module, Call] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.setdefault(module, Call(args, kwargs, output))

    looks = (looks_like_norm, looks_like_mlp, looks_like_attention, looks_like_layer)
    watched = [module for module in model.modules() if any(look(module) for look in looks)]
    with _evaluating(model), ExitStack() as stack:
        for module in watched:
            stack.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        model(input_ids=_few_tokens(model), use_cache=False)
    return calls


def _few_tokens(model: PreTrainedModel) -> Tensor:
    weight = model.get_input_embeddings().weight
    ids: Tensor = (torch.arange(5, device=weight.device) * 7 + 1)[None] % weight.shape[0]
    return ids


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Dropout off for the moment, each module's own setting restored afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
